"""Sockets of one process against each other: who gets what from a data port, and when."""

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rpc_reading_service import transport

SESSION = "0123456789abcdef" * 2
PATIENCE_S = 5.0


class Relay:
    """Passes TCP connections on to a port, and can break them."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._target = 0
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._lets_in = threading.Event()
        self._lets_in.set()

    def start(self, target: int) -> None:
        self._target = target
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                self._lets_in.wait()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [near, far]
                for source, sink in ((near, far), (far, near)):
                    self._threads.append(threading.Thread(target=self._pass_on, args=(source, sink)))
                    self._threads[-1].start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        self._part(source, sink)

    @staticmethod
    def _part(*sockets: socket.socket) -> None:
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def break_connections(self) -> None:
        """And let nobody in until ``let_in``."""
        self._lets_in.clear()
        self._part(*self._sockets)

    def let_in(self) -> None:
        self._lets_in.set()

    def close(self) -> None:
        self.let_in()
        self._part(self._server, *self._sockets)
        self._server.close()
        for thread in self._threads:
            thread.join()
        for each in self._sockets:
            each.close()


class Sockets(transport.Context):
    """A context that closes what was opened in it one by one, as pyzmq wants it."""

    def __init__(self) -> None:
        super().__init__()
        self._opened: list[Any] = []

    def pull(self, *args: Any) -> transport.Pull:
        return self._note(super().pull(*args))

    def push(self, *args: Any) -> transport.Push:
        return self._note(super().push(*args))

    def feed_router(self, *args: Any) -> transport.FeedRouter:
        return self._note(super().feed_router(*args))

    def feed_dealer(self, *args: Any) -> transport.FeedDealer:
        return self._note(super().feed_dealer(*args))

    def gate(self, *args: Any) -> transport.Gate:
        return self._note(super().gate(*args))

    def _note(self, opened: Any) -> Any:
        sockets = [getattr(opened, name) for name in ("raw", "raw_monitor") if hasattr(opened, name)]
        self._opened += [opened._socket, *sockets[1:]]
        return opened

    def close(self) -> None:
        for raw in self._opened:
            raw.close(linger=0)
        super().close()


@pytest.fixture
def context() -> Iterator[Sockets]:
    context = Sockets()
    yield context
    context.close()


@pytest.fixture
def relay() -> Iterator[Relay]:
    relay = Relay()
    yield relay
    relay.close()


@pytest.fixture
def push(context: Sockets) -> transport.Push:
    return context.push(SESSION, None, "127.0.0.1", [0])


def wait_until(happened: Callable[[], bool], *raws: object) -> None:
    """Poll the sockets, so that each thread's commands are carried out, until it has happened."""
    poller = transport.Poller()
    for raw in raws:
        poller.watch(raw)
    deadline = transport.Deadline(PATIENCE_S)
    while not happened():
        assert not deadline.expired
        poller.wait(0.02)


def received(pull: transport.Pull) -> list[bytes]:
    frames = []
    while (frame := pull.receive()) is not None:
        frames.append(frame)
    return frames


def test_nothing_is_sent_before_the_client_is_there_and_its_arrival_is_an_event(
    context: Sockets, push: transport.Push
) -> None:
    assert not push.send([b"too early"])
    pull = context.pull(SESSION)
    pull.connect(transport.beside("127.0.0.1:1", push.port))
    poller = transport.Poller()
    poller.watch(push.raw)
    wait_until(lambda: bool(poller.wait(0.0)) and push.send([b"now"]), pull.raw)
    wait_until(lambda: received(pull) == [b"now"], pull.raw)


def test_a_client_of_another_session_gets_nothing(context: Sockets, push: transport.Push) -> None:
    stranger, pull = context.pull("f" * 32), context.pull(SESSION)
    stranger.connect(transport.beside("127.0.0.1:1", push.port))
    poller = transport.Poller()
    poller.watch(push.raw)
    wait_until(lambda: bool(poller.wait(0.0)), stranger.raw)  # it is there
    assert not push.send([b"secret"])
    pull.connect(transport.beside("127.0.0.1:1", push.port))
    wait_until(lambda: push.send([b"secret"]), push.raw, pull.raw)
    wait_until(lambda: received(pull) == [b"secret"], pull.raw)
    assert received(stranger) == []


