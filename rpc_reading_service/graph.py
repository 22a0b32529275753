"""The only place that looks inside a DataPipe graph: split it, pickle it, shard it, seed it, run it again.

What a worker does to its part is what torchdata's own worker does, in the same order and by torchdata's own functions
(``torchdata.dataloader2.utils``), so that the streams are equal:

    build    apply_sharding(graph, num_workers, worker_id, MULTIPROCESSING), worker_init_fn
    begin    each epoch: seeds of random, torch and numpy, seeds of the graph, iter_reset_fn, worker_reset_fn
"""

import functools
import hashlib
import inspect
import io
import logging
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from types import CodeType, FunctionType, ModuleType
from typing import Any, ClassVar, TypeAlias
from weakref import WeakSet

import cloudpickle
import torch
import torch.utils.data.graph
from torch.utils.data import default_collate
from torch.utils.data.datapipes import _hook_iterator
from torch.utils.data.datapipes._hook_iterator import _generate_input_args_string, _set_datapipe_valid_iterator_id
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.graph_settings import apply_sharding
from torchdata.dataloader2.graph import (
    DataPipe,
    DataPipeGraph,
    find_dps,
    list_dps,
    replace_dp,
    set_graph_random_seed,
    traverse_dps,
)
from torchdata.dataloader2.graph.utils import _find_replicable_branches
from torchdata.dataloader2.random import SeedGenerator
from torchdata.dataloader2.random._philox import PhiloxEngine
from torchdata.dataloader2.utils import WorkerInfo
from torchdata.dataloader2.utils.dispatch import (
    _DummyIterDataPipe,
    find_lca_round_robin_sharding_dp,
    find_non_dispatching_branches,
)
from torchdata.dataloader2.utils.worker import process_init_fn, process_reset_fn
from torchdata.datapipes.iter import FullSync, IterDataPipe, Mapper, PinMemory, Prefetcher

from rpc_reading_service import inplace
from rpc_reading_service.errors import GraphError, GraphPickleError
from rpc_reading_service.messages import CHUNK_BYTES
from rpc_reading_service.transport import Deadline

logger = logging.getLogger(__name__)

InitFn: TypeAlias = Callable[[DataPipe, WorkerInfo], DataPipe]
ResetFn: TypeAlias = Callable[[DataPipe, WorkerInfo, SeedGenerator], DataPipe]
IterResetFn: TypeAlias = Callable[[DataPipe], DataPipe]

JOIN_POLL_S = 0.01
"""How often a look is taken at how far torchdata's prefetch thread is."""

MOST_OF_NAME = 72
"""Characters of a graph's name: it fits one line of 80 columns."""

MOST_OF_CLASS = 30
"""Characters of a class in it: there is always room for the source and the end."""

TOLD_TO_END_S = 0.5
"""A prefetch thread of torchdata's that has been told to end, and has not after so long, is waiting for something."""


# In the training process: split, and pickle.


@dataclass(frozen=True)
class Split:
    """A graph in two parts."""

    end: DataPipe
    """What stays in the training process; its source is the client's DataPipe."""
    branch: DataPipe
    """What every worker runs on its shard."""
    dispatching: DataPipe | None
    """What one dispatching worker runs for all the others; ``branch`` has a placeholder in its place."""
    name: str
    """For those who see the workers run: ``FileLister -> Mapper -> Batcher``, of ``MOST_OF_NAME`` characters."""


def split(datapipe: DataPipe, source: DataPipe) -> Split:
    """Cut the graph at its replicable branch and put ``source`` in the branch's place.

    Raises:
        GraphError: there is no replicable branch, or more than one.
    """
    graph = traverse_dps(datapipe)
    line = _line(graph)
    dispatching = find_lca_round_robin_sharding_dp(graph)
    if dispatching is not None:
        datapipe = next(iter(replace_dp(graph, dispatching, _DummyIterDataPipe()).values()))[0]
        graph = traverse_dps(datapipe)
    branches = _find_replicable_branches(graph)
    if len(branches) != 1:
        raise GraphError(_why_not_one_branch(datapipe, branches))
    branch = branches[0]
    name = _name(line, dispatching if isinstance(branch, _DummyIterDataPipe) else branch)
    if branch is datapipe:
        return Split(source, branch, dispatching, name)
    replace_dp(graph, branch, source)
    return Split(datapipe, branch, dispatching, name)


