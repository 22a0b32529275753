"""Where sockets are opened, polled and closed, but for ``lanes``; ZeroMQ stays behind it.

A socket belongs to the thread that opened it; ``Waker`` is how any other thread gets that thread's attention. The data
sockets are used by several threads, one at a time, under their owner's lock, which is the memory barrier that ZeroMQ
asks for. Every socket lingers for a chosen time, and every wait has a ``Deadline``.
"""

import contextlib
import errno
import functools
import hashlib
import hmac
import ipaddress
import itertools
import os
import re
import resource
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from enum import Enum
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeAlias

import zmq
from zmq.utils import z85

from rpc_reading_service.errors import AddressError
from rpc_reading_service.floods import Connection as Accepted
from rpc_reading_service.floods import Floods, borrowed
from rpc_reading_service.messages import CHUNK_BYTES, CONTROL_BYTES
from rpc_reading_service.security import CurveKeys, Pair

Frame: TypeAlias = bytes | bytearray | memoryview
Piece: TypeAlias = Frame | zmq.Frame
"""A frame of a message, or one that is libzmq's own."""

DATA_BYTES = CHUNK_BYTES + (64 << 10)
"""Largest frame that the client's data socket accepts."""

HANDSHAKE_BYTES = 4096
"""Largest frame that a worker's data socket accepts: credits at most, but the handshake's commands count."""

ANSWERS_WAITING = 10_000
"""Messages that wait for a client that reads nothing. A client's libzmq reads even while user code holds the GIL, so
only a peer that asks and does not listen comes so far; what a client misses is noticed by counting."""

UNACKNOWLEDGED_MS = 15_000
"""Credit that nobody acknowledges for so long ends its connection; TCP alone would try for a quarter of an hour."""

LOCAL_BUFFER_BYTES = 256 << 10
"""What the system holds of a local connection to a daemon, which needs no large window: it is still read when the
connection has been shut down."""

DESCRIPTORS = 65_536
BACKLOG = 1024
"""Connections that the system holds ready for us: with 100, libzmq's own choice, many at once keep others out."""

EVENTS_AT_ONCE = 500
MESSAGES_AT_ONCE = 100
"""What is taken from a socket, to which any number may come, before everything else gets its turn."""

HEARTBEAT_MS = 4_000
HEARTBEAT_TIMEOUT_MS = 14_000
"""ZMTP heartbeats run in libzmq's own thread, so a process that holds the GIL still answers and one that is stopped, or
whose host vanished, does not. A time-out counts silence between frames.

On the control channel only: libzmq 4.3.5 ends the process (``!_io_error``) if a heartbeat is due on a connection that
was closed by the other end while nothing was taken from it, as on the data channel after ``disconnect``, or at a
high-water mark, which no socket therefore has for what it receives. The data channel has TCP's own."""

HANDSHAKE_MS = 10_000
"""How long a connection may take until its peer is known: idle and slow ones give their descriptor back then."""

BROKEN_OFTEN = 3
"""So many handshakes that the other end broke off, by one socket, are no accident."""

KEEPALIVE = 10, 5, 3
"""Seconds until an idle connection is probed, seconds between probes, probes without an answer that end it."""

RECONNECT_MS = 100
RECONNECT_MAX_MS = 2_000


class Deadline:
    """A point in time that every wait of one public call shares; None never comes.

    Args:
        timeout: seconds from now
    """

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self._end = None if timeout is None else time.monotonic() + timeout

    def __repr__(self) -> str:
        return f"<Deadline {self.timeout} s, {self.remaining()} s left>"

    def remaining(self, at_most: float | None = None) -> float | None:
        """Seconds left, never negative, and not more than ``at_most``."""
        if self._end is None:
            return at_most
        left = max(0.0, self._end - time.monotonic())
        return left if at_most is None else min(left, at_most)

    @property
    def expired(self) -> bool:
        return self._end is not None and time.monotonic() >= self._end


# Addresses.

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?\.?")


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port``, ``[ipv6]:port`` or ``tcp://host:port``.

    Raises:
        AddressError: it is none of them; libzmq itself would accept most of what is refused here, and stay silent.
    """
    text = address.removeprefix("tcp://")
    host, colon, port = text.rpartition(":")
    if not colon:
        raise AddressError(f"worker address {address!r} has no port: write host:port")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if not _is_ipv6(host):
            raise AddressError(f"worker address {address!r}: {host!r} is not an IPv6 address")
    elif ":" in host:
        raise AddressError(f"worker address {address!r}: write an IPv6 address in brackets, as in [::1]:5555")
    elif not _NAME.fullmatch(host):
        raise AddressError(f"worker address {address!r} has no valid host name: write host:port")
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise AddressError(f"worker address {address!r}: the port must be a number from 1 to 65535, not {port!r}")
    return host, int(port)


def _is_ipv6(host: str) -> bool:
    try:
        socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    except OSError:
        return False
    return True


def join_address(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve(address: str) -> list[str]:
    """The IP addresses of a worker address, each joined with its port, in the system's order.

    Raises:
        AddressError: the name does not resolve.
    """
    host, port = split_address(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise AddressError(f"worker address {address!r}: the host name {host!r} does not resolve ({error})") from error
    return list(dict.fromkeys(join_address(str(sockaddr[0]), port) for *_, sockaddr in found))


def probe(address: str, timeout: float = 1.0) -> str | None:
    """Why no TCP connection to an IP address can be made; None if one can."""
    host, port = split_address(address)
    try:
        socket.create_connection((host, port), timeout).close()
    except TimeoutError:
        return "no answer: the host is down, or a firewall drops the packets"
    except ConnectionRefusedError:
        return "connection refused: nothing listens there; start rpc-reading-worker, or mend the port"
    except OSError as error:
        return str(error)
    return None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens on this address or interface."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host in ("localhost", "lo")


_GREETING = b"\xff" + bytes(8) + b"\x7f\x03"
"""The first bytes of a ZMTP/3 greeting: enough to be told the other end's mechanism, and to say none."""

