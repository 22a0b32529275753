"""One worker process: it runs one shard of one session's graph.

Two threads:

    main thread    the graph: takes commands and room in the window from the mailbox, encodes batches and sends them
    I/O thread     the channel to the daemon: commands in, answers out; credit in, and what could not be sent yet out

User code may sleep or compute for as long as it likes: what it has produced is sent, and where it is can be asked.
To wake another thread for each batch would take longer than to send it, so the main thread sends its own; the I/O
thread does what is left: while the client is not there, and when the graph takes its time after batches that were
gathered. For these are, if they follow on one another within ``GATHER_S``, and travel together; of a slower graph each
leaves at once. If the daemon dies, so does the worker.
"""

import ctypes
import functools
import logging
import mmap
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

import msgspec
import torch
from msgspec.structs import replace

from rpc_reading_service import (
    buffers,
    codec,
    graph,
    inplace,
    lanes,
    messages,
    ownership,
    protocol,
    segments,
    transport,
)
from rpc_reading_service.dispatch import IDLE_S, DispatchMailbox, Feed, FeedBroken, FeedOutlet
from rpc_reading_service.messages import (
    CHUNK_BYTES,
    AskStack,
    Batches,
    ConnectFeed,
    Credit,
    Data,
    Done,
    EndOfShard,
    FromWorker,
    Limit,
    Pause,
    Phase,
    Resume,
    ShardError,
    Stack,
    StartEpoch,
    StartWorker,
    StopWorker,
    ToWorker,
    ToWorkerData,
    WorkerFailed,
    WorkerReady,
)
from rpc_reading_service.security import Pair
from rpc_reading_service.stream import Packed, Packer, Parcel

logger = logging.getLogger(__name__)

EXIT_FAILED = 70
"""The graph could not be built; WorkerFailed has said why."""

EXIT_ORPHANED = 71
"""The daemon is gone."""

SEGMENTS_PER_WINDOW = 2
"""Shared memory of a worker, in its shares of ``prefetch_bytes``: what is in flight, and what the user keeps."""

GATHER_S = 0.001
"""Batches that follow on one another so quickly wait for the next ones."""

GATHERED_S = 0.002
"""For so long at most, as long as they follow on one another."""

LOOK_S = 0.005
"""After the last of them the I/O thread sees to it: it looks so often, which takes the caches from the graph."""

GATHER_BYTES = 3 * CHUNK_BYTES
"""So many together wait no longer: what they count for in the window, of which this is a good third."""

SETTLED_S = 0.01
"""The graph has not been quick for so long: nothing is gathered, so that the I/O thread need not look."""

_GRAPH, _REPLAY, _ENCODING = Phase.GRAPH, Phase.REPLAY, Phase.ENCODING
"""For each batch: to look a member up in its class takes 0.3 us, twice what is noted with it."""

_PR_SET_PDEATHSIG = 1
"""From Linux's sys/prctl.h."""


