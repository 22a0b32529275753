"""What strangers may make a process hold: bytes that they have sent and that nobody has read yet.

libzmq reads from every connection as fast as it can, and keeps what it has read. Its own mark for that (``RCVHWM``)
does not count the frames of a message that never ends, and may end the process (``transport.HEARTBEAT_TIMEOUT_MS``). So
the kernel is asked how much each connection has brought; what has been read of it is known; and if the difference is
too much for all connections together, those that bring most are shut down. They leave behind what libzmq has read of
them already; a daemon lets nobody new in before that has been read (``transport.Gate``).

A connection alone costs some 40 KB, so that their number is bounded, too.
"""

import ctypes
import socket
import struct
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

MOST_UNREAD_BYTES = 256 << 10
"""For all strangers together. A message of one byte takes three on the wire and twenty times as much in memory."""

MOST_STRANGERS = 2000
"""The oldest leave first: who is of good will has a session soon."""

CHECK_S = 0.02
"""How often to look while there are strangers: what they send within it comes on top."""

HANDSHAKE_BYTES = 1024
"""More than the greeting and the handshake of any connection."""

HEARTBEAT_BYTES_PER_S = 16
"""More than ZMTP's heartbeats, which nobody reads but libzmq."""

TOO_MUCH = "sends more than can be read"
TOO_MANY = f"more than {MOST_STRANGERS} others have none"

_BYTES_RECEIVED = struct.Struct("=128xQ")
"""``tcpi_bytes_received`` in Linux's ``struct tcp_info``."""


@dataclass
class Connection:
    """One connection, from the time it was accepted."""

    peer: str
    """Its IP address."""
    read: int = 0
    """Bytes of it that have been read, headers of frames included."""
    own: float = 0.0
    """Bytes that are taken for libzmq's own."""
    more_own: float = HANDSHAKE_BYTES
    """Bytes that may be taken for that from now on: who brings nothing saves nothing up for later."""
    checked: float = field(default_factory=time.monotonic)

    def unread(self, received: int, now: float) -> int:
        """Bytes that wait, not counting what is libzmq's own."""
        self.more_own = min(HANDSHAKE_BYTES, self.more_own + HEARTBEAT_BYTES_PER_S * (now - self.checked))
        self.checked = now
        waiting = received - self.read - self.own
        own = min(waiting, self.more_own)  # negative, if what was taken for that has been read meanwhile
        self.own += own
        self.more_own -= own
        return int(waiting - own)


class Floods:
    """Watches the connections of one socket; they are named by their descriptors."""

    def __init__(self, most: int = MOST_UNREAD_BYTES) -> None:
        self._most = most
        self._connections: dict[int, Connection] = {}
        self._cut: set[int] = set()

    def accepted(self, descriptor: int, peer: str) -> None:
        self._connections.pop(descriptor, None)  # the new one is the newest
        self._connections[descriptor] = Connection(peer)
        self._cut.discard(descriptor)

    def dropped(self, descriptor: int) -> Connection | None:
        return self._connections.pop(descriptor, None)

    def read(self, descriptor: int, nbytes: int) -> None:
        if connection := self._connections.get(descriptor):
            connection.read += nbytes

    def strangers(self, trusted: Container[int]) -> list[int]:
        """The connections that are watched: all but the trusted ones and those that were shut down."""
        return [each for each in self._connections if each not in trusted and each not in self._cut]

    def is_cut(self, descriptor: int) -> bool:
        """Whether a message came by a connection that was shut down: nobody has to look at it."""
        return descriptor in self._cut

    def cut(self, trusted: Container[int], now: float) -> list[tuple[str, str]]:
        """Shut down what is too much; returns the IP address of each that was, and why."""
        # Of the trusted ones as well, whose heartbeats would count at once on the day that they are not.
        unread = {each: one.unread(received(each), now) for each, one in self._connections.items()}
        strangers = self.strangers(trusted)
        excess = dict.fromkeys(strangers[: max(0, len(strangers) - MOST_STRANGERS)], TOO_MANY)
        excess |= dict.fromkeys(self._loudest({each: unread[each] for each in strangers}), TOO_MUCH)
        self._cut.update(excess)
        return [(self._connections[each].peer, why) for each, why in excess.items() if shut_down(each)]

    def _loudest(self, unread: dict[int, int]) -> list[int]:
        """Without whom the others are within the bound."""
        total, loudest = sum(unread.values()), []
        for each in sorted(unread, key=unread.__getitem__, reverse=True):
            if total <= self._most:
                break
            total -= unread[each]
            loudest.append(each)
        return loudest


@contextmanager
def borrowed(descriptor: int) -> Iterator[socket.socket]:
    """A connection that belongs to libzmq.

    Raises:
        OSError: it is gone.
    """
    connection = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=descriptor)
    try:
        yield connection
    finally:
        connection.detach()


def received(descriptor: int) -> int:
    """Bytes that a TCP connection has brought; 0 if it is none, or is gone."""
    with suppress(OSError, struct.error), borrowed(descriptor) as connection:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size)
        return int(_BYTES_RECEIVED.unpack(info)[0])
    return 0


_libc = ctypes.CDLL(None)

_NOBODY = bytes(16)
"""A ``struct sockaddr`` of AF_UNSPEC."""


def shut_down(descriptor: int) -> bool:
    """End a connection that belongs to libzmq, which notices and closes it; False if it is gone already.

    What the kernel still has of it is thrown away. After ``shutdown`` libzmq would go on and read it.
    """
    with suppress(OSError), borrowed(descriptor) as connection:
        connection.getpeername()
        return int(_libc.connect(descriptor, _NOBODY, len(_NOBODY))) == 0
    return False
