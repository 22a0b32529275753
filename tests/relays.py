"""A relay between a daemon and a client: it listens, changes or slows down what passes."""

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Iterator

HOSTS = "127.0.0.1", "127.0.0.2"
"""Where the daemon is, and where the client finds the relay, with the same ports."""


class Relay:
    """Stands at the daemon's ports on another loopback address; notes what passes, and flips bits on request.

    Args:
        pace: bytes a second on each connection; None for as many as there are
    """

    def __init__(self, ports: range, seed: int = 0, pace: float | None = None) -> None:
        self._pace = pace
        self.captured = bytearray()
        self.said: list[tuple[int, bytearray]] = []
        """What came by each connection from the client's side, and to which port."""
        self.flips = 0
        """Bits still to be flipped, one in a piece."""
        self.flipped = 0
        self._rng = random.Random(seed)
        self._servers = [socket.create_server((HOSTS[1], port)) for port in ports]
        self._sockets: list[socket.socket] = []
        self._threads = [
            threading.Thread(target=self._accept, args=each) for each in zip(self._servers, ports, strict=True)
        ]
        for thread in list(self._threads):
            thread.start()

    def _accept(self, server: socket.socket, port: int) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = server.accept()
                self._sockets.append(near)
                try:
                    far = socket.create_connection((HOSTS[0], port))
                except OSError:
                    near.shutdown(socket.SHUT_RDWR)
                    continue
                self._sockets.append(far)
                self.said.append((port, bytearray()))
                for way in ((near, far, self.said[-1][1]), (far, near, bytearray())):
                    self._threads.append(threading.Thread(target=self._pass_on, args=way))
                    self._threads[-1].start()

    def _pass_on(self, source: socket.socket, target: socket.socket, note: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                self.captured += data
                note += data
                if self.flips:
                    self.flips, self.flipped = self.flips - 1, self.flipped + 1
                    data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
                if self._pace is not None:
                    time.sleep(len(data) / self._pace)
                target.sendall(data)
        part(source, target)

    def close(self) -> None:
        part(*self._servers)
        part(*self._sockets)
        for thread in self._threads:
            thread.join()
        for each in (*self._servers, *self._sockets):
            each.close()


def part(*sockets: socket.socket) -> None:
    """End connections, whoever waits for them."""
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def free_ports() -> range:
    """Three, on both addresses: the daemon's, and its workers'."""
    first = 31_000 + os.getpid() % 300 * 3  # of other runs on this machine, each has others to try first
    for low in range(first, 32_000, 3):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for host in HOSTS:
                for port in range(low, low + 3):
                    stack.enter_context(socket.create_server((host, port)))
            return range(low, low + 3)
    raise AssertionError("no three free ports in a row")


def options(ports: range) -> list[str]:
    return ["--port", str(ports[0]), "--slots", "2", "--data-ports", f"{ports[1]}-{ports[2]}"]


@contextlib.contextmanager
def relay(ports: range, seed: int = 0, pace: float | None = None) -> Iterator[Relay]:
    between = Relay(ports, seed, pace)
    try:
        yield between
    finally:
        between.close()
