"""Train one network on two ranks, each fed by its own share of the workers.

    python examples/ddp_train.py
    python examples/ddp_train.py --workers cpu1:5555,cpu2:5555
    torchrun --nproc-per-node 2 examples/ddp_train.py --workers cpu1:5555,cpu2:5555

The images are scikit-learn's handwritten digits, of which a fifth is held out. The exit code is 1 unless the held-out
accuracy is over 0.95.
"""

import argparse
import os
import random
import socket
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchdata.dataloader2 import DataLoader2, DistributedReadingService, SequentialReadingService
from torchdata.datapipes.iter import IterableWrapper, IterDataPipe

from rpc_reading_service import RPCReadingService
from rpc_reading_service.testing import local_workers

RANKS = 2
HELD_OUT = 5  # every fifth image
BATCH_SIZE = 32  # of each rank
NOISE = 16
REQUIRED_ACCURACY = 0.95

Sample = tuple[np.ndarray, int]
Batch = tuple[torch.Tensor, torch.Tensor]


# The data


def digits() -> tuple[list[Sample], list[Sample]]:
    """For training, and held out: images of 8 x 8 bytes, with their labels."""
    images, labels = load_digits(return_X_y=True)
    pixels = (images * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8)
    samples = [(image, int(label)) for image, label in zip(pixels, labels, strict=True)]
    return [sample for i, sample in enumerate(samples) if i % HELD_OUT], samples[::HELD_OUT]


# The pipeline: all of it runs on the workers


def training_pipeline(samples: list[Sample]) -> IterDataPipe[Batch]:
    # The filter deals the samples out twice: over the ranks, then over each rank's workers.
    return IterableWrapper(samples).shuffle().sharding_filter().map(augment).batch(BATCH_SIZE).collate()


def augment(sample: Sample) -> Sample:
    image, label = sample
    shifted = np.roll(image, random.randint(-1, 1), axis=random.randint(0, 1))
    noise = np.random.randint(-NOISE, NOISE + 1, image.shape)
    return (shifted + noise).clip(0, 255).astype(np.uint8), label


# The training: what every rank does


def train(loader: DataLoader2[Batch], epochs: int) -> nn.Module:
    model = DistributedDataParallel(network())  # averages the gradients of all ranks
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for epoch in range(epochs):
        began, samples, total = time.perf_counter(), 0, 0.0
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(normalise(images)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            samples += len(labels)
            total += loss.item() * len(labels)
        schedule.step()
        report(f"epoch {epoch + 1:2}: loss {total / samples:.3f}, {samples} images in {seconds_since(began)} per rank")
    return model.module


def network() -> nn.Module:
    convolutions = nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.ReLU()
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10))


def normalise(images: torch.Tensor) -> torch.Tensor:
    return images.unsqueeze(1).float() / 127.5 - 1.0


@torch.inference_mode()
def accuracy(model: nn.Module, samples: list[Sample]) -> float:
    images = torch.from_numpy(np.stack([image for image, _ in samples]))
    labels = torch.tensor([label for _, label in samples])
    return (model(normalise(images)).argmax(1) == labels).float().mean().item()


def report(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def seconds_since(began: float) -> str:
    return f"{time.perf_counter() - began:.2f} s"


# The command


def main() -> int:
    options = parse_arguments()
    if "RANK" in os.environ:  # torchrun has started the ranks; without addresses, each starts a worker of its own
        return run(options)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS)}
    if options.workers is not None:
        return spawn_ranks(options)
    with local_workers(RANKS) as addresses:
        options.workers = ",".join(addresses)
        return spawn_ranks(options)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workers", metavar="HOST:PORT,...", help=f"running daemons, for all ranks (default: starts {RANKS} here)"
    )
    parser.add_argument("--epochs", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    return parser.parse_args()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def spawn_ranks(options: argparse.Namespace) -> int:
    try:
        torch.multiprocessing.spawn(run_rank, args=(options,), nprocs=RANKS)
    except torch.multiprocessing.ProcessExitedException as error:
        return error.exit_code
    return 0


def run_rank(rank: int, options: argparse.Namespace) -> None:
    os.environ["RANK"] = str(rank)
    sys.exit(run(options))


def run(options: argparse.Namespace) -> int:
    dist.init_process_group("gloo")
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # the ranks and the workers share these cores
    training, held_out = digits()
    # By default the ranks share the daemons out: with two of each, rank 0 takes the first, rank 1 the second.
    workers = RPCReadingService(workers=options.workers or 1)
    service = SequentialReadingService(DistributedReadingService(), workers)
    with DataLoader2(training_pipeline(training), reading_service=service) as loader:
        loader.seed(options.seed)
        model = train(loader, options.epochs)
    reached = accuracy(model, held_out)
    report(f"held-out accuracy: {reached:.3f} (required: over {REQUIRED_ACCURACY})")
    dist.destroy_process_group()
    return 0 if reached > REQUIRED_ACCURACY else 1


if __name__ == "__main__":
    sys.exit(main())