def _line(graph: DataPipeGraph) -> list[DataPipe]:
    """From the first source to the end; of the DataPipes that one reads from, the first."""
    line = []
    while graph:
        datapipe, graph = next(iter(graph.values()))
        line.append(datapipe)
    return line[::-1]


def _name(line: Sequence[DataPipe], end: DataPipe) -> str:
    """Of the part of a line that comes before what stays in the training process; the middle may be left out."""
    after = next((number for number, datapipe in enumerate(line, 1) if datapipe is end), len(line))
    names = [_cut(_class_name(datapipe), MOST_OF_CLASS) for datapipe in line[:after]]
    shorter = ([names[0], "...", *names[first:]] for first in range(2, len(names)))
    texts = (" -> ".join(each) for each in chain([names], shorter))
    return next(text for text in texts if len(text) <= MOST_OF_NAME)


def _class_name(datapipe: DataPipe) -> str:
    """As users write it: ``Mapper`` is a ``MapperIterDataPipe``."""
    name = type(datapipe).__name__
    short = name.removesuffix("IterDataPipe").removesuffix("MapDataPipe") or name
    return "".join(filter(str.isprintable, short))


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _why_not_one_branch(datapipe: DataPipe, branches: Sequence[DataPipe]) -> str:
    staying = [dp for dp in list_dps(traverse_dps(datapipe)) if hasattr(dp, "is_replicable") and not dp.is_replicable()]
    names = ", ".join(sorted({type(dp).__name__ for dp in staying})) or type(datapipe).__name__
    if not branches:
        return (
            f"no part of the graph can run on workers: {names} (is_replicable() is False) stays in the training "
            "process and everything comes from it; move it behind the part to distribute, or make it replicable"
        )
    ends = ", ".join(type(branch).__name__ for branch in branches)
    return (
        f"the graph has {len(branches)} separate branches for workers (ending in {ends}), joined by {names}, which "
        "stays in the training process (is_replicable() is False); join the branches before it, with zip, mux or concat"
    )


@dataclass(frozen=True)
class Payload:
    """A pickled graph, as it travels."""

    data: bytes
    digest: str
    """SHA-256 in hexadecimal."""
    dispatching: bool
    """Whether it has a part for a dispatching worker."""
    name: str
    """As in Split."""

    @property
    def chunks(self) -> list[memoryview]:
        view = memoryview(self.data)
        return [view[start : start + CHUNK_BYTES] for start in range(0, len(view), CHUNK_BYTES)]


def structure(datapipe: DataPipe) -> str:
    """Fingerprint of a graph's structure: the same in every process, whatever its DataPipes hold."""
    names = [f"{type(dp).__module__}.{type(dp).__qualname__}" for dp in list_dps(traverse_dps(datapipe))]
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


def is_transparent(end: DataPipe, source: DataPipe) -> bool:
    """Whether what stays in the training process passes the workers' batches on one for one, in order."""
    return all(dp is source or type(dp) in _ONE_FOR_ONE for dp in list_dps(traverse_dps(end)))


_ONE_FOR_ONE = {FullSync, Prefetcher, PinMemory}


def dump(
    split_: Split,
    init_fn: InitFn | None,
    reset_fn: ResetFn | None,
    pickle_by_value: Sequence[str | ModuleType] = (),
    tell: Callable[[int], None] = lambda _: None,
) -> Payload:
    """Pickle, once for all workers, what they run.

    Args:
        pickle_by_value: modules that need not be installed on the workers; ``__main__`` never need be
        tell: is told again and again how many bytes there are

    Raises:
        GraphPickleError: names the DataPipe and its attribute, or the function.
    """
    with _by_value(pickle_by_value):
        try:
            data = _pickle((split_.branch, split_.dispatching, init_fn, reset_fn), tell)
        except Exception as error:  # a pickled object's own methods may raise anything
            raise GraphPickleError(_what_cannot_be_pickled(split_, init_fn, reset_fn, error)) from error
    return Payload(data, hashlib.sha256(data).hexdigest(), split_.dispatching is not None, split_.name)


