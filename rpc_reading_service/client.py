"""The training process's end of a session; knows nothing of torchdata.

Two threads. The I/O thread owns the control sockets: it feeds what arrives to ``session`` and carries out the actions
that come out. The thread of the training loop takes batches from ``merge`` and decodes them. Both pure objects are
guarded by one lock; what they decide under it is carried out outside it. The data socket is read by whoever has time
for it, into recycled memory, and then ``merge.add``: see ``intake``, whose lock is taken before this one.

    training loop    next() -> merge.next -> codec.decode -> the user's batch
                       |  waits in intake.wait, and gives credit; if another thread waits there, on the condition
    I/O thread       poll -> intake.read, while nobody waits there; session.receive; session.tick; what is to be done
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from rpc_reading_service import buffers, codec, messages, pinning, protocol, segments, transport
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
    AddressError,
    ClosedError,
    ConnectError,
    KeysError,
    RPCReadingError,
    WorkerError,
    WorkerLostError,
    WorkerTimeoutError,
)
from rpc_reading_service.intake import TURN_S, Deferral, Intake
from rpc_reading_service.links import LinkState
from rpc_reading_service.merge import Entry, Item, Merge, Signal
from rpc_reading_service.messages import (
    AskStack,
    Data,
    EndOfShard,
    FromDaemon,
    HeartbeatReply,
    Limit,
    Opened,
    Pause,
    Resume,
    ShardError,
    Stack,
)
from rpc_reading_service.progress import Progress, Stage
from rpc_reading_service.resolver import Resolver
from rpc_reading_service.security import CurveKeys
from rpc_reading_service.session import ClientSession, SessionOptions
from rpc_reading_service.statistics import Place, Recorder, Statistics
from rpc_reading_service.stream import Arrival
from rpc_reading_service.transport import Deadline

logger = logging.getLogger(__name__)

WARN_AFTER_S = 30.0

CLOSE_S = 1.8
"""How long ``close`` waits for the daemons to confirm that the workers are gone: Ctrl-C is to end within 2 s."""

POLL_S = 0.25
"""How often a wait looks whether it has been abandoned."""

DATA_SILENCE_S = 5.0
"""A worker that is waited for and sends nothing for so long is asked how far it is; one that then has sent what does
not arrive for as long again has lost its data channel."""

STACK_S = 2.0
"""How long a wait that is about to complain waits for the worker's stack."""

DECRYPTING_THREADS = 2
"""libzmq's threads with keys. Each connection has one of them: decrypting takes it 0.6 s for a GB, the kernel 0.3."""

FINALIZED = "the reading service has been finalized: create a new DataLoader2"

TICK_S = 0.5
LEAST_TICK_S = 0.02


_PENDING, _EXHAUSTED = Signal.PENDING, Signal.EXHAUSTED
"""For each batch: to look a member up in its class takes 0.3 us."""


_this_process = object()
"""Another one in each fork. To ask the system who one is would take as long as to find the next batch."""


def _become_another_process() -> None:
    global _this_process
    _this_process = object()


os.register_at_fork(after_in_child=_become_another_process)


