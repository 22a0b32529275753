"""Measures batches a second in a steady state, and what a batch costs.

An endless epoch runs: a warm-up first checks every batch's values and shape, then drains what was prefetched meanwhile.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from apart import CLOSED, Figures
from contenders import AHEAD, CONTENDERS, Contender, Load, Open


def measure(name: str, items: Sequence[dict[str, Any]], seconds: float, warm_up: float) -> Iterator[Figures]:
    """Each item is a ``Load``; the contender is started once, for the most workers of any."""
    loads = [Load(**item) for item in items]
    with CONTENDERS[name].start(max(load.workers for load in loads)) as open_stream:
        for load in loads:
            yield from measure_one(CONTENDERS[name], load, open_stream, seconds, warm_up)


def measure_one(
    contender: Contender, load: Load, open_stream: Open, seconds: float, warm_up: float
) -> Iterator[Figures]:
    started, check = time.perf_counter(), Check(contender, load)
    with open_stream(load) as batches:
        check(next(batches))
        first = time.perf_counter() - started
        consume(map(check, batches), warm_up / 2, turn=load.workers)
        drained = consume(batches, warm_up / 2, turn=load.workers, turns=AHEAD)
        before = CpuTimes.now()
        counted = consume(batches, seconds, turn=load.workers, turns=2)
        here, there = CpuTimes.now().since(before)
        check.passed_over(drained.count + counted.count)
        check(next(batches))
        yield {
            "rate": counted.rate,
            "cpu_here": here / counted.count,
            "cpu_there": there / counted.count,
            "memory": memory_in_use(),
            "first": first,
        }
    yield CLOSED


class Check:
    """Whether batches have the right shape and hold what they should: their number if they come in order.

    Otherwise each holds one number, and none the number of another.
    """

    def __init__(self, contender: Contender, load: Load) -> None:
        self.contender = contender
        self.load = load
        self.index = 0
        self.seen: set[float] = set()

    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        if batch.dtype != torch.float32 or list(batch.shape) != list(self.load.shape):
            raise RuntimeError(f"batch {self.index} is a {batch.dtype} {tuple(batch.shape)}, not a {self.load}")
        if not self.contender.is_limit:
            self.check_values(batch)
        self.index += 1
        return batch

    def check_values(self, batch: torch.Tensor) -> None:
        value = float(batch.view(-1)[0])
        right = value == self.index if self.contender.is_ordered else value not in self.seen
        if not right or not bool((batch == value).all()):
            raise RuntimeError(f"batch {self.index} holds {value}, which is wrong, or other values beside it")
        self.seen.add(value)

    def passed_over(self, count: int) -> None:
        """So many batches were not checked."""
        self.index += count


@dataclass(frozen=True)
class Count:
    count: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.count / self.seconds


def consume(batches: Iterator[torch.Tensor], seconds: float, turn: int, turns: int = 1) -> Count:
    """Take batches as a training loop does, which keeps each until it has the next.

    Args:
        turn: how many workers there are; only whole turns are taken, since their batches may come in bursts
        turns: how many at least, however long they take
    """
    start = time.perf_counter()
    for count, _batch in enumerate(batches, 1):
        passed = time.perf_counter() - start
        if passed >= seconds and count % turn == 0 and count >= turn * turns:
            return Count(count, passed)
    raise RuntimeError("the endless stream came to an end")


# What this process and its descendants use


@dataclass(frozen=True)
class CpuTimes:
    """Seconds of CPU time of this process, and of each of its descendants."""

    here: float
    there: dict[int, float]

    @classmethod
    def now(cls) -> "CpuTimes":
        own = psutil.Process()
        return cls(cpu_time(own.pid), {each.pid: cpu_time(each.pid) for each in own.children(recursive=True)})

    def since(self, before: "CpuTimes") -> tuple[float, float]:
        there = sum(seconds - before.there.get(pid, 0.0) for pid, seconds in self.there.items())
        return self.here - before.here, there


def cpu_time(pid: int) -> float:
    """To the nanosecond, of its clock as ``clock_getcpuclockid`` finds it; psutil's figures have ticks of 10 ms."""
    with suppress(OSError):  # it has ended
        return time.clock_gettime(~pid << 3 | 2)
    return 0.0


def memory_in_use() -> float:
    """Bytes, at this moment, of all of them together; what is shared counted once."""
    own = psutil.Process()
    return float(sum(each.memory_full_info().pss for each in [own, *own.children(True)]))
