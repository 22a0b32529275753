"""``RPCReadingService``: torchdata's calls turned into the client's."""

import itertools
import os
import secrets
import socket
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import cloudpickle
import psutil
import torch
from torchdata.dataloader2.graph import DataPipe
from torchdata.dataloader2.random import SeedGenerator
from torchdata.dataloader2.reading_service import CheckpointableReadingServiceInterface
from torchdata.datapipes.iter import IterDataPipe

from rpc_reading_service import checkpoint, graph, pinning, resolver, transport
from rpc_reading_service.client import WARN_AFTER_S, Client
from rpc_reading_service.daemon import versions
from rpc_reading_service.display import Display
from rpc_reading_service.errors import AddressError, ClosedError, GraphError, GraphPickleError
from rpc_reading_service.graph import InitFn, IterResetFn, ResetFn
from rpc_reading_service.launchers import LocalDaemons, local_slots
from rpc_reading_service.messages import CHUNK_BYTES
from rpc_reading_service.pool import Pool
from rpc_reading_service.preparation import Preparation
from rpc_reading_service.security import CurveKeys, Pair
from rpc_reading_service.session import SessionOptions
from rpc_reading_service.statistics import NOTHING, Statistics

WORKERS_VARIABLE = "RPC_READING_WORKERS"
KEYS_VARIABLE = "RPC_READING_KEYS"
MAX_PREFETCH_BYTES = 2 << 30

_INITIALIZED = {
    "_daemons",
    "_client",
    "_end_datapipe",
    "_collectives",
    "_end",
    "_graph",
    "_epoch",
    "_restored",
    "_seeds",
    "_finalizer",
}

PauseFn = Callable[[DataPipe], DataPipe]
LimitFn = Callable[[DataPipe, int | None], DataPipe]


