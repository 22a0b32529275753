"""The daemon, one per machine: owns the control endpoint, counts slots, starts and watches workers.

One thread, one loop. It never runs user code and never unpickles: it keeps a pickled graph as bytes in memory that its
workers map, and relays what client and worker say to each other. A session ends when its client says so, or when the
client's connection breaks and it is not heard again; then its workers are asked to end, terminated, killed, in turn.
"""

import contextlib
import hashlib
import hmac
import logging
import multiprocessing
import os
import pwd
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from typing import Any

import msgspec
import psutil

from rpc_reading_service import __version__, buffers, floods, logs, messages, protocol, security, transport, usage
from rpc_reading_service.errors import KeysError
from rpc_reading_service.messages import (
    PROTOCOL_VERSION,
    AskStack,
    AskStatus,
    CloseSession,
    ConnectFeed,
    CountedMessage,
    Draining,
    FromClient,
    FromWorker,
    GraphArriving,
    GraphChunk,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Limit,
    Message,
    OpenSession,
    Pause,
    Phase,
    Refused,
    Resume,
    SessionClosed,
    SessionMessage,
    SessionOpened,
    SessionStatus,
    StartEpoch,
    StartWorker,
    Status,
    StopWorker,
    Totals,
    Welcome,
    WorkerExited,
    WorkerFailed,
    WorkerMessage,
    WorkerReady,
    WorkerReport,
    WorkerStatus,
)
from rpc_reading_service.origin import Forked, Origin
from rpc_reading_service.security import SECRET_BYTES, ServerKeys, Strangers

logger = logging.getLogger(__name__)

PRELOAD = ["rpc_reading_service.preload"]
"""Imported once, in the forkserver: a worker then starts in some 20 ms instead of 1.5 s."""

HASH_SEED = "0"
"""Of every worker on every machine, unless the daemon's own PYTHONHASHSEED says otherwise."""

WARM_UP_S = 120.0
ASK_S = 0.7
TERMINATE_S = 0.5
"""How long a worker has to end when asked, and then when terminated, before it is killed."""

STOPPED_S = 5.0
"""How long a worker may be stopped; one under a debugger is traced, which is another thing."""

SHORT = 100
"""Characters of what others call themselves, in a ``Status``."""

DIGEST = 12
"""Characters of a graph's digest, likewise."""

MOST_UNSENT_BYTES = 64 << 20
"""So much may wait for a worker that does not read."""

SHARED_GRAPH_BYTES = 16 << 20
"""Of graphs from this size on, pickled, the workers of a host share one that is loaded; of smaller ones each loads its
own, which costs less than another process."""

MAX_SESSIONS = 1000
MAX_GRAPH_BYTES = 4 << 30

TICK_S = 1.0
MESSAGES_PER_TURN = 100
GRAPH_NEWS_S = 1.0
"""How often a client hears how much of its graph has arrived."""

FAREWELL_S = 0.5

UNKNOWN = "the daemon does not know it"
"""Of a session; its client greets the daemon again."""


def versions() -> dict[str, str]:
    """Of everything that has to fit on both ends, without importing any of it."""
    packages = {name: metadata.version(name) for name in ("torch", "torchdata", "numpy")}
    return {"python": ".".join(map(str, sys.version_info[:3])), "rpc-reading-service": __version__, **packages}


@dataclass(frozen=True)
class DaemonOptions:
    """What the command line says, checked."""

    host: str = "127.0.0.1"
    port: int = 5555
    slots: int = 1
    grace: float = 0.0
    data_ports: Sequence[int] = (0,)
    keys: ServerKeys | None = None
    insecure: bool = False
    max_sessions: int = MAX_SESSIONS
    max_graph_bytes: int = MAX_GRAPH_BYTES
    worker_memory: int | None = None

    def __post_init__(self) -> None:
        if self.keys is None and not self.insecure and not transport.is_loopback(self.host):
            raise KeysError(
                f"without keys whoever can reach {self.host} could run code here as {user_name(os.getuid())}: give "
                "--keys DIR (made by rpc-reading-worker keygen DIR), or insist with --insecure"
            )


