"""One worker feeds the others: elements reach the worker they are for, in order, and no more than it asked for.

Both ends meet here over a wire of lists: no sockets, and a thread only where waiting itself is tested.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpc_reading_service import codec, messages
from rpc_reading_service.buffers import Logbook
from rpc_reading_service.dispatch import (
    BROKEN_S,
    NO_MORE,
    QUEUE_ELEMENTS,
    DispatchMailbox,
    EpochAbandoned,
    Feed,
    FeedBroken,
    FeedOutlet,
)
from rpc_reading_service.errors import RPCReadingError
from rpc_reading_service.messages import (
    Batches,
    Credit,
    EndOfShard,
    Heartbeat,
    Limit,
    Opened,
    ShardError,
    StartEpoch,
    StartWorker,
)
from rpc_reading_service.stream import Packer, Parcel

SESSION, OTHER = "a" * 32, "b" * 32


# ---------------------------------------------------------------------------------------------------- helpers


NOW = 100.0


def logbook() -> Logbook:
    fd = Logbook.create()
    try:
        return Logbook(fd)
    finally:
        os.close(fd)


class Bell:
    """A Waker that counts."""

    def __init__(self) -> None:
        self.rung = 0
        self.rang = threading.Event()

    def wake(self) -> None:
        self.rung += 1
        self.rang.set()


class Wire:
    """The dealers' ends and the router's end of the feed's sockets, and a Context that hands them out."""

    def __init__(self, num_workers: int = 1) -> None:
        self.to_worker = [deque[list[bytes]]() for _ in range(num_workers)]
        self.to_router = deque[list[bytes]]()
        self.dealers: dict[int, Dealer] = {}
        self.raw: Any = None

    def feed_dealer(self, session: str, pair: None, worker: int, address: str, port: int) -> "Dealer":
        self.dealers[worker] = Dealer(self, worker)
        return self.dealers[worker]

    def receive_all(self) -> Iterator[list[bytes]]:
        while self.to_router:
            yield self.to_router.popleft()

    def send(self, worker: int, frames: Sequence[Any]) -> None:
        self.to_worker[worker].append([bytes(frame) for frame in frames])


class Dealer:
    """A worker's end; ``full`` as a socket that takes nothing."""

    def __init__(self, wire: Wire, worker: int) -> None:
        self.raw = ("raw socket of worker", worker)
        self.raw_monitor = ("monitor of worker", worker)
        self.broke = self.full = False
        self._wire = wire
        self._inbox = wire.to_worker[worker]
        self._frames = deque[bytes]()

    def dropped(self) -> bool:
        return self.broke

    def send(self, frames: Sequence[Any]) -> bool:
        if not self.full:
            self._wire.to_router.append([bytes(frame) for frame in frames])
        return not self.full

    def receive(self) -> bytes | None:
        if not self._inbox:
            return None
        self._frames.extend(self._inbox.popleft())
        return self._frames.popleft()

    @property
    def more(self) -> bool:
        return bool(self._frames)

    def receive_frame(self) -> bytes:
        return self._frames.popleft()

    def receive_into(self, place: Any) -> int:
        frame, view = self._frames.popleft(), memoryview(place)
        view[: len(frame)] = frame[: view.nbytes]
        return len(frame)

    def skip(self) -> None:
        self._frames.clear()


def start(num_workers: int = 1, worker: int = 0, *, count: int = 2, nbytes: int = 1 << 20) -> StartWorker:
    return StartWorker(SESSION, worker, 0, 0, num_workers, count, nbytes)


def parcel(seq: int, value: Any = None, epoch: int = 1) -> Parcel:
    encoded = codec.Encoder().encode(value)
    return Parcel(epoch, seq, Batches, encoded.header, list(encoded.buffers))


def end(seq: int, epoch: int = 1) -> Parcel:
    return Parcel(epoch, seq, EndOfShard)


def epoch_of(mailbox: DispatchMailbox, epoch: int) -> StartEpoch:
    """Begin it there; the command is taken, too."""
    command = StartEpoch(SESSION, 9, 0, epoch, 0, 0)
    mailbox.command(command, b"seeds")
    assert mailbox.take(True) == (command, b"seeds")
    return command


def credit(worker: int = 0, consumed: int = 0, epoch: int = 1, session: str = SESSION) -> Credit:
    return Credit(session, worker, 0, epoch, consumed, False)


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Runs it; what it returned or raised is in the list once the thread is joined."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


