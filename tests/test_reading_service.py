"""``RPCReadingService`` under a real ``DataLoader2``: what comes out of it, and what is left when it is over.

The daemons are real and shared by the module. What the workers run travels by value, so that they need not import this
file, and with it pytest, each time that one starts.
"""

import functools
import gc
import json
import logging
import multiprocessing
import os
import pickle
import random
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torchdata.dataloader2 import DataLoader2, MultiProcessingReadingService
from torchdata.datapipes.iter import IterableWrapper, IterDataPipe
from torchdata.datapipes.map import SequenceWrapper

from rpc_reading_service import ClosedError, RPCReadingService, SlotsError
from rpc_reading_service.launchers import LocalDaemons, local_slots

N = 60
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def more_daemons() -> Iterator[list[str]]:
    """One daemon with one slot, and one with four."""
    daemons = LocalDaemons([1, 4])
    try:
        yield daemons.addresses
    finally:
        daemons.close()


@pytest.fixture
def three(two_daemons: list[str], more_daemons: list[str]) -> list[str]:
    """Three one-slot daemons."""
    return [*two_daemons, more_daemons[0]]


@pytest.fixture
def pool(more_daemons: list[str]) -> list[str]:
    """One daemon with four slots."""
    return more_daemons[1:]


def load(datapipe: Any, workers: Any, **options: Any) -> "DataLoader2[Any]":
    options = {"pickle_by_value": (__name__,), "timeout": TIMEOUT_S, **options}
    return DataLoader2(datapipe, reading_service=RPCReadingService(workers, **options))


def sharded(elements: Any) -> Any:
    return IterableWrapper(elements).sharding_filter()


def free_slots(workers: list[str]) -> int:
    """As the refusal of too large a wish counts them."""
    with load(sharded([]), workers, num_workers=4096) as loader, pytest.raises(SlotsError) as refusal:
        iter(loader)
    return sum(int(count) for count in re.findall(r"(\d+) of \d+ slots free", str(refusal.value)))


# What the workers run.


def double(x: int) -> int:
    return 2 * x


def draw(x: int) -> tuple[int, float, float, float]:
    return x, random.random(), float(np.random.rand()), float(torch.rand(()))


def with_pid(x: Any) -> tuple[Any, int]:
    return x, os.getpid()


def with_parent_pid(x: Any) -> tuple[Any, int]:
    return x, os.getppid()


def full(nbytes: int, value: int) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


def hold(fifo: Path, at: int, x: int) -> int:
    """Wait, at one element, until somebody writes to the FIFO."""
    if x == at:
        fifo.open("rb").close()
    return x


class Stays(IterDataPipe[Any]):
    """Says in which process it runs, which should be that of the training loop."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def is_replicable(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        for element in self.source:
            yield element, os.getpid()


class WhichShard(IterDataPipe[Any]):
    """One element: the shard's number, and of how many."""

    shard: tuple[int, int] | None = None
    epoch = 0

    def is_shardable(self) -> bool:
        return True

    def apply_sharding(self, num_of_instances: int, instance_id: int, sharding_group: Any) -> None:
        self.shard = instance_id, num_of_instances

    def __iter__(self) -> Iterator[Any]:
        yield self.shard, self.epoch


