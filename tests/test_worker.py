"""A worker's mailbox: where its two threads meet."""

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rpc_reading_service import buffers, messages, protocol, transport
from rpc_reading_service import worker as worker_module
from rpc_reading_service.buffers import Borrowed, Logbook
from rpc_reading_service.lanes import LanePacker, Lanes, Listener
from rpc_reading_service.messages import Batches, Credit, EndOfShard, Opened, ShardError, StartEpoch
from rpc_reading_service.protocol import AHEAD_BYTES, Window
from rpc_reading_service.segments import Segments
from rpc_reading_service.stream import Packer, Parcel
from rpc_reading_service.transport import Waker
from rpc_reading_service.worker import ClientOutlet, IOThread, Mailbox

SESSION = "0" * 32
LARGE = bytes(2 * AHEAD_BYTES)
MANY = 1 << 20


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    """Of a worker with room for two batches."""
    waker, logbook = Waker(), Logbook(Logbook.create())
    logbook.open(time.monotonic())
    yield Mailbox(Window(2, 1 << 30), waker, Segments(0).board, lambda parcel: None, logbook)
    waker.close()
    logbook.close()


@pytest.fixture
def quick(mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch) -> Mailbox:
    """Of a worker with much room, whose graph is always quick, and has yielded a first batch."""
    monkeypatch.setattr(worker_module, "GATHER_S", 60.0)
    monkeypatch.setattr(worker_module, "GATHERED_S", 60.0)
    mailbox._window = Window(MANY, 1 << 40)
    begin(mailbox, 1)
    mailbox._put_at = time.monotonic()
    return mailbox


def begin(mailbox: Mailbox, epoch: int, skip: int = 0, consumed: int = 0) -> None:
    mailbox.command(StartEpoch(SESSION, 0, 0, epoch, skip, consumed), b"")
    assert mailbox.take(producing=False, replaying=False)


def produced(mailbox: Mailbox, epoch: int, first: int = 0) -> int:
    """How many batches there is room for."""
    for count in itertools.count():
        if not mailbox._has_room():
            return count
        mailbox.put(Parcel(epoch, first + count, Batches, LARGE))
    raise AssertionError


def test_a_window_opens_with_credit(mailbox: Mailbox) -> None:
    begin(mailbox, 1)
    assert produced(mailbox, 1) == 2
    mailbox.command(Credit(SESSION, 0, 0, 1, 1, False), None)
    assert produced(mailbox, 1, 2) == 1


def test_credit_that_overtakes_the_beginning_of_its_epoch_counts(mailbox: Mailbox) -> None:
    mailbox.command(Credit(SESSION, 0, 0, 1, 5, False), None)
    begin(mailbox, 1, skip=6, consumed=4)
    assert produced(mailbox, 1, 6) == 1, "one of six is not consumed"


def test_credit_for_another_epoch_means_nothing(mailbox: Mailbox) -> None:
    mailbox.command(Credit(SESSION, 0, 0, 1, 5, False), None)
    begin(mailbox, 2)
    assert produced(mailbox, 2) == 2


def test_whoever_waits_for_room_goes_on_when_credit_comes(mailbox: Mailbox) -> None:
    begin(mailbox, 1)
    produced(mailbox, 1)
    taken = threading.Thread(target=mailbox.take, args=(True, False))
    taken.start()
    mailbox.command(Credit(SESSION, 0, 0, 1, 1, False), None)
    taken.join(10.0)
    assert not taken.is_alive()


def small(seq: int, epoch: int = 1) -> Parcel:
    return Parcel(epoch, seq, Batches, b"x")


def test_batches_of_a_slow_graph_leave_at_once(mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "GATHER_S", 0.0)
    begin(mailbox, 1)
    assert all(mailbox.put(small(seq)) for seq in range(10))
    assert not mailbox.gathers