def user_name(uid: int) -> str:
    """For texts."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


class StoredGraph:
    """A pickled graph in anonymous memory: nothing is left of it when the daemon and its workers are gone."""

    def __init__(self, digest: str, nbytes: int) -> None:
        self.digest = digest
        self.nbytes = nbytes
        self.received = 0
        self.fd = os.memfd_create("rpc-reading-graph")
        self.origin: Origin | None = None
        self._hash = hashlib.sha256()

    @property
    def complete(self) -> bool:
        return self.received == self.nbytes and self._hash.hexdigest() == self.digest

    def append(self, offset: int, data: bytes) -> bool:
        """False if the piece does not follow on what is here."""
        if offset != self.received or offset + len(data) > self.nbytes:
            return False
        view = memoryview(data)
        while view:
            view = view[os.write(self.fd, view) :]
        self._hash.update(data)
        self.received += len(data)
        return True

    def load(self, forkserver: Any, limit: int | None, session: str) -> Origin | None:
        """The process that loads a large graph for all workers, started if need be, and for this session."""
        if self.origin is None and self.nbytes >= SHARED_GRAPH_BYTES:
            self.origin = Origin(forkserver, self.fd, limit, session)
        return self.origin

    def close(self) -> None:
        if self.origin is not None:
            self.origin.close()
        os.close(self.fd)


@dataclass
class WorkerProcess:
    """One process, from its start until it is gone."""

    start: StartWorker
    process: BaseProcess | Forked
    channel: transport.Channel
    logbook: buffers.Logbook
    output: logs.Output
    usage: usage.Usage
    kill_steps: Iterator[tuple[float, Callable[[], None]]] | None = None
    kill_at: float = float("inf")
    failed: bool = False
    ready: bool = False
    paused: bool = False
    look_at: float = 0.0
    stopped_since: float | None = None

    def __str__(self) -> str:
        return f"worker {self.start.worker} (pid {self.process.pid})"

    def report(self, now: float) -> WorkerReport:
        """What it has done so far, and is at."""
        return self.logbook.report(self.start.worker, self.start.attempt, now)

    def status(self, now: float) -> WorkerStatus:
        """For those who run the daemon."""
        report, used = self.report(now), self.usage
        return WorkerStatus(
            report, self.process.pid or 0, self._state(report), now - used.began, used.cpu, used.memory,
            used.batches_per_s, used.bytes_per_s,
        )  # fmt: skip

    def _state(self, report: WorkerReport) -> str:
        if self.kill_steps is not None:
            return "ending"
        if not self.ready:
            return protocol.WorkerState.STARTING.value
        if self.paused:
            return protocol.WorkerState.PAUSED.value
        state = protocol.WorkerState.STANDBY if report.phase is Phase.IDLE else protocol.WorkerState.RUNNING
        return state.value

    def note(self, message: Any) -> None:
        """What passes between it and its client says which state it is in."""
        match message:
            case WorkerReady():
                self.ready = True
            case WorkerFailed():
                self.failed = True
            case Pause():
                self.paused = True
            case Resume() | StartEpoch():
                self.paused = False

    def stop(self, now: float) -> None:
        """Ask it to end; ``press`` makes sure."""
        if self.kill_steps is None:
            self.kill_steps = iter(
                [(ASK_S, self._ask), (TERMINATE_S, self.process.terminate), (1.0, self.process.kill)]
            )
            self.kill_at = now
            self.press(now)

    def press(self, now: float) -> None:
        """Take the next step if its time has come."""
        while self.kill_steps is not None and now >= self.kill_at:
            seconds, step = next(self.kill_steps, (1.0, self.process.kill))
            step()
            self.kill_at = now + seconds

    def _ask(self) -> None:
        start = self.start
        self.channel.send([messages.encode(StopWorker(start.session, start.worker, start.attempt))])


@dataclass
class Session:
    """One client's session on this daemon."""

    session: str
    client: str
    identity: bytes
    connection: int
    received: int
    """Messages of this session from its client."""
    opened: float
    user: str = ""
    secret: bytes = field(default=b"", repr=False)
    sent: int = 0
    """Messages of this session to its client."""
    was_in_step: bool = True
    slots: int = 0
    graph_name: str = ""
    graph: StoredGraph | None = None
    graph_told: int = 0
    """Bytes of its graph of which its client knows that they are here."""
    tell_graph_at: float = 0.0
    workers: dict[tuple[int, int], WorkerProcess] = field(default_factory=dict)
    orphaned_at: float | None = None
    ending: str | None = None

    def __str__(self) -> str:
        return f"session {self.session[:8]} of {self.client}"

    def about(self, worker: int | None = None) -> dict[str, Any]:
        """For a log call."""
        return logs.about(self.session, worker)

    def status(self, now: float) -> SessionStatus:
        """For those who run the daemon."""
        digest, nbytes = (self.graph.digest, self.graph.nbytes) if self.graph else ("", 0)
        workers = [worker.status(now) for worker in self.workers.values()]
        return SessionStatus(
            self.session[:8], self.client[:SHORT], digest[:DIGEST], self.graph_name, nbytes, self._state,
            now - self.opened, self.slots, workers,
        )  # fmt: skip

    @property
    def _state(self) -> str:
        if self.ending is not None:
            return "ending"
        if self.orphaned_at is not None:
            return "client silent"
        return "open" if self.graph is not None and self.graph.complete else "waits for its graph"


