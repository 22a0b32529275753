"""What strangers may make a process hold: bytes that they have sent and that nobody has read yet.

libzmq reads from every connection as fast as it can, and keeps what it has read. Its own mark for that (``RCVHWM``)
does not count the frames of a message that never ends, and may end the process (``transport.HEARTBEAT_TIMEOUT_MS``). So
the kernel is asked how much each connection has brought; what has been read of it is known; and if the difference is
too much for all connections together, those that bring it are shut down. What they have left behind counts until it has
been read; a daemon lets nobody new in before that (``transport.Gate``).
"""

import os
import socket
import struct
import time
from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass, field

MOST_UNREAD_BYTES = 2 << 20
"""For all strangers together. A message of one byte takes three on the wire and twenty times as much in memory."""

HARMLESS_BYTES = 64 << 10
"""Who has brought less is not shut down for what others have brought."""

CHECK_S = 0.1
"""How often to look while there are strangers: what they send within it comes on top."""

HANDSHAKE_BYTES = 1024
"""More than the greeting and the handshake of any connection."""

HEARTBEAT_BYTES_PER_S = 16
"""More than ZMTP's heartbeats, which nobody reads but libzmq."""

_BYTES_RECEIVED = struct.Struct("=128xQ")
"""``tcpi_bytes_received`` in Linux's ``struct tcp_info``."""


@dataclass
class Connection:
    """One connection, from the time it was accepted."""

    peer: str
    """Its IP address."""
    since: float = field(default_factory=time.monotonic)
    read: int = 0
    """Bytes of it that have been read, headers of frames included."""

    def unread(self, received: int, now: float) -> int:
        """Bytes that wait, not counting what is libzmq's own."""
        own = HANDSHAKE_BYTES + int(HEARTBEAT_BYTES_PER_S * (now - self.since))
        return max(0, received - self.read - own)


class Floods:
    """Watches the connections of one socket; they are named by their descriptors."""

    def __init__(self, most: int = MOST_UNREAD_BYTES) -> None:
        self._most = most
        self._connections: dict[int, Connection] = {}
        self._cut: set[int] = set()
        self._left = 0

    def accepted(self, descriptor: int, peer: str) -> None:
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

    def cut(self, trusted: Container[int]) -> list[str]:
        """Shut down what is too much; returns the IP address of each that was."""
        excess = self._excess(trusted)
        self._cut.update(excess)
        self._left += sum(excess.values())
        return [self._connections[descriptor].peer for descriptor in excess if shut_down(descriptor)]

    def everything_is_read(self) -> None:
        """Of those that were shut down, too."""
        self._left = 0

    def _excess(self, trusted: Container[int]) -> dict[int, int]:
        """If all together are beyond the bound: those that are not harmless, and the bytes of each."""
        now = time.monotonic()
        unread = {each: self._connections[each].unread(received(each), now) for each in self.strangers(trusted)}
        if self._left + sum(unread.values()) <= self._most:
            return {}
        return {descriptor: nbytes for descriptor, nbytes in unread.items() if nbytes > HARMLESS_BYTES}


def received(descriptor: int) -> int:
    """Bytes that a TCP connection has brought; 0 if it is none, or is gone."""
    try:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)
    except OSError:
        return 0
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size)
        return int(_BYTES_RECEIVED.unpack(info)[0])
    except (OSError, struct.error):
        return 0
    finally:
        connection.detach()


def shut_down(descriptor: int) -> bool:
    """End a connection that belongs to libzmq, which notices and closes it; False if it is gone already."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        connection.shutdown(socket.SHUT_RDWR)
        return True
    return False
