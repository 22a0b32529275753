"""The client's end of a session as a state machine: messages and the clock go in, actions come out. No I/O.

Its view of each daemon is a ``Link``, whose states are those of the table in ``links``; workers change state by the
table in ``protocol``. What is to be sent, connected or raised comes out as ``actions``.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rpc_reading_service import protocol
from rpc_reading_service.actions import (
    Action,
    ConnectData,
    DisconnectData,
    Drop,
    Fail,
    FailRemotely,
    FailToConnect,
    Leave,
    Reconnect,
    Resolve,
    Send,
    SendData,
)
from rpc_reading_service.errors import (
    ConnectError,
    GraphError,
    KeysError,
    RPCReadingError,
    SlotsError,
    VersionError,
    WorkerLostError,
)
from rpc_reading_service.links import Link, LinkEvent, LinkState
from rpc_reading_service.messages import (
    PROTOCOL_VERSION,
    CloseSession,
    ConnectFeed,
    Credit,
    Done,
    Draining,
    FromDaemon,
    GraphArriving,
    GraphChunk,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Limit,
    Message,
    OpenSession,
    Pause,
    Refused,
    Resume,
    SessionClosed,
    SessionMessage,
    SessionOpened,
    Stack,
    StartEpoch,
    StartWorker,
    StopWorker,
    Welcome,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
)
from rpc_reading_service.pool import Pool, deal
from rpc_reading_service.progress import Stage
from rpc_reading_service.protocol import WorkerEvent, WorkerState, advance, compare_versions

logger = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
"""How often the client tells each daemon that it is alive."""

REPORT_S = 0.5
"""How often workers may be asked for what they do, at most."""

SILENCE_S = 10.0
"""A daemon that answers no heartbeat for so long is lost: within the 15 s that are promised, with room to act."""

GREETING_S = 10.0
"""How long a socket greets in vain before a fresh one does, with the name resolved anew."""

START_WITHOUT_S = 3.0
"""How long a session waits for daemons that do not answer, and names without an address, if the others have slots
enough."""

DROPPED_S = 3.0
"""How long a daemon has to be heard again after its connection broke."""

RESOLVE_S = 10.0
"""How often the names are resolved anew while a shard has no place: the daemon in the place of a lost one is new."""

ASK_NAMES_S = 1.0
"""How often they are before the session has its workers, if one has no address: those of daemons that are being started
come late."""

HELLO_S = 1.0
"""How often a Hello is repeated to a daemon that does not answer."""

MAX_LOSSES = 3
"""So many losses of one shard at one batch mean that the batch kills its worker."""

MAX_FAILED_STARTS = 5
"""So many workers of one shard that die before they are ready mean that it cannot be started."""

MAX_FRUITLESS = 20
"""So many losses of one shard that is waited for, without a batch in between, mean that it does not get anywhere."""

RESTART_S = 0.05
MAX_RESTART_S = 5.0
"""How long a shard waits for its next worker, from the second loss without a batch in between: doubled each time."""

NO_REQUEST = 0
"""Number of a request that nobody waits for."""

_S, _E, _L = WorkerState, WorkerEvent, LinkState

_REFUSALS = {
    "version": VersionError,
    "keys": KeysError,
    "slots": SlotsError,
    "graph": GraphError,
    "size": GraphError,
}


# The client's view.


@dataclass(frozen=True)
class SessionOptions:
    """What a session needs to know, checked by ``reading_service``."""

    session: str
    client: str
    versions: dict[str, str]
    num_workers: int | None
    prefetch_count: int
    prefetch_bytes: int
    on_worker_loss: str
    timeout: float | None
    connect_timeout: float
    graph_digest: str
    graph_chunks: Sequence[memoryview] = field(repr=False)
    graph_bytes: int = 0
    graph_name: str = ""
    dispatching: bool = False
    pool: Pool | None = None
    transport: str = "auto"
    names: Sequence[str] = ()
    """``dns://name:port`` each; see ``resolver``."""
    secret: bytes = field(default=b"", repr=False)
    """With keys: the session's own secret key, for its workers."""

    def bytes_per_worker(self, num_workers: int) -> int:
        """Each worker's share of ``prefetch_bytes``: its window and the client's meter go by the same."""
        return max(1, self.prefetch_bytes // num_workers)


@dataclass
class Worker:
    """One shard and the process that runs it, as the client sees them."""

    worker: int
    state: WorkerState = WorkerState.VACANT
    address: str = ""
    attempt: int = -1
    pid: int = 0
    port: int = 0
    since: float = 0.0
    losses: dict[tuple[int, int], int] = field(default_factory=dict)
    failed_starts: int = 0
    fruitless: int = 0
    lost_at: tuple[int, int, bool] = (0, -1, False)
    not_before: float = 0.0
    last_loss: str = ""
    skip: int = 0
    """Batches that its process was told to suppress first."""
    is_lost: bool = False
    """Since its last process was lost, none has been ready."""

    def __str__(self) -> str:
        return f"worker {self.worker} on {self.address}" + (f" (pid {self.pid})" if self.pid else "")

    def change(self, event: WorkerEvent, now: float) -> None:
        """The one place where the state changes."""
        self.state = advance(self.state, event)
        self.since = now
        logger.debug("= %s is %s", self, self.state.value)


class ClientSession:
    """The client's end of a session: what was agreed with which daemon, and where each shard runs.

    Args:
        addresses: of the daemons, in the order given by the user
        options: see ``SessionOptions``
        progress: for a shard, batches received and batches consumed in the running epoch (``merge`` knows)
    """

    def __init__(
        self, addresses: Sequence[str], options: SessionOptions, progress: Callable[[int], tuple[int, int]]
    ) -> None:
        self.options = options
        self.links = {address: Link(address) for address in addresses}
        self.workers: list[Worker] = []
        self.epoch = 0
        self.closed = False
        self.closed_at = 0.0
        self.losses = 0
        self.recoveries = 0
        self._progress = progress
        self._wanted: dict[str, int] | None = None
        self._seeds: list[bytes] = []
        self._unfinished: set[int] = set()
        self._pending_requests: dict[int, set[int]] = {}
        self._request_errors: dict[int, bytes] = {}
        self._next_request = NO_REQUEST
        self._standing: dict[type[Message], tuple[bytes, tuple[object, ...]]] = {}
        self._unresolved = dict.fromkeys(options.names, "")
        """Names without an address, and why."""
        self._started = 0.0
        self._widened = 0.0
        """When the last address became known."""
        self._ticked = 0.0
        self._asked_names = 0.0
        self._actions: list[Action] = []
        self._credits: list[SendData] = []

    def __repr__(self) -> str:
        states = ", ".join(f"{worker.worker}: {worker.state.value}" for worker in self.workers)
        return f"<ClientSession {self.options.session[:8]} epoch={self.epoch} workers=[{states}]>"

    def take_actions(self) -> list[Action]:
        """What the driver has to do now, in order; credit, which depends on nothing else, comes last."""
        actions, self._actions = self._actions, []
        return [*actions, *self.take_credits()]

    def take_credits(self) -> list[SendData]:
        """The credit that is to be given now."""
        credits, self._credits = self._credits, []
        return credits

    @property
    def has_actions(self) -> bool:
        """Whether the driver has anything to do, but for credit."""
        return bool(self._actions)

    @property
    def has_credits(self) -> bool:
        """Whether credit is to be given."""
        return bool(self._credits)

    @property
    def num_shards(self) -> int:
        """Shards of the session, not counting the dispatching worker; 0 while they are not known."""
        return max(0, len(self.workers) - self.options.dispatching)

    @property
    def ready(self) -> bool:
        """Whether every worker is there; initialize is over."""
        return bool(self.workers) and all(worker.state not in (_S.VACANT, _S.STARTING) for worker in self.workers)

    @property
    def over(self) -> bool:
        """Whether every daemon has confirmed the end, or never knew of the session."""
        return self.closed and not any(link.held for link in self.links.values())

    # Open: greet every daemon, hold slots, place the shards.

    def open(self, now: float) -> None:
        """Greet every daemon, and ask for the addresses of the names."""
        self._started = self._widened = self._ticked = now
        self._ask_names(now)
        for link in self.links.values():
            link.fresh = now
            self._greet(link, now)

    def _greet(self, link: Link, now: float) -> None:
        link.greeted = now
        self._send(link, Hello(PROTOCOL_VERSION, self.options.versions, self.options.client))

    def _welcome(self, link: Link, message: Welcome, now: float) -> None:
        if link.state is not LinkState.GREETING:
            return
        link.change(LinkEvent.WELCOME)
        link.boot, link.host = message.boot, message.host
        link.slots, link.free, link.sessions = message.slots, message.free, message.sessions
        link.ticket, link.rejected = message.ticket, False
        if self._leave_twin(link):
            return
        for name, text in compare_versions(self.options.versions, message.versions):
            logger.warning("%s: %s differs: %s; results may differ too", link.address, name, text)
        if self.workers:
            if link.was_open:  # it was lost, and may still run what we gave up on: end that before we use it again
                self._send(link, CloseSession(self.options.session))
            self._place_vacant(now)
        else:
            self._proceed(now)

    def _proceed(self, now: float) -> None:
        """The next step of opening: hold slots once every daemon has answered, place the shards once all are held."""
        if self.closed or self.workers:
            return
        silent = [link for link in self.links.values() if link.state is LinkState.GREETING]
        patient = now - self._widened <= START_WITHOUT_S and not self._is_late(now)
        if (silent or self._unresolved) and (patient or not self._suffices()):
            return
        if self._wanted is None:
            self._wanted = self._shares()
            for link in silent:
                logger.warning("starting without %s, which does not answer; it is used once it does", link.address)
            for name in self._unresolved:
                logger.warning("starting without %s, which has no address; it is asked again at each epoch", name)
        for address, slots in self._wanted.items():
            link = self.links[address]
            if link.state is LinkState.GREETED and slots > 0:
                self._open(link, slots, now)
        if all(self.links[address].held >= slots for address, slots in self._wanted.items()):
            self._place_all(now)

    def _suffices(self) -> bool:
        """Whether the daemons that have answered have slots for all that was asked for."""
        if self.options.pool is not None:
            return False
        free = sum(link.free for link in self.links.values() if link.state is not LinkState.GREETING)
        if self.options.num_workers is None:  # a name may still have the address of a daemon that has ended
            silent = [link for link in self.links.values() if link.state is LinkState.GREETING]
            return free > self.options.dispatching and all(link.by_name for link in silent)
        return self._wanted is not None or free >= self.options.num_workers + self.options.dispatching

    def _leave_twin(self, link: Link) -> bool:
        """One daemon may have two addresses, as a name in IPv4 and in IPv6: use one. Whether it is the other one."""
        same = [other for other in self.links.values() if other.boot == link.boot and other.state is not _L.GREETING]
        spare = [other for other in same if other.by_name and not other.in_use]
        if len(same) < 2 or not spare:
            return False
        self._leave(spare[-1])
        return spare[-1] is link

    def _leave(self, link: Link) -> None:
        del self.links[link.address]
        (self._wanted or {}).pop(link.address, None)
        self._actions.append(Leave(link.address))

    # Names: which daemons there are may change while the session lasts.

    def _ask_names(self, now: float) -> None:
        self._asked_names = now
        if self.options.names:
            self._actions.append(Resolve())

    @property
    def unresolved(self) -> list[str]:
        """Names without an address."""
        return list(self._unresolved)

    def resolved(self, addresses: Sequence[str], now: float, unresolved: Mapping[str, str] | None = None) -> None:
        """What the names stand for now: greet who is new, leave who is not named any more and does not answer.

        Args:
            unresolved: names without an address, and why
        """
        if self.closed:
            return
        self._unresolved = dict(unresolved or {})
        for address in addresses:
            if address not in self.links:
                self._widen(address, now)
        placed = {worker.address for worker in self.workers}
        for link in list(self.links.values()):
            gone = link.by_name and link.address not in addresses and link.state is LinkState.GREETING
            if gone and self.workers and link.address not in placed:
                self._leave(link)

    def _widen(self, address: str, now: float) -> None:
        """Before it is dealt to anybody, what was found by name stands in one order, behind what the user gave."""
        link = self.links[address] = Link(address, by_name=True, fresh=now)
        if self._wanted is None:
            self._widened = now
            self.links = dict(sorted(self.links.items(), key=lambda item: item[0] if item[1].by_name else ""))
        self._actions.append(Reconnect(address))
        self._greet(link, now)

    def _shares(self) -> dict[str, int]:
        """Slots to hold on each daemon: all that are free, or as many as wanted dealt out one by one."""
        free = {address: link.free for address, link in self.links.items()}
        extra = int(self.options.dispatching)
        total = None if self.options.num_workers is None else self.options.num_workers + extra
        if self.options.pool is not None:
            slots = {address: link.slots for address, link in self.links.items()}
            total = total or max(self.options.pool.most(slots), 1 + extra)
            limits = self.options.pool.shares(slots, total)
            free = {address: min(count, limits[address]) for address, count in free.items()}
        if sum(free.values()) < (total or 1 + extra):
            raise SlotsError(
                f"num_workers={self.options.num_workers}{self._for_dispatching()}, but only {sum(free.values())} slots "
                f"are free for it: {'; '.join(str(link) for link in self.links.values())}. Ask for fewer workers, "
                "or start more daemons or more slots"
            )
        if total is None:
            return free
        dealt = deal(free, total)
        return {address: dealt.count(address) for address in free}

    def _for_dispatching(self) -> str:
        return " and one for sharding_round_robin_dispatch" if self.options.dispatching else ""

    def _open(self, link: Link, slots: int, now: float) -> None:
        link.change(LinkEvent.ASK)
        link.was_open = True
        link.heard = now  # silence counts from here
        link.wanted = slots
        self._ask_for_slots(link, now)

    def _ask_for_slots(self, link: Link, now: float) -> None:
        """Repeated until it is answered: the question, or its answer, may be lost with a connection."""
        link.beat = now
        options = self.options
        self._send(
            link,
            OpenSession(
                options.session,
                link.sent,
                options.client,
                link.wanted,
                options.graph_digest,
                options.graph_bytes,
                options.graph_name,
                link.ticket,
            ),
        )

    def _opened(self, link: Link, message: SessionOpened, now: float) -> None:
        if not link.held:
            link.received = message.sent
        if link.state is not LinkState.OPENING:
            return
        link.change(LinkEvent.OPENED)
        link.boot = ""  # the next heartbeat tells; the daemon may have been restarted since it was greeted
        link.held = message.slots
        link.has_graph = message.has_graph  # a daemon that was restarted meanwhile has lost it
        if self.workers:
            self._place_vacant(now)
        else:
            self._proceed(now)

    def _place_all(self, now: float) -> None:
        held = {address: link.held for address, link in self.links.items()}
        total = self.options.num_workers + self.options.dispatching if self.options.num_workers else sum(held.values())
        self.workers = [Worker(worker) for worker in range(total)]
        for worker, address in zip(self.workers, deal(held, total), strict=True):
            self._start(worker, self.links[address], now)

    def _start(self, worker: Worker, link: Link, now: float) -> None:
        self._send_graph(link)
        worker.address, worker.attempt = link.address, worker.attempt + 1
        worker.pid = worker.port = 0
        worker.change(_E.START, now)
        total, options = self.num_shards, self.options
        budget = options.bytes_per_worker(total)
        message = StartWorker(
            options.session, worker.worker, worker.attempt, link.sent, total, options.prefetch_count, budget
        )
        self._send(link, message, options.secret or None)
        self._leave_draining()

    def _send_graph(self, link: Link) -> None:
        if link.has_graph:
            return
        link.has_graph, link.arriving = True, 0
        offset = 0
        for chunk in self.options.graph_chunks:
            self._send(link, GraphChunk(self.options.session, offset), chunk)
            offset += chunk.nbytes

    # Messages from the daemons and their workers.

    def receive(self, address: str, message: FromDaemon, payload: bytes | None, now: float) -> None:
        """One control message has arrived."""
        link = self.links.get(address)
        if link is None:
            return  # it was left a moment ago
        link.heard, link.dropped = now, None
        self._handle(link, message, payload, now)
        link.received += isinstance(message, SessionMessage)

    def _handle(self, link: Link, message: FromDaemon, payload: bytes | None, now: float) -> None:
        match message:
            case Welcome():
                self._guard(self._welcome, link, message, now)
            case Refused():
                self._guard(self._refused, link, message, now)
            case SessionOpened():
                self._opened(link, message, now)
            case SessionClosed():
                self._session_closed(link, message, now)
            case GraphArriving():
                link.arriving = message.received if message.received < self.options.graph_bytes else None
            case HeartbeatReply():
                self._heartbeat(link, message, now)
            case Draining():
                self._drain(link, message, now)
            case Stack():
                pass
            case _ if not self._is_current(message):
                logger.debug("stale: %s", message)
            case WorkerReady():
                self._ready(link, message, now)
            case WorkerFailed():
                self._failed(link, message, payload or b"")
            case WorkerExited():
                self.lose(message.worker, message.attempt, message.reason, now, message.batch)
            case Done():
                self._done(message, payload)

    def _guard(self, handle: Callable[..., None], *args: object) -> None:
        try:
            handle(*args)
        except RPCReadingError as error:
            self._fail(error)

    def _is_current(self, message: WorkerReady | WorkerFailed | WorkerExited | Done) -> bool:
        return (
            message.session == self.options.session
            and message.worker < len(self.workers)
            and message.attempt == self.workers[message.worker].attempt
        )

    def _refused(self, link: Link, message: Refused, now: float) -> None:
        link.trouble = message.reason
        link.refused_at = now
        if self.workers and message.kind not in ("version", "keys", "graph", "size"):
            if link.state is LinkState.OPENING:
                away = LinkEvent.LOSE if message.kind == "draining" else LinkEvent.DENIED
                link.change(LinkEvent.KEPT if link.held else away)
            self._place_vacant(now)
            return
        error = _REFUSALS.get(message.kind, ConnectError)
        raise error(f"{link.address} refused: {message.reason}")

    def _ready(self, link: Link, message: WorkerReady, now: float) -> None:
        worker = self.workers[message.worker]
        if worker.state is not _S.STARTING:
            return
        worker.pid, worker.port, worker.since = message.pid, message.port, now
        if worker.worker == self.num_shards:  # the dispatching worker sends the client nothing
            return self._stand_by(worker, now)
        where = (link.address, message.port, message.pid)
        self._actions.append(ConnectData(worker.worker, worker.attempt, *where, message.offer))

    def _failed(self, link: Link, message: WorkerFailed | Done, payload: bytes) -> None:
        worker = self.workers[message.worker]
        where = f"in worker process {worker.worker} on {worker.address} ({link.host})"
        missing = message.missing if isinstance(message, WorkerFailed) else ""
        self._actions.append(FailRemotely(payload, where, worker.address, missing))

    def is_starting(self, worker_id: int, attempt: int) -> bool:
        """Whether this process is the one that the shard waits for."""
        if worker_id >= self.num_shards:
            return False
        worker = self.workers[worker_id]
        return worker.attempt == attempt and worker.state is _S.STARTING

    def is_running(self, worker_id: int, attempt: int, epoch: int) -> bool:
        """Whether this process is at the running epoch of its shard."""
        if worker_id >= self.num_shards or epoch != self.epoch:
            return False
        worker = self.workers[worker_id]
        return worker.attempt == attempt and worker.state is _S.RUNNING

    def data_opened(self, worker_id: int, now: float) -> None:
        """The first message came through the data channel of a starting worker: it works."""
        self._stand_by(self.workers[worker_id], now)

    def _stand_by(self, worker: Worker, now: float) -> None:
        worker.change(_E.READY, now)
        worker.failed_starts = 0
        self.recoveries += worker.is_lost
        worker.is_lost = False
        if not self.options.dispatching:
            self._catch_up(worker, now)
        elif self.ready:
            self._join(now)

    def _catch_up(self, worker: Worker, now: float) -> None:
        """A new process is told what those were told that were there before it."""
        self._repeat(Limit, worker)
        if worker.worker in self._unfinished or (worker.worker == self.num_shards and self._unfinished):
            self._begin(worker, now)
            if self._repeat(Pause, worker):
                worker.change(_E.PAUSE, now)

    def _repeat(self, kind: type[Pause | Limit], worker: Worker) -> bool:
        if kind not in self._standing:
            return False
        payload, more = self._standing[kind]
        self._send_worker(worker, kind, NO_REQUEST, payload, *more)
        return True

    def _join(self, now: float) -> None:
        """The dispatching worker and all that it feeds are there: bring them together; they run as a group."""
        dispatching = self.workers[-1]
        for worker in self.workers[:-1]:
            message = ConnectFeed(
                self.options.session, worker.worker, worker.attempt, dispatching.address, dispatching.port
            )
            self._send(self.links[worker.address], message)
        for worker in self.workers:
            self._catch_up(worker, now)

    # An epoch.

    def start_epoch(self, seeds: Sequence[bytes], now: float, epoch: int | None = None) -> int:
        """Every shard begins the next epoch with its own pickled seeds; returns the epoch's number."""
        self._ask_names(now)
        self._move_from_draining(range(len(self.workers)), now)
        self.epoch = self.epoch + 1 if epoch is None else epoch
        self._seeds = list(seeds)
        self._unfinished = set(range(self.num_shards))
        self._pending_requests.clear()
        self._standing.pop(Pause, None)
        return self.epoch

    def begin_shards(self, now: float) -> None:
        """Tell every worker that is there; those that are not will be told when they are."""
        together = not self.options.dispatching or self.ready
        for worker in self.workers:
            if together and worker.state not in (_S.VACANT, _S.STARTING):
                self._begin(worker, now)

    def _begin(self, worker: Worker, now: float) -> None:
        received, consumed = self._progress(worker.worker)
        worker.change(_E.BEGIN, now)
        worker.skip = received
        message = StartEpoch(self.options.session, worker.worker, worker.attempt, self.epoch, received, consumed)
        self._send(self.links[worker.address], message, self._seeds[worker.worker])

    def shard_ended(self, worker_id: int, now: float) -> None:
        """The shard has nothing more to send in this epoch."""
        self._unfinished.discard(worker_id)
        worker = self.workers[worker_id]
        if worker.state in (_S.RUNNING, _S.PAUSED):
            worker.change(_E.END, now)
        self._move_from_draining([worker_id], now)

    def credit(self, worker_id: int, consumed: int, hungry: bool = False) -> None:
        """Tell the worker how far the training loop is, and whether that is all that has arrived."""
        worker = self.workers[worker_id]
        if worker.state in (_S.RUNNING, _S.PAUSED) and worker_id in self._unfinished:
            message = Credit(self.options.session, worker_id, worker.attempt, self.epoch, consumed, hungry)
            self._credits.append(SendData(worker_id, worker.attempt, message))

    # Requests to every worker: pause, resume, limit.

    def request(
        self, kind: type[Pause | Resume | Limit], payload: bytes, dispatching: bool, now: float, *more: object
    ) -> int:
        """Send it to every worker, or to the dispatching one alone; ``request_waits_for`` tells who is to answer."""
        self._remember(kind, payload, more)
        group = self.workers[self.num_shards :] if dispatching else self.workers[: self.num_shards]
        workers = [w for w in group if w.state in (_S.STANDBY, _S.RUNNING, _S.PAUSED)]
        request = self._new_request(w.worker for w in workers)
        event = {Pause: _E.PAUSE, Resume: _E.RESUME}.get(kind)
        for worker in workers:
            if event is not None and (worker.state, event) in protocol.TRANSITIONS:
                worker.change(event, now)
            self._send_worker(worker, kind, request, payload, *more)
        return request

    def _remember(self, kind: type[Pause | Resume | Limit], payload: bytes, more: tuple[object, ...]) -> None:
        if kind is Resume:
            self._standing.pop(Pause, None)
        else:
            self._standing[kind] = payload, more

    def _new_request(self, workers: Iterable[int]) -> int:
        self._next_request += 1
        self._pending_requests[self._next_request] = set(workers)
        return self._next_request

    def _send_worker(self, worker: Worker, kind: type[Message], request: int, payload: bytes, *more: object) -> None:
        message = kind(self.options.session, worker.worker, worker.attempt, request, *more)
        self._send(self.links[worker.address], message, payload or None)

    def _done(self, message: Done, payload: bytes | None) -> None:
        self._pending_requests.get(message.request, set()).discard(message.worker)
        if payload and message.request == NO_REQUEST:
            self._failed(self.links[self.workers[message.worker].address], message, payload)
        elif payload:
            self._request_errors[message.request] = payload

    def request_waits_for(self, request: int) -> set[int]:
        """Workers that have not answered yet."""
        return self._pending_requests.get(request, set())

    def request_error(self, request: int) -> bytes | None:
        """The encoded exception of a worker that could not carry the request out."""
        return self._request_errors.pop(request, None)

    # What takes long.

    def stages(self, replayed: Callable[[int, int], int]) -> list[Stage]:
        """What keeps batches from coming.

        Args:
            replayed: for a worker and its attempt, batches that the process has suppressed
        """
        stages = [self._sending(), self._starting(), self._replaying(replayed)]
        return [stage for stage in stages if stage.total]

    def _sending(self) -> Stage:
        arriving = [link.arriving for link in self.links.values() if link.arriving is not None]
        total = len(arriving) * self.options.graph_bytes
        return Stage("sending the graph", sum(arriving) / 1e6, total / 1e6, "MB")

    def _starting(self) -> Stage:
        """Whose daemon has no graph yet cannot start."""
        links = self.links  # a vacant worker's may have been left
        workers = [w for w in self.workers if (link := links.get(w.address)) is not None and link.arriving is None]
        ready = sum(w.state not in (_S.VACANT, _S.STARTING) for w in workers)
        return Stage("starting workers", ready, 0 if ready == len(workers) else len(workers), "workers")

    def _replaying(self, replayed: Callable[[int, int], int]) -> Stage:
        """Until its first new batch has arrived."""
        shards = [self.workers[worker] for worker in self._unfinished]
        behind = [w for w in shards if w.state is _S.RUNNING and self._progress(w.worker)[0] == w.skip > 0]
        done = sum(min(w.skip, replayed(w.worker, w.attempt)) for w in behind)
        return Stage("replaying", done, sum(w.skip for w in behind), "batches")

    # Losses.

    def lose(self, worker_id: int, attempt: int, reason: str, now: float, batch: int | None = None) -> None:
        """A worker process is gone, or cannot be relied on any more.

        Args:
            batch: that it was in the middle of
        """
        if self.closed:
            return
        worker = self.workers[worker_id]
        if worker.attempt != attempt or worker.state in (_S.VACANT, _S.CLOSED):
            return
        worker.last_loss = f"{worker} {reason}"
        worker.is_lost = True
        self.losses += 1
        logger.warning("%s", worker.last_loss)
        worker.failed_starts += worker.state is _S.STARTING
        self._wait_longer(worker, now)
        self._vacate(worker, now)
        self._after_loss(worker, batch, now)

    def _place_of(self, worker: Worker) -> tuple[int, int, bool]:
        """The epoch, the batches received, and whether the next one is waited for, all of the worker's shards."""
        shards = range(self.num_shards) if self.options.dispatching else [worker.worker]
        progress = [self._progress(shard) for shard in shards if shard in self._unfinished]
        awaited = worker.state is not _S.PAUSED and any(received == consumed for received, consumed in progress)
        return self.epoch, sum(received for received, _ in progress), awaited

    def _wait_longer(self, worker: Worker, now: float) -> None:
        place = self._place_of(worker)
        worker.fruitless = worker.fruitless + 1 if place == worker.lost_at else 1
        worker.lost_at = place
        if worker.fruitless > 1:
            worker.not_before = now + min(MAX_RESTART_S, RESTART_S * 2**worker.fruitless)

    def break_off(self, worker_id: int, attempt: int, reason: str, now: float) -> None:
        """The worker lives, but its stream is broken: end it, and count it as lost."""
        worker = self.workers[worker_id]
        if worker.attempt == attempt and worker.state not in (_S.VACANT, _S.CLOSED):
            self._send(self.links[worker.address], StopWorker(self.options.session, worker_id, attempt))
            self.lose(worker_id, attempt, reason, now)

    def _after_loss(self, worker: Worker, batch: int | None, now: float) -> None:
        policy = self.options.on_worker_loss
        if policy == "raise":
            return self._fail(WorkerLostError(worker.last_loss))
        if policy == "drop" and worker.worker in self._unfinished:
            self._unfinished.discard(worker.worker)
            self._actions.append(Drop(worker.worker, self.epoch, worker.last_loss))
        if worker.failed_starts >= MAX_FAILED_STARTS:
            text = f"{worker.last_loss}, for the {MAX_FAILED_STARTS}th time in a row while it was being started"
            return self._fail(WorkerLostError(text))
        _, _, awaited = worker.lost_at
        if awaited and worker.fruitless >= MAX_FRUITLESS:
            return self._fail(WorkerLostError(_again_and_again(worker)))
        if batch is not None:
            place = (self.epoch, batch)
            worker.losses[place] = worker.losses.get(place, 0) + 1
            if worker.losses[place] >= MAX_LOSSES:
                text = (
                    f"{worker.last_loss}, for the {MAX_LOSSES}rd time at batch {batch} of its shard in epoch "
                    f"{self.epoch}: that batch kills its worker"
                )
                return self._fail(WorkerLostError(text))
        if self.options.dispatching:
            self._restart_group(worker, now)
        self._place_vacant(now)

    def _restart_group(self, lost: Worker, now: float) -> None:
        """What was dispatched to whom is known to the dispatching worker alone: all of them start again."""
        for worker in self.workers:
            if worker.state is not _S.VACANT:
                self._send(self.links[worker.address], StopWorker(self.options.session, worker.worker, worker.attempt))
                worker.last_loss = f"{worker} starts again with its group: {lost.last_loss}"
                self._vacate(worker, now)

    def _vacate(self, worker: Worker, now: float) -> None:
        worker.change(_E.LOSE, now)
        self._actions.append(DisconnectData(worker.worker, worker.attempt))
        for waiting in self._pending_requests.values():
            waiting.discard(worker.worker)

    def _place_vacant(self, now: float) -> None:
        """Find a slot for every shard without a worker: one that we hold, else one that a daemon has free."""
        for worker in self.workers:
            if worker.state is _S.VACANT and now >= worker.not_before and not self._place(worker, now):
                return

    def _place(self, worker: Worker, now: float) -> bool:
        used = dict.fromkeys(self.links, 0)
        for other in self.workers:
            if other.state is not _S.VACANT:
                used[other.address] += 1
        for link in self.links.values():
            if link.state is LinkState.OPEN and used[link.address] < link.held and not link.draining:
                self._start(worker, link, now)
                return True
        for link in self.links.values():
            is_there = link.state in (LinkState.OPEN, LinkState.GREETED) and not link.draining
            if is_there and now - link.refused_at > HELLO_S:
                self._open(link, used[link.address] + 1, now)
                return False
        return False

    def _lose_link(self, link: Link, reason: str, now: float) -> None:
        logger.warning("%s %s", link.address, reason)
        link.change(LinkEvent.LOSE)
        link.trouble, link.fresh = reason, now
        self._actions.append(Reconnect(link.address))
        for worker in self.workers:
            if worker.address == link.address:
                self.lose(worker.worker, worker.attempt, f"is lost: {link.address} {reason}", now)

    def link_dropped(self, address: str, now: float) -> None:
        """The connection broke: unless the daemon is heard again soon, it is lost."""
        link = self.links.get(address)
        if link is None:
            return
        if link.state is LinkState.OPENING:
            link.dropped = now
            self._ask_for_slots(link, now)
        elif link.state is LinkState.OPEN:
            link.dropped = now
            self._beat(link, now)

    def _beat(self, link: Link, now: float) -> None:
        link.beat = now
        self._send(link, Heartbeat(self.options.session, link.sent))

    def ask_for_reports(self, now: float) -> None:
        """Learn what the workers do before the next heartbeat is due."""
        for link in self.links.values():
            if link.state is LinkState.OPEN and now - link.beat >= REPORT_S:
                self._beat(link, now)

    def link_rejected(self, address: str) -> None:
        """No connection comes about, as the two ends do not agree on their keys: nobody need wait for this daemon."""
        if address in self.links:
            self.links[address].rejected = True

    def _drain(self, link: Link, message: Draining, now: float) -> None:
        logger.warning("%s is ending within %g s: %s", link.address, message.grace, message.reason)
        link.draining, link.trouble = True, message.reason
        self._move_from_draining([w.worker for w in self.workers if w.state is _S.STANDBY], now)

    def _move_from_draining(self, workers: Iterable[int], now: float) -> None:
        """Shards with nothing to lose move on from a daemon that is ending; the others finish their epoch there."""
        known = [self.workers[w] for w in workers if w < len(self.workers)]
        moving = [w for w in known if w.state not in (_S.VACANT, _S.CLOSED) and self.links[w.address].draining]
        if not moving or self.options.dispatching or not self._has_room(len(moving)):
            return
        for worker in moving:
            self._send(self.links[worker.address], StopWorker(self.options.session, worker.worker, worker.attempt))
            worker.last_loss = f"{worker} moves on: its daemon is ending"
            self._vacate(worker, now)
        self._place_vacant(now)

    def _leave_draining(self) -> None:
        """A daemon that is ending need not wait for a session that has no shard there any more."""
        for link in self.links.values():
            if link.draining and link.held and not any(w.address == link.address for w in self.workers):
                self._send(link, CloseSession(self.options.session))
                # It is greeted until one answers that stays: this daemon, after its restart.
                link.change(LinkEvent.LOSE)

    def _has_room(self, workers: int) -> bool:
        """Whether so many more workers seem to fit on daemons that are not ending."""
        staying = [link for link in self.links.values() if not link.draining and link.state is not LinkState.GREETING]
        used = sum(not self.links[w.address].draining for w in self.workers if w.state is not _S.VACANT)
        return sum(max(link.held, link.free) for link in staying) - used >= workers

    def _session_closed(self, link: Link, message: SessionClosed, now: float) -> None:
        if message.session != self.options.session:
            return
        if self.closed:
            link.held = 0
        elif message.reason and link.in_use:
            # Without a reason it answers our own CloseSession, from before the link was lost.
            self._lose_link(link, f"ended the session: {message.reason}", now)

    def _heartbeat(self, link: Link, message: HeartbeatReply, now: float) -> None:
        if not link.boot:
            link.boot = message.boot
            self._leave_twin(link)
        if link.state is not LinkState.OPEN:
            return
        if message.boot != link.boot:
            self._lose_link(link, "was restarted", now)
        elif message.sent != link.received:
            lost = f"of {message.sent} messages that it has sent, {link.received} have arrived"
            self._lose_link(link, f"lost some with a broken connection: {lost}", now)

    # Time.

    def tick(self, now: float) -> None:
        """Send what is due by the clock; give up on who is silent."""
        if self.closed:
            return
        self._forgive(now)
        for link in self.links.values():
            if link.dropped is not None and now - link.dropped > DROPPED_S:
                self._lose_link(link, "closed the connection and does not answer: it has died, or was restarted", now)
            elif link.in_use and now - link.heard > SILENCE_S:
                self._lose_link(link, f"has been silent for {now - link.heard:.0f} s", now)
            if link.state is LinkState.GREETING and now - link.fresh >= GREETING_S:
                link.fresh = now
                self._actions.append(Reconnect(link.address))
            if link.state is LinkState.GREETING and now - link.greeted >= HELLO_S:
                self._greet(link, now)
            elif link.state is LinkState.OPENING and now - link.beat >= HEARTBEAT_S:
                self._ask_for_slots(link, now)
            elif link.state is LinkState.OPEN and now - link.beat >= HEARTBEAT_S:
                self._beat(link, now)
        self._check_deadlines(now)

    def _forgive(self, now: float) -> None:
        """While we did not run (somebody held the GIL, or the process was stopped), nobody else was silent."""
        gap = now - self._ticked
        self._ticked = now
        if gap < HEARTBEAT_S:
            return
        for link in self.links.values():
            link.heard += gap
            link.dropped = None if link.dropped is None else link.dropped + gap

    def _check_deadlines(self, now: float) -> None:
        if not self.workers:
            self._guard(self._proceed, now)
            self._check_opening(now)
            return
        self._place_vacant(now)
        if now - self._asked_names >= RESOLVE_S and any(worker.state is _S.VACANT for worker in self.workers):
            self._ask_names(now)
        for worker in self.workers:
            if worker.state is _S.STARTING and worker.port and now - worker.since > self.options.connect_timeout:
                reason = (
                    f"cannot be reached on its data port {worker.port} within {self.options.connect_timeout:g} s: open "
                    "that port in the firewall, or fix the range with rpc-reading-worker --data-ports LO-HI and open it"
                )
                self._fail(ConnectError(f"{worker} {reason}"))
            elif self._is_overdue(worker, now):
                self._fail(WorkerLostError(self._nowhere_to_go(worker)))

    def _check_opening(self, now: float) -> None:
        """Resolving and connecting share one ``connect_timeout``."""
        silent = [link for link in self.links.values() if link.state is LinkState.GREETING]
        rejected = silent and not self._unresolved and all(link.rejected for link in silent)
        in_vain = rejected or (self._is_late(now) and (silent or self._unresolved))
        if in_vain and not self._suffices() and not self.workers:
            reasons = tuple(reason or self._unanswered(name) for name, reason in self._unresolved.items())
            self._actions.append(FailToConnect([link.address for link in silent], reasons))
        elif self._unresolved and now - self._asked_names >= ASK_NAMES_S:
            self._ask_names(now)

    def _is_late(self, now: float) -> bool:
        return now - self._started >= self.options.connect_timeout

    def _unanswered(self, name: str) -> str:
        return f"{name}: no answer from this machine's DNS within {self.options.connect_timeout:g} s"

    def _is_overdue(self, worker: Worker, now: float, share: float = 1.0) -> bool:
        """Whether it is waited for, and has had no place for ``timeout``, or a share of it."""
        timeout = self.options.timeout
        feeds = worker.worker == self.num_shards and self._unfinished
        needed = not self.epoch or worker.worker in self._unfinished or feeds
        vacant = needed and worker.state is _S.VACANT
        since = max(worker.since, worker.not_before)
        return bool(vacant) and timeout is not None and now - since > share * timeout

    def why_nothing_comes(self, now: float) -> str | None:
        """Which loss keeps the client waiting: of a worker without a place, or of one that is lost again and again."""
        for worker in self.workers:
            if self._is_overdue(worker, now, 0.5):
                return self._nowhere_to_go(worker)
            _, _, awaited = place = self._place_of(worker)
            if awaited and worker.fruitless > 1 and place == worker.lost_at:
                return _again_and_again(worker)
        return None

    def _nowhere_to_go(self, worker: Worker) -> str:
        """Why a shard has no worker: what was lost, and what every daemon said."""
        places = "; ".join(f"{link.address}: {link.trouble or link.state.value}" for link in self.links.values())
        return (
            f"{worker.last_loss}, and no slot was found for its shard within {self.options.timeout:g} s ({places}). "
            "Start daemons at these addresses, or resume from a checkpoint with others"
        )

    # The end.

    def close(self, now: float) -> None:
        """Tell every daemon that knows of the session."""
        self.closed = True
        self.closed_at = now
        for worker in self.workers:
            worker.change(_E.CLOSE, now)
        for link in self.links.values():
            if link.in_use:
                link.held = max(1, link.held)
            if link.in_use or link.was_open:
                self._send(link, CloseSession(self.options.session))

    def tell(self, address: str, message: Message) -> None:
        """Send a message that changes no state."""
        self._send(self.links[address], message)

    def _fail(self, error: BaseException) -> None:
        self._actions.append(Fail(error))

    def _send(self, link: Link, message: Message, payload: bytes | memoryview | None = None) -> None:
        link.sent += isinstance(message, SessionMessage)
        self._actions.append(Send(link.address, message, payload))


def _again_and_again(worker: Worker) -> str:
    return f"{worker.last_loss}, {worker.fruitless} times in a row without a batch in between"