_GREETING_BYTES = 64


def mechanism(address: str, timeout: float = 1.0) -> str | None:
    """What a daemon wants of its peers, ``NULL`` or ``CURVE``; None if that cannot be found out."""
    host, port = split_address(_endpoint(address))
    try:
        with socket.create_connection((host, port), timeout) as connection:
            connection.sendall(_GREETING)
            greeting = b""
            while len(greeting) < _GREETING_BYTES and (more := connection.recv(_GREETING_BYTES)):
                greeting += more
    except OSError:
        return None
    return greeting[12:32].rstrip(b"\0").decode("ascii", "replace") if greeting.startswith(b"\xff") else None


NO_DAEMON = "something answers TCP there, but it is no rpc-reading-worker"


def diagnose(address: str, otherwise: str = NO_DAEMON) -> str:
    """Why a daemon did not answer a greeting, in words for the user; ``otherwise`` if it can be reached."""
    try:
        candidates = resolve(address)
    except AddressError as error:
        return str(error)
    troubles = [probe(candidate) for candidate in candidates]
    return otherwise if None in troubles else troubles[0] or ""


def _endpoint(address: str) -> str:
    """The ZeroMQ endpoint: of several IP addresses the first that accepts (localhost may be ::1 or 127.0.0.1)."""
    candidates = resolve(address)
    if len(candidates) > 1:
        accepting = [candidate for candidate in candidates if probe(candidate) is None]
        candidates = accepting or candidates
    return f"tcp://{candidates[0]}"


# Sockets.


_DOMAIN = b"rpc-reading"
"""Of what asks a ``Gate``: without a domain, libzmq lets in whoever has no key, and might let in whoever has any."""


class Lock(NamedTuple):
    """The keys of one end of a connection; no lock, no encryption.

    Args:
        pair: this end's own
        server: the public key of the end that is connected to; None at that end itself
    """

    pair: Pair
    server: str | None = None

    @classmethod
    def of_client(cls, keys: CurveKeys | None) -> "Lock | None":
        return None if keys is None else cls(keys.pair, keys.server)

    @classmethod
    def binding(cls, pair: Pair | None) -> "Lock | None":
        return None if pair is None else cls(pair)

    def put_on(self, socket_: "zmq.Socket[bytes]") -> None:
        socket_.curve_publickey = self.pair.public.encode()
        socket_.curve_secretkey = self.pair.secret.encode()
        if self.server is not None:
            socket_.curve_serverkey = self.server.encode()
        else:
            socket_.curve_server = True
            socket_.zap_domain = _DOMAIN


class Password(NamedTuple):
    """What the feeds of a session without keys know their own by (PLAIN): others get no further than the handshake.

    It keeps out who cannot see the connection; it is not encrypted, and nothing else is. A connection that broke comes
    back when the gate is answered: not while user code of the worker holds the GIL.

    Args:
        password: that one end shows
        is_asked: whether this is the other end
    """

    password: bytes
    is_asked: bool

    def put_on(self, socket_: "zmq.Socket[bytes]") -> None:
        if self.is_asked:
            socket_.plain_server = True
            socket_.zap_domain = _DOMAIN
        else:
            socket_.plain_username, socket_.plain_password = _DOMAIN, self.password


def _lock_of_session(session: str, pair: Pair | None, connects: bool) -> Lock | Password:
    """For one end of a session's data channels: both have the session's pair, or its password."""
    if pair is None:
        return Password(password(session), is_asked=not connects)
    return Lock(pair, pair.public if connects else None)


