"""Train a small network on images that other processes, or other machines, decode and augment.

    python examples/quickstart.py
    python examples/quickstart.py --workers cpu1:5555,cpu2:5555 --data /a/folder/that/they/see/too

The images are the photographs that scikit-image carries inside its wheel, and the network learns from which of them a
crop comes. Each photograph is cut into tiles, and a third of the tiles is held out, so that no pixel on which the
accuracy is measured was ever trained on. The exit code is 1 unless the held-out accuracy is over 0.9.
"""

import argparse
import io
import os
import random
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO

import numpy as np
import skimage.data
import torch
from PIL import Image, ImageEnhance, ImageOps
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torch import nn
from torchdata.dataloader2 import DataLoader2, InProcessReadingService
from torchdata.datapipes.iter import FileLister, IterDataPipe

from rpc_reading_service import RPCReadingService

PHOTOGRAPHS = (
    "astronaut",
    "brick",
    "chelsea",
    "coffee",
    "grass",
    "gravel",
    "hubble_deep_field",
    "immunohistochemistry",
    "retina",
    "rocket",
)
GRID = 3  # tiles a side
SHARDS = 4  # tar files of each split
CROP = 96  # pixels a side
CROPS_PER_TILE = 4
SHUFFLED_CROPS = 128
BATCH_SIZE = 32
PASSES_PER_EPOCH = 8  # over the tiles, so that an epoch is worth its start
IMAGES_PER_EPOCH = PASSES_PER_EPOCH * len(PHOTOGRAPHS) * GRID * (GRID - 1) * CROPS_PER_TILE
COMPARED_EPOCHS = 2
LOCAL_WORKERS = 2
REQUIRED_ACCURACY = 0.9

Sample = tuple[Image.Image, int]
Batch = tuple[torch.Tensor, torch.Tensor]


# The data: tiles of photographs, as JPEGs in tar files


