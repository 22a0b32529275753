"""Sockets of one process against each other: who gets what from a data port, and when."""

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from zmq.utils.monitor import parse_monitor_message

from rpc_reading_service import transport
from rpc_reading_service.floods import TOO_MUCH, Floods
from rpc_reading_service.floods import received as received_bytes
from rpc_reading_service.security import Pair

SESSION = "0123456789abcdef" * 2
OTHER = "f" * 32
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
    """A context that lets in whoever belongs to the session, or everybody.

    It closes what was opened in it one by one, as pyzmq wants it.
    """

    def __init__(self, everybody: bool = False) -> None:
        super().__init__()
        self._opened: list[Any] = []
        self._gate = self.gate(lambda *_: True) if everybody else self.session_gate(SESSION, None)

    def router(self, *args: Any) -> transport.Router:
        return self._note(super().router(*args))

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
        self._opened += [getattr(opened, name) for name in ("_socket", "_monitor") if hasattr(opened, name)]
        return opened

    def wait_until(self, happened: Callable[[], bool], *raws: object) -> None:
        """Poll the sockets, so that each thread's commands are carried out, until it has happened."""
        poller = transport.Poller()
        for raw in (*raws, self._gate.raw):
            poller.watch(raw)
        deadline = transport.Deadline(PATIENCE_S)
        while not happened():
            assert not deadline.expired
            poller.wait(0.02)
            self._gate.answer()

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
def router() -> Iterator[tuple[Sockets, transport.Router]]:
    """Of a daemon without keys, and its context."""
    context = Sockets(everybody=True)
    yield context, context.router("127.0.0.1", 0)
    context.close()


@pytest.fixture
def relay() -> Iterator[Relay]:
    relay = Relay()
    yield relay
    relay.close()


@pytest.fixture
def push(context: Sockets) -> transport.Push:
    return context.push(SESSION, None, "127.0.0.1", [0])


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
    context.wait_until(lambda: bool(poller.wait(0.0)) and push.send([b"now"]), pull.raw)
    context.wait_until(lambda: received(pull) == [b"now"], pull.raw)


STRANGERS = {
    "without a password": None,
    "with the password of another session": transport.Password(transport.password(OTHER), is_asked=False),
    "with keys": transport.Lock(Pair.new(), Pair.new().public),
}