def _open(context: "zmq.Context[Any]", kind: int, max_bytes: int, lock: Lock | Password | None) -> "zmq.Socket[bytes]":
    socket_: zmq.Socket[bytes] = context.socket(kind)
    socket_.linger = 0
    socket_.ipv6 = True
    socket_.maxmsgsize = max_bytes
    socket_.sndhwm = socket_.rcvhwm = 0  # windows bound what is in flight; a mark would only block or drop
    if max_bytes == CONTROL_BYTES:
        socket_.heartbeat_ivl = HEARTBEAT_MS
        socket_.heartbeat_timeout = HEARTBEAT_TIMEOUT_MS
    socket_.reconnect_ivl = RECONNECT_MS
    socket_.reconnect_ivl_max = RECONNECT_MAX_MS
    socket_.handshake_ivl = HANDSHAKE_MS
    socket_.backlog = BACKLOG
    socket_.tcp_keepalive = 1
    socket_.tcp_keepalive_idle, socket_.tcp_keepalive_intvl, socket_.tcp_keepalive_cnt = KEEPALIVE
    if lock is not None:
        lock.put_on(socket_)
    return socket_


class Context:
    """Owns the sockets of one client, daemon or worker; closing it closes them all."""

    def __init__(self, io_threads: int = 1) -> None:
        self._context: zmq.Context[Any] = zmq.Context(io_threads)

    def close(self) -> None:
        """Close every socket at once; what they still had to send is lost."""
        self._context.destroy(linger=0)

    def gate(self, admits: Callable[[str, str], bool]) -> "Gate":
        return Gate(self._context, admits)

    def session_gate(self, session: str, pair: Pair | None) -> "Gate":
        """For a worker: lets in those who belong to its session."""
        key = password(session) if pair is None else pair.public.encode()
        return self.gate(lambda shown, _address: hmac.compare_digest(shown.encode(), key))

    def dealer(self, address: str, keys: CurveKeys | None = None) -> "Dealer":
        return Dealer(self._context, address, keys)

    def router(self, host: str, port: int, pair: Pair | None = None) -> "Router":
        return Router(self._context, host, port, pair)

    def pull(self, session: str, pair: Pair | None = None) -> "Pull":
        return Pull(self._context, session, pair)

    def push(self, session: str, pair: Pair | None, host: str, ports: Iterable[int]) -> "Push":
        return Push(self._context, session, pair, host, ports)

    def feed_router(self, session: str, pair: Pair | None, host: str, ports: Iterable[int]) -> "FeedRouter":
        return FeedRouter(self._context, session, pair, host, ports)

    def feed_dealer(self, session: str, pair: Pair | None, worker: int, address: str, port: int) -> "FeedDealer":
        return FeedDealer(self._context, session, pair, worker, address, port)


def allow_connections() -> None:
    """Let this process have as many descriptors as the system allows it, so that strangers cannot use them up soon."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if most == resource.RLIM_INFINITY else min(DESCRIPTORS, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


class Gate:
    """Where libzmq asks, for each connection to the daemon or to a worker, whether its peer is let in (ZAP).

    Until it is answered nothing is read from the connection but its handshake.

    It must be there before those sockets are, and belongs to the thread that calls ``answer``.

    Args:
        admits: whether a peer with this public key or password, empty if it has neither, at this IP address, is let in
    """

    def __init__(self, context: "zmq.Context[Any]", admits: Callable[[str, str], bool]) -> None:
        self._admits = admits
        self._socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind("inproc://zeromq.zap.01")
        self.raw = int(self._socket.fd)
        """A descriptor, as ``Push.raw``: readable when somebody has begun to ask."""

    def answer(self) -> None:
        """Answer whoever has been asking.

        All of them, since each that waits takes 50 KB: strangers cannot ask as fast as they are answered.
        """
        for request in _drain(self._socket):
            *first, last = self._answer(*request)
            for frame in first:
                self._socket.send(frame, _MORE)
            self._socket.send(last)

    def _answer(
        self, version: bytes, request: bytes, _domain: bytes, address: bytes, _name: bytes, mechanism: bytes,
        *credentials: bytes,
    ) -> list[bytes]:  # fmt: skip
        user = z85.encode(b"".join(credentials)) if mechanism == b"CURVE" else b""
        shown = credentials[1] if mechanism == b"PLAIN" else user
        admitted = self._admits(shown.decode("ascii", "replace"), address.decode())
        return [version, request, *((b"200", b"let in") if admitted else (b"400", b"not on the list")), user, b""]

    def close(self) -> None:
        self._socket.close(linger=0)


class Failure(Enum):
    """Why two ends of a connection could not agree on who they are; libzmq tells nobody but its monitor."""

    REFUSED = "the client's key is not on the list"
    MISMATCH = "one end has keys, the other has none"
    WRONG_KEY = "the server has another key than the client expects"
    BROKEN = "the handshake was broken off"


def _watched(has_keys: bool) -> int:
    """Which events a monitor of a control socket hears of.

    With keys, not of HANDSHAKE_FAILED_PROTOCOL: libzmq 4.3.5 has that event for a message that cannot be decrypted,
    too, and, having told it, takes the message for one that has to wait: the connection would stay, and be deaf.
    """
    events = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
    events |= zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    return events if has_keys else events | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class Event(NamedTuple):
    """What a monitor tells."""

    kind: int
    value: int
    """The connection's descriptor; of a handshake that failed, the reason."""