def _pickle(value: object, tell: Callable[[int], None]) -> bytes:
    file = _Told(tell)
    _Pickler(file, protocol=5).dump(value)
    return file.getvalue()


class _Told(io.BytesIO):
    """Says how much has been written; as Python code, it also lets other threads run, which the pickler does not."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        super().__init__()
        self._tell = tell

    def write(self, data: Any) -> int:
        count = super().write(data)
        self._tell(self.tell())
        return count


class _Pickler(cloudpickle.Pickler):
    """Keeps the file names of functions that travel by value, which cloudpickle replaces: tracebacks need them."""

    dispatch_table: ClassVar[Any] = ChainMap(
        {CodeType: lambda code: (_code, (cloudpickle.Pickler.dispatch_table[CodeType](code)[1], code.co_filename))},
        cloudpickle.Pickler.dispatch_table,
    )

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, functools._lru_cache_wrapper) and obj.__module__ in _by_value_names():
            return _cached, (obj.__wrapped__, obj.cache_parameters())  # by itself it goes by reference, always
        return super().reducer_override(obj)


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _code(arguments: tuple[Any, ...], filename: str) -> CodeType:
    return CodeType(*arguments).replace(co_filename=filename)


def _by_value_names() -> set[str]:
    return {"__main__", *cloudpickle.list_registry_pickle_by_value()}


@contextmanager
def _by_value(modules: Sequence[str | ModuleType]) -> Iterator[None]:
    # In a process that multiprocessing has spawned, the training script has a second name.
    names = [*modules, *({"__mp_main__"} & sys.modules.keys())]
    loaded = [import_module(module) if isinstance(module, str) else module for module in names]
    registered = [module for module in loaded if module.__name__ not in _by_value_names()]
    for module in registered:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)


def _what_cannot_be_pickled(split_: Split, init_fn: InitFn | None, reset_fn: ResetFn | None, error: Exception) -> str:
    reason = f"{type(error).__name__}: {error}"
    for name, function in (("worker_init_fn", init_fn), ("worker_reset_fn", reset_fn)):
        if not can_pickle(function):
            return unpicklable_function(name, function, error)
    for part in filter(None, (split_.branch, split_.dispatching)):
        for datapipe in list_dps(traverse_dps(part)):
            for name, value in vars(datapipe).items():
                if not isinstance(value, IterDataPipe) and not can_pickle(value):
                    return (
                        f"{type(datapipe).__name__}.{name} = {_brief(value)} cannot be pickled, so the graph cannot be "
                        f"sent to the workers ({reason}); create it in the worker, or leave it out in __getstate__"
                    )
    return f"the graph that ends in {type(split_.branch).__name__} cannot be pickled, so it cannot be sent ({reason})"


def unpicklable_function(name: str, function: object, error: Exception) -> str:
    reason = f"{type(error).__name__}: {error}"
    return f"{name} {function!r} cannot be pickled, so it cannot be sent to the workers ({reason})"


def can_pickle(value: object) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:  # as above: whatever it is, it is the answer
        return False
    return True


def _brief(value: object) -> str:
    return _cut(repr(value), 80)


# Seeds: drawn in the training process, one pickle for each worker and epoch.


class Seeds:
    """Draws each epoch's seeds as ``MultiProcessingReadingService`` does, and sees to it that the next epoch's differ.

    torchdata never advances what it draws from, so its epochs repeat each other in two ways:

    - Without ``dl.seed``, ``SeedGenerator.seed()`` reads torch's global generator and puts it back as it was. Here one
      number is drawn from that generator for each epoch, as torch's own ``DataLoader`` does.
    - After one ``dl.seed(n)``, the workers' generators are spawned from one that stays the same. Here the generator is
      marked when an epoch leaves it (its worker part is spawned once more, on which no stream depends), and one that
      comes back as it was left has been reseeded by nobody: then it is advanced.

    So streams equal torchdata's wherever torchdata's own would change from epoch to epoch.
    """

    def __init__(self) -> None:
        self._left = ""
        self.received = ""
        self.torch_before = ""
        self.start: list[list[int]] = []

    def begin(self, generator: SeedGenerator) -> None:
        """A new epoch: advance whatever nobody else has."""
        self.received = fingerprint(generator)
        self.torch_before = _torch_fingerprint()
        torch.empty((), dtype=torch.int64).random_()
        if self.received == self._left:
            generator.seed(generator.generate_seed())
        self.start = _numbers(generator)

    def begins_again(self, generator: SeedGenerator, received: str, torch_before: str) -> bool:
        """Whether DataLoader2 was told to begin a saved epoch again, ``_restore_checkpoint_beginning_of_epoch()``.

        Then the generator is the one that the epoch was begun with; but so it is if there was no ``dl.seed`` and this
        process gave torch's global generator the same seed as the first one did.
        """
        if fingerprint(generator) != received or received == fingerprint(SeedGenerator()):
            return False
        return not (torch.distributed.is_initialized() and _torch_fingerprint() == torch_before)

    def begin_again(self, generator: SeedGenerator, start: list[list[int]], received: str, torch_before: str) -> None:
        """A saved epoch goes on: its seeds are drawn again, whatever a reading service in front has drawn by now."""
        if _torch_fingerprint() == torch_before:  # the process was seeded as the first one was: follow it
            torch.empty((), dtype=torch.int64).random_()
        generator.__setstate__(_from_numbers(start))
        self.start, self.received, self.torch_before = start, received, torch_before

    def leave(self, start: list[list[int]], end: DataPipe, num_workers: int) -> None:
        """A saved epoch is over: know the generator that it left, by which ``begin`` tells whether to advance."""
        generator = SeedGenerator(_rngs=_from_numbers(start))
        seed_end(end, generator)
        self.spawn(generator, num_workers, None)

    def spawn(self, generator: SeedGenerator, num_workers: int, iter_reset_fn: IterResetFn | None) -> list[bytes]:
        """The pickled seeds of every worker, and of the dispatching worker after them."""
        spawned = [generator.spawn(worker) for worker in range(num_workers)]
        spawned.append(spawned[0].spawn(0))
        payloads = [cloudpickle.dumps((seeds, iter_reset_fn), protocol=5) for seeds in spawned]
        generator.spawn(num_workers, inplace=True)
        self._left = fingerprint(generator)
        return payloads


def fingerprint(generator: SeedGenerator) -> str:
    """Equal for generators that draw equally."""
    return _text(_numbers(generator))


def _text(numbers: list[list[int]]) -> str:
    return hashlib.sha256(repr(numbers).encode()).hexdigest()[:16]


def _torch_fingerprint() -> str:
    return hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:16]


def _numbers(generator: SeedGenerator) -> list[list[int]]:
    """The whole state of a generator: per Philox engine its seed, counter, spawn seed and cached seeds."""
    return [
        [*engine._seed, *engine._ctr, *engine._spawn_seed, *(engine._generated_seeds or ())]
        for engine in generator.__getstate__()
    ]


def _from_numbers(numbers: list[list[int]]) -> tuple[PhiloxEngine, PhiloxEngine]:
    shared, worker = (_engine(values) for values in numbers)
    return shared, worker


def _engine(values: list[int]) -> PhiloxEngine:
    engine = PhiloxEngine()
    engine._seed, engine._ctr, engine._spawn_seed = tuple(values[:2]), values[2:6], tuple(values[6:8])
    engine._generated_seeds = values[8:] or None
    return engine


def seed_end(end: DataPipe, generator: SeedGenerator) -> None:
    """Seed the DataPipes that stay in the training process."""
    set_graph_random_seed(end, generator)


# In a worker: build, begin, pause.


class Shard:
    """What one worker runs.

    Args:
        datapipe: the worker's part of the graph, sharded and initialised
        info: which part
        reset_fn: ``worker_reset_fn``
        shared_seeds: for the dispatching worker: every DataPipe takes the seeds that all workers share
    """

    def __init__(
        self, datapipe: DataPipe, info: WorkerInfo, reset_fn: ResetFn | None, shared_seeds: bool = False
    ) -> None:
        self.datapipe = datapipe
        self.info = info
        self._reset_fn = reset_fn
        self._shared_seeds = shared_seeds

    def begin(self, seeds: bytes) -> Iterator[Any]:
        """Seed everything for an epoch and return its iterator."""
        generator, iter_reset_fn = pickle.loads(seeds)
        self.datapipe = process_reset_fn(
            self.datapipe, self.info, generator, self._shared_seeds, iter_reset_fn, self._reset_fn
        )
        _collate_in_place(self.datapipe)
        return _unheld(self.datapipe)

    def pause(self, pause_fn: bytes | None) -> None:
        """Stop the graph's own threads, then apply the function of a reading service in front."""
        pause(self.datapipe)
        self._apply(pause_fn)

    def resume(self, resume_fn: bytes | None) -> None:
        """The reverse of ``pause``."""
        self._apply(resume_fn)
        resume(self.datapipe)

    def limit(self, num_batches: int | None, limit_fn: bytes | None) -> None:
        """Apply the function of a reading service in front."""
        self._apply(limit_fn, num_batches)

    def _apply(self, function: bytes | None, *args: Any) -> None:
        if function:
            self.datapipe = pickle.loads(function)(self.datapipe, *args)