class Refilled(IterDataPipe[torch.Tensor]):
    """Yields one and the same buffer, filled anew for each element."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def __iter__(self) -> Iterator[torch.Tensor]:
        buffer = torch.empty(self.nbytes, dtype=torch.uint8)
        for value in range(20):
            yield buffer.fill_(value)


class Counted(IterDataPipe[Any]):
    """Never ends; writes a byte to a FIFO for each element."""

    def __init__(self, fifo: Path, nbytes: int) -> None:
        self.fifo = fifo
        self.nbytes = nbytes

    def __iter__(self) -> Iterator[Any]:
        with self.fifo.open("wb", buffering=0) as file:
            while True:
                file.write(b".")
                yield torch.zeros(self.nbytes, dtype=torch.uint8) if self.nbytes else 0


# The same stream as torchdata's own service.


def epochs(loader: "DataLoader2[Any]", seeds: Sequence[int]) -> list[list[Any]]:
    """One epoch for each seed."""
    found = []
    for seed in seeds:
        loader.seed(seed)
        found.append(list(loader))
    return found


def torchdatas_own(datapipe: Any, num_workers: int, seeds: Any) -> list[list[Any]]:
    """The same epochs of torchdata's own service, which at times does not end its processes itself."""
    with DataLoader2(datapipe, reading_service=MultiProcessingReadingService(num_workers=num_workers)) as loader:
        expected = epochs(loader, seeds)
    for process in multiprocessing.active_children():
        process.kill()
        process.join()
    return expected


def test_two_seeded_epochs_equal_those_of_multiprocessing_reading_service(three: list[str]) -> None:
    datapipe = IterableWrapper(range(10_000)).shuffle().sharding_filter().map(draw).batch(16)
    expected = torchdatas_own(datapipe, 3, (11, 12))
    with DataLoader2(datapipe, reading_service=RPCReadingService(three)) as loader:
        assert epochs(loader, (11, 12)) == expected


def test_round_robin_dispatch_equals_that_of_multiprocessing_reading_service(pool: list[str]) -> None:
    shuffled = IterableWrapper(range(200)).shuffle()
    datapipe = shuffled.sharding_round_robin_dispatch(SHARDING_PRIORITIES.MULTIPROCESSING).map(draw).batch(3)
    expected = torchdatas_own(datapipe, 2, (11, 12))
    with load(datapipe, pool, num_workers=2) as loader:
        assert epochs(loader, (11, 12)) == expected


def test_epochs_after_one_seed_differ_and_can_be_repeated(pool: list[str]) -> None:
    def three_epochs() -> list[list[Any]]:
        with load(IterableWrapper(range(N)).shuffle().sharding_filter().map(draw), pool, num_workers=2) as loader:
            loader.seed(7)
            return [list(loader) for _ in range(3)]

    first, second, third = three_epochs()
    assert first != second != third != first
    assert {x for x, *_ in first} == {x for x, *_ in second} == {x for x, *_ in third} == set(range(N))
    assert three_epochs() == [first, second, third]


def test_epochs_without_a_seed_differ(pool: list[str]) -> None:
    with load(IterableWrapper(range(N)).shuffle().sharding_filter().map(draw), pool, num_workers=2) as loader:
        first, second, third = list(loader), list(loader), list(loader)
    assert first != second != third != first


def test_an_epoch_that_was_broken_off_leaks_nothing_into_the_next(pool: list[str]) -> None:
    with load(IterableWrapper(range(500)).shuffle().sharding_filter().map(draw), pool, num_workers=2) as loader:
        (expected,) = epochs(loader, [1])
        for taken in (1, 2, 33):
            loader.seed(2)
            for _, _ in zip(range(taken), loader, strict=False):
                pass
            assert epochs(loader, [1]) == [expected]


def test_the_older_of_two_iterators_is_told_so(pool: list[str]) -> None:
    with load(sharded(range(N)), pool, num_workers=2) as loader:
        older = iter(loader)
        next(older)
        newer = iter(loader)
        assert next(newer) == 0
        with pytest.raises(RuntimeError, match="invalidated because another iterator"):
            next(older)
        assert list(newer) == list(range(1, N))


def test_shards_without_elements_end_the_epoch(pool: list[str]) -> None:
    with load(sharded([5]), pool) as loader:
        assert [list(loader), list(loader)] == [[5], [5]]


# Sessions, slots and where the workers come from.


def test_two_loaders_share_the_daemons(pool: list[str]) -> None:
    with load(sharded(range(N)), pool, num_workers=2) as one, load(sharded(range(N, 2 * N)), pool) as other:
        assert list(zip(one, other, strict=True)) == [(x, x + N) for x in range(N)]


