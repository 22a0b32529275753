"""The client's end of the data channels, lanes or with keys one socket of ZeroMQ's, and whose turn it is to read.

A thread that waits for a batch reads by itself: to be woken by another for each message would take longer than to take
the message in. As soon as it has what it needs, and trains, the I/O thread reads, so that large batches are taken in
meanwhile.

    the training loop waits      it polls the socket and ``bell``, and takes in what comes; the I/O thread looks away
    it has a large batch         the I/O thread goes on with the next one at once
    it has gone for ``TURN_S``   the I/O thread reads

Whatever is done with ZeroMQ's socket may take the news from the descriptor that is polled. So whoever polls it has
read before, and whoever does anything else with it in the other's turn wakes him.
"""

import _signal  # type: ignore[import-not-found]
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Protocol

from rpc_reading_service import buffers, lanes, messages, segments, transport
from rpc_reading_service.actions import ConnectData, SendData
from rpc_reading_service.security import Pair
from rpc_reading_service.stream import Arrival, StreamReader

TURN_S = 0.02
"""A thread that waited here and has gone for so long does something else."""

MESSAGES_PER_TURN = 256
"""Data messages received before anything else gets its turn."""

_get_handler, _set_handler = _signal.getsignal, _signal.signal
"""Those of ``signal`` make members of an enumeration out of handlers, and back: 17 us for each wait, instead of 1."""


class Source(Protocol):
    """Where the streams of all workers come from: ``lanes.Lanes``, or with keys ``Sockets``."""

    @property
    def raw(self) -> int:
        """A descriptor, readable when something may have come."""

    @property
    def drained(self) -> bool:
        """Whether ``raw`` tells of everything that ``read`` has left."""

    def read(self, at_most: int) -> Iterator[Arrival]:
        """What has arrived and is wanted. Who asks for the next has taken in the last; or else calls ``taken``."""

    def taken(self) -> None: ...

    def attach(self, worker: int, attempt: int, attachment: segments.Attachment) -> None: ...

    def connect(self, worker: int, attempt: int, endpoint: str) -> None: ...

    def send(self, worker: int, attempt: int, frame: bytes) -> None: ...

    def disconnect(self, worker: int, attempt: int) -> None: ...

    def tend(self, now: float) -> None:
        """To be called now and then."""

    def close(self) -> None: ...


class Sockets(StreamReader):
    """Encrypted streams: one socket of ZeroMQ's, which connects again by itself."""

    def __init__(
        self, pull: transport.Pull, accepts: Callable[[Any], bool], allocate: Callable[[int], memoryview]
    ) -> None:
        super().__init__(pull, accepts, allocate)
        self._pull = pull
        self._connections: dict[tuple[int, int], transport.DataConnection] = {}
        self._untaken: Arrival | None = None

    @property
    def raw(self) -> int:
        return self._pull.raw

    def read(self, at_most: int) -> Iterator[Arrival]:
        """After an exception of a signal's handler, what may not have been taken in comes again: it has its number."""
        if self._untaken is not None:
            yield self._untaken
        for arrival in super().read(at_most):
            self._untaken = arrival
            yield arrival
        self._untaken = None

    def taken(self) -> None:
        self._untaken = None

    def connect(self, worker: int, attempt: int, endpoint: str) -> None:
        self._connections[worker, attempt] = self._pull.connect(endpoint)

    def send(self, worker: int, attempt: int, frame: bytes) -> None:
        connection = self._connections.get((worker, attempt))
        if connection is not None:
            self._pull.send(connection, frame)

    def disconnect(self, worker: int, attempt: int) -> None:
        connection = self._connections.pop((worker, attempt), None)
        self.forget(worker)
        self.detach(worker, attempt)
        if connection is not None:
            self._pull.disconnect(connection)

    def tend(self, now: float) -> None:
        """Nothing is due, ever."""

    def close(self) -> None:
        self._pull.close()