def _collate_in_place(end: DataPipe) -> None:
    """A graph that ends in torch's own ``default_collate`` writes its batches where they are sent from."""
    if isinstance(end, Mapper) and end.fn is default_collate:
        end.fn = inplace.collate


def _unheld(end: DataPipe) -> Iterator[Any]:
    """As ``iter(end)``, without the generator that torch wraps around each DataPipe's own: it holds what it handed out.

    A batch that nothing holds need not be copied.
    """
    plain = wrapped = type(end).__iter__
    while _is_torchs(plain):  # twice, on a class that has travelled by value
        plain = plain.__wrapped__
    if plain is wrapped or not inspect.isgeneratorfunction(plain) or getattr(end, "_is_child_datapipe", False):
        return iter(end)
    return _generate(end, plain)


def _is_torchs(function: Any) -> bool:
    """Whether it is the generator that torch wraps around a DataPipe's ``__iter__``."""
    code = getattr(function, "__code__", None)
    return code is not None and hasattr(function, "__wrapped__") and code.co_filename == _hook_iterator.__file__


def _generate(end: DataPipe, plain: Callable[[DataPipe], Iterator[Any]]) -> Iterator[Any]:
    _set_datapipe_valid_iterator_id(end)  # type: ignore[no-untyped-call]  # which also resets it
    try:
        yield from plain(end)
    except Exception as error:
        _add_origin(error, end)
        raise