def test_a_worker_hears_its_client_and_no_stranger(context: Sockets, push: transport.Push) -> None:
    stranger, pull = context.pull("f" * 32), context.pull(SESSION)
    connections = [each.connect(transport.beside("127.0.0.1:1", push.port)) for each in (stranger, pull)]
    heard: list[bytes] = []
    for _ in range(3):
        stranger.send(connections[0], b"strange")
    wait_until(lambda: push.send([b"hello"]), push.raw, pull.raw, stranger.raw)
    pull.send(connections[1], b"credit")
    wait_until(lambda: heard.extend(push.receive_all()) or heard != [], push.raw, pull.raw, stranger.raw)
    assert heard == [b"credit"]


def test_a_stranger_that_sends_without_end_does_not_keep_a_worker_from_its_work(
    context: Sockets, push: transport.Push
) -> None:
    stranger = context.pull("f" * 32)
    connection = stranger.connect(transport.beside("127.0.0.1:1", push.port))

    def flooded() -> bool:
        for _ in range(2 * transport.MESSAGES_AT_ONCE):
            stranger.send(connection, b"strange")
        return list(push.receive_all()) == [] and push.behind

    wait_until(flooded, stranger.raw, push.raw)
    wait_until(lambda: list(push.receive_all()) == [] and not push.behind, stranger.raw, push.raw)


def test_each_worker_is_told_what_is_meant_for_it(context: Sockets) -> None:
    pushes = [context.push(SESSION, None, "127.0.0.1", [0]) for _ in range(2)]
    pull = context.pull(SESSION)
    connections = [pull.connect(transport.beside("127.0.0.1:1", push.port)) for push in pushes]
    for number, connection in enumerate(connections):
        pull.send(connection, b"for %d" % number)
    for number, push in enumerate(pushes):
        heard: list[bytes] = []
        wait_until(lambda push=push, heard=heard: heard.extend(push.receive_all()) or heard != [], push.raw, pull.raw)
        assert heard == [b"for %d" % number]
    pull.disconnect(connections[0])
    pull.send(connections[0], b"nobody is there")
    again = pull.connect(transport.beside("127.0.0.1:1", pushes[0].port))
    assert again.name not in [connection.name for connection in connections]


def test_a_client_whose_connection_broke_is_sent_to_again_and_the_sender_is_told(
    context: Sockets, push: transport.Push, relay: Relay
) -> None:
    relay.start(push.port)
    pull = context.pull(SESSION)
    pull.connect(transport.beside("127.0.0.1:1", relay.port))
    wait_until(lambda: push.send([b"one"]), push.raw, pull.raw)
    wait_until(lambda: received(pull) == [b"one"], pull.raw)
    list(push.receive_all())
    relay.break_connections()
    wait_until(lambda: not push.send([b"lost"]), pull.raw)
    relay.let_in()
    poller = transport.Poller()
    poller.watch(push.raw)
    wait_until(lambda: bool(poller.wait(0.0)) and push.send([b"two"]), pull.raw)
    wait_until(lambda: b"two" in received(pull), pull.raw)


def test_a_feed_goes_to_its_worker_alone(context: Sockets) -> None:
    router = context.feed_router(SESSION, None, "127.0.0.1", [0])
    dealers = [context.feed_dealer(SESSION, None, worker, "127.0.0.1:1", router.port) for worker in range(2)]
    stranger = context.feed_dealer("f" * 32, None, 0, "127.0.0.1:1", router.port)
    for dealer in [stranger, *dealers]:
        dealer.send([b"credit"])
    arrived: list[list[bytes]] = []
    wait_until(lambda: arrived.extend(router.receive_all()) or len(arrived) == 3, router.raw)
    for worker in range(2):
        router.send(worker, [b"for %d" % worker])
    for worker, dealer in enumerate(dealers):
        wait_until(lambda dealer=dealer, worker=worker: dealer.receive() == b"for %d" % worker, dealer.raw)
    assert stranger.receive() is None


LEFT_ALONE = """
import time, zmq
from rpc_reading_service import transport
push = transport.Context().push("0" * 32, None, "127.0.0.1", [0])
with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
    stranger.linger = 1000
    stranger.heartbeat_ivl = 100
    stranger.connect(f"tcp://127.0.0.1:{push.port}")
    for _ in range(900):
        stranger.send(bytes(4000))
    time.sleep(0.5)  # its own heartbeats come behind what nobody reads
time.sleep(transport.HEARTBEAT_MS / 1000 + 1.0)
list(push.receive_all())
print("alive")
push.close()
"""


def test_a_stranger_that_leaves_what_nobody_reads_does_not_end_the_process() -> None:
    """libzmq did, when a heartbeat was due on such a connection that had reached a high-water mark."""
    ended = subprocess.run([sys.executable, "-c", LEFT_ALONE], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "alive\n", ended.stderr
