"""Graphs so large that the workers of a host share one."""

import functools
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from daemons import running, until
from torchdata.dataloader2 import DataLoader2
from torchdata.datapipes.iter import IterableWrapper, IterDataPipe

from rpc_reading_service import RPCReadingError, RPCReadingService, WorkerTimeoutError
from rpc_reading_service.daemon import SHARED_GRAPH_BYTES
from rpc_reading_service.testing import local_workers

WORKERS = 3
PIECES = 20
PIECE_BYTES = 1_000_000
PATIENCE_S = 20.0

assert PIECES * PIECE_BYTES > SHARED_GRAPH_BYTES


@pytest.fixture(scope="module")
def daemon() -> Iterator[list[str]]:
    with local_workers(1, WORKERS) as addresses:
        yield addresses


def load(pipe: Any, daemon: list[str], **options: Any) -> "DataLoader2[Any]":
    options = {"pickle_by_value": (__name__,), "timeout": 60.0, **options}
    return DataLoader2(pipe, reading_service=RPCReadingService(daemon, **options))


def pieces() -> list[bytes]:
    """All different, so that pickle does not notice that they are one."""
    return [number.to_bytes(4, "big") * (PIECE_BYTES // 4) for number in range(PIECES)]


class Places(IterDataPipe[tuple[int, int, int]]):
    """Per element: which it is, the worker's parent, and the memory that no other process shares with the worker."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        for piece in self.source:
            yield int.from_bytes(bytes(piece[:4]), "big"), os.getppid(), psutil.Process().memory_full_info().uss


def sharded(elements: Any) -> Any:
    return Places(IterableWrapper(elements, deepcopy=False).sharding_filter())


def numbers(batches: Any) -> list[int]:
    return [number for number, *_ in batches]


def parents(batches: Any) -> set[int]:
    return {parent for _, parent, _ in batches}


def arrays() -> list[Any]:
    return [np.frombuffer(bytearray(piece), dtype=np.uint8) for piece in pieces()]


def tensors() -> list[Any]:
    return [torch.from_numpy(array) for array in arrays()]


@pytest.mark.parametrize("data", [arrays, tensors])
def test_the_workers_share_arrays_and_tensors(daemon: list[str], data: Any) -> None:
    with load(sharded(data()).map(itemgetter(2)), daemon) as loader:
        assert max(loader) < 0.8 * PIECES * PIECE_BYTES
        assert max(loader) < 0.8 * PIECES * PIECE_BYTES, "in the second epoch"


def is_origin(pid: int) -> bool:
    """Whether it was forked from the forkserver, and is not the forkserver itself."""
    parent = psutil.Process(pid).parent()
    return parent is not None and "multiprocessing.forkserver" in " ".join(parent.cmdline())


def test_the_workers_share_one_graph(daemon: list[str]) -> None:
    with load(sharded(pieces()), daemon) as loader:
        batches = list(loader)
        assert numbers(batches) == list(range(PIECES))
        (origin,) = parents(batches)
        assert is_origin(origin)
        assert len(psutil.Process(origin).children()) == WORKERS
        assert max(uss for *_, uss in batches) < 0.8 * PIECES * PIECE_BYTES
        assert numbers(loader) == list(range(PIECES))
    until(lambda: not psutil.pid_exists(origin), PATIENCE_S)


def test_a_small_graph_is_loaded_by_each_worker(daemon: list[str]) -> None:
    with load(sharded(pieces()[:WORKERS]), daemon) as loader:
        batches = list(loader)
        (forkserver,) = parents(batches)
        assert not is_origin(forkserver)
    assert numbers(batches) == list(range(WORKERS))


@pytest.mark.parametrize("whom", ["a worker", "the process that has it loaded"])
def test_a_loss_costs_nothing(daemon: list[str], whom: str) -> None:
    with load(sharded(pieces()), daemon) as loader:
        iterator = iter(loader)
        batches = [next(iterator)]
        (origin,) = parents(batches)
        victim = psutil.Process(origin)
        (victim if whom == "the process that has it loaded" else victim.children()[0]).kill()
        batches += iterator
        assert numbers(batches) == list(range(PIECES))
        again = list(loader)
        assert numbers(again) == list(range(PIECES))
        assert (parents(again) == {origin}) == (whom == "a worker")


class Arrives:
    """Something in a graph that can be copied, as DataLoader2 does, and does something when it is loaded elsewhere."""

    def __init__(self, how: str, path: Path | None = None) -> None:
        self.how, self.path = how, path

    def __reduce__(self) -> Any:
        return _arrive, (self.how, self.path, os.getpid())


def _arrive(how: str, path: Path | None, pid: int) -> Any:
    arrived: Any = Arrives(how, path)
    if os.getpid() != pid:
        match how:
            case "opens a file":
                arrived.file = path.open()
            case "starts a thread":
                arrived.thread = threading.Thread(target=threading.main_thread().join)
                arrived.thread.start()
            case "tells, and waits":
                path.with_suffix(".part").write_text(str(os.getpid()))
                path.with_suffix(".part").rename(path)
                time.sleep(600)
            case "waits":
                time.sleep(600)
            case "raises":
                raise ValueError("no such thing here")
    return arrived


def use(arrived: Any, piece: bytes) -> tuple[int, int, int]:
    used = int(arrived.file.readline()) if arrived.how == "opens a file" else arrived.thread.is_alive()
    return int.from_bytes(piece[:4], "big"), os.getppid(), used


@pytest.mark.parametrize("how", ["opens a file", "starts a thread"])
def test_what_forks_must_not_share_is_loaded_by_each_worker(daemon: list[str], tmp_path: Path, how: str) -> None:
    path = tmp_path / "lines"
    path.write_text("".join(f"{number:01000}\n" for number in range(PIECES)))
    pipe = IterableWrapper(pieces(), deepcopy=False).sharding_filter()
    with load(pipe.map(functools.partial(use, Arrives(how, path))), daemon) as loader:
        batches = list(loader)
        (forkserver,) = parents(batches)
        assert not is_origin(forkserver)
    assert numbers(batches) == list(range(PIECES))
    # Each worker reads the file from its beginning.
    expected = [number // WORKERS if how == "opens a file" else True for number in range(PIECES)]
    assert [used for *_, used in batches] == expected


class Carries(IterDataPipe[Any]):
    """A graph with something in it."""

    def __init__(self, source: Any, what: Any) -> None:
        self.source, self.what = source, what

    def __iter__(self) -> Iterator[Any]:
        yield from self.source


def test_a_stopped_process_that_has_it_loaded_is_not_waited_for_long() -> None:
    with local_workers(1, 2) as addresses, load(sharded(pieces()), addresses, num_workers=1) as loader:
        iterator = iter(loader)
        batches = [next(iterator)]
        (origin,) = parents(batches)
        psutil.Process(origin).suspend()
        try:
            with load(sharded(pieces()), addresses, num_workers=1) as another:
                other = list(another)  # of the same graph, whose second worker cannot be forked
        finally:
            psutil.Process(origin).resume()
        batches += iterator
    assert numbers(batches) == numbers(other) == list(range(PIECES))
    assert parents(batches).isdisjoint(parents(other))


def read_all(addresses: list[str]) -> list[int]:
    pipe = IterableWrapper(pieces(), deepcopy=False).sharding_filter()
    service = RPCReadingService(addresses, num_workers=1, timeout=60.0)
    with DataLoader2(pipe, reading_service=service) as loader:
        return [int.from_bytes(piece[:4], "big") for piece in loader]


def test_two_sessions_that_send_the_same_graph_at_once_are_both_served() -> None:
    spawn = multiprocessing.get_context("spawn")
    with local_workers(1, 2) as addresses, ProcessPoolExecutor(2, spawn) as executor:
        both = list(executor.map(read_all, 2 * [addresses]))
    assert both == 2 * [list(range(PIECES))]


@pytest.mark.slow
def test_if_the_daemon_is_killed_while_a_graph_is_loaded_nothing_is_left(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    with running("--slots", "1", "--port", "0") as daemon:
        pipe = Carries(sharded(pieces()), Arrives("tells, and waits", pid))
        with load(pipe, [daemon.address], timeout=30.0) as loader, ThreadPoolExecutor() as executor:
            opened = executor.submit(iter, loader)
            until(pid.exists, PATIENCE_S)
            daemon.process.kill()
            until(lambda: not psutil.pid_exists(int(pid.read_text())), PATIENCE_S)
            loader.shutdown()
            assert isinstance(opened.exception(), RPCReadingError)


def test_what_cannot_be_loaded_is_an_error_from_a_worker(daemon: list[str]) -> None:
    pipe = Carries(sharded(pieces()), Arrives("raises"))
    with load(pipe, daemon) as loader, pytest.raises(ValueError, match="no such thing here"):
        iter(loader)


def test_a_session_that_ends_while_its_graph_is_loaded_leaves_nothing(daemon: list[str]) -> None:
    pipe = Carries(sharded(pieces()), Arrives("waits"))
    with load(pipe, daemon, timeout=3.0) as loader, pytest.raises(WorkerTimeoutError, match="timeout=3 s"):
        iter(loader)
    with load(sharded(pieces()[:WORKERS]), daemon) as loader:
        assert numbers(loader) == list(range(WORKERS))