class Daemon:
    """Serves until SIGTERM or SIGINT.

    Args:
        options: where to listen, how many slots, whom to let in
        lifeline: a socket whose closing ends the daemon too: the process that started it is gone
        publish: told once a second what the daemon is doing

    Raises:
        OSError: the port is taken, or the host is not one of this machine's.
    """

    def __init__(
        self,
        options: DaemonOptions,
        lifeline: socket.socket | None = None,
        publish: Callable[[Status], None] | None = None,
    ) -> None:
        self.options = options
        self.boot = secrets.token_hex(16)
        self._versions = versions()
        self._ticket_key = secrets.token_bytes(32)
        self._strangers = Strangers()
        self._lifeline = lifeline
        self._publish = publish
        self._began = time.monotonic()
        self._totals = Totals()
        self._ready: set[Any] = set()
        self._sessions: dict[str, Session] = {}
        self._graphs: dict[str, StoredGraph] = {}
        self._waiting: list[tuple[Session, StartWorker]] = []
        self._stopping: str | None = None
        self._drain_until = float("inf")
        self._check_at = 0.0
        self._floods_at = 0.0
        self._watch_at = 0.0
        self._forkserver = multiprocessing.get_context("forkserver")
        self._context = transport.Context()
        self._poller = transport.Poller()
        self._waker = transport.Waker()
        self._flooded = False
        self._gate = self._context.gate(self._admits)
        try:
            self._router = self._context.router(options.host, options.port, options.keys.pair if options.keys else None)
        except OSError:
            self.close()
            raise
        self.address = transport.join_address(options.host, self._router.port)

    # Life cycle.

    def warm_up(self) -> None:
        """Start the forkserver and see that a process with everything imported can be had.

        Raises:
            RuntimeError: it cannot; the reason is on stderr.
        """
        _share_a_hash_seed()
        self._forkserver.set_forkserver_preload(PRELOAD)
        process = self._forkserver.Process(target=_warm_up, name="warm-up")
        process.start()
        process.join(WARM_UP_S)
        if process.exitcode != 0:
            process.kill()
            raise RuntimeError("a worker process cannot be started: see the traceback above")

    def run(self) -> int:
        """Serve; returns the exit code."""
        with self._signals():
            for raw in (self._router.raw, self._router.raw_monitor, self._waker.raw, self._lifeline, self._gate.raw):
                if raw is not None:
                    self._poller.watch(raw)
            if self.options.keys is None and self.options.insecure:
                logger.warning("--insecure: whoever can reach %s runs code as %s", self.address, user_name(os.getuid()))
            while self._stopping is None or self._sessions:
                self._step()
        return 0

    def close(self) -> None:
        """Answers on their way first, then the sockets, then what signals wake."""
        if hasattr(self, "_router"):
            self._router.close(linger=FAREWELL_S)
        self._context.close()
        self._waker.close()

    def drain(self, reason: str) -> None:
        """Take no more sessions, let those that there are finish their epoch or move on, and then stop."""
        if self._stopping is not None or self.options.grace == 0 or not self._sessions:
            return self.stop(reason)
        logger.info("draining: %s", reason)
        self._stopping = reason
        self._drain_until = time.monotonic() + self.options.grace
        for session in self._sessions.values():
            self._tell(session, Draining(session.session, reason, self.options.grace))

    def stop(self, reason: str) -> None:
        """End every session, then the daemon."""
        logger.info("stopping: %s", reason)
        self._stopping = reason
        self._drain_until = float("inf")
        for session in list(self._sessions.values()):
            self._end(session, reason)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        # The handlers do nothing: the signal's number arrives through the waker, and the loop acts on it.
        previous = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
        wakeup = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _step(self) -> None:
        self._ready = self._poller.wait(self._patience())
        for number in self._waker.clear():
            if number == signal.SIGTERM:
                self.drain("the daemon got SIGTERM")
            elif number:
                self.stop(f"the daemon got {signal.Signals(number).name}")
        if self._lifeline is not None and self._lifeline.fileno() in self._ready:
            self.stop("the process that started the daemon is gone")
            self._poller.forget(self._lifeline)
            self._lifeline = None
        now = time.monotonic()
        if now > self._drain_until:
            self.stop(f"{self._stopping}, and its grace of {self.options.grace:g} s is over")
        if not self._flooded:  # else new connections wait until everything has been read
            self._gate.answer()
        # Only then: what a broken connection still brought must not pass for a sign of life after it.
        everything = self._receive_some(now)
        if everything or now >= self._watch_at:
            self._flooded &= not everything
            self._watch_at = now + TICK_S  # at the latest: strangers may see to it that there is always something
            self._watch_connections(now)
        self._cut_floods(time.monotonic())
        if now >= self._check_at:
            self._check_at = now + TICK_S
            self._check_admitted()
            if self._publish is not None:
                self._publish(self.status(now))
        for graph in self._graphs.values():
            self._hear_origin(graph)
        for session in list(self._sessions.values()):
            self._look_after(session, now)

    def _hear_origin(self, graph: StoredGraph) -> None:
        if graph.origin is None:
            return
        self._pass_on(graph.origin.output)
        if graph.origin.loading:
            graph.origin.listen()
            if not graph.origin.loading:
                self._poller.forget(graph.origin.raw)
                logger.info("a graph of %.1f MB is %s", graph.nbytes / 1e6, graph.origin)
                self._start_waiting()

    def _pass_on(self, output: logs.Output) -> None:
        """Log what there is to read."""
        if output.fd in self._ready and not output.read():
            self._poller.forget(output.fd)

    def _patience(self) -> float:
        now = time.monotonic()
        moments = [worker.kill_at - now for session in self._sessions.values() for worker in session.workers.values()]
        tick = floods.CHECK_S if self._router.has_strangers(self._trusted()) else TICK_S
        return max(0.0, min([tick, *moments]))

    # Messages from clients.

    def _receive_some(self, now: float) -> bool:
        """Until the next look for floods, which may be what takes so long; whether it was everything."""
        for request in self._router.receive_all(MESSAGES_PER_TURN):
            self._receive(request, now)
            if time.monotonic() > max(self._floods_at, now):
                break
        return not self._router.behind

    def _receive(self, request: transport.Request, now: float) -> None:
        try:
            message = messages.decode(request.frames[0], FromClient)
        except (msgspec.DecodeError, IndexError) as error:
            self._strangers.note(request.peer or "somebody", "sent a message that is none of ours, dropped", str(error))
            return
        logger.debug("< %s", message)
        payload = request.frames[1] if len(request.frames) > 1 else None
        match message:
            case Hello():
                self._hello(request, message)
            case AskStatus():
                self._ask_status(request, message)
            case OpenSession():
                self._open(request, message)
            case _:
                self._in_session(request, message, payload, now)

    def _in_session(self, request: transport.Request, message: Any, payload: bytes | None, now: float) -> None:
        identity = request.identity
        session = self._sessions.get(message.session)
        if session is None or session.user != request.user:
            reason = "" if isinstance(message, CloseSession) else UNKNOWN
            return self._send(identity, SessionClosed(message.session, reason))
        session.identity, session.connection, session.orphaned_at = identity, request.connection, None
        self._handle(session, message, payload, now)
        session.received += 1

    def _handle(self, session: Session, message: Any, payload: bytes | None, now: float) -> None:
        match message:
            case GraphChunk():
                self._graph_chunk(session, message, payload or b"", now)
            case StartWorker():
                self._start_worker(session, message, payload or b"")
            case StopWorker():
                self._stop_worker(session, message, now)
            case ConnectFeed() | StartEpoch() | Pause() | Resume() | Limit() | AskStack():
                self._relay_down(session, message, payload, now)
            case Heartbeat():
                self._heartbeat(session, message)
            case CloseSession():
                self._end(session, "")

    def _heartbeat(self, session: Session, message: Heartbeat) -> None:
        """Only the second one out of step counts: the first by a new connection may overtake what came before it."""
        if message.sent == session.received:
            session.was_in_step = True
        elif session.was_in_step:
            session.was_in_step = False
        elif not self._is_in_step(session, message):
            return
        now = time.monotonic()
        reports = [worker.report(now) for worker in session.workers.values()]
        self._tell(session, HeartbeatReply(session.session, session.sent, self.boot, reports))

    def _hello(self, request: transport.Request, message: Hello) -> None:
        identity = request.identity
        trouble = protocol.incompatible(message.protocol, message.versions, self._versions)
        if trouble:
            logger.warning("! refused %s: %s", message.client, trouble)
            return self._send(identity, Refused("version", trouble))
        if stranger := self._is_of_another_user(request):
            self._strangers.note(message.client, f"was refused: {stranger}")
            return self._send(identity, Refused("keys", stranger))
        if self._stopping is not None:
            return self._send(identity, Refused("draining", f"the daemon is ending: {self._stopping}"))
        welcome = Welcome(
            PROTOCOL_VERSION, self._versions, self.boot, socket.gethostname(), self.options.slots, self.free,
            len(self._sessions), self._ticket(identity),
        )  # fmt: skip
        self._send(identity, welcome)

    def _ask_status(self, request: transport.Request, message: AskStatus) -> None:
        """No ticket is needed, as the answer itself goes to whoever was looked at, and to nobody else."""
        if message.protocol != PROTOCOL_VERSION:
            trouble = protocol.incompatible(message.protocol, {}, self._versions)
            return self._send(request.identity, Refused("version", trouble or ""))
        if stranger := self._is_of_another_user(request):
            self._strangers.note(request.peer or "somebody", f"may not ask for the status: {stranger}")
            return self._send(request.identity, Refused("keys", stranger))
        self._send(request.identity, self.status(time.monotonic()))

    def status(self, now: float) -> Status:
        """What the daemon and its workers are doing."""
        totals = msgspec.structs.replace(self._totals, strangers=self._strangers.total)
        sessions = list(self._sessions.values())
        for worker in (worker for session in sessions for worker in session.workers.values()):
            totals = usage.add(totals, worker.report(now), worker.usage, worker.start.is_dispatching)
        return Status(
            PROTOCOL_VERSION, self._versions, self.boot, socket.gethostname()[:SHORT], os.getpid(), now - self._began,
            self.options.slots, self.free, self._stopping or "", totals, [session.status(now) for session in sessions],
        )  # fmt: skip

    def _count(self, **more: int) -> None:
        counts = {name: getattr(self._totals, name) + count for name, count in more.items()}
        self._totals = msgspec.structs.replace(self._totals, **counts)

    def _is_of_another_user(self, request: transport.Request) -> str | None:
        """Why the peer may not open a session, in words.

        What is looked up is the connection's descriptor, which may have been closed and be another connection's by now.
        Therefore the answer carries a ticket, which only the peer itself can show: if it still is there to receive it,
        it was there when it was looked up.
        """
        if self.options.keys is not None or self.options.insecure:
            return None
        uid = security.owner(request.connection)
        if uid in (0, os.getuid()):
            return None
        who = "of a user whom the kernel does not name" if uid is None else f"of {user_name(uid)}"
        return (
            f"a process {who} may not run code as {user_name(os.getuid())}, and the daemon has no keys: start it with "
            "--keys DIR, or with --insecure if everybody on that machine may"
        )

    def _ticket(self, identity: bytes) -> str:
        return hmac.digest(self._ticket_key, identity, "sha256").hex()

    @property
    def free(self) -> int:
        """Slots that no session holds."""
        return self.options.slots - sum(session.slots for session in self._sessions.values())

    def _open(self, request: transport.Request, message: OpenSession) -> None:
        identity = request.identity
        session = self._sessions.get(message.session)
        has_ticket = hmac.compare_digest(message.ticket.encode(), self._ticket(identity).encode())
        if not has_ticket if session is None else session.user != request.user:
            return self._send(identity, SessionClosed(message.session, UNKNOWN))  # it will greet again
        if session is not None and session.ending is not None:
            return self._send(identity, Refused("session", f"{session} is ending here; ask again"))
        if session is not None:
            session.identity, session.connection, session.orphaned_at = identity, request.connection, None
            if not self._is_in_step(session, message):
                return
            session.received += 1
        if self._stopping is not None:
            return self._send(identity, Refused("draining", f"the daemon is ending: {self._stopping}"))
        held = session.slots if session else 0
        if message.slots > held + self.free:
            return self._send(identity, Refused("slots", self._no_slots(message)))
        if trouble := self._too_much(message, session):
            return self._send(identity, trouble)
        graph = (session and session.graph) or self._graphs.get(message.graph)
        try:
            graph = graph or StoredGraph(message.graph, message.graph_bytes)
        except OSError as error:  # no descriptors, no memory
            return self._send(identity, Refused("slots", f"{self.address} has no room for the graph: {error}"))
        if session is None:
            connection = request.connection
            received, now = message.sent + 1, time.monotonic()
            session = Session(message.session, message.client, identity, connection, received, now, request.user)
            session.graph_name = logs.printable(message.graph_name)[:SHORT]
            self._sessions[message.session] = session
            self._count(sessions=1)
            opened = "= %s is open, on %d slots, with graph %s"
            logger.info(opened, session, message.slots, session.graph_name, extra=session.about())
        session.slots = max(held, message.slots)
        session.graph = graph
        self._tell(session, SessionOpened(session.session, session.sent, session.slots, graph.complete))

    def _is_in_step(self, session: Session, message: CountedMessage | StartWorker) -> bool:
        """Whether everything has arrived that the client has sent; if not, the session starts again here."""
        if message.sent != session.received:
            lost = f"of {message.sent} messages from the client, {session.received} have arrived"
            self._end(session, f"some were lost with a broken connection: {lost}")
        return session.ending is None

    def _too_much(self, message: OpenSession, session: Session | None) -> Refused | None:
        """Whether the daemon's limits forbid it."""
        limit = self.options.max_sessions
        if session is None and len(self._sessions) >= limit:
            return Refused("slots", f"{self.address} has {limit} sessions, its --max-sessions: end some, or ask others")
        if message.graph_bytes > self.options.max_graph_bytes:
            return Refused(
                "size",
                f"the graph has {message.graph_bytes:,} bytes, and {self.address} takes at most "
                f"{self.options.max_graph_bytes:,} (--max-graph-size): let the graph open its data on the worker "
                "instead of bringing it along, or raise the limit",
            )
        return None

    def _no_slots(self, message: OpenSession) -> str:
        others = len(self._sessions) - (message.session in self._sessions)
        return (
            f"{self.free} of {self.options.slots} slots free on {self.address}: held by {others} "
            f"session{'s' * (others != 1)}, while {message.slots} were asked for"
        )

    def _graph_chunk(self, session: Session, message: GraphChunk, payload: bytes, now: float) -> None:
        graph = session.graph
        if graph is None:
            return
        if not graph.complete and graph.append(message.offset, payload) and graph.complete:
            session.graph = self._graphs.setdefault(graph.digest, graph)
            if session.graph is not graph:  # another session has sent it meanwhile
                graph.close()
            logger.info("%s: its graph has arrived, %.1f MB", session, graph.nbytes / 1e6, extra=session.about())
        if graph.received > session.graph_told and (graph.complete or now >= session.tell_graph_at):
            session.graph_told, session.tell_graph_at = graph.received, now + GRAPH_NEWS_S
            self._tell(session, GraphArriving(session.session, session.sent, graph.received))

    # Workers.

    def _start_worker(self, session: Session, message: StartWorker, secret: bytes) -> None:
        session.secret = secret
        if session.ending is not None or not self._is_in_step(session, message):
            return
        graph = session.graph
        if graph is None or not graph.complete:
            return self._send(session.identity, Refused("graph", "the graph did not arrive whole"))
        self._start_in_slot(session, message)

    def _start_in_slot(self, session: Session, message: StartWorker) -> None:
        running = sum(worker.kill_steps is None for worker in session.workers.values())
        if running >= session.slots:
            return self._exited(session, message, f"was not started: {running} workers run already")
        if len(session.secret) != (0 if self.options.keys is None else SECRET_BYTES):
            return self._exited(session, message, "was not started: no key for its data port came with the request")
        try:
            if not self._has_port() or self._is_loading(session):
                return self._waiting.append((session, message))
            worker = self._launch(session, message)
        except (OSError, EOFError) as error:  # no descriptors; or no memory, at which the forkserver ends
            return self._exited(session, message, f"was not started: {error or 'the forkserver ended'}")
        session.workers[message.worker, message.attempt] = worker
        self._count(workers=1)
        self._poller.watch(worker.channel.raw)
        self._poller.watch(worker.output.fd)
        self._poller.watch(worker.process.sentinel)
        logger.info("= %s: %s started", session, worker, extra=session.about(message.worker))

    def _has_port(self) -> bool:
        """Whether one of ``--data-ports`` is left: a process that was told to end has its port until it is gone."""
        ports = self.options.data_ports
        return 0 in ports or len(ports) > sum(len(session.workers) for session in self._sessions.values())

    def _is_loading(self, session: Session) -> bool:
        """Whether the workers will be forked, when the graph is loaded."""
        graph = session.graph
        assert graph is not None
        new = graph.origin is None
        origin = graph.load(self._forkserver, self.options.worker_memory, session.session)
        if origin is not None and new:
            self._poller.watch(origin.raw)
            self._poller.watch(origin.output.fd)
        return origin is not None and origin.loading

    def _start_waiting(self) -> None:
        """A process is gone, and its port is free; or a graph is loaded."""
        waiting, self._waiting = self._waiting, []
        for session, message in waiting:
            if session.ending is None:
                self._start_in_slot(session, message)

    def _launch(self, session: Session, message: StartWorker) -> WorkerProcess:
        assert session.graph is not None
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            near, far = multiprocessing.Pipe()
            theirs.callback(far.close)
            channel = transport.Channel(near)
            ours.callback(channel.close)
            logbook_fd = buffers.Logbook.create()
            theirs.callback(os.close, logbook_fd)
            logbook = buffers.Logbook(logbook_fd)
            ours.callback(logbook.close)
            output = logs.Output(session.session, message.worker)
            theirs.callback(output.started)
            ours.callback(output.close)
            options = self.options
            args = message, options.host, options.data_ports, session.secret, options.worker_memory
            process: BaseProcess | Forked
            origin = session.graph.origin
            if origin is not None and origin.loaded:
                process = origin.fork(args, far.fileno(), logbook_fd, output.far)
            else:
                process = self._forkserver.Process(
                    target=_worker,
                    args=(far, DupFd(session.graph.fd), DupFd(logbook_fd), DupFd(output.far), *args),
                    name=f"rpc-reading-worker {session.session[:8]}/{message.worker}",
                )
                process.start()
            ours.pop_all()
        used = usage.Usage(process.pid or 0, time.monotonic())
        return WorkerProcess(message, process, channel, logbook, output, used)

    def _stop_worker(self, session: Session, message: StopWorker, now: float) -> None:
        stopped = message.worker, message.attempt
        self._waiting = [
            (s, start) for s, start in self._waiting if (start.worker, start.attempt) != stopped or s is not session
        ]
        if worker := session.workers.get(stopped):
            worker.stop(now)

    def _relay_down(self, session: Session, message: Any, payload: bytes | None, now: float) -> None:
        worker = session.workers.get((message.worker, message.attempt))
        if worker is not None:
            worker.note(message)
            frames = [messages.encode(message)]
            worker.channel.send(frames if payload is None else [*frames, payload])
            self._await_room(session, worker, now)
        elif session.ending is None:  # what said so may have been lost with a connection
            self._exited(session, message, "is not there any more")

    def _await_room(self, session: Session, worker: WorkerProcess, now: float) -> None:
        """What does not fit goes on when the worker reads; one that reads nothing for too long is ended."""
        self._poller.watch(worker.channel.raw, writable=worker.channel.unsent > 0)
        if worker.channel.unsent > MOST_UNSENT_BYTES and worker.kill_steps is None:
            self._give_up(session, worker, f"was ended: it left {worker.channel.unsent >> 20} MiB unread", now)

    def _relay_up(self, session: Session, worker: WorkerProcess) -> None:
        try:
            for frames in worker.channel.receive_all():
                worker.note(messages.decode(frames[0], FromWorker))
                session.sent += 1
                self._router.send(session.identity, frames)
        except (EOFError, msgspec.DecodeError):
            pass  # its exit says the rest

    def _look_after(self, session: Session, now: float) -> None:
        """What its workers say, which of them are gone, and whether the client still is there."""
        for key, worker in list(session.workers.items()):
            self._relay_up(session, worker)
            if worker.channel.unsent:
                worker.channel.flush()
                self._await_room(session, worker, now)
            self._pass_on(worker.output)
            worker.press(now)
            self._look_at(session, worker, now)
            if worker.process.exitcode is not None:
                self._relay_up(session, worker)
                del session.workers[key]
                self._reap(session, worker)
                self._start_waiting()
        if session.orphaned_at is not None and now - session.orphaned_at > protocol.ORPHANED_S:
            self._end(session, "the client is gone")
        if session.ending is not None and not session.workers:
            self._close_session(session)

    def _look_at(self, session: Session, worker: WorkerProcess, now: float) -> None:
        """A stopped process answers nobody, and its daemon's word is all that a client has: end it."""
        if now < worker.look_at:
            return
        worker.look_at = now + TICK_S
        with contextlib.suppress(psutil.NoSuchProcess):
            if worker.usage.look(worker.report(now), now) != psutil.STATUS_STOPPED:
                worker.stopped_since = None
            elif worker.stopped_since is None:
                worker.stopped_since = now
            elif now - worker.stopped_since >= STOPPED_S and worker.kill_steps is None:
                self._give_up(session, worker, f"was stopped (SIGSTOP) for {STOPPED_S:g} s, and then ended", now)

    def _give_up(self, session: Session, worker: WorkerProcess, reason: str, now: float) -> None:
        """It cannot be asked to end."""
        worker.kill_steps = iter([])
        worker.kill_at = now
        self._exited(session, worker.start, reason)

    def _reap(self, session: Session, worker: WorkerProcess) -> None:
        self._poller.forget(worker.channel.raw)
        self._poller.forget(worker.process.sentinel)
        worker.channel.close()
        if not worker.output.ended:
            self._poller.forget(worker.output.fd)
        worker.output.close()
        batch = worker.logbook.read()
        report = worker.report(time.monotonic())
        self._totals = usage.add(self._totals, report, worker.usage, worker.start.is_dispatching)
        worker.logbook.close()
        reason = describe_exit(worker.process.exitcode or 0, self.options.worker_memory)
        cut_off = worker.process.exitcode == protocol.EXIT_CUT_OFF  # not the fault of the batch it was waiting for
        worker.process.close()
        asked = worker.kill_steps is not None
        self._count(lost=not asked)
        level, shard = logging.INFO if asked else logging.WARNING, worker.start.worker
        logger.log(level, "= %s: worker %d %s", session, shard, reason, extra=session.about(shard))
        if not asked and not worker.failed:
            self._exited(session, worker.start, reason, None if cut_off else batch)

    def _exited(self, session: Session, start: WorkerMessage, reason: str, batch: int | None = None) -> None:
        self._tell(session, WorkerExited(session.session, start.worker, start.attempt, reason, batch))

    # The end of a session.

    def _watch_connections(self, now: float) -> None:
        dropped, failed = self._router.events()
        for connection in dropped:
            self._dropped(connection, now)
        for peer, failure in failed:
            self._strangers.note(peer, f"could not connect: {self._explain(failure)}")

    def _trusted(self) -> Container[int]:
        """Connections of those who may run code here."""
        if self.options.keys is not None:
            return self._router.heard
        return {session.connection for session in self._sessions.values() if session.orphaned_at is None}

    def _cut_floods(self, now: float) -> None:
        if now >= self._floods_at:
            cut = self._router.cut_floods(self._trusted())
            self._floods_at = now + floods.CHECK_S
            self._flooded |= bool(cut)
            for peer, why in cut:
                self._strangers.note(peer, f"was cut off: it has no session, and {why}")

    def _explain(self, failure: transport.Failure) -> str:
        if failure is transport.Failure.MISMATCH:
            return "it comes with keys, and this daemon has none: start it with --keys DIR"
        if self.options.keys is not None:
            return "it has no keys, or expects another than this daemon's: give it client.key and server.pub"
        return "it broke off, or is no rpc-reading-service, or comes with keys, and this daemon has none (--keys DIR)"

    def _admits(self, public: str, address: str) -> bool:
        """Whether a client with this public key is let in."""
        keys = self.options.keys
        admitted = keys is None or public in keys.allowed
        if keys is not None and not admitted:
            peer = address.removeprefix("::ffff:")
            trouble = f"was not let in: its public key {public} is in no *.pub file of {keys.allowed.folder}"
            self._strangers.note(peer, trouble)
        return admitted

    def _check_admitted(self) -> None:
        """Who was taken off the allow-list leaves."""
        keys = self.options.keys
        for session in list(self._sessions.values()):
            if keys is not None and session.user not in keys.allowed:
                self._end(session, "its client's key is not on the allow-list any more")

    def _dropped(self, connection: int, now: float) -> None:
        logger.debug("! connection %d broke", connection)
        for session in self._sessions.values():
            if session.connection == connection and session.orphaned_at is None:
                session.orphaned_at = now

    def _end(self, session: Session, reason: str) -> None:
        if session.ending is not None:
            return
        session.ending = reason
        if reason:
            logger.warning("= %s ends: %s", session, reason, extra=session.about())
            self._send(session.identity, SessionClosed(session.session, reason))
        now = time.monotonic()
        for worker in session.workers.values():
            worker.stop(now)

    def _close_session(self, session: Session) -> None:
        """The last of its workers is gone: its slots are free."""
        del self._sessions[session.session]
        graph = session.graph
        if graph is not None and not any(other.graph is graph for other in self._sessions.values()):
            if self._graphs.get(graph.digest) is graph:
                del self._graphs[graph.digest]
            if graph.origin is not None:
                self._forget_origin(graph.origin)
            graph.close()
        logger.info("= %s is closed", session, extra=session.about())
        if not session.ending:
            self._send(session.identity, SessionClosed(session.session, ""))

    def _forget_origin(self, origin: Origin) -> None:
        if origin.loading:
            self._poller.forget(origin.raw)
        if not origin.output.ended:
            self._poller.forget(origin.output.fd)

    def _tell(self, session: Session, message: SessionMessage) -> None:
        session.sent += 1
        self._send(session.identity, message)

    def _send(self, identity: bytes, message: Message) -> None:
        logger.debug("> %s", message)
        self._router.send(identity, [messages.encode(message)])


