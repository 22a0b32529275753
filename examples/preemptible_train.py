"""Train a small network that may be interrupted at any batch, and goes on with the very next one.

    python examples/preemptible_train.py --checkpoint train.pt
    RPC_READING_WORKERS=cpu1:5555,cpu2:5555 python examples/preemptible_train.py --checkpoint train.pt

Slurm, Kubernetes and whoever else wants the machine back send SIGTERM: the model, and where the loader is, are saved to
the checkpoint, and the exit code is 75 (EX_TEMPFAIL: try again). Run it again, on the same workers or on others.
"""

import argparse
import os
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchdata.dataloader2 import DataLoader2
from torchdata.datapipes.iter import IterableWrapper, IterDataPipe

from rpc_reading_service import RPCReadingService

SHARDS = 2  # of the data, whatever the number of machines
BATCH_SIZE = 32
STEPS_PER_LINE = 10


def sample(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A point, and whether it is within the unit circle: runs on the workers."""
    point = torch.rand(2, generator=torch.Generator().manual_seed(index)) * 2 - 1
    return point, (point.square().sum() < 1).float()


def build_pipe(elements: int) -> IterDataPipe:
    return IterableWrapper(range(elements)).shuffle().sharding_filter().map(sample).batch(BATCH_SIZE).collate()


@dataclass
class Progress:
    """How far the training is."""

    epoch: int = 0
    step: int = 0
    seen: int = 0
    """Elements in this epoch."""


class Training:
    """The model and its data; both are saved, and go on together."""

    def __init__(self, checkpoint: Path, elements: int) -> None:
        self.checkpoint = checkpoint
        self.model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.progress = Progress()
        # Addresses and keys come from RPC_READING_WORKERS and RPC_READING_KEYS.
        reading_service = RPCReadingService(num_workers=SHARDS)
        if checkpoint.exists():
            self.loader = self._restore(torch.load(checkpoint, weights_only=False), reading_service)
        else:
            self.loader = DataLoader2(build_pipe(elements), reading_service=reading_service)
            self.loader.seed(0)

    def _restore(self, state: dict[str, Any], reading_service: RPCReadingService) -> "DataLoader2[Any]":
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])
        return DataLoader2.from_state(state["loader"], reading_service)

    def save(self) -> None:
        """Whole or not at all: an interrupted write leaves the old file."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": asdict(self.progress),
            "loader": self.loader.state_dict(),
        }
        part = self.checkpoint.with_suffix(".part")
        torch.save(state, part)
        part.replace(self.checkpoint)

    def run(self, epochs: int, stop: "Stop") -> bool:
        """Train until the end, and return True, or until SIGTERM."""
        while self.progress.epoch < epochs:
            for points, inside in self.loader:
                self.learn(points, inside)
                if stop.asked:
                    return False
            print(f"epoch {self.progress.epoch}: {self.progress.seen} elements", flush=True)
            self.progress = Progress(self.progress.epoch + 1, self.progress.step)
        return True

    def learn(self, points: torch.Tensor, inside: torch.Tensor) -> None:
        loss = nn.functional.binary_cross_entropy_with_logits(self.model(points).squeeze(1), inside)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.progress.step += 1
        self.progress.seen += len(points)
        if self.progress.step % STEPS_PER_LINE == 0:
            print(f"step {self.progress.step}: loss {loss.item():.3f}", flush=True)


class Stop:
    """Whether SIGTERM has come, or SIGUSR1, as from Slurm: the batch in hand is finished first."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._note)

    def _note(self, _number: int, _frame: Any) -> None:
        self.asked = True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="read if it is there, written on SIGTERM")
    parser.add_argument("--epochs", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--elements", type=int, default=20_000, help="of an epoch; default: %(default)s")
    options = parser.parse_args()
    stop = Stop()
    training = Training(options.checkpoint, options.elements)
    finished = training.run(options.epochs, stop)
    if not finished:
        training.save()
        print(f"interrupted in epoch {training.progress.epoch} at step {training.progress.step}", flush=True)
    else:
        options.checkpoint.unlink(missing_ok=True)
    training.loader.shutdown()
    return 0 if finished else os.EX_TEMPFAIL


if __name__ == "__main__":
    sys.exit(main())