@pytest.mark.parametrize("who", STRANGERS)
def test_whoever_does_not_belong_to_the_session_is_shut_out_in_the_handshake(
    context: Sockets, push: transport.Push, who: str
) -> None:
    with dealer(push.port, STRANGERS[who]) as (stranger, monitor):
        stranger.send(b"strange", zmq.NOBLOCK)
        context.wait_until(lambda: monitor.poll(0) > 0, push.raw)
        event = parse_monitor_message(monitor.recv_multipart())
        assert event["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED
    assert not int(push._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN


def test_one_of_the_session_comes_through_the_handshake(context: Sockets, push: transport.Push) -> None:
    with dealer(push.port, transport.Password(transport.password(SESSION), is_asked=False)) as (_, monitor):
        context.wait_until(lambda: monitor.poll(0) > 0, push.raw)
        assert parse_monitor_message(monitor.recv_multipart())["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED


@contextlib.contextmanager
def dealer(port: int, lock: Any) -> Iterator[tuple[Any, Any]]:
    """A socket that connects, and a monitor that tells what becomes of its handshake."""
    with zmq.Context() as theirs, theirs.socket(zmq.DEALER) as socket_:
        socket_.linger = 0
        if lock is not None:
            lock.put_on(socket_)
        with socket_.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED) as monitor:
            socket_.connect(f"tcp://127.0.0.1:{port}")
            yield socket_, monitor
            socket_.disable_monitor()


def test_bytes_that_look_like_an_old_protocol_are_no_message(context: Sockets, push: transport.Push) -> None:
    with socket.create_connection(("127.0.0.1", push.port), PATIENCE_S) as stranger:
        stranger.sendall(bytes.fromhex("01000600") + b"hello")
        stranger.settimeout(PATIENCE_S)
        while stranger.recv(100):
            pass
    assert list(push.receive_all()) == []


def test_a_worker_hears_its_client_and_no_other_worker(context: Sockets, push: transport.Push) -> None:
    other, pull = context.feed_dealer(SESSION, None, 1, "127.0.0.1:1", push.port), context.pull(SESSION)
    connection = pull.connect(transport.beside("127.0.0.1:1", push.port))
    heard: list[bytes] = []
    for _ in range(3):
        other.send([b"strange"])
    context.wait_until(lambda: push.send([b"hello"]), push.raw, pull.raw, other.raw)
    pull.send(connection, b"credit")
    context.wait_until(lambda: heard.extend(push.receive_all()) or heard != [], push.raw, pull.raw, other.raw)
    assert heard == [b"credit"]


def test_everybody_who_asks_to_be_let_in_is_answered(context: Sockets) -> None:
    with context._context.socket(zmq.DEALER) as asking:
        asking.connect("inproc://zeromq.zap.01")
        for number in range(500):
            password = transport.password(SESSION if number % 2 else OTHER)
            asking.send_multipart([b"", b"1.0", b"%d" % number, b"", b"127.0.0.1", b"", b"PLAIN", b"", password])
        context._gate.answer()
        answers = [(int(answer[2]), answer[3]) for answer in transport._drain(asking)]
    assert answers == [(number, b"200" if number % 2 else b"400") for number in range(500)]


def test_each_worker_is_told_what_is_meant_for_it(context: Sockets) -> None:
    pushes = [context.push(SESSION, None, "127.0.0.1", [0]) for _ in range(2)]
    pull = context.pull(SESSION)
    connections = [pull.connect(transport.beside("127.0.0.1:1", push.port)) for push in pushes]
    for number, connection in enumerate(connections):
        pull.send(connection, b"for %d" % number)
    for number, push in enumerate(pushes):
        heard: list[bytes] = []
        context.wait_until(
            lambda push=push, heard=heard: heard.extend(push.receive_all()) or heard != [], push.raw, pull.raw
        )
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
    context.wait_until(lambda: push.send([b"one"]), push.raw, pull.raw)
    context.wait_until(lambda: received(pull) == [b"one"], pull.raw)
    list(push.receive_all())
    relay.break_connections()
    context.wait_until(lambda: not push.send([b"lost"]), pull.raw)
    relay.let_in()
    poller = transport.Poller()
    poller.watch(push.raw)
    context.wait_until(lambda: bool(poller.wait(0.0)) and push.send([b"two"]), pull.raw)
    context.wait_until(lambda: b"two" in received(pull), pull.raw)


def test_a_feed_goes_to_its_worker_alone(context: Sockets) -> None:
    router = context.feed_router(SESSION, None, "127.0.0.1", [0])
    dealers = [context.feed_dealer(SESSION, None, worker, "127.0.0.1:1", router.port) for worker in range(2)]
    stranger = context.feed_dealer(OTHER, None, 0, "127.0.0.1:1", router.port)
    for each in [stranger, *dealers]:
        each.send([b"credit"])
    arrived: list[list[bytes]] = []
    context.wait_until(lambda: arrived.extend(router.receive_all()) or len(arrived) == 2, router.raw)
    for worker in range(2):
        router.send(worker, [b"for %d" % worker])
    for worker, each in enumerate(dealers):
        context.wait_until(lambda each=each, worker=worker: each.receive() == b"for %d" % worker, each.raw)
    assert stranger.receive() is None


def test_what_was_cut_off_and_is_left_to_be_read_is_not_everything(router: tuple[Sockets, transport.Router]) -> None:
    """It was taken for that, so that who was cut off came back at once, and the next flood on top."""
    context, ours = router
    with dealer(ours.port, None) as (stranger, _):
        for _ in range(250):
            stranger.send(bytes(100))
        context.wait_until(lambda: ours.has_strangers(()))
        (connection,) = ours._floods.strangers(())
        context.wait_until(lambda: received_bytes(connection) > 250 * 100)
        ours._floods = Floods(most=0)
        ours._floods.accepted(connection, "192.0.2.1")
        assert ours.cut_floods(()) == [("192.0.2.1", TOO_MUCH)]
        seen = []
        for _ in range(4):
            assert list(ours.receive_all(100)) == []
            seen.append(ours.behind)
        assert seen[-1] is False
        assert seen[:2] == [True, True]


def test_many_who_come_at_once_are_taken_notice_of_bit_by_bit(router: tuple[Sockets, transport.Router]) -> None:
    """A daemon that heard them out, while more came, said nothing to its clients for ten seconds."""
    _, ours = router
    with contextlib.ExitStack() as stack:
        for _ in range(transport.EVENTS_AT_ONCE + 20):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", ours.port), PATIENCE_S))
            assert stranger.recv(1) == b"\xff"  # it was accepted
        counts = []
        for _ in range(2):
            ours.has_strangers(())
            counts.append(len(ours._floods.strangers(())))
    assert counts == [transport.EVENTS_AT_ONCE, transport.EVENTS_AT_ONCE + 20]


LEFT_ALONE = """
import socket, struct, time
from rpc_reading_service import transport

context = transport.Context()
gate = context.gate(lambda *_: True)
router = context.router("127.0.0.1", 0)
poller = transport.Poller()
poller.watch(gate.raw)
greeting = b"\\xff" + bytes(8) + b"\\x7f\\x03\\0NULL" + bytes(48)
ready = b"\\x05READY\\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
with socket.create_connection(("127.0.0.1", router.port), 5.0) as stranger:
    stranger.sendall(greeting + bytes([4, len(ready)]) + ready)
    while len(stranger.recv(65, socket.MSG_PEEK)) < 65:  # it is not let in yet
        poller.wait(0.1)
        gate.answer()
    stranger.sendall(2000 * b"\\0\\1x")
    poller.forget(gate.raw)
    poller.watch(router.raw)
    poller.wait(5.0)
    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets it
time.sleep(transport.HEARTBEAT_MS / 1000 + 1.0)
assert list(router.receive_all(1))
print("alive")
router.close()
gate.close()
"""


def test_a_stranger_that_leaves_what_nobody_reads_does_not_end_the_process() -> None:
    """libzmq did, when a heartbeat was due on such a connection that had reached a high-water mark."""
    ended = subprocess.run([sys.executable, "-c", LEFT_ALONE], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "alive\n", ended.stderr