class Fed:
    """A feed in epoch 1, connected, and what it is sent."""

    def __init__(self, **limits: int) -> None:
        self.bell = Bell()
        self.wire = Wire()
        self.feed = Feed(start(**limits), self.bell)  # type: ignore[arg-type]
        self.packer = Packer(SESSION, 0, 0)
        self.begin(1)
        self.raw = self.feed.connect(self.wire, "cpu1:5555", 7777)  # type: ignore[arg-type]
        self.dealer = self.wire.dealers[0]
        self.sent = self.feed.step(None, NOW)

    def begin(self, epoch: int) -> None:
        """Both threads know of it."""
        self.feed.begin_epoch(epoch)
        self.feed.read(epoch)

    def arrive(self, *parcels: Parcel) -> None:
        for frames in [packed.frames for packed in self.packer.pack(parcels)]:
            self.wire.send(0, frames)
        self.sent = self.feed.step(self.sent, NOW)

    def credits(self) -> list[Credit]:
        return [messages.decode(frames[0], messages.ToWorkerData) for frames in self.wire.receive_all()]


# ---------------------------------------------------------------------------------------------------- a worker's end


def test_elements_come_in_order_until_the_end() -> None:
    fed = Fed()
    fed.arrive(parcel(0, "a"), parcel(1, {"b": 1}), end(2))
    assert list(fed.feed.elements()) == ["a", {"b": 1}]


def test_connecting_says_what_to_poll() -> None:
    assert Fed().raw == [("raw socket of worker", 0), ("monitor of worker", 0)]


def test_nothing_moves_before_the_feed_is_connected() -> None:
    feed = Feed(start(), Bell())  # type: ignore[arg-type]
    feed.begin_epoch(1)
    assert feed.step(None, NOW) is None


def test_an_epoch_begins_with_a_credit_that_asks() -> None:
    fed = Fed()
    assert fed.sent == credit()
    assert fed.credits() == [credit()]


def test_a_credit_is_sent_once() -> None:
    fed = Fed()
    assert fed.feed.step(fed.sent, NOW) == fed.sent
    assert fed.credits() == [credit()]


def test_a_credit_that_could_not_be_sent_is_sent_later() -> None:
    fed = Fed()
    fed.credits()
    dealer: Any = fed.feed._socket
    dealer.full = True
    fed.feed.begin_epoch(2)
    assert fed.feed.step(fed.sent, NOW) == credit()
    dealer.full = False
    assert fed.feed.step(fed.sent, NOW) == credit(epoch=2)


def test_consumption_is_reported_after_a_quarter_of_the_window() -> None:
    fed = Fed(nbytes=1600)
    fed.arrive(*(parcel(seq, seq) for seq in range(20)))
    fed.credits()
    elements = fed.feed.elements()
    taken = 0
    while fed.feed.step(fed.sent, NOW) == fed.sent:
        next(elements)
        taken += 1
    assert fed.credits() == [credit(consumed=taken)]
    assert 1 < taken < 10


def test_a_worker_that_waits_reports_all_that_it_consumed() -> None:
    fed = Fed()
    fed.arrive(parcel(0, "a"))
    elements = fed.feed.elements()
    assert next(elements) == "a"
    fed.bell.rang.clear()
    thread, outcome = in_thread(lambda: next(elements))
    assert fed.bell.rang.wait(10)
    fed.sent = fed.feed.step(fed.sent, NOW)
    assert fed.sent == credit(consumed=1)
    fed.arrive(parcel(1, "b"))
    thread.join(10)
    assert outcome == ["b"]


def test_whoever_waits_is_told_that_the_next_epoch_has_begun() -> None:
    fed = Fed()
    elements = fed.feed.elements()
    fed.arrive(parcel(0, "a"))
    next(elements)
    fed.bell.rang.clear()
    thread, outcome = in_thread(lambda: next(elements))
    assert fed.bell.rang.wait(10)
    fed.feed.begin_epoch(2)
    thread.join(10)
    (error,) = outcome
    assert isinstance(error, EpochAbandoned)
    assert str(error) == "the next epoch has begun"


def test_the_end_of_a_shard_asks_for_no_more() -> None:
    fed = Fed()
    fed.feed.finish(1)
    assert fed.feed.step(fed.sent, NOW) == credit(consumed=NO_MORE)


def test_the_end_of_an_abandoned_epoch_does_not_end_the_next() -> None:
    fed = Fed()
    fed.feed.begin_epoch(2)
    fed.feed.finish(1)
    assert fed.feed.step(fed.sent, NOW) == credit(epoch=2)