class Mailbox:
    """Where the two threads meet: commands one way, parcels the other, and the window between them.

    ``gathers`` says that parcels may wait here for others, and that the I/O thread has to look for them by itself.

    Args:
        window: whether one more batch may be produced
        waker: wakes the I/O thread
        board: where the client may note what was consumed, and this worker that it waits for that
        drop: told of each parcel that will not be sent, since the next epoch has begun
        logbook: where it is noted for what the main thread waits, and how long
    """

    def __init__(
        self,
        window: protocol.Window,
        waker: transport.Waker,
        board: segments.Board,
        drop: Callable[[Parcel], None],
        logbook: buffers.Logbook,
    ) -> None:
        self._window = window
        self._waker = waker
        self._board = board
        self._drop = drop
        self._logbook = logbook
        self._awaited = Phase.CREDIT
        self._credit: Credit | None = None
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._commands: deque[tuple[Any, bytes | None]] = deque()
        self._parcels: list[Parcel] = []
        self._gathered = 0
        self._put_at = self._gathers_since = 0.0
        self.gathers = False
        self._epoch = 0

    # For the main thread.

    def take(self, producing: bool, replaying: bool) -> tuple[Any, bytes | None] | None:
        """The next command; None if there is none and producing may go on. Waits for one or the other.

        A replay is not bounded by the window: what it suppresses is not in flight.
        """
        with self._lock:
            while not self._commands:
                if producing and (replaying or self._has_room()):
                    return None
                self._rest(producing)
            return self._commands.popleft()

    def _rest(self, producing: bool) -> None:
        """Wait for something to happen; whether for the training or for the wire, the credit tells that ends it."""
        self._logbook.wait(self._awaited if producing else Phase.IDLE, time.monotonic())
        self._changed.wait()
        if producing:
            self._logbook.rename(self._awaited)
            self._put_at = time.monotonic()  # it is the graph that is quick or slow

    def _has_room(self) -> bool:
        if not self._window.is_open and not self._look_for_room():
            self._board.starving = True  # and once more: the client may have looked before it was said
            if not self._look_for_room():
                return False
        if self._board.starving:
            self._board.starving = False
        return True

    def _look_for_room(self) -> bool:
        self._window.credit(self._board.consumed(self._epoch))
        return self._window.is_open

    def put(self, parcel: Parcel) -> bool:
        """Leave a parcel that is to be sent; whether it is time for that."""
        with self._lock:
            if parcel.epoch != self._epoch:
                self._drop(parcel)  # the next epoch's command came meanwhile
                return False
            self._parcels.append(parcel)
            if parcel.kind is not Batches:
                return True
            nbytes = protocol.weight(parcel.sizes)
            self._window.produce(nbytes)
            self._gathered += nbytes
            now = time.monotonic()
            if len(self._parcels) == 1:
                self._gathers_since = now
            is_enough = self._gathered >= GATHER_BYTES or now - self._gathers_since >= GATHERED_S
            return not self._is_quick(now) or is_enough or not self._window.is_open

    def _is_quick(self, now: float) -> bool:
        """Whether the next batch may be expected at once."""
        quick = now - self._put_at < GATHER_S
        self._put_at = now
        if quick and not self.gathers:
            self.gathers = True
            self._waker.wake()
        return quick

    # For both.

    def collect(self) -> list[Parcel]:
        """Everything that waits to be sent."""
        with self._lock:
            parcels, self._parcels = self._parcels, []
            self._gathered = 0
            if not parcels and time.monotonic() - self._put_at > SETTLED_S:
                self.gathers = False
        return parcels

    # For whoever hears it, mostly the I/O thread.

    def command(self, message: Any, payload: bytes | None) -> None:
        """A command for the main thread; the window follows at once."""
        with self._lock:
            match message:
                case Credit():
                    self._credit = message
                    self._take_credit()
                case StartEpoch():
                    self._epoch = message.epoch
                    for parcel in self._parcels:
                        self._drop(parcel)
                    self._parcels.clear()
                    self._gathered = 0
                    self._window.begin(message.skip, message.credit)
                    self._take_credit()  # it comes by another way, and may have overtaken this
                    self._commands.append((message, payload))
                case _:
                    self._commands.append((message, payload))
            self._changed.notify()

    def _take_credit(self) -> None:
        if self._credit is not None and self._credit.epoch == self._epoch:
            self._window.credit(self._credit.consumed)
            self._awaited = Phase.WIRE if self._credit.hungry else Phase.CREDIT


