"""The streams of random graphs, element for element those of torchdata's ``MultiProcessingReadingService``.

That service is slow to start and hangs at random, so that the oracle is a model of it, in this process, made of
torchdata's own functions: ``ModelReadingService``. The model is held against the real service on the graphs of
``KNOWN``, each in a process of its own and with a time limit. A graph is a line of Python, so that the smallest one
that fails can be pasted.
"""

import itertools
import multiprocessing
import os
import random
import signal
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.graph_settings import apply_sharding
from torchdata.dataloader2 import DataLoader2, MultiProcessingReadingService, ReadingServiceInterface
from torchdata.dataloader2.graph import find_dps, replace_dp, set_graph_random_seed, traverse_dps
from torchdata.dataloader2.graph._serialization import clone
from torchdata.dataloader2.graph.utils import _find_replicable_branches
from torchdata.dataloader2.random import SeedGenerator
from torchdata.dataloader2.utils import WorkerInfo
from torchdata.dataloader2.utils.dispatch import (
    _DummyIterDataPipe,
    find_lca_round_robin_sharding_dp,
    find_non_dispatching_branches,
)
from torchdata.dataloader2.utils.worker import process_init_fn, process_reset_fn
from torchdata.datapipes.iter import IterableWrapper, IterDataPipe, Prefetcher
from torchdata.datapipes.map import SequenceWrapper

from rpc_reading_service import RPCReadingService
from rpc_reading_service.testing import local_workers

MAX_WORKERS = 4
TIMEOUT_S = 60.0
MPRS_LIMIT_S = 20.0
MPRS_ATTEMPTS = 3