def test_elements_of_one_epoch_never_come_from_the_next() -> None:
    fed = Fed()
    elements = fed.feed.elements()
    fed.feed.begin_epoch(2)
    fed.arrive(parcel(0, "of epoch 2", epoch=2))
    with pytest.raises(EpochAbandoned):
        next(elements)


def test_what_is_left_of_the_last_epoch_is_dropped() -> None:
    fed = Fed()
    fed.arrive(parcel(0, "old"))
    fed.begin(2)
    fed.arrive(parcel(1, "old"))
    fed.arrive(parcel(0, "new", epoch=2), end(1, epoch=2))
    assert list(fed.feed.elements()) == ["new"]


def test_the_dispatching_workers_exception_comes_after_the_elements_before_it() -> None:
    fed = Fed()
    fed.arrive(parcel(0, "a"), Parcel(1, 1, ShardError, codec.encode_error(KeyError("in the graph"))))
    elements = fed.feed.elements()
    assert next(elements) == "a"
    with pytest.raises(KeyError, match="Caught KeyError in dispatching process"):
        next(elements)


def test_an_opening_message_is_no_element() -> None:
    fed = Fed()
    fed.wire.send(0, [messages.encode(Opened(SESSION, 0, 0, 1, 0))])
    fed.arrive(parcel(0, "a"), end(1))
    assert list(fed.feed.elements()) == ["a"]


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        (
            (packed.frames for packed in Packer(SESSION, 0, 0).pack([parcel(2, "c")])),
            "worker 0: 2 batches are missing, numbers 0 to 1",
        ),
        ([[b"garbage"]], "a data message cannot be read: "),
    ],
    ids=["gap", "garbage"],
)
def test_what_does_not_arrive_whole_ends_the_worker(frames: Any, reason: str) -> None:
    fed = Fed()
    for each in frames:
        fed.wire.send(0, list(each))
    check_that_it_ends(fed, reason)


def test_a_broken_connection_ends_the_worker() -> None:
    fed = Fed()
    fed.dealer.broke = True
    check_that_it_ends(fed, "the connection broke")


def check_that_it_ends(fed: Fed, reason: str) -> None:
    """Unless it is stopped before, by whoever knows better what happened."""
    assert fed.feed.patience(60.0, NOW) == 60.0
    fed.arrive()
    assert fed.feed.patience(60.0, NOW + 0.5) == BROKEN_S - 0.5
    fed.arrive()
    with pytest.raises(FeedBroken, match=f"^worker 0 is cut off from the dispatching worker: {reason}"):
        fed.feed.step(fed.sent, NOW + BROKEN_S)


def test_an_abandoned_epoch_is_an_error_of_this_package() -> None:
    assert issubclass(EpochAbandoned, RPCReadingError)


# ---------------------------------------------------------------------------------------------------- the mailbox


def mailbox_of(num_workers: int = 2, **limits: int) -> tuple[DispatchMailbox, Bell]:
    """In epoch 1, in which every worker has asked."""
    bell = Bell()
    mailbox = DispatchMailbox(start(num_workers, **limits), bell, logbook())  # type: ignore[arg-type]
    epoch_of(mailbox, 1)
    for worker in range(num_workers):
        mailbox.credit(credit(worker))
    return mailbox, bell


def test_a_command_comes_before_a_hungry_worker() -> None:
    mailbox, _ = mailbox_of()
    message = Limit(SESSION, 2, 0, 1, None)
    mailbox.command(message, None)
    assert mailbox.take(True) == (message, None)
    assert mailbox.take(True) is None


def test_who_produces_nothing_waits_for_a_command() -> None:
    mailbox, _ = mailbox_of()
    thread, outcome = in_thread(lambda: mailbox.take(False))
    message = Limit(SESSION, 2, 0, 1, None)
    mailbox.command(message, b"function")
    thread.join(10)
    assert outcome == [(message, b"function")]


def test_the_graph_waits_until_a_worker_is_hungry() -> None:
    mailbox, _ = mailbox_of(1)
    mailbox.put(0, parcel(0))
    thread, outcome = in_thread(lambda: mailbox.take(True))
    assert len(mailbox.collect()) == 1
    thread.join(10)
    assert outcome == [None]


def test_a_worker_that_has_not_asked_in_this_epoch_is_not_hungry_and_gets_nothing() -> None:
    mailbox, _ = mailbox_of(1)
    epoch_of(mailbox, 2)
    mailbox.put(0, parcel(0, epoch=2))
    assert mailbox.collect() == []
    mailbox.credit(credit(epoch=2))
    assert [worker for worker, _ in mailbox.collect()] == [0]
    assert mailbox.take(True) is None