def describe_exit(code: int, memory: int | None = None) -> str:
    """What became of a process, in words.

    Args:
        memory: bytes that it might use, if there was a limit: libraries abort where an allocation fails
    """
    if code == protocol.EXIT_CUT_OFF:
        return "ended: its connection to the dispatching worker broke"
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (the out-of-memory killer does that; see dmesg on that machine)" if name == "SIGKILL" else ""
    if memory is not None and name == "SIGABRT":
        hint = f" (libraries do that if the {memory:,} bytes of --worker-memory are used up)"
    return f"was killed by {name}{hint}"


def _worker(connection: Any, graph_fd: Any, logbook_fd: Any, output_fd: Any, *args: Any) -> None:
    logs.redirect(output_fd.detach())
    # Imported here, in the new process, where the forkserver has it ready: the daemon itself needs no torch.
    from rpc_reading_service import worker

    worker.main(connection, lambda: worker.unpickle(graph_fd.detach()), logbook_fd.detach(), *args)


def _share_a_hash_seed() -> None:
    """Let a set of strings have one order in the workers of all daemons: each takes its shard of a source by counting.

    The forkserver inherits it. A fixed number of the user's is left as it is.
    """
    if os.environ.get("PYTHONHASHSEED", "random") == "random":
        os.environ["PYTHONHASHSEED"] = HASH_SEED


def _warm_up() -> None:
    from rpc_reading_service import worker

    worker.warm_up()
