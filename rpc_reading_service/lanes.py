"""The data of sessions without keys: one TCP connection from the client to each worker, and nothing in between.

ZeroMQ hands a message over in a buffer of its own, which a thread of its own has filled. Here a batch is sent from
where it is, and received where it is to be: one copy less at either end, and no thread to wait for.

    client                                                        worker
    Lanes.connect   ====== the session's password ==============> Listener: hears nothing else of a connection before
    Lanes.read      <===== sizes; header; codec headers; buffers = Listener.send
    Lanes.send      ====== sizes; header ========================> Listener.receive_all

A connection that breaks is made again by the client. What was on its way then is lost, which the numbers of the batches
tell: on each further connection the worker begins with the next one, without a batch, or with the message that was the
last if that was none of batches. A ``Lanes`` or a ``Listener`` is used by one thread at a time, under its owner's lock.
"""

import contextlib
import hmac
import itertools
import logging
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import psutil

from rpc_reading_service import buffers, messages, transport
from rpc_reading_service.buffers import Borrowed
from rpc_reading_service.errors import StreamError
from rpc_reading_service.messages import Batches, Chunk, FromWorkerData, Large, Message
from rpc_reading_service.stream import Arrival, Packed, Packer, Parcel, Reader, travelling_sizes
from rpc_reading_service.transport import (
    DATA_BYTES,
    KEEPALIVE,
    RECONNECT_MAX_MS,
    RECONNECT_MS,
    UNACKNOWLEDGED_MS,
)

logger = logging.getLogger(__name__)

_MAGIC = b"rpc-reading lane"

_PREFIX = struct.Struct("<IQ")
"""Before each message: bytes of its header, and of everything after that."""

LITTLE_BYTES = 4096
"""Received together with the rest of a large message: what follows on it begins with a header."""

SCRATCH_BYTES = 64 << 10
"""What is received together, and copied, as long as messages are no larger; then, only ``LITTLE_BYTES``."""

READ_BYTES = 8 << 20
"""Of one connection, before the others get their turn."""

ATTENTION_BYTES = 1 << 20
"""While more is to come, nobody is woken for less."""

PROGRESS_S = 1.0
"""A batch that takes longer tells so often that it is on its way."""

FRAMES_AT_ONCE = 1000
"""Linux takes 1,024 (IOV_MAX)."""

TOGETHER_BYTES = 64 << 10
"""What is smaller is worth a copy: it may wait, and leave with others."""

AT_ONCE_BYTES = 4 << 20
"""What a socket takes at once, about: the rest of anything larger would have to be copied."""

TOLD_BYTES = 4096
"""Largest message to a worker: credit."""

UNSENT_BYTES = 1 << 20
"""Credit for a worker that reads none: then its connection is given up."""

STRANGERS = 128
"""Connections that have not shown the password yet; of more, the oldest is closed."""

DEAF_S = 1.0
"""If a connection cannot be accepted, the next one has to wait for so long."""

STRANGER_S = 10.0
ACCEPTED_AT_ONCE = 64


# Messages.


def hello(session: str) -> bytes:
    """What a client says first: who says something else from the start is no client of anybody's."""
    return _MAGIC + transport.password(session)


def _view(piece: Any) -> memoryview:
    return piece.view if isinstance(piece, Borrowed) else memoryview(piece)


class LanePacker(Packer):
    """Turns parcels into messages of a lane: a batch of any size is one of them."""

    def _message(self, header: Message, body: bytes | None = None, frames: Sequence[Any] = ()) -> list[Any]:
        encoded, body = messages.encode(header), body or b""
        prefix = _PREFIX.pack(len(encoded), len(body) + sum([frame.nbytes for frame in frames]))
        if len(body) < TOGETHER_BYTES:
            return [b"".join((prefix, encoded, body)), *frames]
        return [prefix + encoded, body, *frames]

    def _large(self, parcel: Parcel) -> Iterator[Packed]:
        yield self._batches([parcel])


# The worker's end.