_EVENT = struct.Struct("=Hi")


def _events(monitor: "zmq.Socket[bytes]") -> Iterator[Event]:
    """What has happened; pyzmq's own way to read it takes three times as long."""
    for event, _address in _drain(monitor):
        yield Event._make(_EVENT.unpack(event))


def _failure(event: Event) -> Failure | None:
    """What a monitor's event says about a handshake; None if it is no failed one."""
    match event.kind:
        case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return Failure.REFUSED
        case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL if event.value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            return Failure.MISMATCH
        case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            return Failure.BROKEN
    return None


def _monitor(socket_: "zmq.Socket[bytes]", events: int) -> "zmq.Socket[bytes]":
    """Where a socket's events can be read.

    Without a mark, which pyzmq's own would have: libzmq's thread waits, with a lock held that ``close`` needs, if a
    thousand events have not been read.
    """
    address = f"inproc://events-of-{int(socket_.fd)}"
    socket_.monitor(address, events)
    monitor: zmq.Socket[bytes] = socket_.context.socket(zmq.PAIR)
    monitor.linger = 0
    monitor.rcvhwm = 0
    monitor.connect(address)
    return monitor


def keys_trouble(failure: Failure, keys: CurveKeys | None) -> str | None:
    """Why client and daemon do not come together, in words for the user; None if keys have nothing to do with it."""
    match failure:
        case Failure.MISMATCH if keys is None:
            return "it wants keys, and none are given here: give keys=DIR, or set RPC_READING_KEYS"
        case Failure.MISMATCH:
            return "it has no keys, and keys are given here: start it with --keys DIR, or leave them out here"
        case Failure.REFUSED if keys is not None:
            return (
                f"it does not let this client in: put its public key {keys.pair.public} (client.pub) into the folder "
                "allowed of the daemon's keys"
            )
        case Failure.WRONG_KEY if keys is not None:
            return f"it has another key than {keys.server} (server.pub): copy server.pub from the daemon's keys"
    return None


class Dealer:
    """The client's end of the control channel to one daemon."""

    def __init__(self, context: "zmq.Context[Any]", address: str, keys: CurveKeys | None) -> None:
        endpoint = _endpoint(address)
        self.address = address
        self._mechanism = "NULL" if keys is None else "CURVE"
        self._broken = 0
        self._socket = _open(context, zmq.DEALER, CONTROL_BYTES, Lock.of_client(keys))
        self._monitor = _monitor(self._socket, _watched(keys is not None))
        self._up = False
        self._socket.connect(endpoint)

    @property
    def raw(self) -> Any:
        return self._socket

    @property
    def raw_monitor(self) -> Any:
        return self._monitor

    def send(self, frames: Sequence[Frame]) -> bool:
        """False if nothing was sent: what listens there is no daemon, and libzmq has given it up for good."""
        return _send(self._socket, frames)

    def receive_all(self) -> Iterator[list[bytes]]:
        yield from _drain(self._socket)

    def events(self) -> tuple[bool, Failure | None]:
        """Whether the connection broke since the last call, and why none came about."""
        dropped, failed = False, None
        for event in _events(self._monitor):
            failed = _failure(event) or failed
            if event.kind == zmq.EVENT_DISCONNECTED:
                dropped = True
                failed = failed or (None if self._up else Failure.BROKEN)
            self._up = event.kind == zmq.EVENT_HANDSHAKE_SUCCEEDED
        return dropped, failed

    def look_closer(self) -> Failure:
        """Why the other end broke the handshake off.

        A daemon that is not ready yet does so after ``HANDSHAKE_MS``, one with another key each time that libzmq tries.
        """
        theirs = mechanism(self.address)
        if theirs in ("NULL", "CURVE") and theirs != self._mechanism:
            return Failure.MISMATCH
        self._broken += theirs == "CURVE"
        return Failure.WRONG_KEY if self._broken >= BROKEN_OFTEN else Failure.BROKEN

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)


class Request(NamedTuple):
    """One message from a client."""

    identity: bytes
    """Where an answer goes."""
    connection: int
    """Descriptor of the connection, while it lasts; ``Router.events`` names connections by it."""
    user: str
    """The client's public key; empty without keys."""
    peer: str
    """The client's IP address."""
    frames: list[bytes]