EXAMPLES = settings(
    max_examples=int(os.environ.get("ORACLE_EXAMPLES", "30")),
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.fixture(scope="session")
def daemons() -> Iterator[list[str]]:
    """Two daemons with slots for every session of this file, which keep torchdata's advice on forks to themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONWARNINGS", "ignore")
        with local_workers(2, slots=8) as addresses:
            yield addresses


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Text files of 4, 0 and 7 lines."""
    folder = tmp_path_factory.mktemp("lines")
    for lines in (4, 0, 7):
        (folder / f"{lines}.txt").write_text("".join(f"line {number}\n" for number in range(lines)))
    return [str(folder / f"{lines}.txt") for lines in (4, 0, 7)]


# What the graphs are made of. It works on elements of any shape, since any graph may come before it.


def plain(element: Any) -> Any:
    """The element in terms that ``==`` and ``repr`` tell apart: with its types, and without memory addresses."""
    if isinstance(element, torch.Tensor | np.ndarray):
        return type(element).__name__, str(element.dtype), element.tolist()
    if isinstance(element, list | tuple):
        return type(element).__name__, [plain(each) for each in element]
    return element


def number(element: Any) -> int:
    """A number that depends on everything in the element, but not on the folder that a file lies in."""
    if isinstance(element, tuple) and element and str(element[0]).endswith(".txt"):
        element = Path(element[0]).name, *element[1:]
    return zlib.crc32(repr(plain(element)).encode())


def tag(element: Any) -> tuple[str, Any]:
    return f"{number(element) % 100:02}", element


def draw(element: Any) -> tuple[Any, int, float, float]:
    return element, random.randrange(1000), float(np.random.rand()), torch.rand(()).item()


def tensor(element: Any) -> torch.Tensor:
    return torch.full((3,), number(element) % 1000)


def array(element: Any) -> np.ndarray:
    return np.arange(number(element) % 5, dtype=np.int16)


def keep(element: Any) -> bool:
    return number(element) % 3 != 0


def side(element: Any) -> int:
    return number(element) % 2


def several(element: Any) -> list[Any]:
    return [element] * (number(element) % 4)


def forked(source: Any, join: Callable[[Any, Any], Any]) -> Any:
    return join(*source.fork(2))


def demuxed(source: Any, join: Callable[[Any, Any], Any]) -> Any:
    return join(*source.demux(2, side))


class StaysHere(IterDataPipe[Any]):
    """Its elements, and whatever comes after it, are made in the training process."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def is_replicable(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        yield from self.source


def build(code: str, files: list[str]) -> Any:
    words = {
        "IterableWrapper": IterableWrapper,
        "SequenceWrapper": SequenceWrapper,
        "MULTIPROCESSING": SHARDING_PRIORITIES.MULTIPROCESSING,
        "files": files,
    }
    return eval(code, globals() | words)


# Random graphs.


@dataclass(frozen=True)
class Piece:
    """A line of Python for a graph, or for a part of one, and what decides what may follow."""

    code: str
    full: bool = False
    """It yields an element in every shard, so that it may be cycled for ever."""
    shuffled: bool = False
    """If it is iterated over once more within an epoch, it draws from torch's global generator."""
    sharded: bool = False
    """It may not be sharded again."""
    dispatched: bool = False
    """It can be iterated over only once in an epoch."""

    def then(self, code: str, **changes: bool) -> "Piece":
        return replace(self, code=self.code + code, **changes)


@dataclass(frozen=True)
class Rules:
    """What may be part of a graph besides what always may.

    A prefetch runs what comes before it in a thread of its own, so that global generators would be drawn from in no
    particular order, and a fork or demux would be entered by two threads at once.
    """

    draws: bool
    prefetch: bool
    cycles: bool = True


def sources() -> st.SearchStrategy[Piece]:
    sizes = st.integers(0, 13)
    elements = st.lists(
        st.integers() | st.text(max_size=3) | st.none() | st.floats(allow_nan=False, allow_infinity=False), max_size=6
    )
    return st.one_of(
        sizes.map(lambda size: Piece(f"IterableWrapper(range({size}))", full=size > 0)),
        elements.map(lambda elements: Piece(f"IterableWrapper({elements!r})", full=bool(elements))),
        sizes.map(lambda size: Piece(f"SequenceWrapper(range({size})).map(tag).shuffle()", shuffled=True)),
        sizes.map(lambda size: Piece(f"SequenceWrapper(range({size})).batch(2).to_iter_datapipe()", full=size > 0)),
        st.just(Piece("IterableWrapper(files).open_files().readlines()", full=True)),
        st.just(Piece("IterableWrapper([])")),
    )


def next_steps(piece: Piece, rules: Rules) -> Iterator[Piece]:
    """The piece with one more DataPipe, for every one that is legal."""
    yield piece.then(".shuffle()", shuffled=True)
    yield piece.then(".shuffle(buffer_size=3)", shuffled=True)
    for code in (".batch(2)", ".batch(3)", ".batch(2).unbatch()", ".header(2)", ".header(5)", ".enumerate()"):
        yield piece.then(code)
    for code in (".map(tag)", ".map(tensor)", ".map(array)"):
        yield piece.then(code)
    for code in (".batch(2, drop_last=True)", ".unbatch(-1)", ".filter(keep)", ".flatmap(several)"):
        yield piece.then(code, full=False)
    if rules.draws:
        yield from [piece.then(".map(draw)")] * 3
    if rules.prefetch:
        yield piece.then(".prefetch(2)")
    if not piece.sharded:
        yield from [piece.then(".sharding_filter()", sharded=True, full=False)] * 3
    yield piece.then(".sharding_round_robin_dispatch(MULTIPROCESSING)", dispatched=True, full=False)
    if rules.cycles and not piece.dispatched and (rules.draws or not piece.shuffled):
        yield piece.then(".cycle(2)")
        if piece.full:
            yield piece.then(".cycle().header(20)")


JOINS = ("zip", "mux", "mux_longest", "concat", "zip_longest")


def joined(join: str, left: Piece, right: Piece) -> Piece:
    return Piece(
        f"{left.code}.{join}({right.code})",
        full=left.full and right.full,
        shuffled=left.shuffled or right.shuffled,
        sharded=left.sharded or right.sharded,
        dispatched=left.dispatched or right.dispatched,
    )


@st.composite
def extended(draw_: st.DrawFn, piece: Piece, rules: Rules, most: int) -> Piece:
    for _ in range(draw_(st.integers(0, most))):
        piece = draw_(st.sampled_from(list(next_steps(piece, rules))))
    return piece


@st.composite
def branched(draw_: st.DrawFn, source: Piece, rules: Rules, depth: int) -> Piece:
    """A fork or demux whose two children meet again."""
    inner = replace(rules, prefetch=False, cycles=False)
    children = [replace(source, code=f"{name}{depth}") for name in "ab"]
    left, right = (draw_(extended(child, inner, 3)) for child in children)
    join = joined(draw_(st.sampled_from(JOINS)), left, right)
    kind = draw_(st.sampled_from(("forked", "demuxed")))
    names = ", ".join(child.code for child in children)
    return replace(join, code=f"{kind}({source.code}, lambda {names}: {join.code})", full=False)


@st.composite
def pieces(draw_: st.DrawFn, rules: Rules, depth: int) -> Piece:
    piece = draw_(extended(draw_(sources()), rules, 3))
    shape = draw_(st.sampled_from(("line", "line", "joined", "branched"))) if depth else "line"
    if shape == "joined":
        piece = joined(draw_(st.sampled_from(JOINS)), piece, draw_(pieces(rules, depth - 1)))
    elif shape == "branched":
        piece = draw_(branched(piece, rules, depth))
    return draw_(extended(piece, rules, 3)) if depth else piece


@st.composite
def graphs(draw_: st.DrawFn) -> str:
    draws = draw_(st.booleans())
    code = draw_(pieces(Rules(draws=draws, prefetch=not draws), depth=2)).code
    tails = ("{}", "{}", "{}.prefetch(3)", "StaysHere({}).prefetch(3)", "StaysHere({}).shuffle().batch(2)")
    return draw_(st.sampled_from(tails)).format(code)


# The model.


class GlobalRNGs:
    """``with`` them, the global generators are those of another process."""

    def __init__(self) -> None:
        self._own = self._get()

    def __enter__(self) -> None:
        self._outer = self._get()
        self._set(self._own)

    def __exit__(self, *_: object) -> None:
        self._own = self._get()
        self._set(self._outer)

    @staticmethod
    def _get() -> tuple[Any, Any, Any]:
        return random.getstate(), np.random.get_state(), torch.get_rng_state()

    @staticmethod
    def _set(states: tuple[Any, Any, Any]) -> None:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


class ModelReadingService(ReadingServiceInterface):
    """What ``MultiProcessingReadingService`` does, with workers that are no processes and run only when asked."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers

    def initialize(self, datapipe: Any) -> Any:
        datapipe, self._dispatcher = self._cut_dispatching(without_threads(datapipe))
        graph = traverse_dps(datapipe)
        (branch,) = _find_replicable_branches(graph)
        infos = [WorkerInfo(self._num_workers, worker) for worker in range(self._num_workers)]
        self._workers = [Worker(clone(branch), info, self._dispatcher) for info in infos]
        source = RoundRobin(self._workers)
        self._end = source if branch is datapipe else datapipe
        replace_dp(graph, branch, source)
        return self._end

    def _cut_dispatching(self, datapipe: Any) -> tuple[Any, "Dispatcher | None"]:
        graph = traverse_dps(datapipe)
        dispatching = find_lca_round_robin_sharding_dp(graph)
        if dispatching is None:
            return datapipe, None
        graph = replace_dp(graph, dispatching, _DummyIterDataPipe())
        return next(iter(graph.values()))[0], Dispatcher(dispatching, self._num_workers)

    def initialize_iteration(self, seed_generator: SeedGenerator, iter_reset_fn: Any = None) -> None:
        set_graph_random_seed(self._end, seed_generator)
        seeds = [seed_generator.spawn(worker) for worker in range(self._num_workers)]
        if self._dispatcher is not None:
            self._dispatcher.begin(seeds[0].spawn(0))
        for worker, each in zip(self._workers, seeds, strict=True):
            worker.begin(each)


class Worker:
    """One worker process of the model."""

    def __init__(self, datapipe: Any, info: WorkerInfo, dispatcher: "Dispatcher | None") -> None:
        self._info = info
        self._rngs = GlobalRNGs()
        self._datapipe = process_init_fn(datapipe, info) if dispatcher is None else self._fed(datapipe, dispatcher)

    def _fed(self, datapipe: Any, dispatcher: "Dispatcher") -> Any:
        graph = traverse_dps(datapipe)
        for branch in find_non_dispatching_branches(graph):
            apply_sharding(branch, self._info.num_workers, self._info.worker_id, SHARDING_PRIORITIES.MULTIPROCESSING)
        (placeholder,) = find_dps(graph, _DummyIterDataPipe)
        return next(iter(replace_dp(graph, placeholder, Dealt(dispatcher, self._info.worker_id)).values()))[0]

    def begin(self, seeds: SeedGenerator) -> None:
        with self._rngs:
            self._datapipe = process_reset_fn(self._datapipe, self._info, seeds)
            self._iterator = iter(self._datapipe)

    def next(self) -> Any:
        with self._rngs:
            return next(self._iterator)


class Dispatcher:
    """The dispatching process of the model."""

    def __init__(self, datapipe: Any, num_workers: int) -> None:
        self._info = WorkerInfo(num_workers, 0)
        self._rngs = GlobalRNGs()
        self._children = clone(datapipe).round_robin_demux(num_instances=num_workers, buffer_size=100_000)

    def begin(self, seeds: SeedGenerator) -> None:
        with self._rngs:
            process_reset_fn(self._children[0], self._info, seeds, distributed_shared_seed=True)
            self._iterators = [iter(child) for child in self._children]

    def next(self, worker: int) -> Any:
        with self._rngs:
            return next(self._iterators[worker])


class Outside(IterDataPipe[Any]):
    """What it holds, no traversal of the graph may pickle."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


class Dealt(Outside):
    """In a worker, what comes from the dispatching process."""

    def __init__(self, dispatcher: Dispatcher, worker: int) -> None:
        self._dispatcher = dispatcher
        self._worker = worker

    def __iter__(self) -> Iterator[Any]:
        with suppress(StopIteration):
            while True:
                yield self._dispatcher.next(self._worker)


class RoundRobin(Outside):
    """In the training process, what comes from the workers."""

    def __init__(self, workers: list[Worker]) -> None:
        self._workers = workers

    def __iter__(self) -> Iterator[Any]:
        running = dict.fromkeys(self._workers)
        while running:
            for worker in list(running):
                try:
                    element = worker.next()
                except StopIteration:
                    del running[worker]
                else:
                    yield element


class Through(IterDataPipe[Any]):
    """Takes the place of a prefetch, whose thread would draw from whichever generators are set just then."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        yield from self.source


def without_threads(datapipe: Any) -> Any:
    graph = traverse_dps(datapipe)
    for prefetcher in find_dps(graph, Prefetcher):
        graph = replace_dp(graph, prefetcher, Through(prefetcher.source_datapipe))
    return next(iter(graph.values()))[0]


# The streams.


def streams(datapipe: Any, service: Any, epochs: Sequence[tuple[int, int | None]]) -> list[list[Any]]:
    """For each epoch, given as its seed and how many elements to take of it, what came; the last may be an error."""
    found: list[list[Any]] = []
    with DataLoader2(datapipe, reading_service=service) as loader:
        for seed, count in epochs:
            loader.seed(seed)
            found.append([])
            iterator = iter(loader)
            try:
                for element in itertools.islice(iterator, count):
                    found[-1].append(plain(element))
            except Exception as error:
                found[-1].append(f"raised {type(error).__name__}")
                break  # DataLoader2 has shut down
    return found


def model_streams(datapipe: Any, num_workers: int, epochs: Sequence[tuple[int, int | None]]) -> list[list[Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a fork says that it is reset after a break; in a worker nobody hears it
        return streams(datapipe, ModelReadingService(num_workers), epochs)


def remote(daemons: list[str], num_workers: int) -> RPCReadingService:
    return RPCReadingService(daemons, num_workers=num_workers, pickle_by_value=(__name__,), timeout=TIMEOUT_S)


@EXAMPLES
@given(code=graphs(), num_workers=st.integers(1, MAX_WORKERS), seeds=st.tuples(*[st.integers(0, 2**64 - 1)] * 2))
def test_two_epochs_of_any_graph_equal_the_models(
    daemons: list[str], files: list[str], code: str, num_workers: int, seeds: tuple[int, int]
) -> None:
    datapipe, epochs = build(code, files), [(seed, None) for seed in seeds]
    expected = model_streams(datapipe, num_workers, epochs)
    assert streams(datapipe, remote(daemons, num_workers), epochs) == expected


@EXAMPLES
@given(code=graphs(), num_workers=st.integers(1, MAX_WORKERS), count=st.integers(1, 12))
def test_after_an_early_break_the_next_epoch_of_any_graph_equals_the_models(
    daemons: list[str], files: list[str], code: str, num_workers: int, count: int
) -> None:
    datapipe, epochs = build(code, files), [(1, count), (2, count // 2), (3, None)]
    expected = model_streams(datapipe, num_workers, epochs)
    assert streams(datapipe, remote(daemons, num_workers), epochs) == expected


# The model of MultiProcessingReadingService against the real one.

KNOWN = {
    "a line": ("IterableWrapper(range(23)).shuffle().sharding_filter().map(draw).shuffle(buffer_size=3).batch(2)", 3),
    "unsharded": ("IterableWrapper(range(5)).map(draw).shuffle()", 2),
    "uneven": ("IterableWrapper([[1, 1, 1], [2], [3, 3]]).sharding_filter().unbatch().map(draw)", 3),
    "empty shards": ("IterableWrapper(range(3)).sharding_filter().map(draw)", 4),
    "files": ("IterableWrapper(files).open_files().readlines().shuffle().sharding_filter().prefetch(2)", 2),
    "map-style": ("SequenceWrapper(range(9)).map(tag).shuffle().sharding_filter().enumerate()", 2),
    "one branch sharded": (
        "forked(IterableWrapper(range(9)).shuffle(), lambda a, b: "
        "a.sharding_filter().shuffle().map(draw).zip_longest(b.shuffle().map(tensor))).map(draw)",
        2,
    ),
    "demux and mux": (
        "demuxed(IterableWrapper(range(20)).shuffle(), lambda a, b: "
        "a.shuffle().mux_longest(b.map(draw))).sharding_filter().unbatch(-1)",
        3,
    ),
    "cycled": ("IterableWrapper(range(4)).shuffle().cycle().header(20).sharding_filter().map(draw)", 2),
    "dispatched": (
        "IterableWrapper(range(21)).shuffle().map(draw)"
        ".sharding_round_robin_dispatch(MULTIPROCESSING).map(draw).shuffle().batch(2)",
        3,
    ),
    "dispatched beside sharded": (
        "IterableWrapper(range(9)).shuffle().sharding_round_robin_dispatch(MULTIPROCESSING)"
        ".concat(IterableWrapper(range(9)).shuffle().sharding_filter().shuffle().map(draw)).map(draw)",
        2,
    ),
    "dispatched twice": (
        "IterableWrapper(range(9)).shuffle().sharding_round_robin_dispatch(MULTIPROCESSING)"
        ".zip(IterableWrapper(range(12)).map(draw).sharding_round_robin_dispatch(MULTIPROCESSING)).shuffle()",
        2,
    ),
    "staying": ("StaysHere(IterableWrapper(range(11)).sharding_filter().shuffle().map(draw)).shuffle().batch(2)", 2),
}
BROKEN = {
    # It raises "Can not expect any response without submitted request", and loses elements on the way there.
    "one shard ends two elements before another": ("IterableWrapper([[1], [2, 2, 2]]).sharding_filter().unbatch()", 2),
    "an empty shard before a long one": ("IterableWrapper([[], [2, 2, 2], [3]]).sharding_filter().unbatch()", 3),
}
"""Graphs that are beyond the real service, in torchdata 0.9.0."""


@pytest.mark.parametrize("name", KNOWN)
def test_the_model_equals_multiprocessing_reading_service(files: list[str], name: str) -> None:
    code, num_workers = KNOWN[name]
    epochs = [(5, None), (6, None)]
    expected = model_streams(build(code, files), num_workers, epochs)
    assert len(expected[1]) > 1
    attempts = (multiprocessing_streams(code, files, num_workers, epochs) for _ in range(MPRS_ATTEMPTS))
    found = next(filter(None, attempts), None)
    if found is None:
        pytest.skip(f"MultiProcessingReadingService hung {MPRS_ATTEMPTS} times")
    assert found == expected


@pytest.mark.parametrize("name", KNOWN | BROKEN)
def test_the_streams_of_known_graphs_equal_the_models(daemons: list[str], files: list[str], name: str) -> None:
    code, num_workers = (KNOWN | BROKEN)[name]
    datapipe, epochs = build(code, files), [(5, None), (6, 4), (7, None)]
    expected = model_streams(datapipe, num_workers, epochs)
    assert streams(datapipe, remote(daemons, num_workers), epochs) == expected


def multiprocessing_streams(
    code: str, files: list[str], num_workers: int, epochs: Sequence[tuple[int, int | None]]
) -> list[list[Any]] | None:
    """In a process of its own, which is killed with its workers once it has answered; None if it never does."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torchdata.dataloader2", "hypothesis", "pytest", "rpc_reading_service"])
    ours, theirs = context.Pipe()
    process = context.Process(target=send_multiprocessing_streams, args=(theirs, code, files, num_workers, epochs))
    process.start()
    theirs.close()
    assert process.pid is not None
    try:
        assert ours.recv() == "ready"
        return ours.recv() if ours.poll(MPRS_LIMIT_S) else None
    finally:
        with suppress(ProcessLookupError):  # it died of an exception
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
        process.close()
        ours.close()


def send_multiprocessing_streams(
    connection: "Connection[Any, Any]",
    code: str,
    files: list[str],
    num_workers: int,
    epochs: Sequence[tuple[int, int | None]],
) -> None:
    os.setsid()  # its workers, too, can be killed by it
    connection.send("ready")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        connection.send(streams(build(code, files), Unending(num_workers, multiprocessing_context="fork"), epochs))
    signal.pause()  # until it is killed: its number must not be another's by then


class Unending(MultiProcessingReadingService):
    """How it shuts down, and whether, is no part of the question."""

    def finalize(self) -> None:
        pass