def test_a_worker_may_ask_before_the_epoch_has_begun_here() -> None:
    mailbox, _ = mailbox_of(1)
    mailbox.credit(credit(epoch=2, consumed=5))
    epoch_of(mailbox, 2)
    assert mailbox.take(True) is None


@pytest.mark.parametrize("news", [credit(7), credit(0, NO_MORE, epoch=0)], ids=["unknown worker", "old epoch"])
def test_credit_of_nobody_or_of_an_old_epoch_changes_nothing(news: Credit) -> None:
    mailbox, _ = mailbox_of(1)
    mailbox.credit(news)
    assert mailbox.take(True) is None


def test_each_worker_gets_its_own_up_to_its_window() -> None:
    mailbox, _ = mailbox_of(2, count=1, nbytes=1)
    for seq in range(2):
        mailbox.put(0, parcel(seq, "zero"))
        mailbox.put(1, parcel(seq, "one"))
    assert [(worker, [p.seq for p in parcels]) for worker, parcels in mailbox.collect()] == [(0, [0]), (1, [0])]
    assert mailbox.collect() == []
    mailbox.credit(credit(1, 1))
    assert [(worker, [p.seq for p in parcels]) for worker, parcels in mailbox.collect()] == [(1, [1])]


def test_a_parcel_of_the_last_epoch_is_dropped() -> None:
    mailbox, _ = mailbox_of(1)
    mailbox.put(0, parcel(0, epoch=0))
    assert mailbox.collect() == []


def test_a_new_epoch_clears_what_waits() -> None:
    mailbox, _ = mailbox_of(1)
    mailbox.put(0, parcel(0))
    epoch_of(mailbox, 2)
    mailbox.credit(credit(epoch=2))
    assert mailbox.collect() == []


def test_a_worker_that_wants_no_more_in_this_epoch_gets_nothing_and_hungers_in_the_next() -> None:
    mailbox, _ = mailbox_of(2)
    mailbox.put(0, parcel(0))
    mailbox.credit(credit(0, NO_MORE))
    mailbox.put(0, parcel(1))
    assert mailbox.collect() == []
    epoch_of(mailbox, 2)
    mailbox.credit(credit(0, epoch=2))
    assert mailbox.take(True) is None


def test_a_worker_may_want_no_more_in_an_epoch_that_has_not_begun_here_yet() -> None:
    mailbox, _ = mailbox_of(2)
    mailbox.credit(credit(0, NO_MORE, epoch=2))
    epoch_of(mailbox, 2)
    mailbox.put(0, parcel(0, epoch=2))
    assert mailbox.collect() == []
    mailbox.credit(credit(1, epoch=2))
    mailbox.put(1, parcel(0, epoch=2))
    assert [worker for worker, _ in mailbox.collect()] == [1]


def test_the_io_thread_is_woken_only_if_it_found_nothing() -> None:
    mailbox, bell = mailbox_of(1)
    mailbox.put(0, parcel(0))
    assert bell.rung == 0
    mailbox.collect()
    mailbox.put(0, parcel(1))
    assert bell.rung == 0
    mailbox.collect()
    assert mailbox.collect() == []
    mailbox.put(0, parcel(2))
    mailbox.put(0, parcel(3))
    assert bell.rung == 1


def test_too_many_elements_for_a_worker_that_takes_none_are_refused_with_the_remedy() -> None:
    mailbox, _ = mailbox_of(2)
    one = parcel(0)
    for _ in range(QUEUE_ELEMENTS):
        mailbox.put(1, one)
    with pytest.raises(BufferError) as caught:
        mailbox.put(1, one)
    assert str(caught.value) == (
        f"sharding_round_robin_dispatch holds {QUEUE_ELEMENTS} elements for worker 1, which takes none while another "
        "waits for its own; let every worker use as many elements for a batch"
    )


# ---------------------------------------------------------------------------------------------------- both ends


def test_the_outlet_takes_credit_and_lets_parcels_go() -> None:
    mailbox, _ = mailbox_of(1, count=1, nbytes=1)
    wire = Wire()
    outlet = FeedOutlet(mailbox, wire, SESSION)  # type: ignore[arg-type]
    assert not outlet.pump()
    mailbox.put(0, parcel(0, "a"))
    mailbox.put(0, parcel(1, "b"))
    assert outlet.pump()
    assert not outlet.pump()
    wire.to_router.append([messages.encode(credit(consumed=1))])
    assert outlet.pump()
    assert len(wire.to_worker[0]) == 2