@dataclass(frozen=True)
class Options:
    """The arguments of ``RPCReadingService``, checked."""

    workers: tuple[str, ...] | int | None
    num_workers: int | None
    worker_prefetch_cnt: int
    in_order: bool
    on_worker_loss: str
    timeout: float | None
    connect_timeout: float
    pin_memory: bool
    worker_init_fn: InitFn | None
    worker_reset_fn: ResetFn | None
    pickle_by_value: tuple[str, ...]
    prefetch_bytes: int | None
    share_workers: bool
    transport: str
    keys: str | CurveKeys | None = None
    progress: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.workers, int) and self.num_workers is not None and self.num_workers > self.workers:
            raise ValueError(f"num_workers={self.num_workers}, but workers={self.workers} starts only {self.workers}")

    def _pool(self) -> Pool | None:
        if not self.share_workers or not _is_distributed():
            return None
        return Pool(torch.distributed.get_rank(), torch.distributed.get_world_size())

    def check_ranks(self, own_daemons: bool, by_name: bool = False) -> None:
        """Ranks with different numbers of shards would get overlapping data: torchdata's sharding assumes one.

        Args:
            own_daemons: whether each rank has started its own
            by_name: whether each rank takes the daemons that a name stands for when it asks
        """
        agreed = self.num_workers is not None or isinstance(self.workers, int)
        if _is_distributed() and not agreed and (own_daemons or by_name or not self.share_workers):
            raise ValueError(
                "in a distributed training every rank must have as many workers: give num_workers, the same on each"
            )

    def keys_for_session(self, own_daemons: bool) -> CurveKeys | None:
        """Those given, or named by the environment; daemons that were started here have none.

        Raises:
            KeysError: a file is missing, cannot be read, can be read by others, or holds no key.
        """
        if own_daemons:
            return None
        if isinstance(self.keys, CurveKeys):
            return self.keys
        folder = self.keys or os.environ.get(KEYS_VARIABLE)
        return CurveKeys.load(folder) if folder else None

    def for_session(
        self, payload: graph.Payload, names: Sequence[str], own_daemons: bool, encrypted: bool
    ) -> SessionOptions:
        """What the client needs of them, for one session with this graph.

        Args:
            names: addresses that stand for every daemon of a name
            own_daemons: whether the daemons were started here, for this session alone
            encrypted: whether the session needs a key of its own
        """
        return SessionOptions(
            session=secrets.token_hex(16),
            client=f"{socket.gethostname()} pid {os.getpid()}",
            versions=versions(),
            num_workers=self.num_workers,
            prefetch_count=self.worker_prefetch_cnt,
            prefetch_bytes=self.prefetch_bytes or min(psutil.virtual_memory().available // 4, MAX_PREFETCH_BYTES),
            on_worker_loss=self.on_worker_loss,
            timeout=self.timeout,
            connect_timeout=self.connect_timeout,
            graph_digest=payload.digest,
            graph_chunks=payload.chunks,
            graph_bytes=len(payload.data),
            graph_name=payload.name,
            dispatching=payload.dispatching,
            pool=None if own_daemons else self._pool(),
            transport=self.transport,
            names=names,
            secret=Pair.new().raw if encrypted else b"",
        )


class RPCReadingService(CheckpointableReadingServiceInterface):
    """Runs the replicable part of the graph on workers that may be anywhere and feeds ``DataLoader2`` their batches.

    The batches, and their order, are those of ``MultiProcessingReadingService`` with as many workers.

    Args:
        workers: addresses of the daemons, a list or a comma-separated string of ``host:port``, or of ``dns://name:port``
            for every address that the name has, asked again at each epoch; an int starts that many workers on this
            machine; None takes the addresses in ``RPC_READING_WORKERS``, and if there are none starts
            one worker per core on this machine
        num_workers: number of shards; by default all slots that the daemons have free
        worker_prefetch_cnt: batches per worker that may be in flight or waiting; smaller ones may be more, 16 times as
            many, at most 128, while they are less than 8 MiB times this number, and as many as are 256 KiB
        in_order: round robin over the shards, always the same; otherwise whoever is ready first
        on_worker_loss: ``"recover"`` runs the lost shard again elsewhere, without what has arrived already; ``"raise"``
            raises ``WorkerLostError``; ``"drop"`` goes on without the rest of the shard, with a warning
        timeout: seconds without any batch after which ``WorkerTimeoutError`` is raised; None waits for ever
        connect_timeout: seconds that the daemons have to answer
        pin_memory: put the tensors of each batch into page-locked memory; without CUDA it warns, as ``DataLoader`` does
        worker_init_fn: called in each worker with the graph and a ``WorkerInfo``; returns the graph to use
        worker_reset_fn: called in each worker at the start of each epoch with the graph, a ``WorkerInfo`` and a
            ``SeedGenerator``; returns the graph to use
        pickle_by_value: modules, or their names, that are sent along and need not be installed on the workers
        keys: for daemons with keys, a folder with ``client.key`` and ``server.pub``, or ``CurveKeys``; None takes the
            folder named by ``RPC_READING_KEYS``, if it is set
        prefetch_bytes: upper bound of all batches in flight or waiting, in bytes; one batch per worker may always
            move; by default a quarter of the free memory, at most 2 GiB
        transport: ``"auto"`` moves batches through shared memory where a worker is on this host, else over TCP;
            ``"tcp"`` and ``"shm"`` insist
        share_workers: in a distributed training (``torch.distributed`` is initialized) every rank takes its own share
            of the daemons: ``workers[rank::world_size]`` if there are enough, else an even part of the slots of one;
            False: this rank may use all of ``workers``
        progress: show bars on stderr, if that is a terminal, for what takes longer than 2 s before batches come: the
            graph being pickled and sent, daemon and workers starting, a replay; the log says so at level INFO in any
            case

    Raises:
        TypeError, ValueError, AddressError: an argument is none of what is allowed; named in the text.
    """

    warn_after: float = WARN_AFTER_S
    """A wait that lasts longer, in seconds, is logged: who is waited for, and what it is doing."""

    def __init__(
        self,
        workers: Sequence[str] | str | int | None = None,
        *,
        num_workers: int | None = None,
        worker_prefetch_cnt: int = 4,
        in_order: bool = True,
        on_worker_loss: str = "recover",
        timeout: float | None = 600.0,
        connect_timeout: float = 30.0,
        pin_memory: bool = False,
        worker_init_fn: InitFn | None = None,
        worker_reset_fn: ResetFn | None = None,
        pickle_by_value: Sequence[str | ModuleType] = (),
        keys: str | os.PathLike[str] | CurveKeys | None = None,
        prefetch_bytes: int | None = None,
        transport: str = "auto",
        share_workers: bool = True,
        progress: bool = False,
    ) -> None:
        self._options = Options(
            workers=_check_workers(workers),
            num_workers=_at_least(1, "num_workers", num_workers, optional=True),
            worker_prefetch_cnt=_at_least(1, "worker_prefetch_cnt", worker_prefetch_cnt),
            in_order=_flag("in_order", in_order),
            on_worker_loss=_one_of(("recover", "raise", "drop"), "on_worker_loss", on_worker_loss),
            timeout=_seconds("timeout", timeout, optional=True),
            connect_timeout=_seconds("connect_timeout", connect_timeout),
            pin_memory=_flag("pin_memory", pin_memory),
            worker_init_fn=_callable("worker_init_fn", worker_init_fn),
            worker_reset_fn=_callable("worker_reset_fn", worker_reset_fn),
            pickle_by_value=_check_modules(pickle_by_value),
            prefetch_bytes=_at_least(1, "prefetch_bytes", prefetch_bytes, optional=True),
            share_workers=_flag("share_workers", share_workers),
            transport=_one_of(("auto", "tcp", "shm"), "transport", transport),
            keys=_check_keys(keys),
            progress=_flag("progress", progress),
        )
        self.num_workers = self._options.num_workers  # for reading, as torchdata's service has them
        self.worker_prefetch_cnt = self._options.worker_prefetch_cnt
        self._reset()

    def _reset(self) -> None:
        """What only an initialized service has."""
        self._daemons: LocalDaemons | None = None
        self._client: Client | None = None
        self._end_datapipe: DataPipe | None = None
        self._collectives: graph.Collectives | None = None
        self._end: _End | None = None
        self._graph = ""
        self._epoch = 0
        self._restored: checkpoint.State | None = None
        self._seeds = graph.Seeds()
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._client or self._options}>"

    # DataLoader2 pickles the service before initialize.

    def __getstate__(self) -> dict[str, Any]:
        if self._client is not None:
            raise ClosedError("an initialized RPCReadingService cannot be pickled; pickle it before it is used")
        state = {name: value for name, value in vars(self).items() if name not in _INITIALIZED}
        try:
            state["_options"] = cloudpickle.dumps(self._options)  # lambdas and local functions among them
        except Exception as error:  # a pickled object's own methods may raise anything
            for name in ("worker_init_fn", "worker_reset_fn"):
                function = getattr(self._options, name)
                if not graph.can_pickle(function):
                    raise GraphPickleError(graph.unpicklable_function(name, function, error)) from error
            raise
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _options=cloudpickle.loads(state["_options"]))
        self._reset()

    def statistics(self) -> Statistics:
        """What the workers and the training have done of late, and in words why the training waits, if it does.

        Cheap, and safe from any thread at any time: what was last known stays when the service has been finalized.
        DataLoader2 works with a copy of the service that it is given: ask ``loader.reading_service``.
        """
        return NOTHING if self._client is None else self._client.statistics()

    # From initialize to finalize.

    def initialize(self, datapipe: DataPipe) -> DataPipe:
        """Split the graph, connect, start the workers; returns the part that stays here, with its new source.

        Raises:
            GraphError, ConnectError, VersionError, SlotsError, AddressError: see ``errors``.
            Exception: what the user's modules or ``worker_init_fn`` raised on a worker, as the type it had there.
        """
        return self._initialize(datapipe, self._options)

    def _initialize(self, datapipe: DataPipe, options: Options) -> DataPipe:
        source, pins = _Source(), options.pin_memory and pinning.can_pin()
        terminal = sys.stderr if options.progress and sys.stderr is not None and sys.stderr.isatty() else None
        with Preparation(terminal) as preparation:
            with preparation.stage("pickling the graph", "MB") as tell:
                split, payload = self._pickle(datapipe, source, options, tell)
            with preparation.stage("starting the local daemon"):
                workers = self._addresses(options, extra=payload.dispatching)
        names = [worker for worker in workers if resolver.is_name(worker)]
        options.check_ranks(own_daemons=False, by_name=bool(names))
        addresses = [worker for worker in workers if worker not in names]
        own_daemons = self._daemons is not None
        keys = options.keys_for_session(own_daemons)
        session = options.for_session(payload, names, own_daemons, encrypted=keys is not None)
        client = source.client = Client(addresses, session, options.in_order, self.warn_after, keys, pins)
        source.pin = pinning.pin if pins else None
        self._client = client
        # At interpreter exit, too, the workers are told before the sockets are torn down.
        display = Display(client.lasting, terminal) if terminal is not None else None
        self._finalizer = weakref.finalize(self, _shut_down, client, self._daemons, display)
        try:
            client.open()
        except BaseException:
            self.finalize()
            raise
        self._end_datapipe = split.end
        self._collectives = graph.Collectives(split.end)
        client.abandoned = graph.Abandoned(split.end, source)
        client.tracks_delivery = graph.is_transparent(split.end, source)
        self._end = _End(split.end, client)
        return self._end

    def _pickle(
        self, datapipe: DataPipe, source: DataPipe, options: Options, tell: Callable[[float], None]
    ) -> tuple[graph.Split, graph.Payload]:
        self._graph = graph.structure(datapipe)
        split = graph.split(datapipe, source)
        if split.dispatching is not None and options.on_worker_loss == "drop":
            raise ValueError(
                "on_worker_loss='drop' cannot be had with sharding_round_robin_dispatch, which deals to all shards or "
                "none: use 'recover' or 'raise'"
            )
        functions = options.worker_init_fn, options.worker_reset_fn
        payload = graph.dump(split, *functions, options.pickle_by_value, lambda nbytes: tell(nbytes / 1e6))
        return split, payload

    def _addresses(self, options: Options, extra: int) -> list[str]:
        workers = options.workers
        if isinstance(workers, tuple):
            return list(workers)
        from_environment = os.environ.get(WORKERS_VARIABLE) if workers is None else None
        if from_environment:
            return _parse_addresses(from_environment.split(","), f"the environment's {WORKERS_VARIABLE}")
        options.check_ranks(own_daemons=True)
        slots = workers or options.num_workers or local_slots()
        self._daemons = LocalDaemons([slots + extra])
        try:
            return self._daemons.addresses
        except BaseException:
            self._daemons.close()
            raise

    def initialize_iteration(
        self, seed_generator: SeedGenerator, iter_reset_fn: IterResetFn | None = None
    ) -> IterResetFn | None:
        """Draw the epoch's seeds and let every worker begin."""
        client, end = self._initialized()
        if self._collectives is not None:
            self._collectives.leave(transport.Deadline(self._options.timeout))
        state, self._restored = self._restored, None
        again = state is not None and self._seeds.begins_again(seed_generator, state.received, state.torch_before)
        if state is None or (state.ended and not again):
            self._seeds.begin(seed_generator)
            self._epoch += 1
        else:
            self._seeds.begin_again(seed_generator, state.generator, state.received, state.torch_before)
        graph.seed_end(self._end_datapipe, seed_generator)
        seeds = self._seeds.spawn(seed_generator, client.num_workers, iter_reset_fn)
        _check_size("iter_reset_fn", max(seeds, key=len))
        if state is None or state.ended or again:
            end.begin(skip=0)
            client.start_epoch(seeds)
        else:
            end.begin(state.skip)
            client.start_epoch(seeds, state.consumed, state.turn)
        return None

    # Checkpoint: called by DataLoader2.state_dict and by from_state.

    def checkpoint(self) -> bytes:
        """Where the training loop is, in under 2 KB; see ``checkpoint.State``."""
        if self._client is None or self._end is None or self._epoch == 0:
            return b""
        if self._restored is not None:
            return checkpoint.dump(self._restored)
        consumed, turn, skip = self._end.position()
        state = checkpoint.State(
            num_workers=len(consumed),
            graph=self._graph,
            epoch=self._epoch,
            ended=self._end.ended,
            consumed=consumed,
            turn=turn,
            skip=skip,
            received=self._seeds.received,
            generator=self._seeds.start,
            torch_before=self._seeds.torch_before,
        )
        return checkpoint.dump(state)

    def restore(self, datapipe: DataPipe, serialized_state: bytes) -> DataPipe:
        """As ``initialize``; the first iterator then goes on where the state was saved, on these workers.

        Raises:
            CheckpointError: the state is not ours, is damaged, or belongs to another graph or ``num_workers``.
        """
        if not serialized_state:  # saved before the first iterator
            return self.initialize(datapipe)
        state = checkpoint.load(serialized_state)
        checkpoint.check(state, self._options.num_workers, graph.structure(datapipe))
        adapted = self._initialize(datapipe, replace(self._options, num_workers=state.num_workers))
        self._restored, self._epoch = state, state.epoch
        if state.ended:
            self._seeds.leave(state.generator, self._end_datapipe, state.num_workers)
        return adapted

    def finalize_iteration(self) -> None:
        """Nothing: the workers are on standby when the epoch is over, and stop when the next begins."""

    def finalize(self) -> None:
        """End the workers, and the daemons that were started here. Idempotent; safe half-built and at exit."""
        finalizer = vars(self).get("_finalizer")
        if finalizer is not None and finalizer.alive:  # dead ones may be asked when modules are gone already
            if self._collectives is not None:
                self._collectives.keep()
            finalizer()

    def _initialized(self) -> "tuple[Client, _End]":
        if self._client is None or self._end is None:
            raise ClosedError("the reading service has not been initialized")
        return self._client, self._end

    # Pause, resume, limit: as DataLoader2Iterator asks for them.

    def _pause(self, pause_fn: PauseFn | None = None) -> PauseFn | None:
        client, _ = self._initialized()
        graph.pause(self._end_datapipe)
        client.pause(_pickled("pause_fn", pause_fn))
        return None

    def _resume(self, resume_fn: PauseFn | None = None) -> PauseFn | None:
        client, _ = self._initialized()
        client.resume(_pickled("resume_fn", resume_fn))
        graph.resume(self._end_datapipe)
        return None

    def _limit(self, num_batches: int | None, limit_fn: LimitFn | None = None) -> LimitFn | None:
        if limit_fn is not None:
            self._initialized()[0].limit(num_batches, _pickled("limit_fn", limit_fn))
            limit_fn(self._end_datapipe, num_batches)
        return None