class Listener:
    """A worker's data port: sends to its session's client, and hears nobody else.

    ``raw`` tells of news until they have been heard (``tells_once``, as ZeroMQ's sockets do, is false).

    Args:
        session: the client shows its password
        host, ports: where it may be bound

    Raises:
        OSError: none of the ports is free, or the host is not one of this machine's.
    """

    tells_once = False

    def __init__(self, session: str, host: str, ports: Iterable[int]) -> None:
        self._hello = hello(session)
        self._socket = _listen(host, ports)
        self.port = int(self._socket.getsockname()[1])
        self.connections = 0
        """How often the client has come. What the last one had not read is lost when it comes again."""
        self._epoll = select.epoll()
        self._epoll.register(self._socket, select.EPOLLIN)
        self._strangers: dict[int, _Stranger] = {}
        self._client: socket.socket | None = None
        self._unsent: deque[Any] = deque()
        self._waits_for_room = False
        self._told = bytearray()
        self._deaf_until = 0.0

    @property
    def raw(self) -> int:
        """A descriptor, readable when ``receive_all`` has something to do."""
        return self._epoll.fileno()

    def borrow(self, view: memoryview) -> Borrowed | memoryview:
        """To be sent from where it is, if that is likely to succeed, or a copy; safe from any thread."""
        if TOGETHER_BYTES <= view.nbytes <= AT_ONCE_BYTES and not self._unsent:
            return Borrowed(view)
        return buffers.snapshot(view)

    def send(self, frames: Sequence[Any]) -> bool:
        """False if the client is not connected, and nothing was sent. What does not fit waits for ``receive_all``.

        What was borrowed is needed no longer.

        Raises:
            MemoryError: there is no room for what has to wait, so that the connection is given up.
        """
        if self._client is None:
            return False
        has_room = not self._unsent
        self._unsent.extend(frames)
        if has_room:
            self._flush()
        try:
            for index in range(max(0, len(self._unsent) - len(frames)), len(self._unsent)):
                self._unsent[index] = buffers.keep(self._unsent[index])
        except MemoryError:
            self._lose_client("there is no memory for what it has not read")  # and what is borrowed changes
            raise
        return self._client is not None

    def _flush(self) -> None:
        """Send what fits, once: whoever waits for the owner's lock gets his turn."""
        assert self._client is not None
        views = [_view(piece) for piece in itertools.islice(self._unsent, FRAMES_AT_ONCE)]
        try:
            sent = self._client.sendmsg(views)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            return self._lose_client(str(error))
        while views and sent >= views[0].nbytes:
            sent -= views.pop(0).nbytes
            self._unsent.popleft()
        if sent:
            piece, rest = self._unsent[0], views[0][sent:]
            self._unsent[0] = Borrowed(rest) if isinstance(piece, Borrowed) else rest
        if self._waits_for_room != bool(self._unsent):
            self._waits_for_room = bool(self._unsent)
            self._epoll.modify(self._client, _EVENTS[self._waits_for_room])

    def receive_all(self) -> Iterator[bytes]:
        """What the client says. Also lets it in, and sends what did not fit."""
        for descriptor, events in self._epoll.poll(0):
            if descriptor in self._strangers:
                self._look_at(self._strangers[descriptor])
            elif descriptor == self._socket.fileno():
                self._accept()
            elif self._client is not None and descriptor == self._client.fileno():
                if events & ~select.EPOLLOUT:
                    yield from self._hear()
                if events & select.EPOLLOUT and self._client is not None:
                    self._flush()
        if self._strangers or self._deaf_until:
            self._expire(time.monotonic())

    def _hear(self) -> Iterator[bytes]:
        assert self._client is not None
        try:
            said = self._client.recv(TOLD_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            return self._lose_client(str(error))
        if not said:
            return self._lose_client("it was closed")
        self._told += said
        while len(self._told) >= _PREFIX.size:
            nbytes, rest = _PREFIX.unpack_from(self._told)
            if nbytes > TOLD_BYTES or rest:
                return self._lose_client("what came is no message of ours")
            end = _PREFIX.size + nbytes
            if len(self._told) < end:
                return
            frame = bytes(self._told[_PREFIX.size : end])
            del self._told[:end]
            yield frame

    def _lose_client(self, reason: str) -> None:
        """It connects again; what had not left is lost."""
        if self._client is not None:
            logger.debug("= the client's connection is gone: %s", reason)
            _close(self._client, self._epoll)
        self._client = None
        self._waits_for_room = False
        self._unsent.clear()
        self._told.clear()

    # Who is there.

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, _address = self._socket.accept()
            except BlockingIOError:
                return
            except OSError:  # gone again; or there are too many descriptors, and it would be told of again at once
                return self._listen_again_at(time.monotonic() + DEAF_S)
            while len(self._strangers) >= STRANGERS:
                self._turn_away(next(iter(self._strangers.values())))
            connection.setblocking(False)
            self._epoll.register(connection, select.EPOLLIN)
            until = time.monotonic() + STRANGER_S
            self._strangers[connection.fileno()] = _Stranger(connection, bytearray(), until)

    def _listen_again_at(self, moment: float) -> None:
        self._deaf_until = moment
        self._epoll.modify(self._socket, 0)

    def _look_at(self, stranger: "_Stranger") -> None:
        """The password is compared when all of it is there: who were told sooner could guess it piece by piece."""
        shown, wanted = stranger.shown, self._hello
        try:
            more = stranger.connection.recv(len(wanted) - len(shown))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        shown += more
        is_foreign = not _MAGIC.startswith(shown[: len(_MAGIC)])
        if not more or is_foreign or (len(shown) == len(wanted) and not hmac.compare_digest(shown, wanted)):
            self._turn_away(stranger)
        elif len(shown) == len(wanted):
            del self._strangers[stranger.connection.fileno()]
            self._lose_client("it has connected again")
            _prepare(stranger.connection)
            self._client = stranger.connection
            self.connections += 1

    def _expire(self, now: float) -> None:
        if self._deaf_until and now >= self._deaf_until:
            self._deaf_until = 0.0
            self._epoll.modify(self._socket, select.EPOLLIN)
        for stranger in [each for each in self._strangers.values() if each.until < now]:
            self._turn_away(stranger)

    def _turn_away(self, stranger: "_Stranger") -> None:
        del self._strangers[stranger.connection.fileno()]
        _close(stranger.connection, self._epoll)

    def close(self) -> None:
        """What has not left is lost."""
        if self._epoll.closed:
            return
        for stranger in list(self._strangers.values()):
            self._turn_away(stranger)
        self._lose_client("this end was closed")
        _close(self._socket, self._epoll)
        self._epoll.close()


class _Stranger(NamedTuple):
    """A connection that has not shown the password yet."""

    connection: socket.socket
    shown: bytearray
    until: float
    """When it is closed, of ``time.monotonic``."""


_EVENTS = (select.EPOLLIN, select.EPOLLIN | select.EPOLLOUT)
"""Without and with a wait for room."""


def _listen(host: str, ports: Iterable[int]) -> socket.socket:
    error = OSError(f"no port to bind on {host}")
    for port in ports:
        try:
            return _bound(_interface(host), port)
        except OSError as failure:
            where = transport.join_address(host, port)
            error = OSError(failure.errno, f"cannot bind {where}: {failure.strerror}")
    raise error


def _bound(host: str, port: int) -> socket.socket:
    """An IPv4 address, mapped to IPv6, is one of IPv4: so ZeroMQ, and with it the daemon, chooses for a name."""
    found = socket.getaddrinfo(host, port, socket.AF_INET6, socket.SOCK_STREAM, 0, socket.AI_V4MAPPED)
    address = str(found[0][4][0])
    ipv4 = address.removeprefix("::ffff:")
    listener = socket.socket(socket.AF_INET if "." in ipv4 else socket.AF_INET6)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if listener.family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((ipv4, port) if listener.family == socket.AF_INET else found[0][4])
        listener.listen(transport.BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _interface(host: str) -> str:
    """The address of a network interface, which ZeroMQ takes as a host, too: where the daemon is, of IPv6 sooner."""
    addresses = psutil.net_if_addrs().get(host, ())
    for family in (socket.AF_INET6, socket.AF_INET):
        for address in addresses:
            if address.family == family:
                return str(address.address)
    return _everywhere() if host == "*" else host


def _everywhere() -> str:
    """Of a system without IPv6 the addresses that it has."""
    try:
        socket.socket(socket.AF_INET6).close()
    except OSError:
        return "0.0.0.0"
    return "::"


def _prepare(connection: socket.socket) -> None:
    """The options of an established connection, as ZeroMQ's have them."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in zip((socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT), KEEPALIVE, strict=True):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _close(connection: socket.socket, epoll: select.epoll) -> None:
    """For forks of this process, too, which have it open and are still in the epoll's list."""
    epoll.unregister(connection)
    with contextlib.suppress(OSError):  # it is not connected any more
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


# The client's end.


class Lanes(Reader):
    """The client's end of the connections to all workers of a session.

    Args:
        session: whose password is shown
        accepts, allocate: see ``stream.Reader``
    """

    def __init__(
        self, session: str, accepts: Callable[[Any], bool], allocate: Callable[[int], memoryview] = buffers.allocate
    ) -> None:
        super().__init__(accepts, allocate)
        self._hello = hello(session)
        self._epoll = select.epoll()
        self._lanes: dict[tuple[int, int], _Lane] = {}
        self._open: dict[int, _Lane] = {}
        self._behind: dict[_Lane, None] = {}
        self._untaken: _Lane | None = None
        """Whose next message is being received, or has not been taken in yet."""

    @property
    def raw(self) -> int:
        """A descriptor, readable as long as something can be read from a connection."""
        return self._epoll.fileno()

    @property
    def drained(self) -> bool:
        """Whether ``raw`` tells of everything that ``read`` has left."""
        return not self._behind and self._untaken is None

    # What comes in.

    def read(self, at_most: int) -> Iterator[Arrival]:
        """What has arrived and is wanted. Who asks for the next has taken in the last; or else calls ``taken``.

        An exception that comes from outside, of a signal's handler, leaves a message of which nobody knows how much was
        read, or whether it was taken in: its connection is given up then.
        """
        lane, self._untaken = self._untaken, None
        if lane is not None and lane.is_open:
            self._break(lane, "a message was not taken in")
        left = at_most
        for lane in self._ready():
            while left and lane.is_open:
                self._untaken = lane
                arrival = self._receive(lane)
                if arrival is None:
                    break
                left -= 1
                yield arrival
            self._untaken = None

    def taken(self) -> None:
        """The last arrival has been taken in, and no more are asked for now."""
        self._untaken = None

    def _ready(self) -> Iterable["_Lane"]:
        ready = dict(self._behind)
        for descriptor, events in self._epoll.poll(0):
            lane = self._open[descriptor]
            lane.is_drained = False
            if events & select.EPOLLOUT:
                self._try(lane, lane.flush)
            ready[lane] = None
        return ready

    def _receive(self, lane: "_Lane") -> Arrival | None:
        arrival = None
        try:
            arrival = lane.receive()
        except (OSError, EOFError) as error:
            self._break(lane, str(error) or "it was closed")
        except StreamError as error:
            self._break(lane, str(error))
            return Arrival(None, error=error)
        finally:
            if lane.has_more:
                self._behind[lane] = None
            else:
                self._behind.pop(lane, None)
        return arrival

    # What goes out.

    def connect(self, worker: int, attempt: int, endpoint: str) -> None:
        """To a worker's data port; see ``transport.beside``."""
        if (worker, attempt) in self._lanes:
            self._close(self._lanes[worker, attempt])
        lane = self._lanes[worker, attempt] = _Lane(self, self._epoll, endpoint)
        self._connect(lane)

    def send(self, worker: int, attempt: int, frame: bytes) -> None:
        """To one worker; nothing is sent to one that is gone, and the last of all to one that is not there yet."""
        lane = self._lanes.get((worker, attempt))
        if lane is not None:
            self._try(lane, lambda: lane.tell(_PREFIX.pack(len(frame), 0) + frame))

    def disconnect(self, worker: int, attempt: int) -> None:
        """The worker is gone; whatever is still looked at stays mapped."""
        self.detach(worker, attempt)
        lane = self._lanes.pop((worker, attempt), None)
        if lane is not None:
            self._close(lane)

    def tend(self, now: float) -> None:
        """Connect again to whoever is due, and look for what comes too slowly to wake anybody."""
        for lane in self._lanes.values():
            if not lane.is_open and now >= lane.retry_at:
                self._connect(lane)
            elif lane.is_open and lane.is_slow(now):
                lane.is_drained = False
                self._behind[lane] = None

    def _connect(self, lane: "_Lane") -> None:
        self._try(lane, lambda: lane.open(self._hello))
        if lane.is_open:
            self._open[lane.descriptor] = lane

    def _try(self, lane: "_Lane", act: Callable[[], None]) -> None:
        try:
            act()
        except OSError as error:
            self._break(lane, str(error))

    def _break(self, lane: "_Lane", reason: str) -> None:
        logger.debug("= the connection to %s is gone: %s", lane.endpoint, reason)
        self._close(lane)
        lane.postpone(time.monotonic())

    def _close(self, lane: "_Lane") -> None:
        self._behind.pop(lane, None)
        if lane.is_open:
            self._open.pop(lane.descriptor, None)  # unless it was not opened whole
            lane.close()

    def close(self) -> None:
        for lane in self._lanes.values():
            self._close(lane)
        self._lanes.clear()
        self._epoll.close()

    # Messages.

    def begin(self, frame: bytes, rest: int) -> "_Incoming | Arrival | None":
        """A message whose header has come, and so many bytes are to come; an error, or None, if it is not wanted."""
        header: Any = None
        try:
            header = messages.decode(frame, FromWorkerData)
            if not self._accepts(header):
                self._refuse(header)
            elif not isinstance(header, Batches):
                return self._mark(header, rest)
            elif header.sizes or rest:  # else nothing is missing, or that would have been an error
                return self._batches(header, rest)
        except msgspec.DecodeError as error:
            return Arrival(None, error=StreamError(f"a data message cannot be read: {error}"))
        except StreamError as error:
            return Arrival(header, error=error)
        return None

    def _batches(self, header: Batches, rest: int) -> "_Incoming":
        if not all(header.sizes):
            raise StreamError(f"worker {header.worker}: a batch has no codec header")
        travelling = travelling_sizes(header)
        body = rest - sum(travelling)
        if body != sum([sizes[0] for sizes in header.sizes]):
            raise StreamError(f"worker {header.worker}: what follows has not the size that was announced")
        try:
            place = bytearray(body) if body < TOGETHER_BYTES else self._allocate(body)
            return _Incoming(header, place, [self._allocate(size) for size in travelling])
        except (MemoryError, ValueError, OSError, OverflowError) as error:
            raise StreamError(f"worker {header.worker}: no memory for a batch of {rest} bytes") from error

    def finish(self, incoming: "_Incoming") -> Arrival:
        """A message of which all has come."""
        header = incoming.header
        if not isinstance(header, Batches):
            return Arrival(header, body=bytes(incoming.body))
        body: Any = incoming.body
        # A slice of bytes is nothing that the garbage collector need look at; a view's is, but not copied.
        body = bytes(body) if len(body) < TOGETHER_BYTES else memoryview(body)
        try:
            return Arrival(header, self._entries(header, body, iter(incoming.parts)))
        except StreamError as error:
            return Arrival(header, error=error)

    def _mark(self, header: Any, rest: int) -> "_Incoming":
        """The end of a shard, or whatever else is no batch."""
        if isinstance(header, Large | Chunk) or rest > DATA_BYTES:
            raise StreamError(f"worker {header.worker}: a message of {rest} bytes that is not one of a lane")
        return _Incoming(header, bytearray(rest))


class _Incoming(msgspec.Struct, frozen=True):
    """A message on its way."""

    header: Any
    body: bytearray | memoryview
    parts: Sequence[memoryview] = ()

    @property
    def places(self) -> list[memoryview]:
        """What is to be filled, the last place first: the next one is popped."""
        return [place for place in (*self.parts[::-1], memoryview(self.body)) if place.nbytes]


class _Lane:
    """One connection: what has come of the current message, and what has not left yet.

    Args:
        lanes: knows what is wanted
        epoll: where it is registered while it is open
        endpoint: ``tcp://IP:port``
    """

    def __init__(self, lanes: Lanes, epoll: select.epoll, endpoint: str) -> None:
        self.endpoint = endpoint
        self.retry_at = 0.0
        """When it may be opened again, of ``time.monotonic``."""
        self.is_open = False
        self._lanes = lanes
        self._epoll = epoll
        self._patience = RECONNECT_MS / 1000
        self._last = b""
        self._where = transport.split_address(endpoint)
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))

    def open(self, hello: bytes) -> None:
        """Begin to connect.

        Raises:
            OSError: it cannot be done.
        """
        host, port = self._where
        ((family, *_, address), *_) = socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM, 0, socket.AI_NUMERICHOST)
        self._socket = socket.socket(family)
        self._socket.setblocking(False)
        self._epoll.register(self._socket, _EVENTS[True])
        self.descriptor = self._socket.fileno()
        self.is_open = True
        self._begin(hello)
        with contextlib.suppress(BlockingIOError):
            self._socket.connect(address)

    def _begin(self, hello: bytes) -> None:
        _prepare(self._socket)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS)
        self._outbox = bytearray(hello + self._last)
        self._waits_for_room = True
        self._low = self._high = 0
        """What has been received in advance lies between them in the scratch."""
        self._incoming: _Incoming | None = None
        self._places: list[memoryview] = []
        self._needed = _PREFIX.size
        """Bytes of the next message that have to be there for a start."""
        self._waste = 0
        """Bytes to come that nobody wants."""
        self._is_behind = False
        """Whether the scratch holds something that ``receive`` has not looked at."""
        self._is_large = True
        """The message is larger than the scratch: little is received in advance."""
        self.is_drained = False
        """Whether nothing can be received before the epoll says so; to try costs more than to wait."""
        self._least = 1
        self._has_come = False
        self._told_at = self._looked_at = 0.0

    # What comes in.

    @property
    def wanted(self) -> int:
        """Bytes of the current message's body and buffers that have not come yet."""
        return sum(map(len, self._places))

    @property
    def has_more(self) -> bool:
        """Whether something has been received that ``receive`` has not looked at."""
        return self.is_open and self._is_behind

    def is_slow(self, now: float) -> bool:
        """Whether a batch is on its way, and nothing has been told of it for a while."""
        return self._awaits_batches and now >= self._looked_at + PROGRESS_S

    @property
    def _awaits_batches(self) -> bool:
        return self._incoming is not None and isinstance(self._incoming.header, Batches)

    def receive(self) -> Arrival | None:
        """The next message, or that a large one is on its way; None if nothing more has come.

        Raises:
            OSError, EOFError: the connection is broken.
            StreamError: what comes is no stream of ours.
        """
        left = READ_BYTES
        while (arrival := self._go_on()) is None:
            if self.is_drained or left <= 0:
                self._is_behind = False
                return self._rest()
            left -= self._fill()
        if self._least > 1:
            self._wake_for(1)
        self._is_behind = self._low < self._high
        self.is_drained |= not self._is_behind
        if arrival.error is None:
            self._patience = RECONNECT_MS / 1000
        return arrival

    def _go_on(self) -> Arrival | None:
        """The next message, if all of it has been received; or an error in its place."""
        while self._incoming is None:
            if self._waste:
                self._skip()
            head = None if self._waste else self._take_head()
            if head is None:
                return None
            error = self._begin_message(*head)
            if error is not None:
                return error
        self._pour()
        if self._places:
            return None
        incoming, self._incoming = self._incoming, None
        return self._lanes.finish(incoming)

    def _skip(self) -> None:
        nbytes = min(self._waste, self._high - self._low)
        self._low += nbytes
        self._waste -= nbytes

    def _take_head(self) -> tuple[bytes, int] | None:
        """The header of the next message, which comes whole into the scratch, and how many bytes follow on it."""
        if self._high - self._low < _PREFIX.size:
            return None
        nbytes, rest = _PREFIX.unpack_from(self._scratch, self._low)
        if not 0 < nbytes <= DATA_BYTES:
            raise StreamError(f"{self.endpoint} sent something that is no message of ours")
        self._needed = _PREFIX.size + nbytes
        end = self._low + self._needed
        if end > self._high:
            return None
        frame = bytes(self._scratch[self._low + _PREFIX.size : end])
        self._low, self._needed = end, _PREFIX.size
        return frame, rest

    def _begin_message(self, frame: bytes, rest: int) -> Arrival | None:
        incoming = self._lanes.begin(frame, rest)
        if isinstance(incoming, _Incoming):
            self._incoming, self._places = incoming, incoming.places
            self._is_large = len(frame) + rest > SCRATCH_BYTES
            return None
        self._waste, self._is_large = rest, False
        return incoming

    def _pour(self) -> None:
        """From the scratch into the message's places."""
        while self._places and self._low < self._high:
            place = self._places[-1]
            nbytes = min(len(place), self._high - self._low)
            place[:nbytes] = self._scratch[self._low : self._low + nbytes]
            self._low += nbytes
            self._filled(nbytes)

    def _filled(self, nbytes: int) -> int:
        """So many bytes have come; returns those that did not belong into the message's places."""
        while self._places and nbytes >= len(self._places[-1]):
            nbytes -= len(self._places.pop())
        if self._places and nbytes:
            self._places[-1] = self._places[-1][nbytes:]
            return 0
        return nbytes

    def _fill(self) -> int:
        """Receive, into the places first; bytes received, none if nothing has come."""
        wanted = self._places[: -FRAMES_AT_ONCE - 1 : -1]
        if len(wanted) < FRAMES_AT_ONCE:
            wanted.append(self._room())
        try:
            nbytes, *_ = self._socket.recvmsg_into(wanted)
        except BlockingIOError:
            self.is_drained = True
            return 0
        if not nbytes:
            raise EOFError
        self.is_drained = nbytes < sum(map(len, wanted))
        self._has_come = True
        self._high += self._filled(nbytes)
        return nbytes

    def _room(self) -> memoryview:
        """Where the next head is received, and as much of what follows as is worth a copy."""
        if self._low == self._high:
            self._low = self._high = 0
        if self._low + self._needed > len(self._scratch):
            begun = bytes(self._scratch[self._low : self._high])
            if self._needed > len(self._scratch):
                self._scratch = memoryview(bytearray(self._needed))
            self._scratch[: len(begun)] = begun
            self._low, self._high = 0, len(begun)
        end = max(self._low + self._needed, LITTLE_BYTES if self._is_large else SCRATCH_BYTES)
        return self._scratch[self._high : end]

    def _rest(self) -> Arrival | None:
        """More is to come."""
        wanted = self.wanted
        self._wake_for(min(wanted, ATTENTION_BYTES) if wanted >= TOGETHER_BYTES else 1)
        if not self._awaits_batches:
            return None
        now = self._looked_at = time.monotonic()
        if not self._has_come or now < self._told_at + PROGRESS_S:
            return None
        self._told_at, self._has_come = now, False
        assert self._incoming is not None
        return Arrival(self._incoming.header)

    def _wake_for(self, nbytes: int) -> None:
        """Not before so much has come."""
        if nbytes != self._least:
            self._least = nbytes
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    # What goes out.

    def tell(self, frame: bytes) -> None:
        """Send a message, now or later. A new connection begins with the last one: credit counts from the start."""
        self._last = frame
        if self.is_open:
            self._outbox += frame
            if len(self._outbox) > UNSENT_BYTES:
                raise OSError("the worker reads nothing")
            if not self._waits_for_room:
                self.flush()

    def flush(self) -> None:
        """Send what fits.

        Raises:
            OSError: the connection is broken, or did not come about.
        """
        with contextlib.suppress(BlockingIOError):
            while self._outbox:
                del self._outbox[: self._socket.send(self._outbox)]
        if self._waits_for_room != bool(self._outbox):
            self._waits_for_room = bool(self._outbox)
            self._epoll.modify(self._socket, _EVENTS[self._waits_for_room])

    def postpone(self, now: float) -> None:
        """It cannot be opened again before a while, which grows until something comes."""
        self.retry_at = now + self._patience
        self._patience = min(2 * self._patience, RECONNECT_MAX_MS / 1000)

    def close(self) -> None:
        self.is_open = False
        self._incoming, self._places = None, []
        _close(self._socket, self._epoll)