class Client:
    """One session.

    Args:
        addresses: of the daemons, checked
        options: see ``SessionOptions``
        in_order: see ``merge.Merge``
        warn_after: a wait that lasts longer, in seconds, is logged: who is waited for, and what it is doing
        keys: None for daemons without
        pins: whether what is received lands in page-locked memory
    """

    def __init__(
        self,
        addresses: Sequence[str],
        options: SessionOptions,
        in_order: bool,
        warn_after: float = WARN_AFTER_S,
        keys: CurveKeys | None = None,
        pins: bool = False,
    ) -> None:
        self.keys = keys
        self.allocate = pinning.allocate if pins else buffers.Pool(keep=options.prefetch_bytes).allocate
        self._options = options
        self._warn_after = warn_after
        self._in_order = in_order
        self._pid, self._process = os.getpid(), _this_process
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiter: int | None = None  # the thread that is in intake.wait
        self._session = ClientSession(addresses, options, self._progress)
        self._merge = Merge(0, in_order)
        self._recorder = Recorder(lambda: self._merge.consumed)
        self._stages = Progress()
        self._meters: list[protocol.CreditMeter] = []
        self._reported: list[int] = []
        self._undelivered: deque[int] = deque()
        self.tracks_delivery = False
        self.abandoned: Callable[[], bool] = lambda: False  # whether those who wait for a batch have been told to end
        self.attachments: dict[int, segments.Attachment] = {}
        self._stacks: dict[int, Stack] = {}
        self._heard: dict[int, float] = {}
        self._asked: dict[int, float] = {}
        self._overdue: dict[int, tuple[int, float]] = {}
        self._found: Item | Signal = Signal.PENDING
        self._error: BaseException | None = None
        self._closed = False
        self._last_arrival = 0.0
        self._waker = transport.Waker()
        self._resolver = Resolver(options.names, self._waker.wake)
        self._io = _IOThread(self)

    def __repr__(self) -> str:
        return f"<Client {self._session!r} {self._merge!r}>"

    # Open.

    def open(self) -> None:
        """Connect, hold slots, start the workers.

        Raises:
            ConnectError, VersionError, SlotsError, AddressError: see ``errors``
            Exception: what the user's modules or ``worker_init_fn`` raised on a worker, as the type it had there
        """
        with self._lock:
            self._session.open(time.monotonic())
        self._io.start()
        deadline = Deadline(self._options.timeout)
        with self._lock:
            self._wait(lambda: self._session.ready, deadline, self._opening)

    @property
    def num_workers(self) -> int:
        """Shards of the session; 0 before it is open."""
        return self._merge.num_workers

    def _opening(self) -> str:
        starting = [str(w) for w in self._session.workers if w.state is protocol.WorkerState.STARTING]
        silent = [a for a, link in self._session.links.items() if link.state is LinkState.GREETING]
        greeted = [*silent, *self._session.unresolved] or self._session.links
        return f"waiting for {', '.join(starting or greeted)} to be ready"

    def workers_known(self, total: int) -> None:
        """The number of shards is known: called by the I/O thread with the lock held, before any of them can send."""
        if self._merge.num_workers == total:
            return
        self._merge = Merge(total, self._in_order)
        budget = self._options.bytes_per_worker(total)
        self._meters = [protocol.CreditMeter(budget, self._options.prefetch_count) for _ in range(total)]
        self._reported = [0] * total

    def _progress(self, worker: int) -> tuple[int, int]:
        if worker >= self._merge.num_workers:
            return 0, 0
        return self._merge.received[worker], self._merge.consumed[worker]

    # Use.

    def start_epoch(self, seeds: Sequence[bytes], consumed: Sequence[int] | None = None, turn: int = 0) -> None:
        """Abandon the running epoch and begin the next, each shard with its own pickled seeds.

        Args:
            consumed: per shard, batches that were consumed before, and are not produced again
            turn: the shard whose turn it is
        """
        self._check_process()
        with self._lock:
            self._check_usable()
            now = time.monotonic()
            epoch = self._session.start_epoch(seeds, now)
            self._merge.begin_epoch(epoch, consumed, turn)
            self._reported = self._merge.consumed
            self._undelivered.clear()
            self._session.ask_for_reports(now)
            self._recorder.begin_epoch(epoch, self._merge.num_workers, now)
            self._session.begin_shards(now)
            self._last_arrival = now
            self._heard = dict.fromkeys(range(self._merge.num_workers), now)
            self.notify()
        self._waker.wake()

    @property
    def epoch(self) -> int:
        """Number of the running epoch; 0 before the first."""
        return self._session.epoch

    def next(self, epoch: int) -> Any:
        """The next batch of an epoch.

        Raises:
            StopIteration: the epoch is over, or another one has been started, or nobody wants the batch any more
            Exception: what user code raised in a worker
            WorkerLostError, WorkerTimeoutError, ClosedError: see ``errors``
        """
        self._check_process()
        with self._lock:
            self._check_open()
            item: Any = self._merge.next() if epoch == self._session.epoch else _EXHAUSTED
            if item is _PENDING:
                item = self._wait_for_item(epoch)
            if item is _EXHAUSTED:
                self._end_epoch(epoch)
                raise StopIteration
            worker, entry = item
            is_batch = type(entry) is Entry
            if is_batch and self.tracks_delivery:
                self._undelivered.append(worker)
            told = is_batch and self._meters[worker].consume(entry.nbytes) and self._give_credit(worker)
        if told:
            self._send_credit()
        if is_batch:
            return codec.decode(entry.header, entry.buffers)
        raise codec.decode_error(entry.payload, self._where(worker))

    def _end_epoch(self, epoch: int) -> None:
        if epoch == self._session.epoch and self._merge.exhausted:
            now = time.monotonic()
            self._recorder.end(now)
            self._session.ask_for_reports(now)
            self._waker.wake()

    def delivered(self) -> None:
        """With ``tracks_delivery``: a batch has come out at the end of the graph."""
        if self._undelivered:  # no new epoch has been started meanwhile
            self._undelivered.popleft()

    def position(self) -> tuple[list[int], int]:
        """Batches delivered per shard, and the shard whose turn it is."""
        with self._lock:
            consumed, undelivered = self._merge.consumed, list(self._undelivered)
            for worker in undelivered:
                consumed[worker] -= 1
            return consumed, undelivered[0] if undelivered else self._merge.turn

    def _where(self, worker: int) -> str:
        known = self._session.workers[worker]
        return f"in worker process {worker} on {known.address} (pid {known.pid})"

    def _wait_for_item(self, epoch: int) -> Any:
        def arrived() -> bool:
            self._found = self._merge.next() if self._session.epoch == epoch else Signal.EXHAUSTED
            if self._found is Signal.PENDING and self.abandoned():
                self._found = Signal.EXHAUSTED
            if self._found is Signal.PENDING:
                self._report_consumption()  # each time: the turn passes on when a shard has ended
                self._ask_the_silent()
            return self._found is not Signal.PENDING

        self._recorder.wait(self._merge.awaited, time.monotonic())
        try:
            self._wait(arrived, None, self._waiting_for_batch, self._wait_for_data)
        finally:
            self._recorder.go_on(time.monotonic())
        return self._found

    def _ask_the_silent(self) -> None:
        """Is it busy, or does what it sends not arrive?"""
        now = time.monotonic()
        for worker in self._merge.awaited:
            latest = max(self._heard.get(worker, now), self._asked.get(worker, 0.0))
            known = self._session.workers[worker]
            if now - latest > DATA_SILENCE_S and known.state is protocol.WorkerState.RUNNING:
                self._asked[worker] = now
                # It counts from the start: once more does no harm if the last one was lost.
                self._reported[worker] = self._merge.consumed[worker]
                self._session.credit(worker, self._reported[worker])
                self._session.tell(known.address, AskStack(self._options.session, worker, known.attempt))
                self._waker.wake()

    def _report_consumption(self) -> None:
        """Whoever is waited for must have room."""
        consumed = self._merge.consumed
        full = [w for w in self._merge.awaited if not self._meters[w].leaves_room(consumed[w] - self._reported[w])]
        for worker in full:
            self._give_credit(worker)  # which leaves as soon as this thread waits

    def _give_credit(self, worker: int) -> bool:
        """Let the worker know what was consumed; whether that takes a message."""
        attachment = self.attachments.get(worker)
        consumed = self._reported[worker] = self._merge.consumed[worker]
        if attachment is not None and not attachment.credit(self._session.epoch, consumed):
            return False
        # What is in memory that both share is never under way.
        self._session.credit(worker, consumed, hungry=attachment is None and not self._merge.has_waiting(worker))
        return True

    def _send_credit(self) -> None:
        """At once, without the lock, in the turn of those who wait for batches; or else by the I/O thread."""
        intake = self._io.intake
        if not intake.is_taken:
            return self._waker.wake()
        with self._lock:
            credits = self._session.take_credits()
        intake.send(credits)

    def pause(self, pause_fn: bytes) -> None:
        """Every worker stops producing, once it has finished the batch it is at; whoever feeds them comes last."""
        self._request(Pause, pause_fn, dispatching=False)
        self._request(Pause, pause_fn, dispatching=True)

    def resume(self, resume_fn: bytes) -> None:
        """Every worker goes on; whoever feeds them comes first."""
        self._request(Resume, resume_fn, dispatching=True)
        self._request(Resume, resume_fn, dispatching=False)

    def limit(self, num_batches: int | None, limit_fn: bytes) -> None:
        """Every worker applies the function to its graph."""
        self._request(Limit, limit_fn, False, num_batches)
        self._request(Limit, limit_fn, True, num_batches)

    def _request(
        self, kind: type[Pause | Resume | Limit], function: bytes, dispatching: bool, *more: int | None
    ) -> None:
        self._check_process()
        with self._lock:
            self._check_usable()
            request = self._session.request(kind, function, dispatching, time.monotonic(), *more)
            self._waker.wake()
            name = kind.__name__.lower()
            self._wait(
                lambda: not self._session.request_waits_for(request),
                None,
                lambda: f"waiting for {self._describe(sorted(self._session.request_waits_for(request)))} to {name}",
            )
            error = self._session.request_error(request)
        if error:
            raise codec.decode_error(error, f"in a worker process, in its {name} function")

    # What it is doing.

    def statistics(self) -> Statistics:
        """A snapshot; see there. Safe from any thread, also when the session is over."""
        self._check_process()
        with self._lock:
            now, session = time.monotonic(), self._session
            if not self._closed:
                session.ask_for_reports(now)
                self._waker.wake()
            places = [Place(w.worker, w.address, w.state.value) for w in session.workers]
            return self._recorder.snapshot(places, self._in_order, session.losses, session.recoveries, now)

    def lasting(self) -> Sequence[Stage]:
        """What takes long, and how far it is; safe from any thread."""
        return self._stages.lasting

    # Waiting: every wait has a deadline and a name.

    def _wait(
        self,
        done: Callable[[], bool],
        deadline: Deadline | None,
        name: Callable[[], str],
        rest: Callable[[float], object] | None = None,
    ) -> None:
        """Wait, with the lock held, until ``done()``; without a deadline, until nothing has arrived for ``timeout``.

        Args:
            rest: waits for so many seconds, or until anything has changed
        """
        rest = rest or self._changed.wait
        started = time.monotonic()
        self._last_arrival = max(self._last_arrival, started)
        warn_at = started + self._warn_after
        while not done():
            self._check_usable()
            now = time.monotonic()
            if now >= warn_at:
                warn_at = now + self._warn_after
                logger.warning("%s, for %.0f s now", self._with_stacks(name), now - started)
            if self._out_of_time(deadline, now):
                self._give_up(name)
            rest(min(POLL_S, warn_at - now))

    def _wait_for_data(self, seconds: float) -> None:
        """With the lock held, which is released meanwhile: one thread reads the data socket, others just wait."""
        intake = self._io.intake
        if self._waiter is not None:
            if self._session.has_credits:
                self._waker.wake()
            self._changed.wait(seconds)
            return
        self._waiter = threading.get_ident()
        try:
            with Deferral(intake.wake):
                credits = self._session.take_credits()
                self._changed.release()
                try:
                    intake.send(credits)
                    intake.wait(seconds)
                finally:
                    self._changed.acquire()
        finally:
            self._waiter = None
            self._changed.notify_all()  # another may read now
            if self._session.has_actions:
                self._waker.wake()

    def notify(self) -> None:
        """With the lock held: something has changed that others may wait for."""
        self._changed.notify_all()
        if self._waiter is not None and self._waiter != threading.get_ident():
            self._io.intake.wake()

    def _give_up(self, name: Callable[[], str]) -> None:
        if (loss := self._session.why_nothing_comes(time.monotonic())) is not None:
            raise WorkerLostError(loss)
        text = self._with_stacks(name)
        raise WorkerTimeoutError(f"{text}: gave up after timeout={self._options.timeout:g} s")

    def _out_of_time(self, deadline: Deadline | None, now: float) -> bool:
        if deadline is not None:
            return deadline.expired
        timeout = self._options.timeout
        return timeout is not None and now - self._last_arrival >= timeout

    def _waiting_for_batch(self) -> str:
        return f"waiting for a batch from {self._describe(self._merge.awaited)}"

    def _describe(self, workers: Sequence[int]) -> str:
        texts = []
        for worker in workers:
            known, stack = self._session.workers[worker], self._stacks.get(worker)
            doing = known.last_loss and f", which was lost ({known.last_loss})"
            if known.state is not protocol.WorkerState.VACANT:
                doing = f", {known.state.value}"
                if stack is not None:
                    doing = f", busy {stack.busy_s:.0f} s in {stack.where}" if stack.busy_s else f", at {stack.where}"
            texts.append(f"worker {worker} on {known.address}{doing}")
        return "; ".join(texts) or "the workers"

    def _with_stacks(self, name: Callable[[], str]) -> str:
        """The wait's name, once the workers concerned have said what they are doing, or have not for ``STACK_S``."""
        asked = {w.worker for w in self._session.workers if w.state is not protocol.WorkerState.VACANT and w.pid}
        self._stacks.clear()
        for worker in asked:
            known = self._session.workers[worker]
            message = AskStack(self._options.session, worker, known.attempt)
            self._session.tell(known.address, message)
        self._waker.wake()
        deadline = Deadline(STACK_S)
        while not asked <= self._stacks.keys() and not deadline.expired and self._error is None:
            self._changed.wait(deadline.remaining())
        return name()

    def _check_process(self) -> None:
        """Before the lock is taken: a fork may have copied it while it was held."""
        if self._process is not _this_process:
            raise ClosedError(
                f"this session belongs to process {self._pid}, of which this one ({os.getpid()}) is a fork; create a "
                "DataLoader2 in the process that reads it"
            )

    def _check_usable(self) -> None:
        self._check_open()
        self._raise_error()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(FINALIZED)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    # Close.

    def close(self) -> None:
        """End the workers and wait until they are gone; safe at any time, from any thread, and twice.

        The garbage collector may run it in the I/O thread, in the middle of a step: the session is closed after that.
        """
        if os.getpid() != self._pid or self._closed:
            return
        with self._lock:
            self._closed = True
            if not self._io.is_current:
                self.close_session()
            self.notify()
        self._waker.wake()
        if self._waiter != threading.get_ident():  # a signal's handler may close it in the middle of a wait
            self._io.join(CLOSE_S + 1.0)

    def close_session(self) -> None:
        """Tell the daemons, with the lock held, if that is due and has not been done."""
        if self._closed and not self._session.closed:
            self._recorder.end(time.monotonic())
            self._session.close(time.monotonic())

    # For whoever reads the data socket.

    def accepts(self, header: Any) -> bool:
        """Whether a data message is wanted."""
        with self._lock:
            if header.session != self._options.session:
                return False
            return isinstance(header, Opened) or self._merge.accepts(header)

    def take_in(self, arrival: Arrival) -> None:
        """A data message has been read."""
        with self._lock:
            self._arrive(arrival, time.monotonic())

    def _arrive(self, arrival: Arrival, now: float) -> None:
        header = arrival.header
        if self.failed:
            return  # what has arrived is still handed out, and then the error is raised
        if header is None or arrival.error is not None:
            logger.warning("! a data message was dropped: %s", arrival.error)
            if header is not None:
                self._session.break_off(header.worker, header.attempt, str(arrival.error), now)
        elif isinstance(header, Opened):
            if self._session.is_starting(header.worker, header.attempt):
                self._merge.restart(header.worker, header.attempt)
                self._session.data_opened(header.worker, now)
                self.heard(header.worker)
        elif self._merge.accepts(header):  # the next epoch may have been started while it was received
            self._add(header, arrival, now)
            self.arrived(header.worker)

    def _add(self, header: Data, arrival: Arrival, now: float) -> None:
        if isinstance(header, ShardError):
            self._merge.fail(header.worker, arrival.body)
            self._session.shard_ended(header.worker, now)
        elif isinstance(header, EndOfShard):
            self._merge.end(header.worker)
            self._session.shard_ended(header.worker, now)
        elif arrival.entries:
            self._merge.add(header.worker, arrival.entries)
            nbytes = sum([entry.nbytes for entry in arrival.entries])
            self._recorder.arrive(header.worker, len(arrival.entries), nbytes)

    # For the I/O thread and whoever reads, with the lock held.

    @property
    def lock(self) -> AbstractContextManager[bool]:
        return self._lock

    @property
    def session(self) -> ClientSession:
        return self._session

    @property
    def merge(self) -> Merge:
        return self._merge

    @property
    def waker(self) -> transport.Waker:
        return self._waker

    @property
    def resolver(self) -> Resolver:
        return self._resolver

    def fail(self, error: BaseException) -> None:
        """The session cannot go on: whoever waits, or comes next, is told."""
        if self._error is None and not self._closed:
            logger.debug("! %s", error)
            self._error = error
        self.notify()

    @property
    def connect_timeout(self) -> float:
        return self._options.connect_timeout

    @property
    def failed(self) -> bool:
        return self._error is not None

    def heard(self, worker: int) -> None:
        """A worker is there."""
        self._heard[worker] = time.monotonic()
        self._overdue.pop(worker, None)
        self.notify()

    def arrived(self, worker: int) -> None:
        """A batch came from a worker, or the end of its shard."""
        self._last_arrival = time.monotonic()
        self.heard(worker)

    def stack(self, stack: Stack) -> None:
        """A worker said what it is doing, and how far it is."""
        self._stacks[stack.worker] = stack
        self.notify()
        if self._session.is_running(stack.worker, stack.attempt, stack.epoch):
            self._compare(stack)

    def reported(self, reply: HeartbeatReply) -> None:
        """A daemon told what its workers do."""
        workers = self._session.workers
        current = [r for r in reply.reports if r.worker < len(workers) and workers[r.worker].attempt == r.attempt]
        self._recorder.report(current, time.monotonic())

    def look_at_stages(self, now: float) -> list[str]:
        """What takes long; returns lines for the log."""
        stages = [] if self._closed else self._session.stages(self._recorder.replayed)
        if any(stage.name == "replaying" for stage in stages):
            self._session.ask_for_reports(now)
        return self._stages.look(stages, now)

    def _compare(self, stack: Stack) -> None:
        """What a worker has sent with what has arrived."""
        now = time.monotonic()
        received = self._merge.received[stack.worker] + (stack.worker not in self._merge.unfinished)
        if stack.produced <= received:
            self._overdue.pop(stack.worker, None)
            return
        noted, since = self._overdue.setdefault(stack.worker, (received, now))
        if noted == received and now - max(since, self._heard.get(stack.worker, now)) > DATA_SILENCE_S:
            reason = (
                f"is cut off: {stack.produced - received} of its messages have not arrived for {now - since:.0f} s, "
                "though its daemon answers"
            )
            self._session.break_off(stack.worker, stack.attempt, reason, now)