def write_shards(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split in "train", "held-out":
        members = [(name, tile) for name in PHOTOGRAPHS for tile in tiles(name, held_out=split == "held-out")]
        for shard in range(SHARDS):
            with tarfile.open(folder / f"{split}-{shard}.tar", "w") as archive:
                for number, (name, tile) in enumerate(members[shard::SHARDS]):
                    add_jpeg(archive, f"{name}/{number:03}.jpg", tile)


def tiles(name: str, held_out: bool) -> Iterator[Image.Image]:
    photograph = Image.fromarray(getattr(skimage.data, name)()).convert("RGB")
    width, height = photograph.width // GRID, photograph.height // GRID
    for row in range(GRID):
        for column in range(GRID):
            # A diagonal holds out one tile of each row and column: sky and ground, middle and margin.
            if ((row + column) % GRID == 0) == held_out:
                left, top = column * width, row * height
                yield photograph.crop((left, top, left + width, top + height))


def add_jpeg(archive: tarfile.TarFile, name: str, image: Image.Image) -> None:
    content = io.BytesIO()
    image.save(content, "JPEG", quality=90)
    member = tarfile.TarInfo(name)
    member.size = content.tell()
    content.seek(0)
    archive.addfile(member, content)


# The pipeline: everything from here to collate runs on the workers


def training_pipeline(folder: Path) -> IterDataPipe[Batch]:
    # Tiles are dealt out, not tar files, so that even the tenth worker has work.
    members = open_shards(folder, "train").cycle(PASSES_PER_EPOCH).shuffle().sharding_filter()
    crops = members.map(decode).flatmap(random_crops).shuffle(buffer_size=SHUFFLED_CROPS)
    return crops.batch(BATCH_SIZE).map(collate)


def held_out_pipeline(folder: Path) -> IterDataPipe[Batch]:
    return open_shards(folder, "held-out").map(decode).flatmap(corner_crops).batch(BATCH_SIZE).map(collate)


def open_shards(folder: Path, split: str) -> IterDataPipe[tuple[str, IO[bytes]]]:
    return FileLister(str(folder), masks=f"{split}-*.tar").open_files(mode="b").load_from_tar()


def decode(member: tuple[str, IO[bytes]]) -> Sample:
    path, stream = member
    with closing(stream):
        return Image.open(stream).convert("RGB"), PHOTOGRAPHS.index(Path(path).parent.name)


def random_crops(sample: Sample) -> Iterator[Sample]:
    tile, label = sample
    for _ in range(CROPS_PER_TILE):
        yield jitter_colours(flip(random_crop(tile))), label


def random_crop(tile: Image.Image) -> Image.Image:
    size = random.randint(CROP * 3 // 4, min(*tile.size, CROP * 4 // 3))
    left, top = random.randint(0, tile.width - size), random.randint(0, tile.height - size)
    return crop(tile, left, top, size)


def flip(image: Image.Image) -> Image.Image:
    return ImageOps.mirror(image) if random.random() < 0.5 else image


def jitter_colours(image: Image.Image) -> Image.Image:
    for enhancer in ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color:
        image = enhancer(image).enhance(random.uniform(0.7, 1.3))
    return image


def corner_crops(sample: Sample) -> Iterator[Sample]:
    tile, label = sample
    for left in 0, tile.width - CROP:
        for top in 0, tile.height - CROP:
            yield crop(tile, left, top, CROP), label


def crop(tile: Image.Image, left: int, top: int, size: int) -> Image.Image:
    return tile.resize((CROP, CROP), box=(left, top, left + size, top + size))


def collate(samples: list[Sample]) -> Batch:
    images = np.stack([np.asarray(image) for image, _ in samples])
    return torch.from_numpy(images).permute(0, 3, 1, 2), torch.tensor([label for _, label in samples])


# The training: what this process does with the batches


@dataclass
class Meter:
    """Counts the images that come out of a loader, and the seconds spent in waiting for them and in using them."""

    images: int = 0
    waited: float = 0.0
    used: float = 0.0

    def watch(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        batches = iter(loader)  # outside the measurement: this starts the workers
        asked = time.perf_counter()
        while True:
            batch = next(batches, None)
            received = time.perf_counter()
            self.waited += received - asked
            if batch is None:
                return
            self.images += len(batch[1])
            yield batch
            asked = time.perf_counter()
            self.used += asked - received

    @property
    def images_per_second(self) -> float:
        return self.images / (self.waited + self.used)

    def __str__(self) -> str:
        waited = self.waited / (self.waited + self.used)
        return f"{self.images_per_second:,.0f} images/s · {waited:.0%} waiting for data"


def train(loader: Iterable[Batch], epochs: int, device: torch.device) -> nn.Module:
    model = network().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    meter = Meter()
    with progress_bar() as progress:
        bar = progress.add_task("training", total=epochs * IMAGES_PER_EPOCH, status="starting the workers")
        for _ in range(epochs):
            for images, labels in meter.watch(loader):
                loss = nn.functional.cross_entropy(model(normalise(images, device)), labels.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                progress.update(bar, completed=meter.images, status=meter)
            schedule.step()
    return model


def network() -> nn.Module:
    widths = (3, 16, 32, 64, 64)
    blocks = [block(*ends) for ends in pairwise(widths)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], len(PHOTOGRAPHS)))


def block(inputs: int, outputs: int) -> nn.Module:
    convolution = nn.Conv2d(inputs, outputs, kernel_size=3, stride=2, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


def normalise(images: torch.Tensor, device: torch.device) -> torch.Tensor:
    # Bytes travel, floats do not: a quarter of the traffic.
    return images.to(device).float() / 127.5 - 1.0


def progress_bar() -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TextColumn("{task.fields[status]}")
    return Progress(*columns)


@torch.inference_mode()
def accuracy(model: nn.Module, loader: Iterable[Batch], device: torch.device) -> float:
    model.eval()
    right = [model(normalise(images, device)).argmax(1).cpu() == labels for images, labels in loader]
    return torch.cat(right).float().mean().item()


def images_per_second(loader: Iterable[Batch]) -> float:
    meter = Meter()
    for _ in range(COMPARED_EPOCHS):
        for _ in meter.watch(loader):
            pass
    return meter.images_per_second


# The command


def main() -> int:
    options = parse_arguments()
    torch.manual_seed(options.seed)
    if options.workers is None:
        # Local workers share these cores: more threads here would only take turns with them.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) - LOCAL_WORKERS))
    with tempfile.TemporaryDirectory() as scratch:
        return run(options, folder=options.data or Path(scratch))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workers", metavar="HOST:PORT,...", help=f"running daemons (default: starts {LOCAL_WORKERS} workers here)"
    )
    parser.add_argument("--data", type=Path, help="where to write the tar files (default: a temporary folder)")
    parser.add_argument("--epochs", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--short", dest="epochs", action="store_const", const=6, help="half as many epochs")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    return parser.parse_args()


def run(options: argparse.Namespace, folder: Path) -> int:
    write_shards(folder)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    workers = RPCReadingService(workers=options.workers or LOCAL_WORKERS)
    with DataLoader2(training_pipeline(folder), reading_service=workers) as loader:
        loader.seed(options.seed)
        model = train(loader, options.epochs, device)
        remote = images_per_second(loader)
    with DataLoader2(training_pipeline(folder), reading_service=InProcessReadingService()) as loader:
        in_process = images_per_second(loader)
    with DataLoader2(held_out_pipeline(folder), reading_service=InProcessReadingService()) as loader:
        held_out = accuracy(model, loader, device)

    print(f"the pipeline alone: {remote:,.0f} images/s from the workers, {in_process:,.0f} images/s in this process")
    print(f"held-out accuracy: {held_out:.3f} (required: over {REQUIRED_ACCURACY})")
    return 0 if held_out > REQUIRED_ACCURACY else 1


if __name__ == "__main__":
    sys.exit(main())
