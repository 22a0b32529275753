"""``statistics()`` of pipelines that really are slow in one place: sleeps in the graph, in the loop and on the wire are
the load."""

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from daemons import until
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torchdata.dataloader2 import DataLoader2
from torchdata.datapipes.iter import IterableWrapper

from rpc_reading_service import RPCReadingService, Statistics
from rpc_reading_service.transport import Deadline

pytestmark = pytest.mark.slow

MULTIPROCESSING = SHARDING_PRIORITIES.MULTIPROCESSING

WINDOW_S = 1.5
"""Time enough for the first batches not to count much."""

NBYTES = 100_000
"""Of a batch: a window holds four of them, and not 256 KiB of smaller ones."""


class Step:
    """What the graph does with each element: sleep, and make a batch.

    Args:
        seconds: for an element of each worker, by its shard
        extra: seconds more for the first of every so many
    """

    def __init__(self, *seconds: float, extra: float = 0.0, every: int = 1) -> None:
        self.seconds = seconds
        self.extra = extra
        self.every = every

    def __call__(self, element: int) -> torch.Tensor:
        shard, number = element % 2, element // 2
        time.sleep(self.seconds[shard % len(self.seconds)] + (number % self.every == 0) * self.extra)
        return torch.full((NBYTES,), element % 100, dtype=torch.uint8)


class Sluggish:
    """Takes its time to be encoded."""

    def __reduce__(self) -> Any:
        time.sleep(0.02)
        return int, ()


def sluggish(_element: int) -> Sluggish:
    return Sluggish()


def make(workers: Any, step: Callable[[int], Any], **more: Any) -> "DataLoader2[Any]":
    pipe = IterableWrapper(range(100_000)).sharding_filter().map(step)
    return DataLoader2(pipe, reading_service=RPCReadingService(workers, pickle_by_value=(__name__,), **more))


def read(loader: "DataLoader2[Any]", training: float, *words: str) -> Statistics:
    """Train until the verdict has these words; fails with the statistics as they are if it does not come to that."""
    batches = iter(loader)
    next(batches)
    deadline = Deadline(10.0)
    for _ in batches:
        time.sleep(training)
        statistics = loader.reading_service.statistics()
        if statistics.seconds > WINDOW_S and all(word in statistics.verdict for word in words):
            return statistics
        assert not deadline.expired, str(statistics)
    raise AssertionError("the epoch is over")


def test_a_slow_graph(two_daemons: list[str]) -> None:
    with make(two_daemons, Step(0.04)) as loader:
        found = read(loader, 0.01, "training waits for data", "workers are busy in the graph; about ", "more worker")
        assert found.waiting > 0.05
        assert [w.graph > 0.5 for w in found.workers] == [True, True]


def test_a_slow_training(two_daemons: list[str]) -> None:
    with make(two_daemons, Step(0.001)) as loader:
        found = read(loader, 0.02, "the training step keeps the workers waiting", "about 1 of these 2 workers")
        assert found.waiting < 0.05
        assert [w.credit > w.graph for w in found.workers] == [True, True]
        assert found.workers[0].address == two_daemons[0]


def test_a_slow_shard(two_daemons: list[str]) -> None:
    with make(two_daemons, Step(0.0, 0.03)) as loader:
        words = f"one slow shard, worker 1 on {two_daemons[1]}, holds the others up (it is busy in the graph)"
        found = read(loader, 0.001, words)
        assert found.workers[1].waited_s > found.workers[0].waited_s


def test_batches_that_come_unevenly(two_daemons: list[str]) -> None:
    with make(two_daemons, Step(0.0, extra=0.3, every=30), worker_prefetch_cnt=2) as loader:
        read(loader, 0.015, "although the workers wait for credit", "raise worker_prefetch_cnt")


def test_slow_encoding(two_daemons: list[str]) -> None:
    with make(two_daemons, sluggish) as loader:
        read(loader, 0.001, "workers are busy encoding batches")


def test_a_replay(two_daemons: list[str]) -> None:
    """From a checkpoint; after a loss it is the same."""
    with make(two_daemons, Step(0.015)) as loader:
        batches = iter(loader)
        for _ in range(80):
            next(batches)
        state = loader.state_dict()
    service = RPCReadingService(two_daemons, pickle_by_value=(__name__,))
    with DataLoader2.from_state(state, service) as loader:
        next(iter(loader))
        until(lambda: "workers replay what had arrived before" in loader.reading_service.statistics().verdict)


def test_a_slow_dispatching_worker() -> None:
    dealt = IterableWrapper(range(100_000)).map(Step(0.02)).sharding_round_robin_dispatch(MULTIPROCESSING)
    with DataLoader2(dealt, reading_service=RPCReadingService(2, pickle_by_value=(__name__,))) as loader:
        found = read(loader, 0.001, "the dispatching worker on ", "is busy")
        assert [worker.batches > 0 for worker in found.workers] == [True, True, False]


def test_a_slow_network(slow_link: str, two_daemons: list[str]) -> None:
    """Of all workers, and then of one."""
    with make([slow_link], Step(0.001), transport="tcp", num_workers=2) as loader:
        found = read(loader, 0.001, "the network brings", "MB/s, and batches are under way", "send less")
        assert [worker.wire > worker.graph for worker in found.workers] == [True, True]
    with make([slow_link, two_daemons[0]], Step(0.001), transport="tcp", num_workers=2) as loader:
        read(loader, 0.001, f"one slow shard, worker 0 on {slow_link}", "its batches are long under way")


def test_statistics_can_be_had_at_any_time_from_any_thread(two_daemons: list[str]) -> None:
    service = RPCReadingService(two_daemons, pickle_by_value=(__name__,))
    assert "has not been initialized" in service.statistics().verdict
    pipe = IterableWrapper(range(40)).sharding_filter().map(Step(0.0, extra=1.0, every=10))
    loader = DataLoader2(pipe, reading_service=service)
    statistics = loader.reading_service.statistics  # of the copy that DataLoader2 works with
    epoch = threading.Thread(target=lambda: list(loader))
    epoch.start()
    until(lambda: statistics().waited_s > 0.3)  # it waits still
    assert statistics().batches == 0
    epoch.join()
    ended = statistics()
    assert (ended.epoch, ended.batches, [worker.batches for worker in ended.workers]) == (1, 40, [20, 20])
    assert 40 * NBYTES < ended.nbytes < 40 * NBYTES + 20_000
    until(lambda: statistics().workers[1].graph > 0.5)
    loader.shutdown()
    closed = statistics()
    assert (closed.seconds, closed.batches, closed.losses) == (ended.seconds, 40, 0)
    assert [worker.state for worker in closed.workers] == ["closed", "closed"]


def test_losses_and_recoveries_are_counted(two_daemons: list[str]) -> None:
    with make(two_daemons, Step(0.005)) as loader:
        batches, statistics = iter(loader), loader.reading_service.statistics
        next(batches)
        assert (statistics().losses, statistics().recoveries) == (0, 0)
        os.kill(loader.reading_service._client.session.workers[1].pid, signal.SIGKILL)
        until(lambda: next(batches) is not None and statistics().recoveries == 1)
        assert statistics().losses == 1
        assert "; 1 worker lost, 1 recovered" in str(statistics())
