"""``sharding_round_robin_dispatch``: one dispatching worker runs the graph up to that point and feeds all the others.

    dispatching worker                                  each other worker
      graph -> element k -> queue of worker k % n         graph: DispatchedSource -> Feed.next
               queue -> ROUTER  == data messages ==>      DEALER -> StreamReader -> Merge of one shard
                        ROUTER  <== Credit ===            DEALER: what its graph has consumed

A worker that is hungry (its window is open and its queue empty) makes the dispatching worker take elements until one is
for it; those for others wait in their queues, up to ``QUEUE_ELEMENTS``, as in torchdata's ``round_robin_demux``.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec

from rpc_reading_service import buffers, codec, messages, protocol, transport
from rpc_reading_service.errors import RPCReadingError
from rpc_reading_service.merge import Entry, Failure, Merge, Signal
from rpc_reading_service.messages import Batches, Credit, EndOfShard, Opened, Phase, ShardError, StartWorker
from rpc_reading_service.security import Pair
from rpc_reading_service.stream import Arrival, Packer, Parcel, StreamReader

QUEUE_ELEMENTS = 100_000
"""Elements that may wait for one slow worker while another is hungry; torchdata's own limit is 1,000."""

NO_MORE = (1 << 63) - 1
"""Credit of a worker whose shard has ended: nothing more need be sent to it in this epoch."""


IDLE_S = 1.0
"""How long an I/O thread waits if nothing happens."""

BROKEN_S = 2.0
"""How long a worker whose feed broke waits to be stopped: if whoever fed it is lost, its daemon knows better why."""


class FeedBroken(RPCReadingError):
    """What the dispatching worker sends does not arrive: the worker cannot go on."""


class EpochAbandoned(RPCReadingError):
    """The next epoch was started while user code waited for an element of this one."""