class _IOThread:
    """Owns the control sockets of a client, and opens and closes all of them."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._context = transport.Context(1 if client.keys is None else DECRYPTING_THREADS)
        options = client.session.options
        who = (options.session, options.secret)
        self.intake = Intake(self._context, *who, client.accepts, client.take_in, client.waker.wake, client.allocate)
        self._poller = transport.Poller()
        self._dealers: dict[str, transport.Dealer] = {}
        self._keys_trouble: dict[str, str] = {}
        self._watches_data = False
        self._tick_at = self._look_at = 0.0
        self._beginning = threading.RLock()  # the garbage collector may close the client in any place
        self._has_begun = self._is_over = False
        self._thread = threading.Thread(target=self._run, name="rpc-reading-client", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether it is the thread that asks."""
        return self._thread is threading.current_thread()

    def join(self, seconds: float) -> None:
        """Wait until the sockets are closed; a thread that has not begun to open them never will."""
        with self._beginning:
            self._is_over = not self._has_begun
        if self._is_over:
            self._close()
        elif not self.is_current:
            self._thread.join(seconds)

    def _begin(self) -> bool:
        """Whether the sockets are still wanted: Ctrl-C may come before the thread that was started runs."""
        with self._beginning:
            self._has_begun = not self._is_over
            return self._has_begun

    def _run(self) -> None:
        if not self._begin():
            return
        try:
            self._poller.watch(self._client.waker.raw)
            for address in self._client.session.links:
                self._connect(address)
            while not self._done():
                self._step()
        except Exception as error:  # anything else would leave the training loop waiting for ever
            if not isinstance(error, RPCReadingError):
                logger.exception("! the client's I/O thread failed")
            with self._client.lock:
                self._client.fail(error)
        finally:
            self._close()

    def _close(self) -> None:
        """The sockets, and then what wakes the thread that polls them; that may have been the one to ask for it."""
        self.intake.close()
        self._context.close()
        self._client.waker.close()

    def _done(self) -> bool:
        with self._client.lock:
            session = self._client.session
            if not session.closed:
                return False
            return session.over or time.monotonic() > session.closed_at + CLOSE_S

    def _step(self) -> None:
        now, news = time.monotonic(), []
        self.intake.tend(now)
        with self._client.lock:
            self._client.close_session()
            news_of_names = self._client.resolver.take()
            if news_of_names is not None:
                addresses, unresolved = news_of_names
                self._client.session.resolved(addresses, now, unresolved)
            if now >= self._tick_at:  # and not for every message
                self._client.session.tick(now)
                self._tick_at = now + LEAST_TICK_S
            if now >= self._look_at:
                news = self._client.look_at_stages(now)
                self._look_at = now + TICK_S
            actions = self._client.session.take_actions()
        for line in news:
            logger.info("%s", line)
        for action in actions:
            self._act(action)
        ready = self._poller.wait(self._read())
        self._client.waker.clear()
        for dealer in list(self._dealers.values()):
            if dealer.raw in ready or dealer.raw_monitor in ready:
                self._receive_control(dealer)

    def _read(self) -> float:
        """Read the data socket, if it is this thread's turn; returns how long nothing is to be done, in seconds."""
        mine = not self.intake.is_taken
        if mine != self._watches_data:
            self._watches_data = mine
            if mine:
                self._poller.watch(self.intake.raw)
            else:
                self._poller.forget(self.intake.raw)
        if not mine:
            return TURN_S
        self.intake.read()
        return 0.0 if self.intake.behind or self._client.session.has_actions else TICK_S

    # Actions.

    def _act(self, action: Action) -> None:
        match action:
            case Send():
                frames: list[transport.Frame] = [messages.encode(action.message)]
                if action.payload is not None:
                    frames.append(action.payload)
                dealer = self._dealers.get(action.address)
                if dealer is not None and not dealer.send(frames):
                    self._reconnect(action.address)
            case ConnectData():
                self._connect_data(action)
            case SendData():
                self.intake.send([action])
            case DisconnectData():
                self._disconnect(action.worker, action.attempt)
            case Reconnect():
                self._reconnect(action.address)
            case Leave():
                self._forget(action.address)
            case Resolve():
                self._client.resolver.ask()
            case FailToConnect():
                if not self._client.failed:
                    self._fail_to_connect(action)
            case _:
                with self._client.lock:
                    self._conclude(action)

    def _connect_data(self, action: ConnectData) -> None:
        wanted = self._client.session.options.transport
        offer = None if wanted == "tcp" else action.offer
        attachment = segments.attach(action.pid, offer) if offer is not None else None
        if attachment is not None:
            with self._client.lock:
                self._client.attachments[action.worker] = attachment
        elif wanted == "shm":
            with self._client.lock:
                return self._client.fail(ConnectError(no_shared_memory(action)))
        logger.debug("= worker %d sends by %s", action.worker, "shared memory" if attachment else "TCP")
        try:
            self.intake.connect(action, attachment)
        except AddressError as error:  # its name does not resolve any more
            with self._client.lock:
                self._client.session.break_off(action.worker, action.attempt, str(error), time.monotonic())

    def _conclude(self, action: Action) -> None:
        match action:
            case Drop() if action.epoch != self._client.merge.epoch:
                pass  # the next epoch was started meanwhile
            case Drop():
                self._client.merge.end(action.worker)
                logger.warning("going on without the rest of shard %d: %s", action.worker, action.reason)
                self._client.arrived(action.worker)
            case Fail():
                self._client.fail(action.error)
            case FailRemotely():
                self._client.fail(remote_error(action))

    def _fail_to_connect(self, action: FailToConnect) -> None:
        troubles = {address: self._keys_trouble.get(address) for address in action.addresses}
        reasons = [f"{address}: {trouble or transport.diagnose(address)}" for address, trouble in troubles.items()]
        seconds = f"connect_timeout={self._client.connect_timeout:g} s"
        if not reasons:
            error: RPCReadingError = AddressError("; ".join(action.unresolved))
        elif all(troubles.values()) and not action.unresolved:
            error = KeysError(f"no session with {'; '.join(reasons)}")
        else:
            error = ConnectError(f"no answer within {seconds} from {'; '.join([*reasons, *action.unresolved])}")
        with self._client.lock:
            self._client.fail(error)

    def _connect(self, address: str) -> None:
        dealer = self._dealers[address] = self._context.dealer(address, self._client.keys)
        self._poller.watch(dealer.raw)
        self._poller.watch(dealer.raw_monitor)

    def _reconnect(self, address: str) -> None:
        self._forget(address)
        try:
            self._connect(address)
        except AddressError as error:  # its name may resolve again later; the session tries
            with self._client.lock:
                self._client.session.links[address].trouble = str(error)

    def _forget(self, address: str) -> None:
        dealer = self._dealers.pop(address, None)
        if dealer is None:
            return
        self._poller.forget(dealer.raw)
        self._poller.forget(dealer.raw_monitor)
        dealer.close()

    def _disconnect(self, worker: int, attempt: int) -> None:
        self.intake.disconnect(worker, attempt)
        with self._client.lock:
            self._client.attachments.pop(worker, None)

    # Control messages.

    def _receive_control(self, dealer: transport.Dealer) -> None:
        now = time.monotonic()
        for frames in dealer.receive_all():
            try:
                message = messages.decode(frames[0], FromDaemon)
            except msgspec.DecodeError as error:
                logger.warning("! %s sent something that is no message of ours: %s", dealer.address, error)
                continue
            logger.debug("< %s", message)
            self._keys_trouble.pop(dealer.address, None)
            with self._client.lock:
                self._client.session.receive(dealer.address, message, frames[1] if len(frames) > 1 else None, now)
                if isinstance(message, Stack):
                    self._client.stack(message)
                elif isinstance(message, HeartbeatReply):
                    self._client.reported(message)
                if self._client.session.num_shards:
                    self._client.workers_known(self._client.session.num_shards)
                self._client.notify()
        dropped, failure = dealer.events()
        trouble = self._keys_trouble_of(dealer, failure) if failure is not None else None
        with self._client.lock:
            if dropped:
                self._client.session.link_dropped(dealer.address, now)
            if trouble:
                self._client.session.link_rejected(dealer.address)

    def _keys_trouble_of(self, dealer: transport.Dealer, failure: transport.Failure) -> str | None:
        """Whether keys are why no connection comes about; whichever end notices first breaks it off for the other."""
        if failure is transport.Failure.BROKEN:
            failure = dealer.look_closer()
        trouble = transport.keys_trouble(failure, self._client.keys)
        if trouble:
            self._keys_trouble[dealer.address] = trouble
        return trouble


def no_shared_memory(action: ConnectData) -> str:
    """Why a worker cannot serve a client that insists on shared memory."""
    return (
        f"worker {action.worker} on {action.address} and this process do not see the same shared memory, on which "
        "transport='shm' insists: that takes one host, one user and, for containers, one PID namespace; use 'auto' or "
        "'tcp'"
    )


def remote_error(action: FailRemotely) -> BaseException:
    """The exception that user code raised while a worker was set up; a missing module comes with the remedy."""
    error = codec.decode_error(action.payload, action.where)
    if not action.missing:
        return error
    top = action.missing.partition(".")[0]
    text = (
        f"{action.address} has no module {action.missing!r}, which the graph needs: install it there, start "
        f"rpc-reading-worker with it on PYTHONPATH, or send it along with pickle_by_value=({top!r},)"
    )
    missing = ModuleNotFoundError(text, name=action.missing)
    missing.__cause__ = error if isinstance(error, Exception) else WorkerError(str(error))
    return missing