class Intake:
    """Every worker's stream comes in here, and what it is told goes out. Safe from any thread.

    Args:
        context: where the socket is opened, with keys
        session, secret: whose; the secret is empty without keys
        accepts: whether a message with this header is wanted
        arrive: told of each message that has been taken in
        hand_over: wakes the I/O thread, whose turn it is
        allocate: gives the memory for a buffer
    """

    def __init__(
        self,
        context: transport.Context,
        session: str,
        secret: bytes,
        accepts: Callable[[Any], bool],
        arrive: Callable[[Arrival], None],
        hand_over: Callable[[], None],
        allocate: Callable[[int], memoryview] = buffers.allocate,
    ) -> None:
        self._source: Source = (
            Sockets(context.pull(session, Pair.from_raw(secret)), accepts, allocate)
            if secret
            else lanes.Lanes(session, accepts, allocate)
        )
        self.raw = self._source.raw
        """What the I/O thread polls in its turn."""
        self._arrive = arrive
        self._hand_over = hand_over
        self._lock = threading.Lock()
        self._waits = threading.Lock()
        self._bell = transport.Waker()
        self._poller = transport.Descriptors()
        self._poller.watch(self.raw)
        self._poller.watch(self._bell.raw)
        self._turn_ends = -math.inf
        self._has_large = False
        self._closed = False

    # What comes in.

    @property
    def is_taken(self) -> bool:
        """Whether it is the turn of a thread that waits, or has waited just now."""
        return time.monotonic() < self._turn_ends

    @property
    def behind(self) -> bool:
        """Whether ``read`` has left something that nobody will be told of."""
        return not self._source.drained

    def read(self) -> None:
        """For the I/O thread: take in what has arrived, up to a limit, or until somebody waits for it."""
        with self._lock:
            if self._closed:
                return
            for arrival in self._source.read(MESSAGES_PER_TURN):
                self._arrive(arrival)
                if self._turn_ends == math.inf:
                    self._source.taken()
                    return self.wake()  # who waits may be polling already

    def wait(self, seconds: float) -> None:
        """For one thread at a time: read, and if there is nothing yet, wait for it, or for ``wake``."""
        deadline = transport.Deadline(seconds)
        with self._waits:
            self._has_large = False
            try:
                self._turn_ends = math.inf
                while not self._read_what_is_waited_for() and self._rest(deadline):
                    pass
            finally:
                self._turn_ends = time.monotonic() + (0.0 if self._has_large else TURN_S)
        if self._has_large:
            self._hand_over()

    def _rest(self, deadline: transport.Deadline) -> bool:
        """Whether something may have come."""
        if self._closed or deadline.expired:
            return False
        ready = self._poller.wait(deadline.remaining() or 0.0)
        if self._bell.raw.fileno() not in ready:
            return bool(ready)
        self._bell.clear()
        self._read_what_is_waited_for()
        return False

    def _read_what_is_waited_for(self) -> bool:
        """All small batches that have arrived, but one large one; whether there was anything."""
        taken = False
        with self._lock:
            if self._closed:
                return False
            for arrival in self._source.read(MESSAGES_PER_TURN):
                taken = True
                self._arrive(arrival)
                if arrival.is_large:
                    self._source.taken()
                    self._has_large = True
                    break
        return taken or self.behind

    def wake(self) -> None:
        """End ``wait``."""
        self._bell.wake()

    # What goes out.

    def connect(self, action: ConnectData, attachment: segments.Attachment | None) -> None:
        """To a worker, some of whose buffers may lie in the attached shared memory.

        Raises:
            AddressError: its host's name does not resolve any more.
        """
        endpoint = transport.beside(action.address, action.port)  # which may take a while
        with self._lock:
            if attachment is not None:
                self._source.attach(action.worker, action.attempt, attachment)
            self._source.connect(action.worker, action.attempt, endpoint)
        self._touched()

    def send(self, actions: Sequence[SendData]) -> None:
        """To one worker each; nothing is sent to those that are gone."""
        if not actions:
            return
        with self._lock:
            for action in actions:
                if not self._closed:
                    self._source.send(action.worker, action.attempt, messages.encode(action.message))
        self._touched()

    def disconnect(self, worker: int, attempt: int) -> None:
        """The worker is gone; whatever is still looked at stays mapped."""
        with self._lock:
            self._source.disconnect(worker, attempt)
        self._touched()

    def tend(self, now: float) -> None:
        """For the I/O thread, now and then."""
        with self._lock:
            self._source.tend(now)

    def _touched(self) -> None:
        """Who polls has read before, and reads now: a thread that waits may be polling already."""
        if self._turn_ends == math.inf:
            self.wake()

    def close(self) -> None:
        """Before its context is: nobody polls the socket any more then."""
        with self._lock:
            self._closed = True
        self.wake()
        with self._waits:
            self._bell.close()
            self._source.close()


class Deferral:
    """What is done within it is done whole before Ctrl-C: the exception comes at its end, which ``hurry`` brings about.

    For SIGINT alone, whose handler raises in most programs, and in the main thread alone, where handlers run.

    Args:
        hurry: ends a wait that would end late
    """

    def __init__(self, hurry: Callable[[], None]) -> None:
        self._hurry = hurry
        self._handler: Any = None
        self._noted: tuple[Any, ...] | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            handler = _get_handler(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                _set_handler(signal.SIGINT, self._note)

    def _note(self, *args: Any) -> None:
        self._noted = args
        self._hurry()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handler is not None:
            _set_handler(signal.SIGINT, self._handler)
            if self._noted is not None:
                self._handler(*self._noted)