class _Guarded:
    """A socket that others connect to; what strangers make it hold is bounded."""

    def __init__(self, socket_: "zmq.Socket[bytes]", events: int = zmq.EVENT_DISCONNECTED) -> None:
        self._socket = socket_
        self._monitor = _monitor(socket_, zmq.EVENT_ACCEPTED | events)
        self._floods = Floods()

    @property
    def raw_monitor(self) -> Any:
        return self._monitor

    def has_strangers(self, trusted: Container[int]) -> bool:
        """Whether ``cut_floods`` has to be called again soon."""
        self._hear()
        return bool(self._floods.strangers(trusted))

    def cut_floods(self, trusted: Container[int]) -> list[tuple[str, str]]:
        """Shut down connections that bring too much, unless they are trusted; returns their IP addresses, and why."""
        self._hear()
        return self._floods.cut(trusted, time.monotonic())

    def _hear(self) -> None:
        """Who has come and gone; more may wait, since some come back without end."""
        for event in itertools.islice(_events(self._monitor), EVENTS_AT_ONCE):
            if event.kind == zmq.EVENT_ACCEPTED:
                self._floods.accepted(event.value, _peer(event.value))
            elif event.kind == zmq.EVENT_DISCONNECTED:
                self._gone(event, self._floods.dropped(event.value))
            else:
                self._gone(event, None)

    def _gone(self, event: Event, connection: Accepted | None) -> None:
        """Something else than a new connection."""

    def _message(self, most: int) -> list[zmq.Frame] | None:
        """The next message, of whose frames after so many none is kept; None if nothing has arrived."""
        try:
            frames = [self._socket.recv(zmq.NOBLOCK, copy=False)]
        except zmq.Again:
            return None
        frame, nbytes = frames[0], 0
        while frame.more:
            frame = self._socket.recv(copy=False)
            nbytes += _on_the_wire(frame)
            if len(frames) < most:
                frames.append(frame)
        self._floods.read(_connection(frame), nbytes)
        return frames

    def close(self, linger: float = 0.0) -> None:
        """Close; what is on its way gets ``linger`` seconds."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=int(linger * 1000))


def _on_the_wire(frame: zmq.Frame) -> int:
    """Bytes of a frame with its header."""
    nbytes = len(frame)
    return nbytes + (2 if nbytes < 256 else 9)


class Router(_Guarded):
    """The daemon's end of the control channel to all its clients; its context must have a ``Gate``.

    Raises:
        OSError: the port is taken, or the host is not one of this machine's.
    """

    def __init__(self, context: "zmq.Context[Any]", host: str, port: int, pair: Pair | None) -> None:
        socket_ = _open(context, zmq.ROUTER, CONTROL_BYTES, Lock.binding(pair))
        socket_.zap_domain = _DOMAIN
        socket_.sndhwm = ANSWERS_WAITING
        if is_loopback(host):
            socket_.rcvbuf = LOCAL_BUFFER_BYTES
        super().__init__(socket_, _watched(pair is not None) & ~zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._events: deque[tuple[Event, Accepted | None]] = deque()
        self.behind = False
        """Whether ``receive_all`` has left something."""
        self._heard: set[int] = set()
        self._failed: Failure | None = None
        self.port = _bind(self._socket, host, [port])

    @property
    def raw(self) -> Any:
        return self._socket

    @property
    def heard(self) -> Container[int]:
        """Connections that something has been read from; with keys, those whose peer is known."""
        return self._heard

    def send(self, identity: bytes, frames: Sequence[Frame]) -> None:
        """To one client; a client that is gone gets nothing, and no error."""
        self._socket.send_multipart([identity, *frames], zmq.NOBLOCK, copy=False)

    def receive_all(self, at_most: int) -> Iterator[Request]:
        """What has arrived, but for what was left behind by connections that were shut down."""
        self.behind = True
        for _ in range(at_most):
            frames = self._message(_REQUEST_FRAMES)
            if frames is None:
                self.behind = False
                return
            last = frames[-1]
            if self._floods.is_cut(_connection(last)):
                continue
            self._heard.add(_connection(last))
            known = _property(last, "User-Id"), _property(last, "Peer-Address")
            yield Request(frames[0].bytes, _connection(last), *known, [frame.bytes for frame in frames[1:]])

    def events(self) -> tuple[list[int], list[tuple[str, Failure]]]:
        """Connections that broke since the last call, and who could not connect, by IP address."""
        self._hear()
        dropped: list[int] = []
        failed: list[tuple[str, Failure]] = []
        while self._events:
            event, connection = self._events.popleft()
            if event.kind != zmq.EVENT_DISCONNECTED:
                self._failed = _failure(event)
                continue
            peer, failure = connection.peer if connection else _GONE, self._failed
            dropped.append(event.value)
            if failure is None and event.value not in self._heard:
                failure = Failure.BROKEN
            if failure not in (None, Failure.REFUSED):  # the two events of one connection follow on one another
                failed.append((peer, failure))
            self._failed = None
            self._heard.discard(event.value)
        return dropped, failed

    def _gone(self, event: Event, connection: Accepted | None) -> None:
        """To be told of when everything has been read that came before it."""
        self._events.append((event, connection))


_REQUEST_FRAMES = 3
"""The sender's name, a message, a payload."""

_GONE = "a peer that was gone at once"


def _peer(connection: int) -> str:
    """The IP address at the other end, unless it is gone already."""
    try:
        with borrowed(connection) as ours:
            return str(ours.getpeername()[0]).removeprefix("::ffff:")
    except (OSError, IndexError):
        return _GONE


def _property(frame: zmq.Frame, name: str) -> str:
    try:
        return str(frame.get(name)).removeprefix("::ffff:")
    except zmq.ZMQError:
        return ""


