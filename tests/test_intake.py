"""A client's data socket: whoever waits for a batch reads it, and the other thread only if nobody does."""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from rpc_reading_service import intake as intake_module
from rpc_reading_service import messages, transport
from rpc_reading_service.actions import ConnectData, SendData
from rpc_reading_service.intake import Deferral, Intake, Sockets
from rpc_reading_service.lanes import LanePacker, Listener
from rpc_reading_service.messages import CHUNK_BYTES, Batches, Credit, Opened
from rpc_reading_service.security import Pair
from rpc_reading_service.stream import Arrival, Packer, Parcel

SESSION = "0123456789abcdef" * 2
LONG_S = 30.0
"""Longer than any wait here that ends as it should."""


class Ends:
    """Both ends of a data channel, in one process; with keys, or by a lane."""

    def __init__(self, has_keys: bool) -> None:
        self.context = transport.Context()
        pair = Pair.new() if has_keys else None
        self.gate = self.context.session_gate(SESSION, pair)
        self.push: Any = Listener(SESSION, "127.0.0.1", [0])
        self.packer: Packer = LanePacker(SESSION, 0, 0)
        if has_keys:
            self.push.close()
            self.push, self.packer = self.context.push(SESSION, pair, "127.0.0.1", [0]), Packer(SESSION, 0, 0)
        self.arrived: list[tuple[str, int]] = []
        self.is_open = False
        self.has_arrived = threading.Event()
        self.handed_over = threading.Event()
        who = SESSION, b"" if pair is None else pair.raw
        self.intake = Intake(self.context, *who, lambda header: True, self._note, self.handed_over.set)
        self.intake.connect(ConnectData(0, 0, "127.0.0.1:1", self.push.port, 0, None), None)
        self._seq = 0
        deadline = transport.Deadline(LONG_S)
        while not self.push.send(self.packer.opened().frames):  # the first tells that the connection is there
            assert not deadline.expired
            self.intake.wait(0.01)
            self.gate.answer()
            list(self.push.receive_all())
        self.until(lambda: self.is_open)

    def _note(self, arrival: Arrival) -> None:
        self.is_open |= isinstance(arrival.header, Opened)
        if arrival.entries and arrival.header is not None:
            self.arrived.append((threading.current_thread().name, arrival.header.seq))
            self.has_arrived.set()

    def send_batch(self) -> None:
        self._send(Parcel(1, self._seq, Batches, b"x"))

    def send_large(self) -> None:
        self._send(Parcel(1, self._seq, Batches, b"x" * (CHUNK_BYTES + 1)))

    def _send(self, parcel: Parcel) -> None:
        self._seq += 1
        for message in self.packer.pack([parcel]):
            assert self.push.send(message.frames)

    def until(self, done: Callable[[], bool]) -> None:
        deadline = transport.Deadline(LONG_S)
        while not done():
            assert not deadline.expired
            self.intake.wait(0.1)

    def close(self) -> None:
        self.intake.close()
        self.push.close()
        self.gate.close()
        self.context.close()