class Feed:
    """A worker's end: elements from the dispatching worker, for the worker's graph.

    Two threads use it: the main thread takes, the I/O thread, which owns the socket, receives and gives credit.
    """

    def __init__(self, start: StartWorker, waker: transport.Waker, pair: Pair | None = None) -> None:
        self._start = start
        self._waker = waker
        self._pair = pair
        self._changed = threading.Condition()
        self._merge = Merge(1)
        self._epoch = 0
        self._reading = 0
        self._credit: Credit | None = None
        self._socket: transport.FeedDealer | None = None
        self._reader: StreamReader | None = None
        self._meter = protocol.CreditMeter(start.prefetch_bytes)
        self._broken: FeedBroken | None = None
        self._broken_at = float("inf")

    # For the main thread, that is the graph.

    def read(self, epoch: int) -> None:
        """The graph begins this epoch; the I/O thread may know of a later one already."""
        self._reading = epoch

    def elements(self) -> Iterator[Any]:
        """The elements of the running epoch.

        Raises:
            EpochAbandoned: see there
            Exception: what the dispatching worker's graph raised
        """
        epoch = self._reading
        while True:
            item = self._take(epoch)
            if isinstance(item, Signal):
                return
            if isinstance(item, Failure):
                raise codec.decode_error(item.payload, "in dispatching process")
            yield codec.decode(item.header, item.buffers)

    def _take(self, epoch: int) -> Entry | Failure | Signal:
        with self._changed:
            while (item := self._next(epoch)) is Signal.PENDING:
                self._ask(epoch)
                self._changed.wait()
            if isinstance(item, Signal):
                return item
            entry: Entry | Failure = item[1]
            if isinstance(entry, Entry) and self._meter.consume(entry.nbytes):
                self._ask(epoch)
            return entry

    def _next(self, epoch: int) -> Any:
        if epoch != self._epoch:
            raise EpochAbandoned("the next epoch has begun")
        return self._merge.next()

    def finish(self, epoch: int) -> None:
        """The worker's shard has ended, maybe before the elements have."""
        with self._changed:
            if epoch == self._epoch:
                self._ask(epoch, NO_MORE)

    def _ask(self, epoch: int, consumed: int | None = None) -> None:
        consumed = self._merge.consumed[0] if consumed is None else consumed
        credit = Credit(self._start.session, self._start.worker, 0, epoch, consumed, hungry=False)
        if credit != self._credit:
            self._credit = credit
            self._waker.wake()

    # For the I/O thread.

    def begin_epoch(self, epoch: int) -> None:
        """Whoever waits for the last epoch's elements is woken."""
        with self._changed:
            self._epoch = epoch
            self._merge.begin_epoch(epoch)
            self._ask(epoch)
            self._changed.notify_all()

    def connect(self, context: transport.Context, address: str, port: int) -> list[Any]:
        """Connect to the dispatching worker; returns what to poll."""
        self._socket = context.feed_dealer(self._start.session, self._pair, self._start.worker, address, port)
        self._reader = StreamReader(self._socket, self._accepts)
        return [self._socket.raw, self._socket.raw_monitor]

    def patience(self, at_most: float, now: float) -> float:
        """Seconds until the next ``step``, if nothing happens before."""
        return max(0.0, min(at_most, self._broken_at + BROKEN_S - now))

    def step(self, sent: Credit | None, now: float) -> Credit | None:
        """Receive what has arrived, send the credit that is due; returns the last credit sent.

        Raises:
            FeedBroken: see there
        """
        if self._socket is None or self._reader is None:
            return sent
        if self._socket.dropped():
            self._break("the connection broke", now)
        if self._broken is not None and now - self._broken_at >= BROKEN_S:
            raise self._broken
        for arrival in self._reader.read(256):
            with self._changed:
                self._arrive(arrival, now)
        with self._changed:
            credit = self._credit
        if credit is not None and credit != sent and self._socket.send([messages.encode(credit)]):
            return credit
        return sent

    def _break(self, reason: str, now: float) -> None:
        if self._broken is None:
            self._broken = FeedBroken(f"worker {self._start.worker} is cut off from the dispatching worker: {reason}")
            self._broken_at = now

    def _accepts(self, header: Any) -> bool:
        with self._changed:
            return not isinstance(header, Opened) and self._merge.accepts(header)

    def _arrive(self, arrival: Arrival, now: float) -> None:
        if arrival.error is not None or arrival.header is None:
            self._break(str(arrival.error), now)
        elif not self._merge.accepts(arrival.header):
            return
        elif isinstance(arrival.header, ShardError):
            self._merge.fail(0, arrival.body)
        elif isinstance(arrival.header, EndOfShard):
            self._merge.end(0)
        else:
            self._merge.add(0, arrival.entries)
        self._changed.notify_all()