class _Source(IterDataPipe[Any]):
    """Takes the place of the branch that runs on the workers."""

    client: Client
    pin: Callable[[Any], Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        yield from self.batches()

    def batches(self) -> Iterator[Any]:
        """As ``iter``, without what torch wraps around that of every DataPipe."""
        batches = map(self.client.next, itertools.repeat(self.client.epoch))
        return batches if self.pin is None else (self.pin(batch) for batch in batches)

    def __len__(self) -> int:
        raise TypeError(
            "the number of batches is not known here: workers produce them until their shards end; count an epoch, or "
            "take len() of the DataPipe before it is given to DataLoader2"
        )


class _Delivery:
    """How ``_End`` is iterated over; apart, since torch wraps the ``__iter__`` that a DataPipe's own class defines."""

    datapipe: DataPipe
    ended = False
    _client: Client
    _delivered = 0
    _skip = 0

    def __iter__(self) -> Iterator[Any]:
        delivered = self._client.delivered if self._client.tracks_delivery else None
        for element in self.datapipe.batches() if isinstance(self.datapipe, _Source) else self.datapipe:
            if delivered is not None:
                delivered()
            self._delivered += 1
            if self._delivered > self._skip:
                yield element
        self.ended = True


class _End(_Delivery, IterDataPipe[Any]):
    """The end of the graph in the training process: counts what the training loop gets.

    If what stays here does not pass the workers' batches on one for one, so that the client tracks no delivery, a saved
    epoch can only go on by running it again from its start, with the first elements suppressed.

    Args:
        datapipe: what stays in the training process
    """

    def __init__(self, datapipe: DataPipe, client: Client) -> None:
        self.datapipe = datapipe
        self._client = client

    def begin(self, skip: int) -> None:
        """An epoch begins; so many elements at its start are suppressed."""
        self.ended = False
        self._delivered = 0
        self._skip = skip

    def position(self) -> tuple[list[int], int, int]:
        """Batches consumed per shard, whose turn it is, and elements to suppress."""
        if self._client.tracks_delivery:
            return *self._client.position(), 0
        return [0] * self._client.num_workers, 0, max(self._delivered, self._skip)

    def __len__(self) -> int:
        return len(self.datapipe)


def _shut_down(client: Client, daemons: LocalDaemons | None, display: Display | None) -> None:
    if display is not None:
        display.close()
    client.close()
    if daemons is not None:
        daemons.close()


def _is_distributed() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _pickled(name: str, function: Any) -> bytes:
    pickled = b"" if function is None else bytes(cloudpickle.dumps(function, protocol=5))
    _check_size(name, pickled)
    return pickled


def _check_size(name: str, pickled: bytes) -> None:
    """What is larger than a control message may be would be dropped by the daemon, without a word."""
    if len(pickled) > CHUNK_BYTES:
        raise GraphError(
            f"{name} pickles to {len(pickled):,} bytes, and at most {CHUNK_BYTES:,} can be sent to the workers: let it "
            "use what the graph has, instead of bringing large objects along"
        )


# Arguments.


def _check_keys(keys: object) -> str | CurveKeys | None:
    """A folder is read here, so that what is wrong with it is said at once, and again by ``initialize``."""
    if keys is None or isinstance(keys, CurveKeys):
        return keys
    if not isinstance(keys, str | os.PathLike):
        raise TypeError(f"keys must be a folder, CurveKeys or None, not {keys!r}")
    folder = os.path.abspath(os.fspath(keys))
    CurveKeys.load(folder)
    return folder


def _check_workers(workers: Sequence[str] | str | int | None) -> tuple[str, ...] | int | None:
    if workers is None:
        return None
    if isinstance(workers, bool):
        raise TypeError("workers must be addresses, a number of local workers, or None, not a bool")
    if isinstance(workers, int):
        return int(_at_least(1, "workers", workers))
    if isinstance(workers, str):
        workers = workers.split(",")
    if not isinstance(workers, Sequence):
        raise TypeError(f"workers must be addresses, a number of local workers, or None, not {workers!r}")
    return tuple(_parse_addresses(workers, "workers"))


def _parse_addresses(addresses: Sequence[str], name: str) -> list[str]:
    parsed: list[str] = []
    for address in addresses:
        if not isinstance(address, str):
            raise TypeError(f"{name}: a worker address must be a string such as 'cpu1:5555', not {address!r}")
        parsed.append(resolver.normalize(address.strip()))
    if not parsed:
        raise AddressError(f"{name} is empty: name at least one host:port, or leave it out for local workers")
    repeated = sorted({address for address in parsed if parsed.count(address) > 1})
    if repeated:
        raise AddressError(f"{name} names {', '.join(repeated)} more than once")
    return parsed


def _check_modules(modules: Sequence[str | ModuleType]) -> tuple[str, ...]:
    if isinstance(modules, str | ModuleType) or not isinstance(modules, Sequence):
        raise TypeError(f"pickle_by_value must be a sequence of modules or their names, not {modules!r}")
    for module in modules:
        if not isinstance(module, str | ModuleType):
            raise TypeError(f"pickle_by_value must name modules, not {module!r}")
    return tuple(module if isinstance(module, str) else module.__name__ for module in modules)


def _at_least(least: int, name: str, value: int | None, optional: bool = False) -> Any:
    if value is None and optional:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int{' or None' * optional}, not {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")
    return value


def _seconds(name: str, value: float | None, optional: bool = False) -> Any:
    if value is None and optional:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be seconds as a number{' or None' * optional}, not {value!r}")
    if not value > 0:
        raise ValueError(f"{name} must be more than 0 seconds, not {value}")
    return float(value)


def _one_of(choices: Sequence[str], name: str, value: str) -> str:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")
    return value


def _flag(name: str, value: bool) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, not {value!r}")
    return value


def _callable(name: str, value: Any) -> Any:
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be callable or None, not {value!r}")
    return value