@pytest.fixture(params=[False, True], ids=["lanes", "keys"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    ends = Ends(request.param)
    yield ends
    ends.close()


@pytest.fixture
def encrypted() -> Iterator[Ends]:
    ends = Ends(has_keys=True)
    yield ends
    ends.close()


def credit(consumed: int) -> SendData:
    return SendData(0, 0, Credit(SESSION, 0, 0, 1, consumed, False))


def in_a_thread(act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act, name="another")
    thread.start()
    return thread


def ended(thread: threading.Thread) -> bool:
    thread.join(LONG_S / 2)
    return not thread.is_alive()


def test_whoever_waits_takes_in_what_comes(ends: Ends) -> None:
    waiting = in_a_thread(lambda: ends.intake.wait(LONG_S))
    ends.send_batch()
    assert ended(waiting)
    assert ends.arrived == [("another", 0)]


def test_it_stays_the_turn_of_whoever_waited_for_a_short_while(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake_module, "TURN_S", LONG_S)
    ends.intake.wait(0.0)
    assert ends.intake.is_taken
    monkeypatch.setattr(intake_module, "TURN_S", 0.0)
    ends.intake.wait(0.0)
    assert not ends.intake.is_taken


def test_a_wait_can_be_ended(ends: Ends) -> None:
    waiting = in_a_thread(lambda: ends.intake.wait(LONG_S))
    ends.intake.wake()
    assert ended(waiting)
    assert ends.arrived == []


def has_come(ends: Ends) -> bool:
    source: Any = ends.intake._source
    if isinstance(source, Sockets):
        return transport._has_news(source._pull._socket)
    return bool(source._epoll.poll(0))


def test_what_comes_while_another_thread_sends_is_not_missed(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sending takes the news that something has come from the descriptor that the first thread polls."""
    poll, has_read, may_poll = ends.intake._poller.wait, threading.Event(), threading.Event()

    def late(seconds: float) -> set[Any]:
        has_read.set()
        may_poll.wait()
        return poll(seconds)

    monkeypatch.setattr(ends.intake._poller, "wait", late)
    waiting = in_a_thread(lambda: ends.intake.wait(LONG_S))
    has_read.wait()
    ends.send_batch()
    deadline = transport.Deadline(LONG_S)
    while not has_come(ends):
        assert not deadline.expired
    ends.intake.send([credit(1)])
    may_poll.set()
    assert ended(waiting)
    assert ends.arrived == [("another", 0)]


def test_credit_arrives_at_the_worker_whoever_sends_it(ends: Ends) -> None:
    heard: list[bytes] = []
    threads = [in_a_thread(lambda n=n: ends.intake.send([credit(n)])) for n in range(10)]  # type: ignore[misc]
    ends.until(lambda: heard.extend(ends.push.receive_all()) or len(heard) == 10)
    assert all(map(ended, threads))
    assert {messages.decode(frame, Credit).consumed for frame in heard} == set(range(10))


def test_what_is_read_at_once_is_bounded(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake_module, "MESSAGES_PER_TURN", 2)
    for _ in range(3):
        ends.send_batch()
    ends.until(lambda: len(ends.arrived) >= 2)
    ends.until(lambda: len(ends.arrived) == 3 and not ends.intake.behind)
    for _ in range(100):
        ends.send_batch()
    deadline = transport.Deadline(LONG_S)
    while not ends.intake.behind:
        ends.intake.read()
        assert not deadline.expired
    assert len(ends.arrived) < 103


@pytest.mark.parametrize("has_keys", [False, True])
def test_nothing_is_read_sent_or_waited_for_once_it_is_closed(has_keys: bool) -> None:
    ends = Ends(has_keys)
    ends.send_batch()
    waiting = in_a_thread(lambda: [ends.intake.wait(LONG_S) for _ in range(2)])
    assert ends.has_arrived.wait(LONG_S)  # and not ``until``, which would wait for the thread's second turn to end
    ends.close()
    assert ended(waiting)
    ends.intake.send([credit(1)])
    ends.intake.read()
    assert len(ends.arrived) == 1


def test_after_a_large_batch_the_other_thread_reads_the_next_one_at_once(ends: Ends) -> None:
    ends.send_batch()
    ends.until(lambda: len(ends.arrived) == 1)
    assert ends.intake.is_taken
    assert not ends.handed_over.is_set()
    for _ in range(3):
        ends.send_large()

    def went_on() -> bool:
        """What the system had no room for is sent now."""
        assert list(ends.push.receive_all()) == []
        return len(ends.arrived) == 2

    ends.until(went_on)
    assert not ends.intake.is_taken
    assert ends.handed_over.is_set()
    deadline = transport.Deadline(LONG_S)
    while len(ends.arrived) < 4:
        assert list(ends.push.receive_all()) == []
        ends.intake.read()
        assert not deadline.expired


def test_what_an_exception_kept_from_being_taken_in_is_not_lost(ends: Ends) -> None:
    """A signal's handler raised it. With keys it comes again; a lane is made again, by which the worker tells."""
    arrive = ends.intake._arrive

    def interrupted(arrival: Arrival) -> None:
        ends.intake._arrive = arrive
        raise TimeoutError

    ends.intake._arrive = interrupted
    ends.send_batch()
    with pytest.raises(TimeoutError):
        ends.until(lambda: False)
    assert ends.intake.behind, "it has to be looked at"

    def came_back() -> bool:
        ends.intake.tend(time.monotonic() + LONG_S)
        assert list(ends.push.receive_all()) == []
        return ends.push.connections == 2 or bool(ends.arrived)

    ends.until(came_back)
    ends.intake.wait(0.0)
    assert [seq for _, seq in ends.arrived] == ([0] if isinstance(ends.push, transport.Push) else [])
    assert not ends.intake.behind


def test_whoever_reads_gives_way_to_whoever_waits(ends: Ends) -> None:
    """The other thread stops after the message that it is at."""
    for _ in range(3):
        ends.send_batch()
    ends.until(lambda: ends.arrived != [])
    count = len(ends.arrived)
    ends.intake._turn_ends = math.inf
    ends.send_batch()
    deadline = transport.Deadline(LONG_S)
    while len(ends.arrived) == count:
        ends.intake.read()
        assert not deadline.expired
    assert len(ends.arrived) == count + 1


def test_a_name_that_takes_long_keeps_nobody_from_reading(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answered = threading.Event(), threading.Event()

    def slow(address: str, port: int) -> str:
        asked.set()
        assert answered.wait(LONG_S)
        return f"tcp://127.0.0.1:{port}"

    monkeypatch.setattr(transport, "beside", slow)
    connecting = in_a_thread(lambda: ends.intake.connect(ConnectData(1, 0, "slow:1", 1, 0, None), None))
    assert asked.wait(LONG_S)
    ends.send_batch()
    ends.until(lambda: ends.arrived != [])
    answered.set()
    assert ended(connecting)


def test_ctrl_c_waits_for_what_is_done_whole_and_hurries_it() -> None:
    steps = []

    def whole() -> None:
        with Deferral(lambda: steps.append("hurried")):
            signal.raise_signal(signal.SIGINT)
            steps.append("done")

    with pytest.raises(KeyboardInterrupt):
        whole()
    assert steps == ["hurried", "done"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_is_left_alone_where_it_is_ignored_and_in_other_threads() -> None:
    def within() -> None:
        with Deferral(lambda: None):
            kept.append(signal.getsignal(signal.SIGINT))

    kept: list[Any] = []
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        within()
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended(in_a_thread(within))
    assert kept == [signal.SIG_IGN, signal.default_int_handler]


def test_a_message_to_a_worker_that_ctrl_c_broke_off_is_not_continued_by_the_next(
    encrypted: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = encrypted
    real, calls = zmq.Socket.send, []

    def interrupted(socket: Any, data: Any, *args: Any, **options: Any) -> Any:
        calls.append(data)
        if len(calls) == 2:  # the first is whom it is for
            raise KeyboardInterrupt
        return real(socket, data, *args, **options)

    monkeypatch.setattr(zmq.Socket, "send", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ends.intake.send([credit(1)])
    monkeypatch.undo()
    ends.intake.send([credit(2)])
    heard: list[bytes] = []
    ends.until(lambda: heard.extend(ends.push.receive_all()) or len(heard) == 2)
    assert heard[0] == b""
    assert messages.decode(heard[1], Credit).consumed == 2


def test_ctrl_c_in_the_middle_of_a_message_costs_that_message_alone(
    encrypted: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = encrypted
    real, calls = transport.Pull.receive_frame, []

    def interrupted(pull: Any) -> bytes:
        calls.append(pull)
        if len(calls) == 2:  # the first is the header
            raise KeyboardInterrupt
        return real(pull)

    monkeypatch.setattr(transport.Pull, "receive_frame", interrupted)
    ends.send_batch()
    with pytest.raises(KeyboardInterrupt):
        ends.until(lambda: ends.arrived != [])
    ends.send_batch()
    ends.until(lambda: ends.arrived != [])
    assert [seq for _, seq in ends.arrived] == [1]