def _connection(frame: zmq.Frame) -> int:
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1  # bytes that look like ZMTP/1.0: from no client of ours


_POLLIN, _MORE = int(zmq.POLLIN), int(zmq.SNDMORE)
_EVENTS, _RCVMORE = int(zmq.EVENTS), int(zmq.RCVMORE)
"""For each message: as attributes of a socket they take pyzmq 3 us, and to find in vain that nothing came, 5."""


def _has_news(socket_: "zmq.Socket[bytes]") -> bool:
    """Whether something can be received."""
    return bool(int(socket_.get(_EVENTS)) & _POLLIN)


class _Reading:
    """A socket that data messages are read from, frame by frame."""

    _socket: "zmq.Socket[bytes]"

    @property
    def raw(self) -> Any:
        return self._socket

    def receive(self) -> bytes | None:
        """The first frame of the next message; None if nothing has arrived."""
        return self._socket.recv(zmq.NOBLOCK) if _has_news(self._socket) else None

    @property
    def more(self) -> bool:
        """Whether the current message has a further frame."""
        return bool(self._socket.get(_RCVMORE))

    def receive_frame(self) -> bytes:
        """A further frame of the current message."""
        return self._socket.recv()

    def receive_into(self, place: Any) -> int:
        """A further frame, written into a writable buffer; returns the frame's size, which may be larger."""
        return int(self._socket.recv_into(place))

    def skip(self) -> None:
        """Drop what is left of the current message."""
        while self._socket.get(_RCVMORE):
            self._socket.recv_into(bytearray())

    def close(self) -> None:
        self._socket.close(linger=0)


@functools.lru_cache(maxsize=1024)  # a dispatching worker asks for each message
def _secret_name(session: str, what: str) -> bytes:
    """The name under which a socket of a session is sent to: only who knows the session can tell it.

    It begins with a letter, since libzmq keeps names that begin with a zero for itself.
    """
    return b"s" + hashlib.sha256(f"{what} of {session}".encode()).digest()


def password(session: str) -> bytes:
    """What is shown at a data port without keys: only who knows the session can tell it."""
    return _secret_name(session, "password").hex().encode()


class DataConnection(NamedTuple):
    """One of a client's connections."""

    endpoint: str
    name: bytes
    """By which it is sent to: for none but this connection, ever."""


class Pull(_Reading):
    """The client's data socket: every worker's stream arrives here, and what it is told goes back.

    A ROUTER, so that each worker can be told something by itself; workers send to it by its name. It is not
    ``immediate``: libzmq 4.3.5 would drop what has arrived by a connection that breaks, and end the process
    (``!_more``) if that was within a message.
    """

    def __init__(self, context: "zmq.Context[Any]", session: str, pair: Pair | None) -> None:
        self._socket = _open(context, zmq.ROUTER, DATA_BYTES, _lock_of_session(session, pair, connects=True))
        self._socket.tcp_maxrt = UNACKNOWLEDGED_MS
        self._socket.routing_id = _secret_name(session, "client")
        self._connected = itertools.count(1)

    @property
    def raw(self) -> int:
        """A descriptor, readable when something may have happened; see ``Push.raw``."""
        return int(self._socket.fd)

    def connect(self, endpoint: str) -> DataConnection:
        """To a worker's data port; see ``beside``."""
        connection = DataConnection(endpoint, b"w%d" % next(self._connected))
        self._socket.setsockopt(zmq.CONNECT_ROUTING_ID, connection.name)
        self._socket.connect(connection.endpoint)
        return connection

    def receive(self) -> bytes | None:
        """The first frame of the next message, after the name of its connection; None if nothing has arrived."""
        return None if super().receive() is None else self.receive_frame()

    def send(self, connection: DataConnection, frame: bytes) -> None:
        """To one worker; nothing is sent if the connection is broken."""
        try:
            _send(self._socket, [connection.name, frame])
        except BaseException:  # Ctrl-C between the two: without an end, the next message would be taken for the rest
            self._socket.send(b"", zmq.NOBLOCK)
            raise

    def disconnect(self, connection: DataConnection) -> None:
        try:
            self._socket.disconnect(connection.endpoint)
        except zmq.ZMQError as error:
            if error.errno != errno.ENOENT:  # what listens there broke the handshake, and libzmq has given it up
                raise


class FeedDealer(_Reading):
    """A worker's end of the stream that a dispatching worker feeds it."""

    def __init__(
        self, context: "zmq.Context[Any]", session: str, pair: Pair | None, worker: int, address: str, port: int
    ) -> None:
        self._socket = _open(context, zmq.DEALER, DATA_BYTES, _lock_of_session(session, pair, connects=True))
        self._socket.routing_id = _secret_name(session, f"worker {worker}")
        self._monitor = _monitor(self._socket, zmq.EVENT_DISCONNECTED)
        self._socket.connect(beside(address, port))

    @property
    def raw_monitor(self) -> Any:
        return self._monitor

    def dropped(self) -> bool:
        """Whether the connection broke since the last call."""
        return sum(1 for _ in _drain(self._monitor)) > 0

    def send(self, frames: Sequence[Frame]) -> bool:
        """False if nothing was sent."""
        return _send(self._socket, frames)