class DispatchMailbox:
    """Where the dispatching worker's threads meet: as ``worker.Mailbox``, with a queue and a window for each worker."""

    def __init__(self, start: StartWorker, waker: transport.Waker, logbook: buffers.Logbook) -> None:
        self._waker = waker
        self._logbook = logbook
        self._changed = threading.Condition()
        self._commands: deque[tuple[Any, bytes | None]] = deque()
        self._windows = [protocol.Window(start.prefetch_count, start.prefetch_bytes) for _ in range(start.num_workers)]
        self._queues: list[deque[Parcel]] = [deque() for _ in range(start.num_workers)]
        self._epoch = 0
        self._credits = [(0, 0)] * start.num_workers  # epoch, elements consumed
        self._sated = [False] * start.num_workers
        self._io_waits = False

    def take(self, producing: bool, replaying: bool = False) -> tuple[Any, bytes | None] | None:
        """The next command; None if a worker is hungry. Waits for one or the other."""
        with self._changed:
            while not self._commands:
                if producing and any(self._is_hungry(worker) for worker in range(len(self._queues))):
                    return None
                self._logbook.wait(Phase.CREDIT if producing else Phase.IDLE, time.monotonic())
                self._changed.wait()
            return self._commands.popleft()

    def _is_hungry(self, worker: int) -> bool:
        return (
            self._has_asked(worker)
            and not self._sated[worker]
            and not self._queues[worker]
            and self._windows[worker].is_open
        )

    def _has_asked(self, worker: int) -> bool:
        return self._credits[worker][0] == self._epoch

    def put(self, worker: int, parcel: Parcel) -> None:
        """Queue a parcel for a worker.

        Raises:
            BufferError: too many wait for it already.
        """
        with self._changed:
            if parcel.epoch != self._epoch:
                return
            if self._sated[worker]:
                return
            if parcel.kind is Batches and len(self._queues[worker]) >= QUEUE_ELEMENTS:
                raise BufferError(
                    f"sharding_round_robin_dispatch holds {QUEUE_ELEMENTS} elements for worker {worker}, which takes "
                    "none while another waits for its own; let every worker use as many elements for a batch"
                )
            self._queues[worker].append(parcel)
            io_waits, self._io_waits = self._io_waits, False
        if io_waits:
            self._waker.wake()

    def command(self, message: Any, payload: bytes | None) -> None:
        """A command for the main thread."""
        with self._changed:
            if isinstance(message, messages.StartEpoch):
                self._epoch = message.epoch
                for queue, window in zip(self._queues, self._windows, strict=True):
                    queue.clear()
                    window.begin(0)
                for worker in range(len(self._queues)):
                    self._apply(worker)
            self._commands.append((message, payload))
            self._changed.notify()

    def credit(self, credit: Credit) -> None:
        """A worker says how far it is, and in which epoch, which may be one that has not begun here yet."""
        with self._changed:
            if credit.worker >= len(self._queues) or credit.epoch < self._epoch:
                return
            self._credits[credit.worker] = credit.epoch, credit.consumed
            self._apply(credit.worker)
            self._changed.notify()

    def _apply(self, worker: int) -> None:
        """What the worker said last, if it was of this epoch."""
        _, consumed = self._credits[worker]
        self._sated[worker] = self._has_asked(worker) and consumed == NO_MORE
        if self._has_asked(worker):
            self._windows[worker].credit(consumed)
        if self._sated[worker]:
            self._queues[worker].clear()

    def collect(self) -> list[tuple[int, list[Parcel]]]:
        """For each worker the parcels that may leave now."""
        leaving: list[tuple[int, list[Parcel]]] = []
        with self._changed:
            for worker, (queue, window) in enumerate(zip(self._queues, self._windows, strict=True)):
                parcels = []
                while self._has_asked(worker) and queue and window.is_open:
                    parcels.append(queue.popleft())
                    window.produce(protocol.weight(parcels[-1].sizes))
                if parcels:
                    leaving.append((worker, parcels))
            self._io_waits = not leaving
            if leaving:
                self._changed.notify()  # a queue may have run empty: its worker is hungry
        return leaving


class FeedOutlet:
    """The dispatching worker's way out: what the queues let go, to the worker that it is for."""

    def __init__(self, mailbox: DispatchMailbox, router: transport.FeedRouter, session: str) -> None:
        self._mailbox = mailbox
        self._router = router
        self._packer = Packer(session, 0, 0)  # to each worker its feed is stream 0
        self._session = session
        self.raw = [router.raw]

    def pump(self) -> bool:
        """Move what can be moved; whether anything was."""
        for frames in self._router.receive_all():
            credit = _read_credit(frames)
            if credit is not None and credit.session == self._session:
                self._mailbox.credit(credit)
        leaving = self._mailbox.collect()
        for worker, parcels in leaving:
            for message in self._packer.pack(parcels):
                self._router.send(worker, message.frames)
        return bool(leaving)

    def hear(self) -> None:
        """``pump`` has heard."""

    def abandon(self) -> None:
        """A new epoch: nothing waits here that would have to be dropped."""

    @property
    def patience(self) -> float:
        return IDLE_S


def _read_credit(frames: list[bytes]) -> Credit | None:
    """None for bytes that are no credit."""
    try:
        credit: Credit = messages.decode(frames[0], messages.ToWorkerData)
    except (msgspec.DecodeError, IndexError):
        return None
    return credit
