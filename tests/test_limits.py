"""What a daemon allows at most, and what is said beyond it."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from daemons import Daemon, running
from torchdata.dataloader2 import DataLoader2
from torchdata.dataloader2.random import SeedGenerator
from torchdata.datapipes.iter import IterableWrapper

from rpc_reading_service import GraphError, RPCReadingService, SlotsError
from rpc_reading_service.cli import main
from rpc_reading_service.daemon import describe_exit

GRAPH_BYTES = 200_000
MEMORY = 300 << 20
USED_UP = f"the {MEMORY:,} bytes that rpc-reading-worker --worker-memory gives each worker are used up"


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    options = ["--max-sessions", "1", "--max-graph-size", "200KB", "--worker-memory", "300MiB"]
    with running("--port", "0", "--slots", "3", *options) as started:
        assert started.line
        yield started


def load(daemon: Daemon, pipe: Any, **options: Any) -> "DataLoader2[Any]":
    service = RPCReadingService([daemon.address], num_workers=1, timeout=60.0, pickle_by_value=(__name__,), **options)
    return DataLoader2(pipe, reading_service=service)


def tensor(megabytes: int) -> torch.Tensor:
    return torch.ones(megabytes << 20, dtype=torch.uint8)


def kept(megabytes: int) -> torch.Tensor:
    """User code can still reach it."""
    KEPT.append(tensor(megabytes))
    return KEPT[-1]


KEPT: list[torch.Tensor] = []


def array(megabytes: int) -> bytes:
    return bytes(megabytes << 20)


def test_one_session_more_is_refused_and_served_when_another_has_ended(daemon: Daemon) -> None:
    pipe = IterableWrapper(range(5)).sharding_filter()
    with load(daemon, pipe) as first:
        iter(first)
        words = f"{daemon.address} has 1 sessions, its --max-sessions: end some, or ask others"
        with pytest.raises(SlotsError, match=re.escape(words)):
            iter(load(daemon, pipe))
        assert list(first) == list(range(5))
    with load(daemon, pipe) as second:
        assert list(second) == list(range(5))


def test_a_larger_graph_is_refused_before_it_is_sent(daemon: Daemon) -> None:
    words = rf"the graph has 3\d\d,\d\d\d bytes, and {daemon.address} takes at most 200,000 \(--max-graph-size\): let"
    with pytest.raises(GraphError, match=words):
        iter(load(daemon, IterableWrapper([bytes(300_000)]).sharding_filter()))


@pytest.mark.parametrize("make", [tensor, array])
def test_a_worker_that_wants_more_memory_fails_by_name_and_its_shard_alone(daemon: Daemon, make: Any) -> None:
    with load(daemon, IterableWrapper([5, 10, 500]).sharding_filter().map(make)) as loader:
        iterator = iter(loader)
        assert len(next(iterator)) == 5 << 20
        assert len(next(iterator)) == 10 << 20
        with pytest.raises(MemoryError, match=re.escape(USED_UP)):
            next(iterator)


def test_a_batch_whose_copy_finds_no_room_fails_by_name_too(daemon: Daemon) -> None:
    with load(daemon, IterableWrapper([5, 200]).sharding_filter().map(kept), transport="tcp") as loader:
        iterator = iter(loader)
        assert len(next(iterator)) == 5 << 20
        with pytest.raises(MemoryError, match=rf"{re.escape(USED_UP)} .* to send 209,715,200 bytes"):
            next(iterator)


def test_a_library_that_aborts_under_a_limit_is_told_with_the_limit() -> None:
    assert describe_exit(-6) == "was killed by SIGABRT"
    assert describe_exit(-6, 5_000_000) == (
        "was killed by SIGABRT (libraries do that if the 5,000,000 bytes of --worker-memory are used up)"
    )


SIZES = {"--max-graph-size": "5", "--worker-memory": "5 GB"}


@pytest.mark.parametrize("option", SIZES)
def test_a_size_without_a_unit_is_refused(option: str) -> None:
    result = CliRunner().invoke(main, [option, SIZES[option]])
    assert result.exit_code == 2
    assert f"{SIZES[option]!r} is not a size such as 500MB or 8GiB" in result.output


class Large:
    """A function that brings a large object along."""

    def __init__(self) -> None:
        self.data = bytes(2 << 20)

    def __call__(self, graph: Any, *_: Any) -> Any:
        return graph


def test_a_function_that_is_too_large_for_a_control_message_is_refused_by_name(two_daemons: list[str]) -> None:
    pipe = IterableWrapper(range(5)).sharding_filter()
    service = RPCReadingService(two_daemons, pickle_by_value=(__name__,))
    adapted = service.initialize(pipe)
    try:
        words = r"pickles to 2,\d\d\d,\d\d\d bytes, and at most 1,048,576 can be sent to the workers"
        for name, call in {
            "pause_fn": lambda: service._pause(Large()),
            "resume_fn": lambda: service._resume(Large()),
            "limit_fn": lambda: service._limit(5, Large()),
            "iter_reset_fn": lambda: service.initialize_iteration(SeedGenerator(5), Large()),
        }.items():
            with pytest.raises(GraphError, match=f"^{name} {words}"):
                call()
        service.initialize_iteration(SeedGenerator(5))
        assert sorted(adapted) == list(range(5))
    finally:
        service.finalize()