@pytest.mark.parametrize(
    "frames",
    [[], [b""], [b"garbage"], [messages.encode(Heartbeat(SESSION, 0))],
     [messages.encode(Limit(SESSION, 0, 0, 1, None))],
     [messages.encode(credit(consumed=1, session=OTHER))]],
    ids=["nothing", "empty", "garbage", "no worker's message", "no credit", "another session"],
)  # fmt: skip
def test_what_is_no_credit_of_this_session_changes_nothing(frames: list[bytes]) -> None:
    mailbox, _ = mailbox_of(1, count=1, nbytes=1)
    wire = Wire()
    outlet = FeedOutlet(mailbox, wire, SESSION)  # type: ignore[arg-type]
    mailbox.put(0, parcel(0, "a"))
    mailbox.put(0, parcel(1, "b"))
    outlet.pump()
    wire.to_router.append(frames)
    assert not outlet.pump()


@given(
    num_workers=st.integers(1, 3),
    length=st.integers(0, 12),
    limits=st.tuples(st.integers(1, 3), st.sampled_from([1, 200, 1 << 20])),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_every_element_reaches_its_worker_once_and_in_order(
    num_workers: int, length: int, limits: tuple[int, int], data: st.DataObject
) -> None:
    """Whatever the order in which the threads of all workers move, over two epochs, the first of them abandoned."""
    count, nbytes = limits
    wire, begin = Wire(num_workers), start(num_workers, count=count, nbytes=nbytes)
    mailbox = DispatchMailbox(begin, Bell(), logbook())  # type: ignore[arg-type]
    outlet = FeedOutlet(mailbox, wire, SESSION)  # type: ignore[arg-type]
    feeds = [Feed(start(num_workers, worker, count=count, nbytes=nbytes), Bell()) for worker in range(num_workers)]  # type: ignore[arg-type]
    for feed in feeds:
        feed.connect(wire, "cpu1:5555", 7777)  # type: ignore[arg-type]
    sent: list[Credit | None] = [None] * num_workers
    produced, epoch = 0, 0
    got: list[list[Any]] = []
    graphs: list[Iterator[Any]] = []

    def begin() -> None:
        nonlocal produced, epoch, got, graphs
        epoch, produced, got = epoch + 1, 0, [[] for _ in feeds]
        for worker in data.draw(st.permutations(range(num_workers + 1))):
            if worker == num_workers:
                epoch_of(mailbox, epoch)
            else:
                feeds[worker].begin_epoch(epoch)
                feeds[worker].read(epoch)
        graphs = [feed.elements() for feed in feeds]

    def move(kind: str, worker: int) -> bool:
        nonlocal produced
        match kind:
            case "produce" if produced <= length and any(mailbox._is_hungry(each) for each in range(num_workers)):
                assert mailbox.take(True) is None
                if produced < length:
                    turn = produced % num_workers
                    mailbox.put(turn, parcel(produced // num_workers, f"{epoch}/{produced}", epoch))
                else:
                    for each in range(num_workers):
                        mailbox.put(each, end(len(range(each, length, num_workers)), epoch))
                produced += 1
            case "pump":
                heard = bool(wire.to_router)
                return outlet.pump() or heard
            case "step":
                arrived, before = bool(wire.to_worker[worker]), sent[worker]
                sent[worker] = feeds[worker].step(before, NOW)
                return arrived or sent[worker] != before
            case "take" if feeds[worker]._merge.received != feeds[worker]._merge.consumed:
                got[worker].append(next(graphs[worker]))
            case "take" if not feeds[worker]._merge.exhausted and feeds[worker]._credit != _asking(
                feeds[worker], epoch
            ):
                feeds[worker]._ask(epoch)  # what a graph that has to wait does first
            case _:
                return False
        return True

    kinds = ["produce", "pump", "step", "take"]
    begin()
    for _ in range(data.draw(st.integers(0, 25))):
        move(data.draw(st.sampled_from(kinds)), data.draw(st.integers(0, num_workers - 1)))
    begin()
    moved = [True]
    while any(moved):
        moved = [move(kind, worker) for kind in kinds for worker in range(num_workers)]
    assert got == [[f"2/{k}" for k in range(worker, length, num_workers)] for worker in range(num_workers)]
    assert all(feed._merge.exhausted for feed in feeds)
    assert [list(graph) for graph in graphs] == [[] for _ in feeds]


def _asking(feed: Feed, epoch: int) -> Credit:
    return Credit(SESSION, feed._start.worker, 0, epoch, feed._merge.consumed[0], False)