def test_what_was_gathered_for_a_while_leaves(quick: Mailbox, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not quick.put(small(0))
    monkeypatch.setattr(worker_module, "GATHERED_S", 0.0)
    assert quick.put(small(1))
    monkeypatch.setattr(worker_module, "GATHERED_S", 60.0)
    quick.collect()
    assert not quick.put(small(2))


def test_batches_of_a_quick_graph_gather_up_to_a_third_of_the_window(quick: Mailbox) -> None:
    due = [quick.put(small(seq)) for seq in range(worker_module.GATHER_BYTES // protocol.weight([1]) + 1)]
    assert due.index(True) == len(due) - 1
    assert len(quick.collect()) == len(due)
    assert not quick.put(small(len(due))), "it begins anew"


def test_a_batch_that_closes_the_window_leaves_with_those_that_wait(quick: Mailbox) -> None:
    quick._window = Window(3, 3 * protocol.weight([1]))
    assert [quick.put(small(seq)) for seq in range(3)] == [False, False, True]


def test_the_end_of_a_shard_does_not_wait(quick: Mailbox) -> None:
    assert not quick.put(small(0))
    assert quick.put(Parcel(1, 1, EndOfShard))


def test_the_other_thread_is_told_to_look_after_what_is_gathered_until_nothing_more_comes(
    quick: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not quick.put(small(0))
    assert quick.gathers
    assert quick._waker.clear() == b"\0", "once, as it looks by itself from then on"
    quick.put(small(1))
    assert quick._waker.clear() == b""
    assert len(quick.collect()) == 2
    assert quick.gathers, "the graph may be in the middle of the next batch"
    monkeypatch.setattr(worker_module, "SETTLED_S", 0.0)
    quick.collect()
    assert not quick.gathers


def test_a_new_epoch_drops_what_is_gathered(quick: Mailbox) -> None:
    dropped: list[Parcel] = []
    quick._drop = dropped.append
    assert not quick.put(small(0))
    begin(quick, 2)
    assert [parcel.seq for parcel in dropped] == [0]
    assert not quick.put(small(1)), "which belongs to the former epoch, too"
    assert len(dropped) == 2
    assert quick.collect() == []


def test_whoever_sends_hears_what_has_come(quick: Mailbox) -> None:
    """The other thread may not be told of it: sending takes the news from the descriptor that it polls."""
    context = transport.Context()
    gate = context.session_gate(SESSION, None)
    push, pull = context.push(SESSION, None, "127.0.0.1", [0]), context.pull(SESSION)
    outlet = ClientOutlet(quick, push, Packer(SESSION, 0, 0), lambda parcel: None)
    connection = pull.connect(transport.beside("127.0.0.1:1", push.port))
    quick.put(small(0))
    deadline = transport.Deadline(10.0)
    while quick._window.consumed == 0:
        outlet.pump()
        gate.answer()
        pull.send(connection, messages.encode(Credit(SESSION, 0, 0, 1, 1, False)))
        assert not deadline.expired
    push.close()
    pull.close()
    gate.close()
    context.close()


class Nobody:
    """A data port to which no client has come."""

    raw = -1
    tells_once = False
    connections = 0

    def send(self, frames: Any) -> bool:
        return False

    def receive_all(self) -> Iterator[bytes]:
        return iter(())


def test_a_batch_that_waits_for_the_client_and_cannot_be_copied_is_not_sent_later(
    quick: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    outlet = ClientOutlet(quick, Nobody(), LanePacker(SESSION, 0, 0), lambda parcel: None)  # type: ignore[arg-type]
    outlet.pump()

    def full(view: memoryview) -> memoryview:
        raise MemoryError(f"there is no room to send {view.nbytes:,} bytes")

    monkeypatch.setattr(buffers, "snapshot", full)
    quick.put(Parcel(1, 0, Batches, b"x", [Borrowed(memoryview(bytes(100)))]))
    with pytest.raises(MemoryError, match="no room to send 100 bytes"):
        outlet.pump()
    assert len(outlet._outgoing) == 1, "the message that tells that the worker is there"


SENT: dict[str, tuple[list[Parcel], list[tuple[type[Any], int]]]] = {
    "nothing": ([], [(Opened, 0)]),
    "batches": ([small(0), small(1)], [(Batches, 2)]),
    "the end": ([small(0), Parcel(1, 1, EndOfShard)], [(EndOfShard, 1)]),
    "an error": ([small(0), Parcel(1, 1, ShardError, b"traceback")], [(ShardError, 1)]),
}


@pytest.mark.parametrize(("parcels", "told"), SENT.values(), ids=SENT)
def test_a_client_that_comes_again_learns_whether_it_has_missed_anything(
    parcels: list[Parcel], told: list[tuple[type[Any], int]], quick: Mailbox
) -> None:
    """Though the worker has nothing more to send: its window is full, or its shard has ended."""
    listener = Listener(SESSION, "127.0.0.1", [0])
    outlet = ClientOutlet(quick, listener, LanePacker(SESSION, 0, 0), lambda parcel: None)
    heard: list[tuple[type[Any], int]] = []

    def accepts(header: Any) -> bool:
        heard.append((type(header), header.seq))
        return True

    with contextlib.closing(listener), contextlib.closing(Lanes(SESSION, accepts)) as client:
        connect(client, listener, outlet)
        read(client, heard, 1)
        for parcel in parcels:
            quick.put(parcel)
        outlet.pump()
        for _ in range(2):
            client.disconnect(0, 0)  # with what it has not read
            heard.clear()
            connect(client, listener, outlet)
            read(client, heard, 1)
            assert heard == told
        quick.put(small(2))
        outlet.pump()
        read(client, heard, 2)
        assert heard == [*told, (Batches, 2)]


def connect(client: Lanes, listener: Listener, outlet: ClientOutlet) -> None:
    before, deadline = listener.connections, transport.Deadline(20.0)
    client.connect(0, 0, f"tcp://127.0.0.1:{listener.port}")
    while listener.connections == before:
        assert not deadline.expired
        assert list(client.read(100)) == []
        outlet.hear()
    outlet.pump()


def read(client: Lanes, heard: list[Any], count: int) -> None:
    deadline = transport.Deadline(20.0)
    while len(heard) < count:
        assert not deadline.expired
        list(client.read(1))


class Idle:
    """What an I/O thread does not need while nothing happens."""

    raw: Any = ()
    patience: Any = 0.0

    def __init__(self) -> None:
        self.heard = 0

    def pump(self) -> bool:
        return False

    def hear(self) -> None:
        self.heard += 1

    def step(self, sent: Any, now: float) -> Any:
        return sent


def test_a_data_port_is_heard_now_and_then_though_it_has_no_news() -> None:
    """Strangers that are silent have to leave, and a port that is deaf for a while has to listen again."""
    outlet, feed, waker = Idle(), Idle(), Waker()
    feed.patience = lambda at_most, now: at_most
    io = IOThread(Idle(), waker, None, None, outlet, feed, None, None)  # type: ignore[arg-type]
    io._poller.watch(waker.raw)
    io._step()
    assert outlet.heard == 1
    waker.wake()
    io._step()
    assert outlet.heard == 1, "it is another that has news"
    waker.close()