class Runner:
    """The main thread's work: the worker's side of the state machine.

    Args:
        shard: what to run
        mailbox: where commands come from and parcels go
        send: sees to it that what waits in the mailbox is sent
        reply: sends a control message back to the client
        start: which worker this is
        feed: from the dispatching worker, if there is one
        logbook: where the daemon can read what this worker has done, and was at when it died
        memory: shared with the client; None if there is none to share
        limit: bytes of memory that the worker may use; None if there is no limit
        sends_from_place: whether what need not be copied is sent from where it is
    """

    def __init__(
        self,
        shard: graph.Shard,
        mailbox: Any,
        send: Callable[[], object],
        reply: "Reply",
        start: StartWorker,
        feed: Feed,
        logbook: buffers.Logbook,
        memory: segments.Segments | None,
        limit: int | None = None,
        sends_from_place: bool = False,
    ) -> None:
        self._limit = limit
        self._sends_from_place = sends_from_place
        self._asks_who_holds = False
        """Whether it matters, in this epoch: what is put into shared memory is copied in any case."""
        self._last_nbytes = 0
        self.state = protocol.WorkerState.STARTING
        self.busy_since: float | None = None
        self._shard = shard
        self._mailbox = mailbox
        self._send = send
        self._reply = reply
        self._start = start
        self._feed = feed
        self._logbook = logbook
        self._memory = memory
        self._encoder = codec.Encoder()
        self._iterator: Iterator[Any] | None = None
        self._epoch = 0
        self._seq = 0
        self._skip = 0
        self._ended = False
        self._change(protocol.WorkerEvent.READY)

    def _change(self, event: protocol.WorkerEvent) -> None:
        self.state = protocol.advance(self.state, event)
        logger.debug("= worker %d is %s", self._start.worker, self.state.value)

    @property
    def position(self) -> tuple[int, int]:
        """Epoch, and batches of it produced, one more at the end of the shard; read by the I/O thread."""
        return self._epoch, self._seq + self._ended

    def run(self) -> None:
        """Serve until told to stop."""
        while True:
            producing = self.state is protocol.WorkerState.RUNNING
            command = self._mailbox.take(producing, replaying=self._skip > 0)
            if command is None:
                self._produce()
            elif isinstance(command[0], StopWorker):
                return
            else:
                self._obey(*command)

    def _obey(self, message: Any, payload: bytes | None) -> None:
        logger.debug("< %s", message)
        match message:
            case StartEpoch():
                self._begin(message, payload or b"")
            case Pause():
                self._change(protocol.WorkerEvent.PAUSE)
                self._answer(message, self._shard.pause, payload)
            case Resume():
                self._answer(message, self._shard.resume, payload)
                self._change(protocol.WorkerEvent.RESUME)
            case Limit():
                self._answer(message, self._shard.limit, message.num_batches, payload)

    def _answer(self, message: Pause | Resume | Limit, act: Any, *args: Any) -> None:
        error: bytes | None = None
        try:
            act(*args)
        except BaseException as caught:  # user code may raise anything; the client is told
            error = codec.encode_error(caught)
        self._reply(Done(message.session, message.worker, message.attempt, message.request), error)

    # An epoch.

    def _begin(self, message: StartEpoch, seeds: bytes) -> None:
        self._change(protocol.WorkerEvent.BEGIN)
        self._epoch, self._seq, self._skip = message.epoch, message.skip, message.skip
        self._ended = False
        self._asks_who_holds = self._sends_from_place and self._memory is not None and not self._memory.accepted
        self._logbook.ask(_GRAPH, time.monotonic())
        # The old iterator ends first: a thread of its own would go on drawing from the generators seeded next.
        self._iterator = None
        self._feed.read(message.epoch)
        try:
            self._iterator = self._shard.begin(seeds)
        except BaseException as error:  # as above
            self._fail(error)

    def _produce(self) -> None:
        """One step of the graph: a batch, its end, or its exception."""
        assert self._iterator is not None
        self.busy_since = now = time.monotonic()
        if self._skip:
            self._logbook.ask(_REPLAY, now)
        else:
            self._logbook.ask(_GRAPH, now, self._seq)
        try:
            holder = [next(self._iterator)]
        except StopIteration:
            self._finish(EndOfShard)
        except BaseException as error:  # user code may raise anything; the client is told, in order
            self._fail(error)
        else:
            self._deliver(holder)
        finally:
            self.busy_since = None
            self._logbook.idle()

    def _deliver(self, holder: list[Any]) -> None:
        """Encode the batch, and let go of it: whether anybody else holds it decides whether it must be copied."""
        if self._skip:
            self._skip -= 1
            self._logbook.replayed()
            return
        self._logbook.enter(_ENCODING, time.monotonic())
        # To ask takes 3 us: not after small ones.
        asks = self._asks_who_holds and self._last_nbytes >= ownership.SOLE_BYTES
        sole = ownership.sole(holder) if asks else ()
        try:
            encoded = self._encoder.encode(holder.pop())
        except BaseException as error:  # a batch's own reducers may raise anything, too
            return self._fail(error)
        try:
            # They are let go of when they are placed.
            copies = self._copies(encoded, sole) if encoded.buffers else ()
            parcel = Parcel(self._epoch, self._seq, Batches, encoded.header, copies)
            self._put(parcel)
        except (BufferError, MemoryError) as error:
            return self._fail(error)
        self._seq += 1
        self._last_nbytes = sum(parcel.sizes)
        self._logbook.produced(self._last_nbytes)

    def _copies(self, encoded: codec.Encoded, sole: Container[int]) -> Sequence[Any]:
        """User code can reach the batch's memory as soon as it goes on."""
        if self._memory is None:
            return [transport.Copied(buffer) for buffer in encoded.buffers]
        return self._memory.place(encoded.buffers, len(encoded.header) <= CHUNK_BYTES, sole)

    def _put(self, parcel: Parcel) -> None:
        if self._mailbox.put(parcel) or (parcel.buffers and parcel.is_borrowed):
            self._send()

    def _fail(self, error: BaseException) -> None:
        if self._limit is not None and is_out_of_memory(error):
            limit = f"the {self._limit:,} bytes that rpc-reading-worker --worker-memory gives each worker are used up"
            limited = MemoryError(f"{limit} ({type(error).__name__}: {error})")
            error = limited.with_traceback(error.__traceback__)
        self._finish(ShardError, codec.encode_error(error))

    def _finish(self, kind: type[Data], body: bytes = b"") -> None:
        self._change(protocol.WorkerEvent.END)
        self._put(Parcel(self._epoch, self._seq, kind, body))
        self._feed.finish(self._epoch)
        self._iterator = None
        self._ended = True


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed; torch has no type of its own for it."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