def test_slots_are_held_from_the_first_iter_to_shutdown(pool: list[str]) -> None:
    with load(sharded(range(N)), pool, num_workers=1) as one:
        assert free_slots(pool) == 4
        iter(one)
        with load(sharded(range(N)), pool, num_workers=2) as other:
            iter(other)
            assert free_slots(pool) == 1
        assert free_slots(pool) == 3
    assert free_slots(pool) == 4


def test_as_many_workers_as_slots_are_free(two_daemons: list[str], pool: list[str]) -> None:
    with load(WhichShard(), [*two_daemons, *pool]) as loader:
        assert [shard for shard, _ in loader] == [(worker, 6) for worker in range(6)]


def test_workers_are_dealt_out_over_the_daemons(two_daemons: list[str]) -> None:
    with load(sharded(range(N)).map(with_parent_pid), two_daemons, num_workers=2) as loader:
        (first, one), (second, other) = list(loader)[:2]
    assert (first, second) == (0, 1)
    assert one != other


def test_a_number_starts_so_many_workers_here_and_ends_them() -> None:
    with load(sharded(range(N)).map(with_pid), 2) as loader:
        elements = list(loader)
    assert [x for x, _ in elements] == list(range(N))
    pids = {pid for _, pid in elements}
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert not any(map(psutil.pid_exists, pids))


def test_without_addresses_one_worker_per_core_starts_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RPC_READING_WORKERS", raising=False)
    with load(sharded(range(N)).map(with_pid), None) as loader:
        assert len({pid for _, pid in loader}) == local_slots()