class FeedRouter:
    """The dispatching worker's end of the streams to all the others.

    Raises:
        OSError: none of the ports is free.
    """

    def __init__(
        self, context: "zmq.Context[Any]", session: str, pair: Pair | None, host: str, ports: Iterable[int]
    ) -> None:
        self._session = session
        self._socket = _open_to_session(context, session, pair)
        self.port = _bind(self._socket, host, ports)

    @property
    def raw(self) -> Any:
        return self._socket

    def receive_all(self) -> Iterator[list[bytes]]:
        """What the workers send, without their names; more may wait."""
        for frames in itertools.islice(_drain(self._socket), MESSAGES_AT_ONCE):
            yield frames[1:]

    def send(self, worker: int, frames: Sequence[Piece]) -> None:
        """To one worker; it has connected, or nothing would be sent to it."""
        _send(self._socket, [_secret_name(self._session, f"worker {worker}"), *frames])


def _open_to_session(context: "zmq.Context[Any]", session: str, pair: Pair | None) -> "zmq.Socket[bytes]":
    """A ROUTER that sends to peers of the session by their secret names; its context must have a ``session_gate``.

    A name that connects again is known at its new connection (``router_handover``): the old one may be half open.
    """
    socket_ = _open(context, zmq.ROUTER, HANDSHAKE_BYTES, _lock_of_session(session, pair, connects=False))
    socket_.router_mandatory = True
    socket_.router_handover = True
    return socket_


def beside(address: str, port: int) -> str:
    """The endpoint of another port on a daemon's host.

    Raises:
        AddressError: the host's name does not resolve any more.
    """
    host, daemon_port = split_address(address)
    ip, _ = split_address(_endpoint(join_address(host, daemon_port)))
    return f"tcp://{join_address(ip, port)}"


class Copied:
    """Bytes of somebody else's, copied straight into the frames that they leave in.

    libzmq frees those itself. Frames that show memory of ours would each have to be followed by a thread of pyzmq's,
    which takes longer than to copy 344 KB.

    Args:
        data: of format ``B``

    Raises:
        MemoryError: there is no room for it.
    """

    def __init__(self, data: memoryview) -> None:
        self.nbytes = data.nbytes
        starts = range(0, self.nbytes, CHUNK_BYTES) or [0]
        try:
            self.frames = [zmq.Frame(data[start : start + CHUNK_BYTES], copy=True) for start in starts]
            """Each of ``CHUNK_BYTES``, but for the last."""
        except zmq.ZMQError as error:
            if error.errno != errno.ENOMEM:
                raise
            raise MemoryError(f"there is no room to send {self.nbytes:,} bytes") from error


def _send(socket_: "zmq.Socket[bytes]", frames: Sequence[Piece]) -> bool:
    try:
        socket_.send_multipart(frames, zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return False
    except zmq.ZMQError as error:
        if error.errno != zmq.EHOSTUNREACH:
            raise
        return False  # nobody of that name is connected
    return True


class Push:
    """A worker's data socket: sends to its session's client, and to nobody else who connects.

    Raises:
        OSError: none of the ports is free.
    """

    tells_once = True
    """Whether ``raw`` does not tell again of news that nobody has heard."""
    connections = 0
    """libzmq does not tell when the client comes again."""

    def __init__(
        self, context: "zmq.Context[Any]", session: str, pair: Pair | None, host: str, ports: Iterable[int]
    ) -> None:
        self._client = _secret_name(session, "client")
        self._socket = _open_to_session(context, session, pair)
        self.port = _bind(self._socket, host, ports)

    @property
    def raw(self) -> Any:
        """A descriptor, readable when something may have happened: the client has connected, or says something.

        Not the socket itself, as polling that costs a fifth of the CPU time of a batch of 32 B. Whatever is done with
        the socket may take the descriptor's news with it, so that ``receive_all`` has to be called now and then.
        """
        return self._socket.fd

    def receive_all(self) -> Iterator[bytes]:
        """What the client says. Also takes notice that it has connected."""
        while _has_news(self._socket):
            ours = self._socket.recv() == self._client
            while self._socket.rcvmore:
                frame = self._socket.recv()
                if ours:
                    yield frame

    def send(self, frames: Sequence[Piece]) -> bool:
        """False if the client is not connected, and nothing was sent; ``raw`` tells when it is."""
        return _send(self._socket, [self._client, *frames])

    def close(self) -> None:
        self._socket.close(linger=0)


def _bind(socket_: "zmq.Socket[bytes]", host: str, ports: Iterable[int]) -> int:
    error: OSError = OSError(f"no port to bind on {host}")
    for port in ports:
        try:
            socket_.bind(f"tcp://{join_address(host, port) if port else _wildcard(host)}")
        except zmq.ZMQError as zmq_error:
            error = OSError(
                zmq_error.errno, f"cannot bind {join_address(host, port)}: {os.strerror(zmq_error.errno or 0)}"
            )
            continue
        return split_address(socket_.getsockopt_string(zmq.LAST_ENDPOINT))[1]
    raise error


def _wildcard(host: str) -> str:
    return f"[{host}]:*" if ":" in host else f"{host}:*"


def _drain(socket_: Any) -> Iterator[list[bytes]]:
    """What has arrived. Frames tell whether more follow in a fifth of the time that the socket takes to be asked."""
    while True:
        try:
            frame = socket_.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return
        frames = [frame.bytes]
        while frame.more:
            frame = socket_.recv(copy=False)
            frames.append(frame.bytes)
        yield frames


# Waiting.


class Waker:
    """Wakes a thread that waits in ``Poller.wait``, from any other thread or from a signal handler."""

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)

    @property
    def raw(self) -> socket.socket:
        return self._receiver

    def fileno(self) -> int:
        """Of the end to write to, for ``signal.set_wakeup_fd``."""
        return self._sender.fileno()

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake already; closed: it needs no waking any more
            self._sender.send(b"\0")

    def clear(self) -> bytes:
        """Forget the calls so far; returns one byte for each: signal numbers, or zeros."""
        try:
            return self._receiver.recv(4096)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        self._receiver.close()
        self._sender.close()