def _add_origin(error: Exception, end: DataPipe) -> None:
    """The line that torch adds to the text of what passes through a DataPipe."""
    thrown, others = "thrown by __iter__ of", "single iterator per IterDataPipe constraint"
    arguments = _generate_input_args_string(end)  # type: ignore[no-untyped-call]
    text = f"\nThis exception is {thrown} {type(end).__name__}({arguments})"
    first = error.args[0] if error.args else None
    if not isinstance(first, str):
        error.args = (text,)
    elif thrown not in first and others not in first:
        error.args = (first + text, *error.args[1:])


def pause(datapipe: DataPipe) -> None:
    """Pause every DataPipe of a graph that has threads of its own, from its end to its sources."""
    for dp in list_dps(traverse_dps(datapipe)):
        if isinstance(dp, Prefetcher):
            _pause_prefetcher(dp)
        elif callable(getattr(dp, "pause", None)):
            dp.pause()


def resume(datapipe: DataPipe) -> None:
    """The reverse of ``pause``."""
    for dp in reversed(list_dps(traverse_dps(datapipe))):
        if callable(getattr(dp, "resume", None)):
            dp.resume()


def _thread_of(prefetcher: Prefetcher) -> tuple[Any, Any]:
    """Its thread and what that works on; one that was unpickled and has not begun lacks the attribute."""
    return prefetcher.thread, getattr(prefetcher, "prefetch_data", None)