class DispatchRunner(Runner):
    """The dispatching worker's main thread: deals its elements out to the other workers."""

    def _put(self, parcel: Parcel) -> None:
        workers = self._start.num_workers
        turn = parcel.seq % workers
        if parcel.kind is not EndOfShard:
            self._mailbox.put(turn, _for_worker(parcel, turn, workers))
        if parcel.kind is not Batches:
            for worker in range(workers):
                if parcel.kind is EndOfShard or worker != turn:
                    self._mailbox.put(worker, _for_worker(replace(parcel, kind=EndOfShard), worker, workers))


def _for_worker(parcel: Parcel, worker: int, workers: int) -> Parcel:
    """The parcel, numbered within the stream of the worker that it is dealt to."""
    return replace(parcel, seq=(parcel.seq - worker + workers - 1) // workers)


class Reply:
    """Sends control messages to the client by way of the daemon; safe from both threads."""

    def __init__(self, channel: transport.Channel) -> None:
        self._channel = channel
        self._lock = threading.Lock()

    def __call__(self, message: FromWorker, payload: bytes | None = None) -> None:
        logger.debug("> %s", message)
        frames = [messages.encode(message)]
        with self._lock:
            self._channel.send_whole(frames if payload is None else [*frames, payload])


class Outlet(Protocol):
    """Where parcels go; this is what the I/O thread does with it."""

    raw: list[Any]
    """What to poll."""

    def pump(self) -> bool:
        """Move what can be moved; whether anything was."""

    def hear(self) -> None:
        """What is polled has news."""

    def abandon(self) -> None:
        """A new epoch: drop what waits."""

    @property
    def patience(self) -> float:
        """Seconds after which the I/O thread has to ``pump`` if nothing happens."""


class ClientOutlet:
    """The way to the client: a socket which has nobody to send to before the client is there, or there again.

    Either thread may ``pump``. Whatever is done with a socket of ZeroMQ's may take the news from the descriptor that
    the I/O thread polls: so whoever does something reads what has come. A ``Listener`` goes on telling, and is only
    read by the I/O thread.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        push: transport.Push | lanes.Listener,
        packer: Packer,
        drop: Callable[[Parcel], None],
    ) -> None:
        self._mailbox = mailbox
        self._push = push
        self._packer = packer
        self._drop = drop
        opened = packer.opened()
        self._outgoing: deque[Packed] = deque([opened])
        self._opened = False
        self._connections = 0
        self._last: Packed | tuple[int, int] = opened
        """What the client needs again after a connection that broke, to know whether anything is missing: the last
        message; or, if it was of batches, their epoch, and the number of the next one."""
        self._lock = threading.Lock()
        self.raw: list[Any] = [push.raw]

    def pump(self) -> bool:
        with self._lock:
            parcels = self._mailbox.collect()
            self._outgoing.extend(self._packer.pack(parcels))
            sent = self._send()
            if self._push.tells_once:
                self._hear()
                while self._send():  # the client is there now
                    self._hear()
        return bool(parcels) or sent

    def hear(self) -> None:
        with self._lock:
            self._hear()

    @property
    def patience(self) -> float:
        return LOOK_S if self._mailbox.gathers else IDLE_S

    def _hear(self) -> None:
        for frame in self._push.receive_all():
            try:
                self._mailbox.command(messages.decode(frame, ToWorkerData), None)
            except msgspec.DecodeError as error:
                logger.error("! what the client sent cannot be read: %s", error)
        if self._push.connections > self._connections:
            self._connections = self._push.connections
            if self._opened:
                last = self._last
                self._outgoing.appendleft(self._packer.nothing_before(*last) if isinstance(last, tuple) else last)

    def _send(self) -> bool:
        """Whether anything was sent."""
        sent = False
        while self._outgoing:
            packed = self._outgoing.popleft()  # if it cannot be copied, its memory is going to change
            if not self._push.send(packed.frames):
                self._outgoing.appendleft(packed)
                break
            self._opened = sent = True
            self._note(packed)
        if self._outgoing:
            self._keep()
        return sent

    def _note(self, packed: Packed) -> None:
        if not packed.parcels:
            return
        last = packed.parcels[-1]
        self._last = (last.epoch, last.seq + 1) if last.kind is Batches else packed

    def _keep(self) -> None:
        """What nobody is there to take waits, out of reach of user code."""
        for packed in list(self._outgoing):
            try:
                packed.frames[:] = map(buffers.keep, packed.frames)
            except MemoryError:
                self._outgoing.remove(packed)
                for parcel in packed.parcels:
                    self._drop(parcel)
                raise

    def abandon(self) -> None:
        with self._lock:
            first = 0 if self._opened else 1
            while len(self._outgoing) > first:
                for parcel in self._outgoing.pop().parcels:
                    self._drop(parcel)


class IOThread:
    """Moves commands in and parcels out.

    Args:
        channel: to the daemon
        outlet: to whoever takes the parcels
        feed: from the dispatching worker, if there is one
        gate: lets in those who belong to the session, where ZeroMQ's sockets are connected to
    """

    def __init__(
        self, channel: transport.Channel, waker: transport.Waker, reply: Reply, command: Any, outlet: Any, feed: Feed,
        context: transport.Context, gate: transport.Gate | None,
    ) -> None:  # fmt: skip
        self.runner: Runner | None = None
        self._channel = channel
        self._waker = waker
        self._reply = reply
        self._command = command
        self._outlet = outlet
        self._feed = feed
        self._context = context
        self._gate = gate
        self._credit: Credit | None = None
        self._poller = transport.Poller()
        self._main_thread = threading.main_thread().ident

    def run(self) -> None:
        """Until the daemon is gone, and then end the process, whatever the main thread is doing."""
        gate = [] if self._gate is None else [self._gate.raw]
        for raw in (self._channel.raw, self._waker.raw, *gate, *self._outlet.raw):
            self._poller.watch(raw)
        try:
            while True:
                self._step()
        except EOFError:
            os._exit(EXIT_ORPHANED)
        except FeedBroken as error:
            logger.error("! %s", error)
            os._exit(protocol.EXIT_CUT_OFF)
        except BaseException:
            logger.critical("the I/O thread failed", exc_info=True)
            os._exit(EXIT_ORPHANED)

    def _step(self) -> None:
        moved = self._outlet.pump()
        self._credit = self._feed.step(self._credit, time.monotonic())
        ready = self._poller.wait(0.0 if moved else self._feed.patience(self._outlet.patience, time.monotonic()))
        if not ready or not ready.isdisjoint(self._outlet.raw):  # now and then, too: who is silent has to leave
            self._outlet.hear()
        if self._waker.raw.fileno() in ready:
            self._waker.clear()
        if self._gate is not None and self._gate.raw in ready:
            self._gate.answer()
        if self._channel.raw in ready:
            for frames in self._channel.receive_all():
                self._receive(frames)

    def _receive(self, frames: list[bytes]) -> None:
        try:
            message = messages.decode(frames[0], ToWorker)
        except msgspec.DecodeError as error:
            logger.error("! a command cannot be read: %s", error)
            return
        match message:
            case AskStack():
                self._reply(self._stack(message))
            case ConnectFeed():
                for raw in self._feed.connect(self._context, message.address, message.port):
                    self._poller.watch(raw)
            case _:
                if isinstance(message, StartEpoch):
                    self._outlet.abandon()
                    self._feed.begin_epoch(message.epoch)
                self._command(message, frames[1] if len(frames) > 1 else None)

    # What the main thread is doing.

    def _stack(self, message: AskStack) -> Stack:
        runner = self.runner
        since = runner.busy_since if runner else None
        busy = 0.0 if since is None else time.monotonic() - since
        epoch, produced = runner.position if runner else (0, 0)
        return Stack(message.session, message.worker, message.attempt, epoch, produced, busy, self._where())

    def _where(self) -> str:
        frame = sys._current_frames().get(self._main_thread or 0)
        if frame is None:
            return "no main thread"
        ours = os.path.dirname(__file__)
        entries = [entry for entry in traceback.extract_stack(frame) if not entry.filename.startswith(ours)]
        user = [
            entry for entry in entries if "site-packages" not in entry.filename and "/lib/python" not in entry.filename
        ]
        entry = (user or entries)[-1]
        return f"{entry.name}, {os.path.basename(entry.filename)}:{entry.lineno}"


# The process.


def main(
    connection: "Connection[Any, Any]",
    unpickle: Callable[[], graph.Parts],
    logbook_fd: int,
    start: StartWorker,
    host: str,
    ports: Sequence[int],
    secret: bytes,
    limit: int | None,
) -> None:
    """Entry point of the process.

    Args:
        connection: to the daemon
        unpickle: gives the graph
        logbook_fd: what this worker is at, for the daemon
        start: which worker this is
        host, ports: where its data port may be bound
        secret: of the session, with keys
        limit: bytes of memory that it may use
    """
    become_worker()
    threading.current_thread().name = f"worker-{start.worker}"
    if limit is not None:
        limit_memory(limit)
    channel = transport.Channel(connection)
    reply = Reply(channel)
    try:
        logbook = buffers.Logbook(logbook_fd)
        logbook.open(time.monotonic())
        runner = _build(channel, reply, unpickle, logbook, start, host, ports, secret, limit)
    except BaseException as error:  # user code may raise anything; the client is told
        failed = WorkerFailed(start.session, start.worker, start.attempt, graph.missing_module(error))
        reply(failed, codec.encode_error(error))
        os._exit(EXIT_FAILED)
    runner.run()


def _build(
    channel: transport.Channel,
    reply: Reply,
    unpickle: Callable[[], graph.Parts],
    logbook: buffers.Logbook,
    start: StartWorker,
    host: str,
    ports: Sequence[int],
    secret: bytes,
    limit: int | None,
) -> Runner:
    context = transport.Context()
    waker = transport.Waker()
    pair = Pair.from_raw(secret) if secret else None
    gate = context.session_gate(start.session, pair) if start.is_dispatching or pair else None
    feed = Feed(start, waker, pair)
    mailbox: Mailbox | DispatchMailbox
    outlet: Outlet
    memory: segments.Segments | None = None
    if start.is_dispatching:
        mailbox, router = DispatchMailbox(start, waker, logbook), context.feed_router(start.session, pair, host, ports)
        outlet, port = FeedOutlet(mailbox, router, start.session), router.port
        send: Callable[[], object] = waker.wake  # the I/O thread alone uses this socket
    else:
        window = protocol.Window(start.prefetch_count, start.prefetch_bytes)
        who = start.session, start.worker, start.attempt
        push: transport.Push | lanes.Listener
        packer: Packer
        copy: Callable[[memoryview], Any]
        if pair is None:
            push, packer = lanes.Listener(start.session, host, ports), lanes.LanePacker(*who)
            copy = push.borrow
        else:
            push, packer = context.push(start.session, pair, host, ports), Packer(*who)
            copy = transport.Copied
        memory = segments.Segments(SEGMENTS_PER_WINDOW * start.prefetch_bytes, copy)
        drop = functools.partial(_take_back, memory)
        mailbox = Mailbox(window, waker, memory.board, drop, logbook)
        outlet = ClientOutlet(mailbox, push, packer, drop)
        port, send = push.port, outlet.pump
    io = IOThread(channel, waker, reply, mailbox.command, outlet, feed, context, gate)
    threading.Thread(target=io.run, name="rpc-reading-io", daemon=True).start()
    if memory is not None:
        inplace.lend_from(memory.lend)
    shard = graph.load(unpickle(), start.num_workers, start.worker, feed.elements)
    kind = DispatchRunner if start.is_dispatching else Runner
    io.runner = kind(shard, mailbox, send, reply, start, feed, logbook, memory, limit, pair is None)
    offer = None if memory is None else memory.offer
    reply(WorkerReady(start.session, start.worker, start.attempt, os.getpid(), port, offer))
    return io.runner


def _take_back(memory: segments.Segments, parcel: Parcel) -> None:
    for buffer in parcel.buffers:
        if isinstance(buffer, segments.Lent):
            memory.take_back(buffer)


def become_worker() -> None:
    """What a process that runs user code needs, and does not inherit."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the daemon's terminal is the daemon's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    buffers.tune_malloc()
    torch.set_num_threads(1)


def limit_memory(nbytes: int) -> None:
    """Let allocations fail in this process beyond what it has now and so much more, before the system kills somebody.

    What counts is the process's own writable memory (``RLIMIT_DATA``): heap and private mappings, not its libraries and
    not memory that is shared.
    """
    with open("/proc/self/status") as status:
        (now,) = [int(line.split()[1]) << 10 for line in status if line.startswith("VmData:")]
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (now + nbytes, hard))


def unpickle(fd: int) -> graph.Parts:
    """The graph, from bytes that every process shares which maps them; closes the descriptor."""
    with os.fdopen(fd, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return graph.unpickle(data)


def warm_up() -> None:
    """Does nothing, in a process that has everything imported."""