class Poller:
    """Waits for any of a set of things: sockets, pipes, process sentinels."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()

    def watch(self, raw: Any, writable: bool = False) -> None:
        """Until it is readable; with ``writable``, or writable."""
        self._poller.register(raw, zmq.POLLIN | zmq.POLLOUT if writable else zmq.POLLIN)

    def forget(self, raw: Any) -> None:
        self._poller.unregister(raw)

    def wait(self, seconds: float) -> set[Any]:
        """Those that are ready: sockets themselves, file descriptors for anything else."""
        return {raw for raw, _ in self._poller.poll(max(0, int(seconds * 1000 + 0.999)))}


class Descriptors:
    """Waits as ``Poller`` does, in a quarter of the time, but not for ZeroMQ's sockets."""

    def __init__(self) -> None:
        self._poll = select.poll()

    def watch(self, raw: Any) -> None:
        """A descriptor, or what has one."""
        self._poll.register(raw, select.POLLIN)

    def wait(self, seconds: float) -> list[int]:
        """The descriptors that are ready."""
        return [descriptor for descriptor, _ in self._poll.poll(max(0, int(seconds * 1000 + 0.999)))]


class Channel:
    """Messages between the daemon and a worker process, over a socket pair: ``[message]`` or with a payload.

    It has no name that anybody else could connect to. The daemon never waits for a worker here, which may be stopped in
    the middle of a message: what does not fit waits for ``flush``, what has come in part waits for the rest.
    """

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        self._socket.setblocking(False)
        connection.close()
        self._outbox = bytearray()
        self._inbox = bytearray()

    @property
    def raw(self) -> int:
        return self._socket.fileno()

    @property
    def unsent(self) -> int:
        """Bytes that wait for ``flush``."""
        return len(self._outbox)

    def send(self, frames: Sequence[Frame]) -> bool:
        """False if the other end is gone."""
        self._outbox += _SIZES.pack(*(memoryview(frame).nbytes for frame in (*frames, b"")[:2]))
        for frame in frames:
            self._outbox += frame
        return self.flush()

    def flush(self) -> bool:
        """Send what fits; False if the other end is gone."""
        try:
            while self._outbox:
                del self._outbox[: self._socket.send(self._outbox)]
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True

    def send_whole(self, frames: Sequence[Frame]) -> None:
        """As ``send``, but wait until all of it has left, or the other end is gone."""
        poller = select.poll()
        poller.register(self._socket, select.POLLOUT)
        alive = self.send(frames)
        while alive and self._outbox:
            poller.poll()
            alive = self.flush()

    def receive_all(self) -> Iterator[list[bytes]]:
        """What has arrived.

        Raises:
            EOFError: the other end is gone.
        """
        is_open = True
        while is_open and (data := self._read()) is not None:
            is_open = bool(data)
            self._inbox += data
        yield from self._messages()
        if not is_open:
            raise EOFError("the other end is gone")

    def _read(self) -> bytes | None:
        """Empty at the end, None if there is nothing now."""
        try:
            return self._socket.recv(_CHANNEL_READ)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def _messages(self) -> Iterator[list[bytes]]:
        """The whole messages that have come."""
        while len(self._inbox) >= _SIZES.size:
            first, second = _SIZES.unpack_from(self._inbox)
            end = _SIZES.size + first + second
            if len(self._inbox) < end:
                return
            body = bytes(self._inbox[_SIZES.size : end])
            del self._inbox[:end]
            yield [body[:first], body[first:]] if second else [body]

    def close(self) -> None:
        self._socket.close()


_SIZES = struct.Struct("<QQ")
_CHANNEL_READ = 1 << 18