def _pause_prefetcher(prefetcher: Prefetcher) -> None:
    """``Prefetcher.pause`` waits for ever if its thread ends between its two looks at it; this one looks again."""
    thread, state = _thread_of(prefetcher)
    if thread is None or state is None:
        return
    state.run_prefetcher = False
    while thread.is_alive() and not state.paused and not state.stop_iteration:
        thread.join(JOIN_POLL_S)


class Collectives:
    """The ``FullSync`` DataPipes that stay in the training process, and the ``Prefetcher`` behind them.

    ``FullSync`` fetches one element ahead, and a ``Prefetcher`` behind it several. A rank that stops its threads before
    they have begun a collective which another rank has begun is one behind from then on: the other one waits for it
    until it begins the next epoch, which then ends too early on both.

    Args:
        end: what stays in the training process
    """

    def __init__(self, end: DataPipe) -> None:
        datapipes = list_dps(traverse_dps(end))
        self._fullsyncs = [dp for dp in datapipes if isinstance(dp, FullSync)]
        self._prefetchers = [
            dp for dp in datapipes if isinstance(dp, Prefetcher) and find_dps(traverse_dps(dp), FullSync)
        ]

    def leave(self, deadline: Deadline) -> None:
        """Bring an epoch that is left early to where it is left on every rank: each ``Prefetcher`` fills its buffer."""
        if any(fullsync._executor is not None for fullsync in self._fullsyncs):
            for prefetcher in self._prefetchers:
                _fill(prefetcher, deadline)
        self.keep()

    def keep(self) -> None:
        """Let no ``FullSync`` cancel what it has submitted to its thread."""
        for fullsync in self._fullsyncs:
            if fullsync._executor is not None:
                fullsync._executor._futures.clear()


def _fill(prefetcher: Prefetcher, deadline: Deadline) -> None:
    thread, state = _thread_of(prefetcher)
    while (
        thread is not None
        and state is not None
        and state.run_prefetcher
        and len(state.prefetch_buffer) < state.buffer_size
        and thread.is_alive()
        and not deadline.expired
    ):
        thread.join(JOIN_POLL_S)
    if deadline.expired:
        logger.warning(
            "%r behind FullSync has not filled its buffer within timeout=%s s: the next epoch may end early, or hang",
            prefetcher, deadline.timeout,
        )  # fmt: skip


class Abandoned:
    """Says whether the threads that read from a source have been told to end.

    Ctrl-C, or any exception inside torchdata's ``Prefetcher``, makes that join its thread, which may be waiting for a
    batch that takes minutes. ``FullSync`` is left alone: its thread owes the other ranks a collective.

    Args:
        end: what stays in the training process
        source: the client's DataPipe in it
    """

    def __init__(self, end: DataPipe, source: DataPipe) -> None:
        found = [] if find_dps(traverse_dps(end), FullSync) else list_dps(traverse_dps(end))
        prefetchers = [each for each in found if isinstance(each, Prefetcher)]
        # Weakly: whoever drops a loader in mid-epoch need not wait for the garbage collector to have it shut down.
        self._prefetchers = WeakSet(each for each in prefetchers if source in list_dps(traverse_dps(each)))
        self._deadline: Deadline | None = None

    def __call__(self) -> bool:
        """A thread that ends by itself looks the same, but not for long."""
        if not any(map(_is_told_to_end, self._prefetchers)):
            self._deadline = None
        elif self._deadline is None:
            self._deadline = Deadline(TOLD_TO_END_S)
        return self._deadline is not None and self._deadline.expired