def test_without_addresses_the_environment_names_them(two_daemons: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RPC_READING_WORKERS", ", ".join(two_daemons))
    children = psutil.Process().children()
    with load(WhichShard(), None) as loader:
        assert [shard for shard, _ in loader] == [(0, 2), (1, 2)]
        assert psutil.Process().children() == children


def test_addresses_may_be_one_string_with_commas(two_daemons: list[str]) -> None:
    with load(WhichShard(), ",".join(two_daemons)) as loader:
        assert [shard for shard, _ in loader] == [(0, 2), (1, 2)]


# Order.


def test_in_order_takes_the_shards_in_turn_whatever_their_speed(pool: list[str], fifo: Path) -> None:
    with load(sharded(range(N)).map(functools.partial(hold, fifo, 2)), pool, num_workers=2) as loader:
        iterator = iter(loader)
        assert [next(iterator), next(iterator)] == [0, 1]
        fifo.open("wb").close()
        assert list(iterator) == list(range(2, N))


def test_out_of_order_a_slow_shard_holds_nobody_back(pool: list[str], fifo: Path) -> None:
    held = sharded(range(N)).map(functools.partial(hold, fifo, 0))
    with load(held, pool, num_workers=2, in_order=False) as loader:
        iterator = iter(loader)
        assert [next(iterator) for _ in range(N // 2)] == list(range(1, N, 2))
        fifo.open("wb").close()
        assert list(iterator) == list(range(0, N, 2))


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


# Graphs.


def test_fork_and_zip_stay_aligned(pool: list[str]) -> None:
    one, other = sharded(range(N)).fork(2)
    with load(one.map(double).zip(other), pool, num_workers=2) as loader:
        assert [list(loader), list(loader)] == 2 * [[(2 * x, x) for x in range(N)]]


def test_demux_and_mux_lose_nothing(pool: list[str]) -> None:
    even, odd = IterableWrapper(range(N)).sharding_filter().map(double).demux(2, half_is_odd, buffer_size=N)
    with load(even.mux(odd), pool, num_workers=2) as loader:
        assert [sorted(loader), sorted(loader)] == 2 * [list(range(0, 2 * N, 2))]


def half_is_odd(x: int) -> int:
    return x // 2 // 2 % 2


def test_a_map_datapipe_may_be_the_source(pool: list[str]) -> None:
    datapipe = SequenceWrapper(range(N)).map(double).shuffle().sharding_filter()
    with load(datapipe, pool, num_workers=2) as loader:
        assert sorted(loader) == list(range(0, 2 * N, 2))


def test_a_map_datapipe_may_be_the_whole_graph(pool: list[str]) -> None:
    with load(SequenceWrapper(range(N)).map(double), pool, num_workers=1) as loader:
        assert list(loader) == list(range(0, 2 * N, 2))


def test_a_non_replicable_end_stays_in_the_training_process(pool: list[str]) -> None:
    with load(Stays(sharded(range(N)).map(with_pid)), pool, num_workers=2) as loader:
        elements = list(loader)
    assert [x for (x, _), _ in elements] == list(range(N))
    assert {pid for _, pid in elements} == {os.getpid()}
    assert len({pid for (_, pid), _ in elements} - {os.getpid()}) == 2


def test_worker_init_fn_may_be_a_lambda_and_returns_the_graph_to_use(pool: list[str]) -> None:
    with load(
        sharded(range(4)),
        pool,
        num_workers=2,
        worker_init_fn=lambda datapipe, info: datapipe.map(lambda x: (x, info.worker_id, info.num_workers)),
    ) as loader:
        assert list(loader) == [(0, 0, 2), (1, 1, 2), (2, 0, 2), (3, 1, 2)]


def test_worker_reset_fn_may_be_a_lambda_and_runs_before_each_epoch(pool: list[str]) -> None:
    with load(WhichShard(), pool, num_workers=2, worker_reset_fn=lambda *arguments: count_epoch(*arguments)) as loader:
        assert [list(loader), list(loader)] == [[((0, 2), n), ((1, 2), n)] for n in (1, 2)]


def count_epoch(datapipe: Any, info: Any, seeds: Any) -> Any:
    assert (info.worker_id, info.num_workers) == datapipe.shard
    assert seeds.generate_seed() >= 0
    datapipe.epoch += 1
    return datapipe


# What travels.


@pytest.mark.parametrize("nbytes", [100, 10_000, 3_000_000])
def test_a_source_may_refill_one_buffer(pool: list[str], nbytes: int) -> None:
    with load(Refilled(nbytes), pool, num_workers=1) as loader:
        for value, element in enumerate(loader):
            assert torch.equal(element, full(nbytes, value))
        assert value == 19


def test_a_user_may_keep_and_change_what_arrived_after_shutdown(pool: list[str]) -> None:
    with load(sharded(range(20)).map(functools.partial(full, 100_000)), pool, num_workers=2) as loader:
        kept = [element.add_(1) for element in loader]
    gc.collect()
    for value, element in enumerate(kept):
        assert torch.equal(element.add_(1), full(100_000, value + 2))


def test_batches_larger_than_a_message_arrive_whole(pool: list[str]) -> None:
    with load(sharded(range(8)).map(functools.partial(full, 5_000_000)), pool, num_workers=2) as loader:
        for value, element in enumerate(loader):
            assert torch.equal(element, full(5_000_000, value))
        assert value == 7


def test_many_tiny_batches_arrive_in_order(pool: list[str]) -> None:
    with load(sharded(range(30_000)), pool, num_workers=2) as loader:
        assert list(loader) == list(range(30_000))


def test_functions_of_a_module_that_the_workers_lack_may_travel_by_value(
    pool: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("def triple(x):\n    return 3 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here

    with load(sharded(range(4)).map(only_here.triple), pool, num_workers=2, pickle_by_value=[only_here]) as loader:
        assert list(loader) == [0, 3, 6, 9]


SCRIPT = """
import json, sys
from collections import namedtuple
from dataclasses import dataclass
from enum import Enum
from torchdata.dataloader2 import DataLoader2
from torchdata.datapipes.iter import IterableWrapper, IterDataPipe
from rpc_reading_service import RPCReadingService

Point = namedtuple("Point", "x y")

@dataclass
class Sample:
    x: int
    next: "Point"

class Colour(Enum):
    RED, BLUE = 0, 1

class Doubled(IterDataPipe):
    def __init__(self, source):
        super().__init__()
        self.source = source

    def __iter__(self):
        for x in self.source:
            yield self.twice(x)

    @staticmethod
    def twice(x):
        return 2 * x

class Plus:
    def __init__(self, n):
        self.n = n

    def __call__(self, x):
        return x + self.n

    def minus(self, x):
        return x - self.n

OFFSET = 10

def add(x):
    return x + OFFSET

def point(x):
    return Point(x, -x)

def sample(x):
    return Sample(x, Point(x, x))

def read(datapipe):
    with DataLoader2(datapipe, reading_service=RPCReadingService(sys.argv[1:])) as loader:
        return list(loader)

def numbers():
    return IterableWrapper(range(4)).sharding_filter()

def elements(function):
    return read(numbers().map(function))

points, samples = elements(point), elements(sample)
findings = {
    "functions": elements(add) == [10, 11, 12, 13],
    "lambdas": elements(lambda x: x * OFFSET) == [0, 10, 20, 30],
    "datapipes": read(Doubled(numbers())) == [0, 2, 4, 6],
    "objects": elements(Plus(1)) == [1, 2, 3, 4] and elements(Plus(1).minus) == [-1, 0, 1, 2],
    "enums": elements(lambda x: Colour(x % 2)) == 2 * [Colour.RED, Colour.BLUE],
    "namedtuples": [type(p) for p in points] == 4 * [Point] and points == [Point(x, -x) for x in range(4)],
    "dataclasses": [type(s) for s in samples] == 4 * [Sample] and samples == [sample(x) for x in range(4)],
}

# As in a notebook of which a cell was changed and run again.

def add(x):
    return x - OFFSET

@dataclass
class Sample:
    x: int
    next: "Point"
    new: str = "field"

again = elements(sample)
changed = [type(s) for s in again] == 4 * [Sample] and again == [sample(x) for x in range(4)]
print(json.dumps({**findings, "what changed": changed and elements(add) == [-10, -9, -8, -7]}))
"""


@pytest.fixture(scope="module")
def script_findings(two_daemons: list[str]) -> dict[str, bool]:
    """What a training script, which no worker can import, found to be so."""
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, *two_daemons], stdout=subprocess.PIPE, timeout=90, check=True
    )
    findings: dict[str, bool] = json.loads(process.stdout)
    return findings


IN_MAIN = ["functions", "lambdas", "datapipes", "objects", "enums", "namedtuples", "dataclasses", "what changed"]


@pytest.mark.parametrize("what", IN_MAIN)
def test_what_main_defines_travels_by_value_and_comes_back_as_its_own(
    script_findings: dict[str, bool], what: str
) -> None:
    assert script_findings[what]


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory can be pinned here")
def test_pin_memory_without_cuda_warns_and_goes_on(pool: list[str]) -> None:
    with load(sharded(range(4)), pool, num_workers=1, pin_memory=True) as loader:
        with pytest.warns(UserWarning, match="pin_memory=True has no effect: no CUDA device is available"):
            iterator = iter(loader)
        assert list(iterator) == [0, 1, 2, 3]


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_whose_turn_comes_while_it_is_waited_has_room(pool: list[str], transport: str) -> None:
    """Its window is full of batches that were consumed, but it has not been told; the first worker ends meanwhile."""
    pipe = sharded(range(10)).map(functools.partial(full, 600_000))
    options = {"prefetch_bytes": 2 << 20, "num_workers": 2, "transport": transport, "timeout": 20.0}
    with load(pipe, pool, **options) as loader:
        assert [int(batch[0]) for batch in loader] == list(range(10))


# How far the workers run ahead.

WINDOWS = {
    "by number": (9_000_000, {"worker_prefetch_cnt": 4}, range(4, 5)),
    "by number, large batches": (10_000_000, {"worker_prefetch_cnt": 2}, range(2, 3)),
    "middling ones by number": (100_000, {"worker_prefetch_cnt": 1}, range(16, 17)),
    "middling ones by bytes": (1_000_000, {"worker_prefetch_cnt": 1}, range(9, 10)),
    "by prefetch_bytes": (5_000_000, {"worker_prefetch_cnt": 8, "prefetch_bytes": 16_000_000}, range(3, 4)),
    "at least one": (100_000, {"prefetch_bytes": 1}, range(1, 2)),
    "small ones by bytes": (0, {"worker_prefetch_cnt": 4}, range(1000, 4096)),
}


@pytest.mark.parametrize("window", WINDOWS)
def test_workers_run_only_so_far_ahead_of_a_consumer_that_stops(pool: list[str], fifo: Path, window: str) -> None:
    nbytes, options, bound = WINDOWS[window]
    with fifo_reader(fifo) as produced, load(Counted(fifo, nbytes), pool, num_workers=1, **options) as loader:
        iterator = iter(loader)
        assert bound.start <= produced(bound.start) < bound.stop
        for _ in range(3):
            next(iterator)
        assert produced(bound.start) < bound.stop + 3


class fifo_reader:
    """Counts the bytes that were written to a FIFO: waits for so many, and then until no more come for a while."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self._count = 0

    def __enter__(self) -> Callable[[int], int]:
        return self._read

    def _read(self, at_least: int) -> int:
        while select.select([self._descriptor], [], [], 0.4 if self._count >= at_least else TIMEOUT_S)[0]:
            self._count += len(os.read(self._descriptor, 65_536))
        return self._count

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


# Pause, resume, limit.


def test_a_paused_loader_yields_nothing_and_resumes_where_it_was(pool: list[str]) -> None:
    with load(sharded(range(200)).shuffle().map(draw), pool, num_workers=2) as loader:
        (expected,) = epochs(loader, [3])
        loader.seed(3)
        iterator = iter(loader)
        elements = [next(iterator) for _ in range(5)]
        iterator._pause()
        assert list(iterator) == []
        iterator.resume()
        assert [*elements, *iterator] == expected


def test_a_limit_pauses_after_so_many_batches(pool: list[str]) -> None:
    with load(sharded(range(10)), pool, num_workers=2) as loader:
        iterator = iter(loader)
        iterator.limit(3)
        assert list(iterator) == [0, 1, 2]
        iterator.resume()
        assert list(iterator) == [3, 4, 5]
        iterator.resume()
        iterator.limit(None)
        assert list(iterator) == [6, 7, 8, 9]


def test_a_graph_with_a_thread_of_its_own_can_be_paused(pool: list[str]) -> None:
    with load(sharded(range(100)).prefetch(5), pool, num_workers=2) as loader:
        iterator = iter(loader)
        elements = [next(iterator) for _ in range(5)]
        for _ in range(3):
            iterator._pause()
            iterator.resume()
            elements += [next(iterator) for _ in range(5)]
        assert [*elements, *iterator] == list(range(100))


# The life of a service.


def test_a_service_pickles_before_it_is_initialized_and_not_after(pool: list[str]) -> None:
    original = RPCReadingService(pool, num_workers=2, worker_init_fn=lambda datapipe, info: datapipe.map(double))
    with DataLoader2(sharded(range(4)), reading_service=pickle.loads(pickle.dumps(original))) as loader:
        assert list(loader) == [0, 2, 4, 6]
        with pytest.raises(ClosedError, match="an initialized RPCReadingService cannot be pickled"):
            pickle.dumps(loader.reading_service)


def test_finalize_may_come_early_and_often(pool: list[str]) -> None:
    service = RPCReadingService(pool, num_workers=2)
    service.finalize()
    datapipe = service.initialize(sharded(range(4)))
    assert datapipe is not None
    service.finalize()
    service.finalize()
    assert free_slots(pool) == 4


def test_finalize_is_safe_on_a_service_that_was_never_built() -> None:
    RPCReadingService.__new__(RPCReadingService).finalize()


def test_a_loader_that_is_dropped_in_mid_epoch_frees_its_slots(pool: list[str]) -> None:
    loader = load(sharded(range(N)), pool)
    assert next(iter(loader)) == 0
    del loader
    gc.collect()
    assert free_slots(pool) == 4


def test_a_traceback_that_keeps_a_loader_alive_keeps_no_one_else_from_the_slots(pool: list[str]) -> None:
    def train() -> None:
        with load(sharded(range(N)), pool) as loader:
            next(iter(loader))
            raise ArithmeticError("the loss is not a number")

    with pytest.raises(ArithmeticError) as kept:
        train()
    assert free_slots(pool) == 4
    assert kept.traceback


def test_a_script_that_ends_in_mid_epoch_takes_its_workers_along() -> None:
    script = """
import os
from torchdata.dataloader2 import DataLoader2
from torchdata.datapipes.iter import IterableWrapper
from rpc_reading_service import RPCReadingService

loader = DataLoader2(IterableWrapper(range(10**9)).map(lambda x: os.getpid()), reading_service=RPCReadingService(1))
print(next(iter(loader)))
"""
    # Whoever is left behind would hold stderr open, so that this waits in vain.
    quiet = {**os.environ, "PYTHONWARNINGS": "ignore"}
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60, env=quiet)
    assert (process.returncode, process.stderr) == (0, b"")
    assert not psutil.pid_exists(int(process.stdout))


def test_a_loader_may_be_shut_down_by_the_thread_that_owns_its_sockets(
    pool: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The garbage collector runs in any thread."""
    loader = load(sharded(range(50)), pool)
    next(iter(loader))
    (thread,) = (each for each in threading.enumerate() if each.name == "rpc-reading-client")

    class ShutDown(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if threading.current_thread() is thread:
                loader.shutdown()

    with caplog.at_level(logging.DEBUG, "rpc_reading_service.client"):
        handler = ShutDown()
        logging.getLogger("rpc_reading_service.client").addHandler(handler)
        thread.join(10)
        logging.getLogger("rpc_reading_service.client").removeHandler(handler)
    assert not thread.is_alive()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_loader_may_be_made_read_and_shut_down_by_three_threads(pool: list[str]) -> None:
    loader = load(sharded(range(N)), pool, num_workers=2)
    with ThreadPoolExecutor(1) as reading, ThreadPoolExecutor(1) as closing:
        iterator = iter(loader)
        assert reading.submit(list, iterator).result(TIMEOUT_S) == list(range(N))
        closing.submit(loader.shutdown).result(TIMEOUT_S)
    assert free_slots(pool) == 4


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_is_told_and_does_the_parent_no_harm(pool: list[str]) -> None:
    def child(sender: "Connection[Any, Any]") -> None:
        try:
            next(iterator)
        except ClosedError as error:
            sender.send(str(error))
        loader.shutdown()

    with load(sharded(range(N)), pool, num_workers=2) as loader:
        iterator = iter(loader)
        assert next(iterator) == 0
        receiver, sender = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(target=child, args=(sender,))
        with receiver, sender:
            process.start()
            sender.close()
            text = receiver.recv()
        process.join(TIMEOUT_S)
        assert process.exitcode == 0
        assert list(iterator) == list(range(1, N))
    assert f"belongs to process {os.getpid()}, of which this one ({process.pid}) is a fork" in text
    assert "create a DataLoader2 in the process that reads it" in text


def test_shutdown_does_not_wait_for_a_worker_that_is_busy(pool: list[str], fifo: Path) -> None:
    with load(sharded(range(N)).map(functools.partial(hold, fifo, 1)), pool, num_workers=2) as loader:
        assert next(iter(loader)) == 0
        began = time.monotonic()
    assert time.monotonic() - began < 5
    assert free_slots(pool) == 4