def _is_told_to_end(prefetcher: Prefetcher) -> bool:
    thread, state = _thread_of(prefetcher)
    return thread is not None and thread.is_alive() and (state is None or state.stop_iteration)


Parts: TypeAlias = tuple[DataPipe, DataPipe | None, InitFn | None, ResetFn | None]
"""What runs remotely: the graph, the part of the dispatching worker, ``worker_init_fn`` and ``worker_reset_fn``."""


def unpickle(data: Any) -> Parts:
    """What was dumped.

    Raises:
        Exception: whatever the user's modules raise
    """
    parts: Parts = pickle.loads(data)
    return parts


def load(parts: Parts, num_workers: int, worker_id: int, elements: Callable[[], Iterator[Any]]) -> Shard:
    """Take the shard of one worker from a graph, or, for the id after the last, that of the dispatching worker.

    Args:
        elements: what the dispatching worker sends, for a graph that has one

    Raises:
        Exception: whatever ``worker_init_fn`` raises
    """
    torch.utils.data.graph.pickle = _Tracing  # type: ignore[assignment, attr-defined]
    branch, dispatching, init_fn, reset_fn = parts
    if worker_id == num_workers:
        return Shard(dispatching, WorkerInfo(num_workers, 0), reset_fn, shared_seeds=True)
    info = WorkerInfo(num_workers, worker_id)
    if dispatching is None:
        return Shard(process_init_fn(branch, info, init_fn), info, reset_fn)
    return Shard(_build_dispatched(branch, info, init_fn, DispatchedSource(elements)), info, reset_fn)


class _Tracer(pickle.Pickler):
    """What torch finds the DataPipes of a graph with, by pickling it and throwing away what is written.

    Classes and functions are passed over. Those that have come by value can be pickled by no name here, so that torch
    would ask ``dill``, which need not be installed, takes long, and fails at classes that refer to each other. Nor is
    anything copied or kept, tensors and arrays neither: it would be all data in the graph once more, for each epoch.
    """

    def __init__(self, file: Any) -> None:
        super().__init__(_Nowhere(), protocol=5, buffer_callback=lambda _: None)  # or arrays would be copied first

    def reducer_override(self, obj: Any) -> Any:
        return (iter, ((),)) if isinstance(obj, type | FunctionType | torch.Tensor) else NotImplemented


class _Nowhere:
    """A file for what nobody reads."""

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes


class _Tracing:
    """As much of ``pickle`` as ``torch.utils.data.graph`` uses; in workers only."""

    Pickler = _Tracer
    PickleError = pickle.PickleError


class DispatchedSource(IterDataPipe[Any]):
    """In a worker's graph, the place of what the dispatching worker runs.

    Args:
        elements: the elements of the running epoch
    """

    def __init__(self, elements: Callable[[], Iterator[Any]]) -> None:
        self._elements = elements

    def __iter__(self) -> Iterator[Any]:
        yield from self._elements()


def _build_dispatched(branch: DataPipe, info: WorkerInfo, init_fn: InitFn | None, source: DataPipe) -> DataPipe:
    """As ``process_init_fn``, with our source in the placeholder's place: only branches beside it are sharded."""
    graph = traverse_dps(branch)
    for dp in find_non_dispatching_branches(graph):
        apply_sharding(dp, info.num_workers, info.worker_id, SHARDING_PRIORITIES.MULTIPROCESSING)
    (placeholder,) = find_dps(graph, _DummyIterDataPipe)
    datapipe = next(iter(replace_dp(graph, placeholder, source).values()))[0]
    return datapipe if init_fn is None else init_fn(datapipe, info)


def missing_module(error: BaseException) -> str:
    """The module whose absence made ``load`` fail; empty if it was anything else."""
    if isinstance(error, ModuleNotFoundError):
        return error.name or ""
    return ""
