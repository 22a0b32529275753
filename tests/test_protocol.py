"""The session and its workers in values only: every state and event, the window, and whole histories with losses.

The histories play a ``ClientSession`` and a ``Merge`` against a model of daemons and workers: no sockets, no clock.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rpc_reading_service.actions import (
    ConnectData,
    DisconnectData,
    Drop,
    Fail,
    FailRemotely,
    FailToConnect,
    Leave,
    Reconnect,
    Resolve,
    Send,
    SendData,
)
from rpc_reading_service.errors import (
    ConnectError,
    GraphError,
    RPCReadingError,
    SlotsError,
    StreamError,
    VersionError,
    WorkerLostError,
)
from rpc_reading_service.links import (
    LinkState,
)
from rpc_reading_service.merge import Entry, Merge, Signal
from rpc_reading_service.messages import (
    PROTOCOL_VERSION,
    Batches,
    CloseSession,
    ConnectFeed,
    Credit,
    Data,
    Done,
    Draining,
    EndOfShard,
    GraphArriving,
    GraphChunk,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Limit,
    Message,
    Offer,
    Opened,
    OpenSession,
    Pause,
    Refused,
    Resume,
    SessionClosed,
    SessionOpened,
    Stack,
    StartEpoch,
    StartWorker,
    StopWorker,
    Welcome,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
)
from rpc_reading_service.pool import Pool, deal
from rpc_reading_service.protocol import (
    AHEAD_AT_MOST,
    AHEAD_BYTES,
    AHEAD_COUNT,
    BATCH_OVERHEAD_BYTES,
    CREDIT_COUNT,
    SMALL_WINDOW_BYTES,
    TRANSITIONS,
    CreditMeter,
    Window,
    WorkerEvent,
    WorkerState,
    advance,
    compare_versions,
    incompatible,
    weight,
)
from rpc_reading_service.segments import Board
from rpc_reading_service.session import (
    ASK_NAMES_S,
    DROPPED_S,
    GREETING_S,
    HEARTBEAT_S,
    HELLO_S,
    MAX_FAILED_STARTS,
    MAX_FRUITLESS,
    MAX_LOSSES,
    MAX_RESTART_S,
    NO_REQUEST,
    REPORT_S,
    RESOLVE_S,
    SILENCE_S,
    START_WITHOUT_S,
    ClientSession,
    SessionOptions,
    Worker,
)

TICKET = "looked at"
SESSION, OTHER, BOOT = "a" * 32, "b" * 32, "0" * 32
OFFER = Offer(3, bytes(32))
VERSIONS = {"python": "3.11.4", "torch": "2.12.0", "rpc-reading-service": "0.1.0"}


def round_robin(shards: Sequence[Sequence[Any]]) -> list[Any]:
    """The reference: one from each in turn, without those that have no more."""
    longest = max(map(len, shards), default=0)
    return [shard[i] for i in range(longest) for shard in shards if i < len(shard)]


# ---------------------------------------------------------------------------------------------------- one worker

S, E = WorkerState, WorkerEvent

NEXT: dict[WorkerEvent, dict[WorkerState, WorkerState]] = {
    E.START: {S.VACANT: S.STARTING},
    E.READY: {S.STARTING: S.STANDBY},
    E.BEGIN: {S.STANDBY: S.RUNNING, S.RUNNING: S.RUNNING, S.PAUSED: S.RUNNING},
    E.END: {S.RUNNING: S.STANDBY, S.PAUSED: S.STANDBY},
    E.PAUSE: {S.STANDBY: S.STANDBY, S.RUNNING: S.PAUSED, S.PAUSED: S.PAUSED},
    E.RESUME: {S.STANDBY: S.STANDBY, S.RUNNING: S.RUNNING, S.PAUSED: S.RUNNING},
    E.LOSE: {S.STARTING: S.VACANT, S.STANDBY: S.VACANT, S.RUNNING: S.VACANT, S.PAUSED: S.VACANT},
    E.CLOSE: dict.fromkeys(S, S.CLOSED),
}


@pytest.mark.parametrize("event", WorkerEvent)
@pytest.mark.parametrize("state", WorkerState)
def test_every_event_in_every_state_of_a_worker(state: WorkerState, event: WorkerEvent) -> None:
    if state in NEXT[event]:
        assert advance(state, event) is NEXT[event][state]
    else:
        with pytest.raises(RPCReadingError, match=f"^a worker that is {state.value} cannot {event.value}$"):
            advance(state, event)


def test_a_closed_worker_stays_closed() -> None:
    assert {event for state, event in TRANSITIONS if state is S.CLOSED} == {E.CLOSE}


# ---------------------------------------------------------------------------------------------------- the window

weights = st.one_of(st.integers(0, 5_000), st.integers(0, 400_000), st.integers(0, 8_000_000))


def test_a_batch_weighs_its_parts_and_its_objects() -> None:
    assert weight([3, 0, 7]) == BATCH_OVERHEAD_BYTES + 10
    assert weight([]) == BATCH_OVERHEAD_BYTES


@given(st.integers(1, 6), st.integers(1, 3_000_000), st.lists(st.one_of(weights, st.none()), max_size=40))
@settings(max_examples=100, deadline=None)
def test_the_window_is_open_within_its_bound_only(count: int, nbytes: int, script: list[int | None]) -> None:
    """A weight is a batch that wants to leave; None is credit for the oldest one in flight."""
    window, flying = Window(count, nbytes), deque[int]()
    largest = 0
    for each in script:
        if each is None and flying:
            flying.popleft()
            window.credit(window.consumed + 1)
        elif each is not None and window.is_open:
            assert not flying or sum(flying) + largest <= nbytes
            is_middling = len(flying) < AHEAD_COUNT * count and sum(flying) < AHEAD_BYTES * count
            assert len(flying) < count or sum(flying) < SMALL_WINDOW_BYTES or is_middling
            flying.append(each)
            window.produce(each)
            largest = max(largest, each)
        assert window.in_flight_bytes == sum(flying)
        assert window.produced - window.consumed == len(flying)
        assert window.is_open or flying, "nothing is in flight, and still it is closed"


def test_count_batches_may_always_be_in_flight() -> None:
    window = Window(3, 100 << 20)
    for _ in range(3):
        assert window.is_open
        window.produce(3 * AHEAD_BYTES)
    assert not window.is_open


def test_of_middling_batches_more_may_be_in_flight() -> None:
    window = Window(3, 100 << 20)
    while window.is_open:
        window.produce(344 << 10)
    assert window.produced == 3 * AHEAD_COUNT
    window = Window(3, 100 << 20)
    while window.is_open:
        window.produce(1 << 20)
    assert window.in_flight_bytes == 3 * AHEAD_BYTES


@pytest.mark.parametrize(("count", "produced"), [(8, 128), (16, 128), (100, 128), (200, 200)])
def test_but_no_more_than_leave_segments_for_what_the_user_keeps(count: int, produced: int) -> None:
    window = Window(count, 1 << 30)
    while window.is_open:
        window.produce(100 << 10)
    assert window.produced == produced
    assert 3 * AHEAD_AT_MOST <= Board.SLOTS


def test_but_no_more_bytes_than_the_budget() -> None:
    window = Window(3, 3 << 20)
    while window.is_open:
        window.produce(1 << 20)
    assert window.in_flight_bytes == 3 << 20


def test_small_batches_travel_together_beyond_the_count() -> None:
    window, sent = Window(2, 100 << 20), 0
    while window.is_open:
        window.produce(1024)
        sent += 1
    assert sent == SMALL_WINDOW_BYTES // 1024


def test_a_batch_over_the_budget_moves_alone() -> None:
    window = Window(4, 1000)
    window.produce(5000)
    assert not window.is_open
    window.credit(1)
    assert window.is_open


def test_room_is_kept_for_the_largest_batch_so_far() -> None:
    window = Window(10, 1000)
    window.produce(600)
    assert not window.is_open
    window.credit(1)
    window.produce(300)
    assert window.is_open
    window.produce(200)
    assert not window.is_open


def test_older_news_of_consumption_changes_nothing() -> None:
    window = Window(1, 1000)
    window.produce(10)
    window.produce(10)
    window.credit(2)
    window.credit(1)
    assert (window.consumed, window.in_flight_bytes) == (2, 0)


def test_credit_for_what_was_not_produced_yet_counts_up_to_what_was() -> None:
    window = Window(1, 1 << 30)
    window.produce(AHEAD_BYTES)
    window.credit(1 << 60)
    assert window.consumed == 1
    window.produce(AHEAD_BYTES)
    assert not window.is_open


def test_a_replayed_window_knows_how_many_are_in_flight_but_not_their_weight() -> None:
    window = Window(2, 1 << 30)
    window.produce(1 << 20)
    window.begin(10, 7)
    assert (window.produced, window.consumed, window.in_flight_bytes) == (10, 7, 0)
    window.produce(1 << 20)
    window.credit(10)
    assert window.in_flight_bytes == 1 << 20
    window.credit(11)
    assert window.in_flight_bytes == 0


def test_a_replay_cannot_have_consumed_more_than_it_produced() -> None:
    window = Window(1, 1)
    window.begin(2, 5)
    assert window.consumed == 2


# ---------------------------------------------------------------------------------------------------- credit


def test_the_worker_is_told_after_a_quarter_of_the_small_window() -> None:
    meter = CreditMeter(1 << 30)
    quarter = SMALL_WINDOW_BYTES // 4
    many = 2 * AHEAD_COUNT
    assert [meter.consume(quarter // many) for _ in range(2 * many)] == [*[False] * (many - 1), True] * 2


def test_the_worker_is_told_after_half_of_a_smaller_budget() -> None:
    meter = CreditMeter(400)
    assert [meter.consume(each) for each in (199, 1, 200, 50)] == [False, True, True, False]


def test_the_worker_is_told_of_some_middling_batches_at_once() -> None:
    meter = CreditMeter(1 << 30, count=4)
    assert [meter.consume(344 << 10) for _ in range(2 * CREDIT_COUNT)] == [*[False] * (CREDIT_COUNT - 1), True] * 2


def test_the_worker_is_told_of_half_its_large_batches_at_once() -> None:
    meter = CreditMeter(1 << 30, count=4)
    assert [meter.consume(AHEAD_BYTES) for _ in range(5)] == [False, True, False, True, False]


def test_a_budget_of_nothing_tells_after_every_batch() -> None:
    assert CreditMeter(1).consume(0)


@given(
    count=st.integers(1, 5),
    nbytes=st.integers(1, 2_000_000),
    sizes=st.lists(weights, max_size=25),
    moves=st.lists(st.sampled_from(["produce", "arrive", "consume", "credit"]), max_size=80),
)
@settings(max_examples=100, deadline=None)
def test_worker_and_consumer_never_wait_for_each_other(
    count: int, nbytes: int, sizes: list[int], moves: list[str]
) -> None:
    """Whatever the order of their moves, everything arrives, since a consumer that waits reports what it consumed."""
    window, meter = Window(count, nbytes), CreditMeter(nbytes, count)
    to_send, flying, news = deque(sizes), deque[int](), deque[int]()
    consumed = reported = 0

    def move(kind: str) -> bool:
        nonlocal consumed, reported
        match kind:
            case "produce" if to_send and window.is_open:
                window.produce(to_send[0])
                flying.append(to_send.popleft())
            case "consume" if flying:
                consumed += 1
                if meter.consume(flying.popleft()):
                    reported = consumed
                    news.append(consumed)
            case "consume" if reported != consumed and not meter.leaves_room(consumed - reported):
                # It waits: client._report_consumption.
                reported = consumed
                news.append(consumed)
            case "credit" if news:
                window.credit(news.popleft())
            case _:
                return False
        return True

    for kind in moves:
        move(kind)
    while move("produce") or move("consume") or move("credit"):
        pass
    assert consumed == len(sizes)


# ---------------------------------------------------------------------------------------------------- dealing slots


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.data())
@settings(max_examples=80, deadline=None)
def test_shards_are_dealt_in_turn_as_long_as_there_are_slots(counts: list[int], data: st.DataObject) -> None:
    slots = {f"cpu{i}:5555": count for i, count in enumerate(counts)}
    total = data.draw(st.integers(0, sum(counts)))
    dealt = deal(slots, total)
    assert dealt == round_robin([[address] * count for address, count in slots.items()])[:total]
    assert slots == {f"cpu{i}:5555": count for i, count in enumerate(counts)}, "the argument was changed"


@pytest.mark.timeout(10)
def test_more_shards_than_slots_cannot_be_dealt() -> None:
    with pytest.raises(SlotsError, match=r"^3 shards need a slot each, but only 2 are held$"):
        deal({"a": 1, "b": 1}, 3)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(1, 6))
@settings(max_examples=80, deadline=None)
def test_ranks_never_share_a_slot(counts: list[int], world_size: int) -> None:
    slots = {f"cpu{i}:5555": count for i, count in enumerate(counts)}
    shares = [Pool(rank, world_size).shares(slots, 0) for rank in range(world_size)]
    for address, count in slots.items():
        assert sum(share[address] for share in shares) <= count
    if len(slots) >= world_size:
        assert all(sum(share[address] for share in shares) == count for address, count in slots.items())


def test_ranks_take_daemons_in_turn_or_divide_one() -> None:
    assert Pool(1, 2).shares({"a": 2, "b": 3, "c": 4, "d": 5}, 1) == {"a": 0, "b": 3, "c": 0, "d": 5}
    assert Pool(2, 3).shares({"a": 5, "b": 2}, 1) == {"a": 2, "b": 0}


def test_every_rank_is_told_that_one_gets_too_few_slots() -> None:
    text = (
        "^2 ranks share 3 slots \\(a with 2, b with 1\\); rank 1 would get 1 of the 2 that each rank needs: start more "
        "daemons or more slots, or ask for fewer num_workers$"
    )
    for rank in range(2):
        with pytest.raises(SlotsError, match=text):
            Pool(rank, 2).shares({"a": 2, "b": 1}, 2)


# ---------------------------------------------------------------------------------------------------- versions


def test_equal_versions_fit() -> None:
    assert incompatible(PROTOCOL_VERSION, VERSIONS, VERSIONS) is None
    assert compare_versions(VERSIONS, VERSIONS) == []


@pytest.mark.parametrize(
    ("name", "there", "fits"),
    [
        ("python", "3.11.9", True),
        ("python", "3.12.4", False),
        ("python", "4.11.4", False),
        ("torch", "2.13.1", True),
        ("torch", "3.0.0", False),
        ("rpc-reading-service", "0.2.0", True),
    ],
)
def test_a_python_or_a_major_torch_that_differs_is_refused(name: str, there: str, fits: bool) -> None:
    text = (
        f"the client runs {name} {there}, this daemon {name} {VERSIONS[name]}: install the same version on both sides"
    )
    assert incompatible(PROTOCOL_VERSION, VERSIONS | {name: there}, VERSIONS) == (None if fits else text)


def test_an_unknown_version_is_refused_as_absent() -> None:
    text = "the client runs python absent, this daemon python 3.11.4: install the same version on both sides"
    assert incompatible(PROTOCOL_VERSION, {}, VERSIONS) == text


def test_another_protocol_is_refused_with_the_packages_of_both_sides() -> None:
    assert incompatible(99, VERSIONS | {"rpc-reading-service": "9.9"}, {}) == (
        f"the client speaks protocol 99 (rpc-reading-service 9.9), this daemon protocol {PROTOCOL_VERSION} "
        "(rpc-reading-service unknown): install the same version on both sides"
    )
    text = incompatible(99, {}, VERSIONS)
    assert text is not None
    assert "the client speaks protocol 99 (rpc-reading-service unknown)" in text


def test_versions_that_differ_are_compared_by_name() -> None:
    theirs = {"python": "3.11.4", "torch": "2.13.0", "numpy": "2.0"}
    assert compare_versions(VERSIONS, theirs) == [
        ("numpy", "absent here, 2.0 there"),
        ("rpc-reading-service", "0.1.0 here, absent there"),
        ("torch", "2.12.0 here, 2.13.0 there"),
    ]


# ---------------------------------------------------------------------------------------------------- by hand


def options(**changes: Any) -> SessionOptions:
    graph = memoryview(b"graph")
    defaults = SessionOptions(
        session=SESSION, client="trainer (pid 1)", versions=VERSIONS, num_workers=None, prefetch_count=2,
        prefetch_bytes=4_000_000, on_worker_loss="recover", timeout=60.0, connect_timeout=30.0,
        graph_digest="d" * 64, graph_chunks=[graph[:3], graph[3:]], graph_bytes=5, graph_name="Source -> End",
    )  # fmt: skip
    return dataclasses.replace(defaults, **changes)


class Played:
    """A session whose daemons are played by the test, message by message."""

    def __init__(
        self,
        *addresses: str,
        found: Sequence[str] = (),
        progress: dict[int, tuple[int, int]] | None = None,
        **changes: Any,
    ) -> None:
        self.now = 100.0
        self.progress = progress or {}
        self.session = ClientSession(addresses, options(**changes), lambda worker: self.progress.get(worker, (0, 0)))
        self.session.open(self.now)
        if found:
            self.session.resolved(found, self.now)

    def receive(self, address: str, message: Any, payload: bytes | None = None) -> None:
        self.session.receive(address, message, payload, self.now)

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.session.tick(self.now)

    def watch(self, seconds: float) -> None:
        """As ``tick``, in steps such as the client's I/O thread makes: while it does not run, nobody is silent."""
        for _ in range(int(seconds)):
            self.tick(1.0)
        self.tick(seconds - int(seconds))

    def take(self, *kinds: type) -> list[Any]:
        """The actions of these kinds; of messages, the messages. The others are dropped."""
        actions = self.session.take_actions()
        found = [action.message if isinstance(action, Send) and action.message else action for action in actions]
        return [each for each in found if isinstance(each, kinds or object)]

    def welcome(self, address: str, slots: int = 1, free: int | None = None, sessions: int = 0, **more: Any) -> None:
        free = slots if free is None else free
        boot, versions = more.get("boot", BOOT), more.get("versions", VERSIONS)
        self.receive(
            address, Welcome(PROTOCOL_VERSION, versions, boot, f"host of {address}", slots, free, sessions, TICKET)
        )

    def opened(self, address: str, slots: int = 1, has_graph: bool = False) -> None:
        self.receive(address, SessionOpened(SESSION, self.session.links[address].received, slots, has_graph))

    def beat(self, address: str, boot: str = BOOT, lost: int = 0) -> None:
        """The daemon answers a heartbeat; so many of its messages have not arrived."""
        self.receive(address, HeartbeatReply(SESSION, self.session.links[address].received + lost, boot, []))

    def ready(self, worker: int, port: int = 6000) -> None:
        """The worker gets ready, and its data channel opens."""
        known = self.session.workers[worker]
        self.receive(known.address, WorkerReady(SESSION, worker, known.attempt, 42, port, None))
        if self.session.is_starting(worker, known.attempt):
            self.session.data_opened(worker, self.now)

    def again(self, worker: int) -> float:
        """The worker is started again, and gets ready; how long that took."""
        began = self.now
        while self.session.workers[worker].state is S.VACANT:
            self.tick(0.05)
            self.beat(self.session.links["a"].address)
        self.ready(worker)
        return round(self.now - began, 2)

    def exited(self, worker: int, reason: str = "was killed by SIGKILL", batch: int | None = None) -> None:
        known = self.session.workers[worker]
        self.receive(known.address, WorkerExited(SESSION, worker, known.attempt, reason, batch))

    def states(self) -> list[WorkerState]:
        return [worker.state for worker in self.session.workers]

    def places(self) -> list[str]:
        return [worker.address for worker in self.session.workers]

    def error(self) -> str:
        """The text of the one Fail."""
        (fail,) = self.take(Fail)
        return str(fail.error)


def opening(*slots: int, **changes: Any) -> Played:
    """Daemons a, b, ... with so many free slots each have answered."""
    played = Played(*"abc"[: len(slots)], **changes)
    for address, count in zip("abc", slots, strict=False):
        played.welcome(address, count)
    return played


def started(*slots: int, **changes: Any) -> Played:
    """All slots asked for are held; the workers are starting."""
    played = opening(*slots, **changes)
    for message in [a for a in played.session.take_actions() if isinstance(a, Send)]:
        if isinstance(message.message, OpenSession):
            played.opened(message.address, message.message.slots or 0)
    return played


def running(*slots: int, **changes: Any) -> Played:
    """Every worker runs epoch 1."""
    played = started(*slots, **changes)
    for worker in played.session.workers:
        played.ready(worker.worker)
    played.session.start_epoch([b"seeds of %d" % w.worker for w in played.session.workers], played.now)
    played.session.begin_shards(played.now)
    played.take()
    return played


# Opening.


def test_every_daemon_is_greeted_at_once_and_again_each_second() -> None:
    played = Played("a", "b")
    hello = Hello(PROTOCOL_VERSION, VERSIONS, "trainer (pid 1)")
    assert played.session.take_actions() == [Send("a", hello), Send("b", hello)]
    played.welcome("a")
    played.tick(HELLO_S / 2)
    assert played.take(Hello) == []
    played.tick(HELLO_S / 2)
    assert played.session.take_actions() == [Send("b", hello)]


def test_slots_are_held_once_every_daemon_has_answered() -> None:
    played = Played("a", "b")
    played.welcome("a", 2)
    assert played.take(OpenSession) == []
    played.welcome("b", 3)
    assert played.take(OpenSession) == [
        OpenSession(SESSION, 0, "trainer (pid 1)", slots, "d" * 64, 5, "Source -> End", TICKET) for slots in (2, 3)
    ]


@pytest.mark.parametrize(("num_workers", "held"), [(None, [0, 2]), (1, [0, 1])])
def test_a_rank_holds_its_share_of_the_pool_alone(num_workers: int | None, held: list[int]) -> None:
    played = opening(2, 3, pool=Pool(1, 2), num_workers=num_workers)
    wanted = {"a": 0, "b": 0}
    for action in played.session.take_actions():
        if isinstance(action, Send) and isinstance(action.message, OpenSession):
            wanted[action.address] = action.message.slots
    assert list(wanted.values()) == held


def test_a_pool_that_is_too_small_is_refused_with_the_arithmetic() -> None:
    played = opening(1, pool=Pool(1, 2))
    fail = played.take(Fail)[0]
    assert isinstance(fail.error, SlotsError)
    assert str(fail.error).startswith("2 ranks share 1 slots (a with 1); rank 0 would get")


def test_daemons_that_reject_our_keys_are_not_waited_for() -> None:
    played = Played("a", "b")
    played.welcome("a")
    played.session.link_rejected("b")
    played.tick()
    assert played.take(FailToConnect) == [FailToConnect(["b"])]


def test_a_daemon_that_rejects_our_keys_is_not_missed_if_the_others_suffice() -> None:
    played = Played("a", "b", num_workers=1)
    played.welcome("a")
    played.session.link_rejected("b")
    played.tick()
    assert played.take(FailToConnect) == []


def test_a_second_answer_to_a_repeated_hello_changes_nothing() -> None:
    played = opening(1)
    played.take()
    played.welcome("a", 9)
    assert played.take() == []


def test_a_daemon_without_free_slots_is_not_asked_for_any() -> None:
    played = Played("a", "b")
    played.welcome("a", 4, free=0, sessions=2)
    played.welcome("b", 1)
    sent = [a.address for a in played.session.take_actions() if isinstance(a, Send)]
    assert sent == ["a", "b", "b"]


def test_num_workers_are_dealt_one_by_one() -> None:
    played = opening(1, 4, num_workers=3)
    assert [message.slots for message in played.take(OpenSession)] == [1, 2]


def test_a_pool_of_ranks_limits_what_is_held() -> None:
    played = opening(4, 4, pool=Pool(1, 2))
    sent = [a for a in played.session.take_actions() if isinstance(a, Send) and isinstance(a.message, OpenSession)]
    assert [(a.address, a.message.slots) for a in sent if isinstance(a.message, OpenSession)] == [("b", 4)]


def test_too_few_free_slots_are_an_error_that_names_every_daemon() -> None:
    played = Played("a", "b", num_workers=3)
    played.welcome("a", 2, free=1, sessions=1)
    played.welcome("b", 4, free=0, sessions=2)
    text = played.error()
    assert text.startswith("num_workers=3, but only 1 slots are free for it: ")
    assert "1 of 2 slots free on a: held by 1 session;" in text
    assert "0 of 4 slots free on b: held by 2 sessions" in text
    assert text.endswith("Ask for fewer workers, or start more daemons or more slots")


def test_the_dispatching_worker_needs_a_slot_of_its_own() -> None:
    played = opening(1, dispatching=True)
    assert played.error().startswith(
        "num_workers=None and one for sharding_round_robin_dispatch, but only 1 slots are free for it: "
    )


def test_the_shards_are_dealt_in_turn_and_the_graph_is_sent_once_a_daemon() -> None:
    played = started(2, 1)
    assert played.places() == ["a", "b", "a"]
    assert played.states() == [S.STARTING] * 3
    actions = [a for a in played.session.take_actions() if isinstance(a, Send)]
    chunks = [
        (a.address, a.message.offset, bytes(a.payload or b"")) for a in actions if isinstance(a.message, GraphChunk)
    ]
    assert chunks == [(address, offset, part) for address in "ab" for offset, part in ((0, b"gra"), (3, b"ph"))]
    starts = [(a.address, a.message) for a in actions if isinstance(a.message, StartWorker)]
    sent = [3, 3, 4]  # OpenSession and the graph; on a, worker 0 as well
    assert starts == [
        (place, StartWorker(SESSION, i, 0, sent[i], 3, 2, 4_000_000 // 3)) for i, place in enumerate("aba")
    ]


def test_a_graph_that_the_daemon_has_is_not_sent() -> None:
    played = opening(1)
    played.take()
    played.opened("a", has_graph=True)
    assert [type(message) for message in played.take()] == [StartWorker]


def test_slots_that_were_not_asked_for_change_nothing() -> None:
    played = Played("a")
    played.opened("a", 4)
    assert played.session.workers == []


def test_a_ready_worker_is_connected_to_and_stands_by_when_the_channel_works() -> None:
    played = started(1)
    played.take()
    played.receive("a", WorkerReady(SESSION, 0, 0, 42, 6000, OFFER))
    assert played.take() == [ConnectData(0, 0, "a", 6000, 42, OFFER)]
    assert not played.session.ready
    assert played.session.is_starting(0, 0)
    played.session.data_opened(0, played.now)
    assert played.session.ready
    assert str(played.session.workers[0]) == "worker 0 on a (pid 42)"
    assert not played.session.is_starting(0, 0)


def test_nobody_else_is_starting() -> None:
    played = started(1)
    assert not played.session.is_starting(0, 1)
    assert not played.session.is_starting(1, 0)


def test_a_session_without_workers_is_not_ready() -> None:
    assert not Played("a").session.ready
    assert Played("a").session.num_shards == 0


def test_no_answer_within_connect_timeout_fails_with_the_silent_daemons() -> None:
    played = Played("a", "b", "c")
    played.welcome("b")
    played.tick(29.9)
    assert played.take(FailToConnect) == []
    played.tick(0.1)
    assert played.take(FailToConnect) == [FailToConnect(["a", "c"])]


def test_a_daemon_that_answers_but_opens_nothing_is_not_counted_as_silent() -> None:
    played = opening(1)
    played.take()
    for _ in range(40):
        played.beat("a")
        played.tick(1.0)
    assert played.take(FailToConnect) == []


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("version", VersionError),
        ("slots", SlotsError),
        ("graph", GraphError),
        ("session", ConnectError),
        ("draining", ConnectError),
        ("something newer", ConnectError),
    ],
)
def test_a_refusal_while_opening_is_the_error_of_its_kind(kind: str, error: type[Exception]) -> None:
    played = Played("a")
    played.receive("a", Refused(kind, "because"))
    (fail,) = played.take(Fail)
    assert type(fail.error) is error
    assert str(fail.error) == "a refused: because"


@pytest.mark.parametrize(("kind", "error"), [("version", VersionError), ("graph", GraphError)])
def test_what_no_other_slot_can_mend_fails_even_later(kind: str, error: type[Exception]) -> None:
    played = started(1)
    played.receive("a", Refused(kind, "because"))
    (fail,) = played.take(Fail)
    assert type(fail.error) is error


def test_versions_that_merely_differ_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    played = Played("a")
    played.welcome("a", versions=VERSIONS | {"torch": "2.13.0"})
    assert caplog.messages == ["a: torch differs: 2.12.0 here, 2.13.0 there; results may differ too"]


def test_a_worker_that_fails_to_build_the_graph_fails_the_session_there() -> None:
    played = started(1)
    played.take()
    played.receive("a", WorkerFailed(SESSION, 0, 0, "mymodule"), b"the exception")
    played.receive("a", WorkerFailed(SESSION, 0, 0, ""))
    where = "in worker process 0 on a (host of a)"
    assert played.take() == [FailRemotely(b"the exception", where, "a", "mymodule"), FailRemotely(b"", where, "a", "")]


def test_a_data_port_that_cannot_be_reached_is_named_with_the_remedy() -> None:
    played = started(1)
    played.receive("a", WorkerReady(SESSION, 0, 0, 42, 6000, None))
    for _ in range(31):
        played.beat("a")
        played.tick(1.0)
    fail = played.take(Fail)[0]
    assert isinstance(fail.error, ConnectError)
    assert str(fail.error) == (
        "worker 0 on a (pid 42) cannot be reached on its data port 6000 within 30 s: open that port in the firewall, "
        "or fix the range with rpc-reading-worker --data-ports LO-HI and open it"
    )


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_graph_may_take_longer_to_build_than_connect_timeout(attempt: int) -> None:
    played = running(1) if attempt else started(1)
    if attempt:
        played.exited(0)
    for _ in range(40):
        played.beat("a")
        played.tick(1.0)
    played.receive("a", WorkerReady(SESSION, 0, attempt, 42, 6000, None))
    played.tick(0.5)
    assert played.take(Fail) == []


@pytest.mark.timeout(10)
def test_a_daemon_lost_while_opening_is_asked_again() -> None:
    played = opening(1, 1, num_workers=2)
    played.opened("a")
    played.receive("a", SessionClosed(SESSION, "the daemon got SIGTERM"))
    played.opened("b")
    assert played.session.workers == []
    played.welcome("a", boot="1" * 32)
    played.opened("a")
    assert played.places() == ["a", "b"]


@pytest.mark.timeout(10)
def test_slots_that_come_after_close_start_nothing() -> None:
    played = opening(1, 1, num_workers=2)
    played.session.close(played.now)
    played.opened("a")
    played.receive("a", SessionClosed(SESSION, ""))
    played.take()
    played.opened("b")
    assert played.take() == []
    played.receive("b", SessionClosed(SESSION, ""))
    assert played.session.over


def test_enough_daemons_start_without_one_that_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    played = Played("a", "b", num_workers=2)
    played.welcome("a", 2)
    played.tick(START_WITHOUT_S)
    assert played.take(OpenSession) == []
    played.tick(0.1)
    assert [message.slots for message in played.take(OpenSession)] == [2]
    assert "starting without b, which does not answer; it is used once it does" in caplog.messages
    played.opened("a", 2)
    assert played.places() == ["a", "a"]


@pytest.mark.parametrize("changes", [{"num_workers": 3}, {}, {"num_workers": 1, "pool": Pool(0, 2)}], ids=repr)
def test_a_silent_daemon_is_waited_for_if_the_others_are_not_known_to_be_enough(changes: dict[str, Any]) -> None:
    played = Played("a", "b", **changes)
    played.welcome("a", 2)
    played.tick(START_WITHOUT_S + 1)
    assert played.take(OpenSession) == []


def test_a_late_daemon_is_used_for_the_next_loss() -> None:
    played = Played("a", "b", num_workers=1)
    played.welcome("a")
    played.tick(START_WITHOUT_S + 0.1)
    played.opened("a")
    played.ready(0)
    played.welcome("b")
    played.take()
    played.receive("a", SessionClosed(SESSION, "over"))
    assert asked(played) == ["b"]


def test_a_daemon_greeted_in_vain_is_greeted_through_a_fresh_socket() -> None:
    played = Played("a", connect_timeout=100.0)
    played.tick(GREETING_S - 0.1)
    assert played.take(Reconnect) == []
    played.tick(0.1)
    assert [type(each) for each in played.take()] == [Reconnect]
    played.tick(HELLO_S)
    assert [type(each) for each in played.take()] == [Hello]


# Daemons that are found by name.

TWIN = "1" * 32


def by_name(*slots: int, **changes: Any) -> Played:
    """As ``started``, with daemons a, b, ... that a name had at first, a boot identifier for each."""
    played = Played(found="abc"[: len(slots)], names=["dns://workers:5555"], **changes)
    for number, (address, count) in enumerate(zip("abc", slots, strict=False)):
        played.welcome(address, count, boot=str(number) * 32)
    for address in asked(played):
        played.opened(address, played.session.links[address].wanted)
    for worker in played.session.workers:
        played.ready(worker.worker)
    played.take()
    return played


def test_names_are_resolved_at_each_epoch_and_while_a_shard_has_no_place() -> None:
    played = by_name(1)
    for epoch in 1, 2:
        played.session.start_epoch([b"seeds"], played.now)
        assert played.take(Resolve) == [Resolve()], epoch
    for _ in range(int(RESOLVE_S) + 1):
        played.tick(1.0)
        played.beat("a", boot="0" * 32)
    assert played.take(Resolve) == []
    played.receive("a", SessionClosed(SESSION, "over"))
    played.tick(0.1)
    assert played.take(Resolve) == [Resolve()]
    played.tick(RESOLVE_S - 0.1)
    assert played.take(Resolve) == []
    played.tick(0.1)
    assert played.take(Resolve) == [Resolve()]


def test_without_names_nothing_is_resolved() -> None:
    assert running(1).session.start_epoch([b"seeds"], 100.0)
    played = running(1)
    played.session.start_epoch([b"seeds"], played.now)
    assert played.take(Resolve) == []


def test_an_address_that_a_name_has_now_is_used_for_the_next_loss() -> None:
    played = by_name(1)
    played.session.resolved(["a", "b"], played.now)
    assert [type(each) for each in played.take()] == [Reconnect, Hello]
    played.welcome("b", boot=TWIN)
    assert played.take() == []
    played.receive("a", SessionClosed(SESSION, "over"))
    assert asked(played) == ["b"]


def test_an_address_that_a_name_has_no_more_is_left_once_nobody_answers_there() -> None:
    played = by_name(1, 1, num_workers=1)
    played.session.resolved(["b"], played.now)
    assert played.take(Leave) == []
    assert played.places() == ["a"]
    played.receive("a", SessionClosed(SESSION, "over"))
    played.session.resolved(["b"], played.now)
    assert played.take(Leave) == []  # it is where the shard was, which has no other place yet
    played.opened("b")
    played.session.resolved(["b"], played.now)
    assert played.take(Leave) == [Leave("a")]
    played.welcome("a")
    played.session.link_dropped("a", played.now)
    played.session.link_rejected("a")
    assert list(played.session.links) == ["b"]


def test_an_address_that_the_user_gave_is_never_left() -> None:
    played = running(1)
    played.receive("a", SessionClosed(SESSION, "over"))
    played.session.resolved([], played.now)
    assert list(played.session.links) == ["a"]


def test_a_closed_session_meets_nobody() -> None:
    played = by_name(1)
    played.session.close(played.now)
    played.session.resolved(["b"], played.now)
    assert list(played.session.links) == ["a"]


@pytest.mark.parametrize(("found", "starts"), [("ab", True), ("a", False)])
def test_of_the_addresses_of_a_name_those_that_do_not_answer_are_not_waited_for(found: str, starts: bool) -> None:
    played = Played(*({"a", "b"} - set(found)), found=found, names=["dns://workers:5555"])
    played.welcome("a", 2)
    played.tick(START_WITHOUT_S + 0.1)
    assert [message.slots for message in played.take(OpenSession)] == [2] * starts


def unresolved(*addresses: str, **changes: Any) -> Played:
    """Daemons of two slots each that the user gave have answered, and a name has no address yet."""
    played = Played(*addresses, names=["dns://late:5555"], **changes)
    played.session.resolved([], played.now, {"dns://late:5555": "it does not resolve"})
    for address in addresses:
        played.welcome(address, 2)
    return played


@pytest.mark.parametrize(
    ("changes", "starts"),
    [({}, True), ({"num_workers": 2}, True), ({"num_workers": 3}, False), ({"pool": Pool(0, 2)}, False)],
)
def test_a_name_without_an_address_is_waited_for_as_a_daemon_that_does_not_answer(
    changes: dict[str, Any], starts: bool, caplog: pytest.LogCaptureFixture
) -> None:
    played = unresolved("a", **changes)
    played.watch(START_WITHOUT_S)
    assert played.take(OpenSession) == []
    played.tick(0.1)
    assert [message.slots for message in played.take(OpenSession)] == [2] * starts
    said = "starting without dns://late:5555, which has no address; it is asked again at each epoch"
    assert (said in caplog.text) == starts


def test_a_name_without_an_address_is_asked_again_until_there_is_one() -> None:
    played = unresolved("a", num_workers=3)
    assert played.session.unresolved == ["dns://late:5555"]
    assert played.take(Resolve) == [Resolve()]
    for _ in range(3):
        played.tick(ASK_NAMES_S)
        assert played.take(Resolve) == [Resolve()]
    played.session.resolved(["b"], played.now)
    played.tick(ASK_NAMES_S)
    assert played.take(Resolve) == []
    played.welcome("b", 2, boot=TWIN)
    assert asked(played) == ["a", "b"]


def test_what_a_name_comes_to_have_has_as_long_to_answer_as_any_other() -> None:
    played = unresolved("a", num_workers=1)
    played.watch(START_WITHOUT_S - 0.1)
    played.session.resolved(["b"], played.now)
    played.watch(START_WITHOUT_S)
    assert asked(played) == []
    played.tick(0.1)
    assert asked(played) == ["a"]


def test_what_a_name_comes_to_have_at_the_last_moment_does_not_end_a_session_that_can_do_without() -> None:
    played = unresolved("a", num_workers=2, connect_timeout=20.0)
    for number in range(19):
        found = [f"b{n}" for n in range(number + 1)]
        played.session.resolved(found, played.now, {"dns://late:5555": "it does not resolve"})
        played.watch(1.0)
    assert asked(played) == []
    played.tick(1.0)
    assert asked(played) == ["a"]
    assert played.take(FailToConnect) == []


def test_resolving_and_connecting_share_one_connect_timeout() -> None:
    played = unresolved(connect_timeout=20.0)
    played.watch(19.0)
    played.session.resolved(["b"], played.now)
    assert played.take(FailToConnect) == []
    played.tick(1.0)
    assert played.take(FailToConnect) == [FailToConnect(["b"])]


def test_who_does_not_answer_and_what_does_not_resolve_are_told_together() -> None:
    names = ["dns://late:5555", "dns://silent:5555"]
    played = Played("a", names=names, connect_timeout=20.0)
    played.session.resolved([], played.now, {names[0]: "it does not resolve", names[1]: ""})
    played.session.link_rejected("a")
    played.watch(19.9)
    assert played.take(FailToConnect) == []
    played.tick(0.1)
    unanswered = "dns://silent:5555: no answer from this machine's DNS within 20 s"
    assert played.take(FailToConnect) == [FailToConnect(["a"], ("it does not resolve", unanswered))]


def test_every_rank_has_the_addresses_in_one_order_whatever_name_resolves_first() -> None:
    played = Played("z", "y", names=["dns://one:1", "dns://two:1"])
    played.session.resolved(["b", "d"], played.now, {"dns://one:1": ""})
    played.session.resolved(["a", "b", "c", "d"], played.now)
    assert list(played.session.links) == ["z", "y", "a", "b", "c", "d"]


def test_an_address_that_comes_when_the_slots_are_dealt_holds_up_nothing() -> None:
    played = Played(found="a", names=["dns://workers:5555"])
    played.welcome("a")
    played.tick(START_WITHOUT_S + 0.1)
    played.session.resolved(["a", "b"], played.now)
    played.opened("a", 1)
    assert played.places() == ["a"]


def test_a_name_whose_addresses_have_no_free_slot_is_waited_for() -> None:
    played = Played(found="ab", names=["dns://workers:5555"])
    played.welcome("a", 2, free=0)
    played.tick(START_WITHOUT_S + 0.1)
    assert played.take(Fail, OpenSession) == []


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_daemon_with_two_addresses_is_used_at_the_first(order: str) -> None:
    played = Played("a", found="b", names=["dns://workers:5555"])
    for address in order:
        played.welcome(address, 2)
    played.tick(0.1)
    actions = played.session.take_actions()
    assert [each for each in actions if isinstance(each, Leave)] == [Leave("b")]
    opened = [each.address for each in actions if isinstance(each, Send) and isinstance(each.message, OpenSession)]
    assert opened == ["a"]


def test_a_daemon_in_use_whose_other_address_comes_later_is_not_disturbed() -> None:
    played = by_name(1)
    played.session.resolved(["a", "b", "c"], played.now)
    played.welcome("b", boot="0" * 32)  # before a heartbeat has told that it is the same
    played.beat("a", boot="0" * 32)
    played.welcome("c", boot="0" * 32)
    assert played.take(Leave, CloseSession) == [Leave("b"), Leave("c")]
    assert played.places() == ["a"]


def test_a_daemon_that_the_user_gave_by_two_addresses_keeps_both() -> None:
    played = Played("a", "b", num_workers=1)
    played.welcome("a")
    played.welcome("b")
    assert played.take(Leave) == []


def test_an_address_that_turns_out_to_be_the_daemon_in_use_is_not_missed_while_opening() -> None:
    played = Played("a", found="b", names=["dns://workers:5555"], num_workers=1)
    played.welcome("a", 1)
    played.tick(START_WITHOUT_S + 0.1)
    played.opened("a")
    played.beat("a")
    played.welcome("b", 1)
    played.ready(0)
    assert (played.states(), list(played.session.links)) == ([S.STANDBY], ["a"])


# Epochs and requests.


def test_every_shard_begins_with_its_own_seeds_where_merge_says() -> None:
    played = started(2, progress={1: (5, 3)})
    played.ready(0)
    played.ready(1)
    played.take()
    assert played.session.start_epoch([b"zero", b"one"], played.now) == 1
    played.session.begin_shards(played.now)
    assert played.session.take_actions() == [
        Send("a", StartEpoch(SESSION, 0, 0, 1, 0, 0), b"zero"),
        Send("a", StartEpoch(SESSION, 1, 0, 1, 5, 3), b"one"),
    ]
    assert played.states() == [S.RUNNING, S.RUNNING]


def test_epochs_count_up_unless_a_checkpoint_gives_the_number() -> None:
    played = running(1)
    assert played.session.start_epoch([b""], played.now, 17) == 17
    assert played.session.start_epoch([b""], played.now) == 18


def test_a_worker_that_gets_ready_late_begins_then() -> None:
    played = started(1)
    played.session.start_epoch([b"seeds"], played.now)
    played.session.begin_shards(played.now)
    assert played.take(StartEpoch) == []
    played.ready(0)
    assert played.take(StartEpoch) == [StartEpoch(SESSION, 0, 0, 1, 0, 0)]


def test_a_worker_lost_after_its_end_does_not_begin_again() -> None:
    played = running(1)
    played.session.shard_ended(0, played.now)
    assert played.states() == [S.STANDBY]
    played.exited(0)
    played.ready(0)
    assert played.take(StartEpoch) == []
    assert played.states() == [S.STANDBY]


def test_the_end_of_a_shard_on_standby_changes_nothing() -> None:
    played = running(1)
    played.session.shard_ended(0, played.now)
    played.session.shard_ended(0, played.now)
    assert played.states() == [S.STANDBY]


def test_credit_goes_to_shards_that_have_more_to_send() -> None:
    played = running(2)
    played.session.shard_ended(1, played.now)
    played.session.credit(0, 4)
    played.session.credit(1, 4)
    played.session.credit(0, 5, hungry=True)
    assert played.session.has_credits
    assert not played.session.has_actions
    assert played.take() == [SendData(0, 0, Credit(SESSION, 0, 0, 1, consumed, consumed == 5)) for consumed in (4, 5)]
    assert not played.session.has_credits


def test_credit_for_a_vacant_worker_waits_for_the_replay() -> None:
    played = running(1)
    played.exited(0)
    played.take()
    played.session.credit(0, 4)
    assert played.take() == []


def test_a_request_goes_to_every_worker_and_waits_for_each() -> None:
    played = running(2)
    request = played.session.request(Pause, b"function", False, played.now)
    assert played.session.take_actions() == [Send("a", Pause(SESSION, w, 0, request), b"function") for w in (0, 1)]
    assert played.states() == [S.PAUSED] * 2
    played.receive("a", Done(SESSION, 1, 0, request))
    assert played.session.request_waits_for(request) == {0}
    played.receive("a", Done(SESSION, 0, 0, request), b"the exception")
    assert played.session.request_waits_for(request) == set()
    assert played.session.request_error(request) == b"the exception"
    assert played.session.request_error(request) is None


def test_resume_and_limit_carry_what_they_need() -> None:
    played = running(1)
    first = played.session.request(Pause, b"", False, played.now)
    second = played.session.request(Limit, b"limit", False, played.now, 7)
    third = played.session.request(Resume, b"", False, played.now)
    assert [action[1:] for action in played.session.take_actions() if isinstance(action, Send)] == [
        (Pause(SESSION, 0, 0, first), None),
        (Limit(SESSION, 0, 0, second, 7), b"limit"),
        (Resume(SESSION, 0, 0, third), None),
    ]
    assert played.states() == [S.RUNNING]


def test_a_new_process_is_told_what_the_others_were_asked() -> None:
    played = running(2)
    played.session.request(Limit, b"limit", False, played.now, 7)
    played.session.request(Pause, b"pause", False, played.now)
    played.take()
    played.exited(1)
    played.ready(1)
    told = [action[1:] for action in played.session.take_actions() if isinstance(action, Send)]
    assert [(type(message), payload) for message, payload in told[1:]] == [
        (Limit, b"limit"), (StartEpoch, b"seeds of 1"), (Pause, b"pause"),
    ]  # fmt: skip
    assert played.states() == [S.PAUSED] * 2
    played.session.request(Resume, b"", False, played.now)
    played.exited(1)
    played.again(1)
    assert played.states() == [S.RUNNING] * 2


def test_an_epoch_begins_unpaused() -> None:
    played = running(1)
    played.session.request(Pause, b"pause", False, played.now)
    played.session.start_epoch([b"seeds"], played.now)
    played.exited(0)
    played.ready(0)
    assert played.states() == [S.RUNNING]


def test_a_new_process_that_cannot_do_what_the_others_were_asked_fails_the_session() -> None:
    played = running(1)
    played.session.request(Limit, b"limit", False, played.now, 7)
    played.exited(0)
    played.ready(0)
    played.take()
    played.receive("a", Done(SESSION, 0, 1, NO_REQUEST), b"the exception")
    assert played.take() == [FailRemotely(b"the exception", "in worker process 0 on a (host of a)", "a", "")]


def test_a_request_to_the_dispatching_worker_goes_to_it_alone() -> None:
    played = running(3, dispatching=True)
    played.session.request(Pause, b"", True, played.now)
    assert [message.worker for message in played.take(Pause)] == [2]
    assert played.session.request(Pause, b"", False, played.now) == 2
    assert [message.worker for message in played.take(Pause)] == [0, 1]


def test_a_lost_worker_is_not_waited_for() -> None:
    played = running(2)
    request = played.session.request(Pause, b"", False, played.now)
    played.exited(0)
    assert played.session.request_waits_for(request) == {1}
    assert played.session.request_waits_for(request + 1) == set()


def test_an_answer_to_a_request_of_the_last_epoch_changes_nothing() -> None:
    played = running(1)
    request = played.session.request(Pause, b"", False, played.now)
    played.session.start_epoch([b""], played.now)
    played.receive("a", Done(SESSION, 0, 0, request))
    assert played.session.request_waits_for(request) == set()


def test_a_message_that_changes_no_state_can_be_sent() -> None:
    played = running(1)
    played.session.tell("a", CloseSession(SESSION))
    assert played.session.take_actions() == [Send("a", CloseSession(SESSION))]


# Losses.


def test_a_lost_shard_is_replayed_in_its_own_slot() -> None:
    played = running(2, progress={1: (5, 3)})
    played.exited(1)
    assert played.take() == [DisconnectData(1, 0), StartWorker(SESSION, 1, 1, 7, 2, 2, 2_000_000)]
    played.ready(1)
    assert played.take(StartEpoch) == [StartEpoch(SESSION, 1, 1, 1, 5, 3)]
    assert played.session.workers[1].last_loss == "worker 1 on a (pid 42) was killed by SIGKILL"


@pytest.mark.parametrize(
    "message",
    [
        WorkerExited(OTHER, 0, 0, "x", None),
        WorkerExited(SESSION, 9, 0, "x", None),
        WorkerExited(SESSION, 0, 1, "x", None),
        WorkerReady(SESSION, 0, 1, 1, 1, None),
        WorkerReady(SESSION, 0, 0, 1, 1, None),
        WorkerFailed(SESSION, 0, 3, ""),
        Done(OTHER, 0, 0, 1),
        Stack(SESSION, 0, 0, 1, 5, 1.0, "in decode"),
        SessionClosed(OTHER, "x"),
        StopWorker(SESSION, 0, 0),
    ],
    ids=repr,
)
def test_a_stale_or_foreign_message_changes_nothing(message: Any) -> None:
    played = running(1)
    played.receive("a", message)
    assert played.take() == []
    assert played.states() == [S.RUNNING]


def test_a_worker_is_lost_once() -> None:
    played = running(1)
    played.session.lose(0, 0, "was killed", played.now)
    played.take()
    played.session.lose(0, 0, "was killed", played.now)
    assert played.take() == []


def test_a_broken_stream_ends_its_worker_and_counts_as_a_loss() -> None:
    played = running(1)
    played.session.break_off(0, 0, "has a gap", played.now)
    assert [type(each) for each in played.take()] == [StopWorker, DisconnectData, StartWorker]
    played.session.break_off(0, 0, "has a gap", played.now)
    assert played.take() == []


def test_raise_fails_at_the_first_loss() -> None:
    played = running(2, on_worker_loss="raise")
    played.exited(1, "exited with code 3")
    (fail,) = played.take(Fail)
    assert isinstance(fail.error, WorkerLostError)
    assert str(fail.error) == "worker 1 on a (pid 42) exited with code 3"


def test_drop_gives_up_the_shard_and_replaces_its_worker_for_the_next_epoch() -> None:
    played = running(2, on_worker_loss="drop")
    played.exited(1)
    assert played.take(Drop) == [Drop(1, played.session.epoch, "worker 1 on a (pid 42) was killed by SIGKILL")]
    played.ready(1)
    assert played.take(StartEpoch) == []
    assert played.states() == [S.RUNNING, S.STANDBY]
    played.session.start_epoch([b"", b""], played.now)
    played.session.begin_shards(played.now)
    assert [message.worker for message in played.take(StartEpoch)] == [0, 1]


def test_nothing_is_dropped_of_a_shard_that_has_ended() -> None:
    played = running(1, on_worker_loss="drop")
    played.session.shard_ended(0, played.now)
    played.exited(0)
    assert played.take(Drop) == []


def test_a_batch_that_kills_its_worker_again_and_again_fails_the_session() -> None:
    played = running(1)
    for _ in range(MAX_LOSSES - 1):
        played.exited(0, batch=5)
        played.again(0)
    assert played.take(Fail) == []
    played.exited(0, batch=5)
    assert played.error() == (
        "worker 0 on a (pid 42) was killed by SIGKILL, for the 3rd time at batch 5 of its shard in epoch 1: that batch "
        "kills its worker"
    )


def test_losses_at_different_batches_are_no_pattern() -> None:
    played = running(1)
    for batch in range(MAX_LOSSES + 2):
        played.exited(0, batch=batch)
        played.again(0)
    assert played.take(Fail) == []


@pytest.mark.parametrize("when", ["opening", "replacing"])
def test_a_worker_that_dies_again_and_again_while_it_starts_fails_the_session(when: str) -> None:
    played = started(1, timeout=None) if when == "opening" else running(1, timeout=None)
    for _ in range(MAX_FAILED_STARTS - 1 if when == "opening" else MAX_FAILED_STARTS):
        played.exited(0, "was killed by SIGSEGV")
        for _ in range(40):
            played.beat("a")
            played.tick(1.0)
        assert played.states() == [S.STARTING]
    assert played.take(Fail) == []
    played.exited(0, "was killed by SIGSEGV")
    assert played.error() == "worker 0 on a was killed by SIGSEGV, for the 5th time in a row while it was being started"


def test_losses_between_epochs_are_no_batch_s_fault() -> None:
    played = running(1)
    played.session.shard_ended(0, played.now)
    for _ in range(MAX_LOSSES + 1):
        played.exited(0)
        played.again(0)
    assert played.take(Fail) == []


def test_losses_without_a_batch_in_between_are_waited_for_longer_and_longer_and_then_fail_the_session() -> None:
    played = running(1, timeout=None)
    waits = []
    for _ in range(MAX_FRUITLESS - 1):
        played.exited(0)
        waits.append(played.again(0))
    assert waits[0] == 0.0
    assert all(later >= sooner - 0.05 for sooner, later in pairwise(waits))  # the clock's step
    assert waits[-1] == pytest.approx(MAX_RESTART_S, abs=0.06)
    assert played.take(Fail) == []
    played.exited(0)
    assert played.error() == (
        "worker 0 on a (pid 42) was killed by SIGKILL, 20 times in a row without a batch in between"
    )


@pytest.mark.parametrize("why", ["ended", "paused", "nobody waits"])
def test_losses_that_nobody_waited_for_never_fail_the_session(why: str) -> None:
    played = running(1, timeout=None, progress={0: (5, 4)} if why == "nobody waits" else {})
    if why == "ended":
        played.session.shard_ended(0, played.now)
    if why == "paused":
        played.session.request(Pause, b"", False, played.now)
    for _ in range(MAX_FRUITLESS + 1):
        played.exited(0)
        played.again(0)
    assert played.take(Fail) == []
    played.progress[0] = 5, 5
    played.session.request(Resume, b"", False, played.now)
    played.exited(0)
    assert played.take(Fail) == []


@pytest.mark.parametrize("why", ["dropped", "between epochs"])
def test_a_shard_that_nobody_waits_for_may_be_without_a_place_for_long(why: str) -> None:
    played = running(1, 1, on_worker_loss="drop" if why == "dropped" else "recover")
    if why == "between epochs":
        played.session.shard_ended(1, played.now)
    played.receive("b", SessionClosed(SESSION, "the daemon got SIGTERM"))
    for _ in range(100):
        played.beat("a")
        played.receive("a", Refused("slots", "0 of 1 slots free on a"))
        played.tick(1.0)
    assert played.take(Fail) == []
    assert played.session.why_nothing_comes(played.now) is None


def test_only_a_worker_that_is_long_without_a_place_is_the_one_that_is_missing() -> None:
    played = running(1, 1)
    played.receive("b", SessionClosed(SESSION, "the daemon got SIGTERM"))
    assert played.session.why_nothing_comes(played.now + 29) is None
    text = "worker 1 on b (pid 42) is lost: b ended the session: the daemon got SIGTERM, and no slot was found"
    assert (played.session.why_nothing_comes(played.now + 31) or "").startswith(text)


@pytest.mark.parametrize("state", ["waiting to start again", "running again", "with a batch since", "not waited for"])
def test_a_worker_that_was_lost_twice_without_a_batch_is_what_is_waited_for(state: str) -> None:
    played = running(1, progress={0: (5, 4)} if state == "not waited for" else {})
    played.exited(0)
    assert played.session.why_nothing_comes(played.now) is None
    played.again(0)
    played.exited(0)
    if state != "waiting to start again":
        played.again(0)
    if state == "with a batch since":
        played.progress[0] = 1, 0
    expected = "worker 0 on a (pid 42) was killed by SIGKILL, 2 times in a row without a batch in between"
    guilty = state in ("waiting to start again", "running again")
    assert played.session.why_nothing_comes(played.now) == (expected if guilty else None)


@pytest.mark.parametrize("dispatching", [False, True])
def test_a_batch_in_between_makes_up_for_losses(dispatching: bool) -> None:
    played = running(3, dispatching=dispatching)
    for received in range(MAX_FRUITLESS + 1):
        played.progress[1] = received, 0
        played.exited(2 if dispatching else 1)
        for worker in range(3) if dispatching else [1]:
            assert played.again(worker) == 0.0
    assert played.take(Fail) == []


def test_a_shard_without_a_place_waits_for_timeout_and_then_says_where_it_looked() -> None:
    played = running(1, 1)
    played.receive("b", SessionClosed(SESSION, "the daemon got SIGTERM"))
    assert played.states() == [S.RUNNING, S.VACANT]
    for _ in range(61):
        played.beat("a")
        played.receive("a", Refused("slots", "0 of 1 slots free on a"))
        played.tick(1.0)
    fail = played.take(Fail)[0]
    assert isinstance(fail.error, WorkerLostError)
    assert str(fail.error) == (
        "worker 1 on b (pid 42) is lost: b ended the session: the daemon got SIGTERM, and no slot was found for its "
        "shard within 60 s (a: 0 of 1 slots free on a; b: ended the session: the daemon got SIGTERM). Start daemons at "
        "these addresses, or resume from a checkpoint with others"
    )


def test_without_a_timeout_a_shard_waits_for_a_place_for_ever() -> None:
    played = running(1, timeout=None)
    played.receive("a", SessionClosed(SESSION, "the daemon got SIGTERM"))
    played.tick(1e6)
    assert played.take(Fail) == []


def test_another_daemon_is_asked_for_one_slot_more() -> None:
    played = running(1, 1)
    played.receive("b", SessionClosed(SESSION, "over"))
    assert [message.slots for message in played.take(OpenSession)] == [2]
    played.opened("a", 2)
    assert played.places() == ["a", "a"]


def test_a_daemon_that_refused_is_asked_again_a_second_later_and_others_meanwhile() -> None:
    played = running(1, 1, 1)
    played.receive("c", SessionClosed(SESSION, "over"))
    assert asked(played) == ["a"]
    played.receive("a", Refused("slots", "full"))
    assert asked(played) == ["b"]
    played.receive("b", Refused("slots", "full"))
    assert asked(played) == []
    played.tick(HELLO_S + 0.1)
    assert asked(played) == ["a"]


def asked(played: Played) -> list[str]:
    sent = [action for action in played.session.take_actions() if isinstance(action, Send)]
    return [action.address for action in sent if isinstance(action.message, OpenSession)]


def test_a_daemon_with_no_share_is_asked_hours_later_without_being_taken_for_silent() -> None:
    played = Played("a", "b", num_workers=1)
    played.welcome("a")
    played.welcome("b")
    played.opened("a")
    played.ready(0)
    for _ in range(100):
        played.beat("a")
        played.tick(1.0)
    played.receive("a", SessionClosed(SESSION, "over"))
    played.take()
    played.tick()
    assert Reconnect("b") not in played.take()
    played.opened("b")
    assert played.places() == ["b"]


# Links.


def test_open_links_are_told_that_the_session_is_alive() -> None:
    played = running(1)
    played.tick(HEARTBEAT_S)
    assert [type(each) for each in played.take()] == [Heartbeat]
    played.tick(HEARTBEAT_S / 2)
    assert played.take() == []


def test_a_silent_daemon_is_lost_with_all_its_workers() -> None:
    played = running(2)
    played.watch(SILENCE_S)
    assert played.take(Reconnect) == []
    played.watch(1.0)
    assert played.take(Reconnect, DisconnectData) == [Reconnect("a"), DisconnectData(0, 0), DisconnectData(1, 0)]
    assert played.session.workers[1].last_loss == "worker 1 on a (pid 42) is lost: a has been silent for 11 s"
    assert played.states() == [S.VACANT] * 2


def test_a_broken_connection_is_asked_at_once_and_lost_soon() -> None:
    played = running(1)
    played.session.link_dropped("a", played.now)
    assert [type(each) for each in played.take()] == [Heartbeat]
    played.watch(DROPPED_S)
    assert played.take(Reconnect) == []
    played.tick(0.1)
    assert played.take(Reconnect) == [Reconnect("a")]
    assert "a closed the connection and does not answer: it has died, or was restarted" in (
        played.session.workers[0].last_loss
    )


def test_a_client_that_did_not_run_holds_nobodys_silence_against_him() -> None:
    played = running(1)
    played.tick(10 * SILENCE_S)
    assert played.take(Reconnect) == []
    played.watch(SILENCE_S + 1)
    assert played.take(Reconnect) == [Reconnect("a")]


def test_a_connection_that_comes_back_is_not_lost() -> None:
    played = running(1)
    played.session.link_dropped("a", played.now)
    played.beat("a")
    played.tick(DROPPED_S + 1)
    assert played.take(Reconnect) == []


def test_a_connection_that_lost_messages_is_given_up() -> None:
    played = running(2)
    played.beat("a")
    assert played.take(Reconnect) == []
    played.beat("a", lost=1)
    assert played.take(Reconnect) == [Reconnect("a")]
    assert played.session.workers[0].last_loss == (
        "worker 0 on a (pid 42) is lost: a lost some with a broken connection: of 5 messages that it has sent, 4 have "
        "arrived"
    )


def test_reports_are_asked_for_between_heartbeats_but_not_again_and_again() -> None:
    played = running(1, 1)
    played.now += REPORT_S
    for _ in range(3):
        played.session.ask_for_reports(played.now)
    assert [type(each) for each in played.take()] == [Heartbeat, Heartbeat]
    played.receive("b", SessionClosed(SESSION, "the daemon got SIGTERM"))  # and a is asked for one more slot
    played.take()
    played.now += REPORT_S
    played.session.ask_for_reports(played.now)
    assert played.take() == []


def test_what_was_lost_and_has_a_worker_again_is_counted_and_what_moves_is_not() -> None:
    played = running(1, 2)
    played.exited(0)
    assert (played.session.losses, played.session.recoveries) == (1, 0)
    played.exited(0)
    played.again(0)
    assert (played.session.losses, played.session.recoveries) == (2, 1)
    played.ready(0)
    played.session.shard_ended(2, played.now)
    played.receive("b", Draining(SESSION, "it got SIGTERM", 60.0))
    assert (played.session.losses, played.session.recoveries) == (2, 1)


def test_heartbeats_tell_how_many_messages_came_before_them() -> None:
    played = running(1)
    counted = played.session.links["a"].sent
    played.tick(HEARTBEAT_S)
    played.tick(HEARTBEAT_S)
    assert played.take(Heartbeat) == [Heartbeat(SESSION, counted), Heartbeat(SESSION, counted + 1)]


def test_slots_are_asked_for_again_until_there_is_an_answer() -> None:
    played = opening(2)
    (asked,) = played.take(OpenSession)
    played.tick(HEARTBEAT_S)
    played.session.link_dropped("a", played.now)
    assert played.take() == [msgspec.structs.replace(asked, sent=1), msgspec.structs.replace(asked, sent=2)]
    played.opened("a", 2)
    assert played.session.links["a"].state is LinkState.OPEN


def test_a_broken_connection_to_a_daemon_that_holds_nothing_is_nothing() -> None:
    played = Played("a")
    played.take()
    played.session.link_dropped("a", played.now)
    assert played.take() == []


def test_a_daemon_that_was_restarted_before_it_was_needed_is_not_lost() -> None:
    played = running(1)
    played.beat("a", "1" * 32)
    assert played.session.workers[0].last_loss == ""


def test_a_restarted_daemon_is_lost_and_greeted_again() -> None:
    played = running(1)
    played.beat("a")
    played.beat("a", "1" * 32)
    assert played.session.workers[0].last_loss == "worker 0 on a (pid 42) is lost: a was restarted"
    assert played.session.links["a"].state is LinkState.GREETING
    played.tick(HELLO_S)
    assert [type(each) for each in played.take()] == [Reconnect, DisconnectData, Hello]
    played.welcome("a", boot="1" * 32)
    assert [type(each) for each in played.take()] == [CloseSession, OpenSession]
    played.receive("a", SessionClosed(SESSION, ""))
    played.opened("a")
    assert [type(each) for each in played.take()] == [GraphChunk, GraphChunk, StartWorker]


@pytest.mark.parametrize("state", [LinkState.OPENING, LinkState.OPEN])
def test_a_daemon_that_forgot_the_session_is_lost(state: LinkState) -> None:
    played = running(1, 1) if state is LinkState.OPEN else opening(1)
    assert played.session.links["a"].state is state
    played.receive("a", SessionClosed(SESSION, "the daemon does not know it"))
    assert played.take(Reconnect) == [Reconnect("a")]
    assert played.session.links["a"].trouble == "ended the session: the daemon does not know it"


def test_a_daemon_that_restarted_unnoticed_is_sent_the_graph_again() -> None:
    played = running(1, 1)
    played.receive("b", SessionClosed(SESSION, "over"))
    played.take()
    played.opened("a", 2, has_graph=False)
    assert [type(each) for each in played.take()] == [GraphChunk, GraphChunk, StartWorker]


# What takes long.


def nothing_yet(_worker: int, _attempt: int) -> int:
    return 0


def told(played: Played, replayed: Callable[[int, int], int] = nothing_yet) -> list[str]:
    return [str(stage) for stage in played.session.stages(replayed)]


def test_a_graph_that_is_under_way_is_a_stage_until_every_daemon_has_it() -> None:
    played = started(1, 1, graph_bytes=50_000_000)
    assert told(played) == ["sending the graph: 0 of 100 MB"]
    for address, megabytes in (("a", 10), ("b", 30)):
        played.receive(address, GraphArriving(SESSION, 1, megabytes * 1_000_000))
    assert told(played) == ["sending the graph: 40 of 100 MB"]
    played.receive("b", GraphArriving(SESSION, 2, 50_000_000))
    assert told(played) == ["sending the graph: 10 of 50 MB", "starting workers: 0 of 1 workers"]
    played.receive("a", GraphArriving(SESSION, 2, 50_000_000))
    assert told(played) == ["starting workers: 0 of 2 workers"]
    played.ready(0)
    assert told(played) == ["starting workers: 1 of 2 workers"]
    played.ready(1)
    assert told(played) == []


def test_a_graph_that_was_under_way_to_a_lost_daemon_is_not_any_more() -> None:
    played = started(1, 1)
    played.receive("a", GraphArriving(SESSION, 1, 5))
    played.receive("b", SessionClosed(SESSION, "the daemon got SIGTERM"))
    assert told(played) == ["starting workers: 0 of 2 workers"]


def test_a_replay_is_a_stage_until_its_first_new_batch_has_arrived() -> None:
    played = running(1, 1, progress={0: (40, 38), 1: (60, 60)})
    for address in "ab":
        played.receive(address, GraphArriving(SESSION, 1, 5))
    for worker in range(2):
        played.exited(worker)
        played.tick(0.1)
        played.ready(worker)
    assert told(played) == ["replaying: 0 of 100 batches"]
    assert told(played, lambda worker, attempt: 25 if (worker, attempt) == (1, 1) else 900) == [
        "replaying: 65 of 100 batches"
    ]
    played.progress[0] = (41, 38)
    assert told(played) == ["replaying: 0 of 60 batches"]
    played.session.shard_ended(1, played.now)
    assert told(played) == []


# A daemon that is ending.


def drained(played: Played, address: str) -> None:
    played.receive(address, Draining(SESSION, "the daemon got SIGTERM", 30.0))


def test_a_shard_on_standby_moves_on_from_a_daemon_that_is_ending() -> None:
    played = Played("a", "b", num_workers=1)
    played.welcome("a")
    played.welcome("b")
    played.opened("a")
    played.ready(0)
    played.take()
    drained(played, "a")
    assert played.session.workers[0].last_loss == "worker 0 on a (pid 42) moves on: its daemon is ending"
    assert [type(each) for each in played.take()] == [StopWorker, DisconnectData, OpenSession]
    played.opened("b")
    assert played.places() == ["b"]


@pytest.mark.parametrize("place", ["held", "asked"])
def test_a_daemon_that_is_ending_is_left_once_its_last_shard_has_moved_on(place: str) -> None:
    played = opening(1, 1, num_workers=2)
    played.opened("a")
    played.opened("b", 2 if place == "held" else 1)
    played.session.links["b"].free = 2
    played.ready(0)
    played.ready(1)
    played.take()
    drained(played, "a")
    sent = played.take(OpenSession, CloseSession)
    if place == "asked":
        assert [type(message) for message in sent] == [OpenSession]
        played.opened("b", 2)
        sent = played.take(CloseSession)
    assert played.places() == ["b", "b"]
    assert sent == [CloseSession(SESSION)]


def test_a_running_shard_finishes_its_epoch_on_a_daemon_that_is_ending() -> None:
    played = running(1, 2, num_workers=2)
    played.welcome("b", 2)
    drained(played, "a")
    assert played.take(StopWorker) == []
    assert played.session.is_running(0, 0, 1)
    played.session.shard_ended(0, played.now)
    assert [message.worker for message in played.take(StopWorker)] == [0]


def test_a_shard_stays_on_a_daemon_that_is_ending_if_there_is_no_other_place() -> None:
    played = running(1)
    drained(played, "a")
    played.session.shard_ended(0, played.now)
    assert played.take(StopWorker) == []


def test_a_daemon_that_is_ending_gets_no_other_shard() -> None:
    played = running(1, 2, num_workers=2)
    drained(played, "b")
    played.receive("a", SessionClosed(SESSION, "over"))
    assert asked(played) == []


@pytest.mark.parametrize(("worker", "attempt", "epoch"), [(7, 0, 1), (0, 1, 1), (0, 0, 2)])
def test_nobody_else_is_running(worker: int, attempt: int, epoch: int) -> None:
    assert not running(1).session.is_running(worker, attempt, epoch)


# Dispatching.


def test_a_dispatched_group_is_brought_together_when_all_are_there() -> None:
    played = started(2, 1, dispatching=True)
    played.session.start_epoch([b"0", b"1", b"dispatching"], played.now)
    played.ready(0)
    played.ready(2, 7777)
    played.session.begin_shards(played.now)
    assert played.take(ConnectFeed, StartEpoch) == []
    played.ready(1)
    sent = played.take(ConnectFeed, StartEpoch)
    assert sent == [
        *(ConnectFeed(SESSION, worker, 0, "a", 7777) for worker in (0, 1)),
        *(StartEpoch(SESSION, worker, 0, 1, 0, 0) for worker in (0, 1, 2)),
    ]
    assert played.session.num_shards == 2


def test_a_dispatched_group_without_an_epoch_is_only_connected() -> None:
    played = started(2, dispatching=True)
    played.ready(0)
    played.ready(1)
    assert [type(each) for each in played.take(ConnectFeed, StartEpoch)] == [ConnectFeed]
    played.session.start_epoch([b"", b""], played.now)
    played.session.begin_shards(played.now)
    assert [message.worker for message in played.take(StartEpoch)] == [0, 1]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_dispatched_group_starts_again_as_one(lost: int) -> None:
    played = running(3, dispatching=True)
    played.exited(lost)
    actions = played.take()
    assert {each.worker for each in actions if isinstance(each, StopWorker)} == {0, 1, 2} - {lost}
    assert [(e.worker, e.attempt) for e in actions if isinstance(e, StartWorker)] == [(0, 1), (1, 1), (2, 1)]
    for worker in range(3):
        played.ready(worker)
    assert [message.worker for message in played.take(StartEpoch)] == [0, 1, 2]
    other = (lost + 1) % 3
    assert played.session.workers[other].last_loss == (
        f"worker {other} on a (pid 42) starts again with its group: worker {lost} on a (pid 42) was killed by SIGKILL"
    )


@pytest.mark.parametrize("again", ["repeated", "late"])
def test_a_dispatching_worker_that_gets_ready_twice_or_too_late_changes_nothing(again: str) -> None:
    played = running(1, 2, dispatching=True)
    assert played.places() == ["a", "b", "b"]
    ready = WorkerReady(SESSION, 2, 0, 42, 7777, None)
    if again == "late":  # its group starts again, and there is no slot for it
        played.receive("a", SessionClosed(SESSION, "over"))
        played.receive("b", Refused("slots", "full"))
        assert played.states()[2] is S.VACANT
    before = played.states()
    played.take()
    played.receive("b", ready)
    assert played.take() == []
    assert played.states() == before


# The end.


def test_close_tells_every_daemon_that_knows_the_session() -> None:
    played = running(1, 1)
    played.session.close(played.now)
    assert played.session.take_actions() == [Send(address, CloseSession(SESSION)) for address in "ab"]
    assert played.states() == [S.CLOSED] * 2
    played.receive("a", SessionClosed(SESSION, ""))
    assert not played.session.over
    played.receive("b", SessionClosed(SESSION, ""))
    assert played.session.over


def test_close_before_any_answer_is_over_at_once() -> None:
    played = Played("a")
    assert not played.session.over
    played.session.close(played.now)
    assert played.session.over
    played.welcome("a")
    assert played.take(OpenSession) == []


def test_a_closed_session_loses_nobody_and_ticks_no_more() -> None:
    played = running(1)
    played.session.close(played.now)
    played.take()
    played.tick(1e6)
    played.session.lose(0, 0, "was killed", played.now)
    played.session.break_off(0, 0, "has a gap", played.now)
    assert played.take() == []


def test_close_twice_is_fine() -> None:
    played = running(1)
    played.session.close(played.now)
    played.session.close(played.now)
    assert played.states() == [S.CLOSED]


def test_reprs_show_state_and_counts() -> None:
    played = running(2)
    assert repr(played.session) == "<ClientSession aaaaaaaa epoch=1 workers=[0: running, 1: running]>"
    assert str(played.session.links["a"]) == "2 of 2 slots free on a"
    assert str(Worker(3, address="a")) == "worker 3 on a"


# ---------------------------------------------------------------------------------------------------- whole histories
#
#     Trainer: ClientSession + Merge, joined as client.py joins them
#        |  inbox, outbox of each daemon: control messages under way, in order, each of one connection
#     SimDaemon: slots, boot, frozen, alive
#     SimWorker: the table, a Window, and the data messages that it has sent and nobody has received


WEIGHTS = [0, 1_000, 90_000, 700_000, 3_000_000]


def shard_items(lengths: Sequence[int], epoch: int, worker: int) -> list[str]:
    """What a shard yields in an epoch."""
    return [f"{epoch}/{worker}/{seq}" for seq in range((lengths[worker] + epoch) % 6)]


class SimWorker:
    """One process: what worker.py does, without a graph."""

    def __init__(self, start: StartWorker, port: int, lengths: Sequence[int]) -> None:
        self.start = start
        self.port = port
        self.state = WorkerState.STARTING
        self.window = Window(start.prefetch_count, start.prefetch_bytes)
        self.stream: deque[Data] = deque()
        self.feed: SimWorker | None = None
        self.fed: dict[int, int] = {}
        self.alive = True
        self.epoch = self.seq = self.skip = 0
        self._lengths = lengths

    @property
    def is_dispatching(self) -> bool:
        return self.start.is_dispatching

    def _header(self, kind: Any, *fields: Any) -> Any:
        start = self.start
        return kind(start.session, start.worker, start.attempt, self.epoch, self.seq, *fields)

    def get_ready(self) -> WorkerReady:
        self.state = advance(self.state, E.READY)
        self.stream.append(self._header(Opened))
        return WorkerReady(self.start.session, self.start.worker, self.start.attempt, 42, self.port, None)

    def obey(self, message: Any, workers: dict[int, "SimWorker"]) -> Done | None:
        match message:
            case ConnectFeed():
                self.feed = workers.get(message.port)
            case StartEpoch():
                self.state = advance(self.state, E.BEGIN)
                self.epoch, self.seq, self.skip = message.epoch, 0, message.skip
                self.window.begin(message.skip, message.credit)
                self.fed.clear()
            case Credit() if message.epoch == self.epoch:
                self.window.credit(message.consumed)
            case Pause():
                self.state = advance(self.state, E.PAUSE)
                return Done(message.session, message.worker, message.attempt, message.request)
            case Resume():
                self.state = advance(self.state, E.RESUME)
                return Done(message.session, message.worker, message.attempt, message.request)
        return None

    @property
    def at_batch(self) -> int | None:
        """What killed it, for all that its daemon knows."""
        return self.seq if self.state is S.RUNNING and self.seq >= self.skip else None

    def _is_fed(self, dispatching: bool) -> bool:
        """A dispatching worker feeds each other worker from the epoch's beginning, and feeds it to one process only."""
        if not dispatching:
            return True
        feed = self.feed
        if feed is None or not feed.alive or (feed.state, feed.epoch) != (S.RUNNING, self.epoch):
            return False
        return feed.fed.setdefault(self.start.worker, self.start.attempt) == self.start.attempt

    def work(self, dispatching: bool) -> bool:
        """One step of the graph; False if there is nothing to do, or no room."""
        if self.state is not S.RUNNING or self.is_dispatching or not self._is_fed(dispatching):
            return False
        items = shard_items(self._lengths, self.epoch, self.start.worker)
        if self.seq < self.skip:
            assert self.seq < len(items), "more is to be skipped than there is"
            self.seq += 1
        elif not self.window.is_open:
            return False
        elif self.seq == len(items):
            self.stream.append(self._header(EndOfShard))
            self.state = advance(self.state, E.END)
        else:
            size = WEIGHTS[(self.start.worker + self.seq) % len(WEIGHTS)]
            self.window.produce(weight([size]))
            self.stream.append(self._header(Batches, [[size]], {}))
            self.seq += 1
        return True


class SimDaemon:
    """What daemon.py does for this session; ``taken`` slots belong to others."""

    def __init__(self, address: str, slots: int, world: "World") -> None:
        self.address = address
        self.slots = slots
        self.boot = 0
        self.taken = 0
        self.alive, self.frozen = True, False
        self.inbox: deque[tuple[int, Message]] = deque()
        self.outbox: deque[tuple[int, Message]] = deque()
        self._world = world
        self.forget()

    def forget(self) -> None:
        """Start with no session."""
        self.known = self.has_graph = False
        self.held = self.connection = self.sent = self.received = 0
        self.ending: str | None = None
        self.workers: dict[tuple[int, int], SimWorker] = {}

    def say(self, message: Message, connection: int | None = None) -> None:
        self.outbox.append((self.connection if connection is None else connection, message))

    def tell(self, message: Message) -> None:
        """As ``say``, and count it."""
        self.say(message)
        self.sent += 1

    def handle(self, connection: int, message: Message) -> None:
        free = self.slots - self.taken - self.held
        match message:
            case Hello():
                boot, sessions = f"{self.boot:032x}", bool(self.taken) + self.known
                self.say(
                    Welcome(PROTOCOL_VERSION, VERSIONS, boot, "host", self.slots, free, sessions, TICKET), connection
                )
            case OpenSession() if self.ending is not None:
                self.say(Refused("session", "it is ending here; ask again"), connection)
            case OpenSession() if self.known and message.sent != self.received:
                self.connection = connection
                self.end("messages were lost")
            case OpenSession():
                self.received = message.sent + 1
                if message.slots > self.held + free:
                    self.say(Refused("slots", f"{free} of {self.slots} slots free"), connection)
                    return
                self.known, self.held, self.connection = True, max(self.held, message.slots), connection
                self.tell(SessionOpened(SESSION, self.sent, self.held, self.has_graph))
            case _ if not self.known:
                unknown = "" if isinstance(message, CloseSession) else "the daemon does not know it"
                self.say(SessionClosed(SESSION, unknown), connection)
            case _:
                self.connection = connection
                self._in_session(message)
                self.received += 1

    def _in_session(self, message: Any) -> None:
        match message:
            case Heartbeat() if message.sent != self.received:
                self.end("messages were lost")
            case Heartbeat():
                self.tell(HeartbeatReply(SESSION, self.sent, f"{self.boot:032x}", []))
            case GraphChunk():
                self.has_graph = True
            case CloseSession():
                self.end("")
            case StartWorker() if message.sent != self.received:
                self.end("messages were lost")
            case StartWorker() if self.ending is None:
                assert self.has_graph, "a worker is started before its graph is there"
                assert len(self.workers) < self.held, "more workers are started than slots are held"
                worker = SimWorker(message, self._world.new_port(), self._world.lengths)
                self.workers[message.worker, message.attempt] = worker
                self._world.by_port[worker.port] = worker
            case StopWorker():
                self.bury((message.worker, message.attempt))
            case _ if isinstance(message, ConnectFeed | StartEpoch | Pause | Resume):
                addressed = self.workers.get((message.worker, message.attempt))
                if addressed is not None and (answer := addressed.obey(message, self._world.by_port)):
                    self.tell(answer)

    def end(self, reason: str) -> None:
        """The session ends: its workers are asked to; ``reap`` finds them gone."""
        if self.known and self.ending is None:
            self.ending = reason
            if reason:
                self.say(SessionClosed(SESSION, reason))

    def reap(self) -> None:
        for key in list(self.workers):
            self.bury(key)
        if not self.ending:
            self.say(SessionClosed(SESSION, ""))
        self.forget()

    def bury(self, key: tuple[int, int]) -> None:
        worker = self.workers.pop(key, None)
        if worker is not None:
            worker.alive = False

    def die(self) -> None:
        for key in list(self.workers):
            self.bury(key)
        self.alive = self.frozen = False
        self.inbox.clear()
        self.outbox.clear()
        self.forget()

    def revive(self) -> None:
        self.alive = True
        self.boot += 1


class World:
    """The daemons, and the trainer that uses them: client.py's two threads, one move at a time."""

    def __init__(self, slots: Sequence[int], lengths: Sequence[int], in_order: bool, **changes: Any) -> None:
        self.now = 0.0
        self.lengths = lengths
        self.in_order = in_order
        self.by_port: dict[int, SimWorker] = {}
        self.daemons = {f"cpu{i}:5555": SimDaemon(f"cpu{i}:5555", count, self) for i, count in enumerate(slots)}
        self.options = options(timeout=None, connect_timeout=1e6, **changes)
        self.session = ClientSession(list(self.daemons), self.options, self._progress)
        self.merge = Merge(0, in_order)
        self.meters: list[CreditMeter] = []
        self.reported: list[int] = []
        self.connections = dict.fromkeys(self.daemons, 0)
        self.streams: dict[tuple[int, int], SimWorker] = {}
        self.delivered: list[str] = []
        self.dropped: dict[int, int] = {}
        self.error: BaseException | None = None
        self.session.open(self.now)
        self.act()

    def new_port(self) -> int:
        return 6000 + len(self.by_port)

    def _progress(self, worker: int) -> tuple[int, int]:
        if worker >= self.merge.num_workers:
            return 0, 0
        return self.merge.received[worker], self.merge.consumed[worker]

    # The trainer.

    def act(self) -> None:
        """Carry out what the session wants."""
        for action in self.session.take_actions():
            match action:
                case Send():
                    self.daemons[action.address].inbox.append((self.connections[action.address], action.message))
                case SendData():
                    if (addressed := self.streams.get((action.worker, action.attempt))) is not None:
                        addressed.obey(action.message, self.by_port)
                case ConnectData():
                    worker = self.by_port[action.port]
                    if worker.alive:
                        self.streams[action.worker, action.attempt] = worker
                case DisconnectData():
                    self.streams.pop((action.worker, action.attempt), None)
                case Reconnect():
                    self.connections[action.address] += 1
                case Drop():
                    self.dropped[action.worker] = self.merge.received[action.worker]
                    self.merge.end(action.worker)
                case Fail():
                    self.error = self.error or action.error
                case _:
                    raise AssertionError(f"unexpected: {action}")

    def hear(self, address: str) -> bool:
        """One control message from a daemon arrives; those of an older connection do not."""
        outbox = self.daemons[address].outbox
        while outbox:
            connection, message = outbox.popleft()
            if connection == self.connections[address]:
                self.session.receive(address, message, None, self.now)  # type: ignore[arg-type]
                self._workers_known()
                self.act()
                return True
        return False

    def _workers_known(self) -> None:
        total = self.session.num_shards
        if total and self.merge.num_workers != total:
            self.merge = Merge(total, self.in_order)
            self.meters = [CreditMeter(max(1, self.options.prefetch_bytes // total)) for _ in range(total)]
            self.reported = [0] * total

    def receive_data(self, key: tuple[int, int]) -> bool:
        """One data message arrives."""
        worker = self.streams[key]
        if not worker.stream:
            return False
        self.arrive(worker.stream.popleft())
        return True

    def arrive(self, header: Data) -> None:
        try:
            wanted = isinstance(header, Opened) or self.merge.accepts(header)
        except StreamError as error:
            self.session.break_off(header.worker, header.attempt, str(error), self.now)
            return self.act()
        match header:
            case Opened():
                if self.session.is_starting(header.worker, header.attempt):
                    self.merge.restart(header.worker, header.attempt)
                    self.session.data_opened(header.worker, self.now)
            case Batches() if wanted:
                name = f"{header.epoch}/{header.worker}/{header.seq}"
                self.merge.add(header.worker, [Entry(name, [], weight(*header.sizes))])
            case EndOfShard() if wanted:
                self.merge.end(header.worker)
                self.session.shard_ended(header.worker, self.now)
        self.act()

    def start_epoch(self) -> None:
        epoch = self.session.start_epoch([b"seeds"] * len(self.session.workers), self.now)
        self.merge.begin_epoch(epoch)
        self.reported = [0] * self.merge.num_workers
        self.delivered.clear()
        self.dropped.clear()
        self.session.begin_shards(self.now)
        self.act()

    def take(self) -> bool:
        """The training loop asks for the next batch; if it has to wait, it reports what it has consumed."""
        item = self.merge.next()
        if isinstance(item, Signal):
            for worker in self.merge.awaited if item is Signal.PENDING else []:
                if not self.meters[worker].leaves_room(self.merge.consumed[worker] - self.reported[worker]):
                    self._give_credit(worker)
            self.act()
            return False
        worker, entry = item
        assert isinstance(entry, Entry)
        self.delivered.append(entry.header)
        if self.meters[worker].consume(entry.nbytes):
            self._give_credit(worker)
        self.act()
        return True

    def _give_credit(self, worker: int) -> None:
        self.reported[worker] = self.merge.consumed[worker]
        self.session.credit(worker, self.reported[worker])

    # The world.

    def serve(self, address: str) -> bool:
        """A daemon handles one message."""
        daemon = self.daemons[address]
        if not daemon.alive or daemon.frozen or not daemon.inbox:
            return False
        daemon.handle(*daemon.inbox.popleft())
        return True

    def work(self, daemon: SimDaemon, worker: SimWorker) -> bool:
        """A worker gets ready, or takes one step."""
        if worker.state is S.STARTING:
            daemon.tell(worker.get_ready())
            return True
        return worker.work(self.options.dispatching)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.session.tick(self.now)
        self.act()

    def exchange(self) -> bool:
        """Everything that is under way arrives, once around; whether anything did."""
        moved = [self.serve(address) for address in self.daemons for _ in range(20)]
        for daemon in self.daemons.values():
            if daemon.ending is not None:
                daemon.reap()
                moved.append(True)
            moved += [self.work(daemon, worker) for worker in daemon.workers.values() for _ in range(3)]
        moved += [self.hear(address) for address in self.daemons for _ in range(20)]
        moved += [self.receive_data(key) for key in list(self.streams) for _ in range(3) if key in self.streams]
        return any(moved)

    def settle(self, done: Callable[[], bool]) -> None:
        """From here nothing goes wrong any more, and slots are free: then it must come to an end."""
        needed = len(self.session.workers)
        for daemon in self.daemons.values():
            daemon.frozen, daemon.taken = False, 0
            if not daemon.alive and needed > sum(other.slots for other in self.daemons.values() if other.alive):
                daemon.revive()
        for _ in range(200):
            while self.exchange() and self.error is None:
                pass
            while self.merge.num_workers and self.take():
                pass
            if done() or self.error is not None:
                return
            self.wait(0.5)
        raise AssertionError(f"a silent hang: {self.session!r} {self.merge!r}")

    def expected(self) -> list[list[str]]:
        return [shard_items(self.lengths, self.session.epoch, worker) for worker in range(self.merge.num_workers)]


class Histories(RuleBasedStateMachine):
    """Losses, delays, stale messages and new epochs in any order, and then the epoch ends as if nothing had been."""

    MOST_FAULTS = 2  # with more, a shard may be lost MAX_LOSSES times at one batch
    DISPATCHING = False

    @initialize(
        slots=st.lists(st.integers(1, 3), min_size=1, max_size=3),
        lengths=st.lists(st.integers(0, 5), min_size=9, max_size=9),
        in_order=st.booleans(),
        policy=st.sampled_from(["recover", "recover", "drop"]),
        fewer=st.integers(0, 3),
    )
    def open(self, slots: list[int], lengths: list[int], in_order: bool, policy: str, fewer: int) -> None:
        self.faults = 0
        dispatching = self.DISPATCHING
        if dispatching:
            slots, policy = [slots[0] + 1, *slots[1:]], "recover"
        most = sum(slots) - dispatching
        num_workers = max(1, most - fewer) if fewer else None
        self.world = World(
            slots, lengths, in_order, on_worker_loss=policy, dispatching=dispatching, num_workers=num_workers
        )
        self.world.settle(lambda: self.world.session.ready)
        assert self.world.error is None
        assert self.world.session.num_shards == (num_workers or most)
        self.world.start_epoch()

    # What is always possible.

    def daemon(self, data: st.DataObject) -> SimDaemon:
        return data.draw(st.sampled_from(list(self.world.daemons.values())))

    @rule(data=st.data(), times=st.integers(1, 5))
    def a_daemon_serves(self, data: st.DataObject, times: int) -> None:
        for _ in range(times):
            self.world.serve(self.daemon(data).address)

    @rule(data=st.data(), times=st.integers(1, 5))
    def control_messages_arrive(self, data: st.DataObject, times: int) -> None:
        for _ in range(times):
            self.world.hear(self.daemon(data).address)

    @rule(data=st.data(), times=st.integers(1, 6))
    def a_worker_works(self, data: st.DataObject, times: int) -> None:
        workers = [(daemon, worker) for daemon in self.world.daemons.values() for worker in daemon.workers.values()]
        if workers:
            daemon, worker = data.draw(st.sampled_from(workers))
            for _ in range(times):
                self.world.work(daemon, worker)

    @precondition(lambda self: self.world.streams)
    @rule(data=st.data(), times=st.integers(1, 6))
    def data_messages_arrive(self, data: st.DataObject, times: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.world.streams)))
        for _ in range(times):
            if key in self.world.streams:
                self.world.receive_data(key)

    @rule(times=st.integers(1, 4))
    def the_training_loop_takes(self, times: int) -> None:
        for _ in range(times):
            self.world.take()

    @rule(times=st.integers(1, 3))
    def everything_moves(self, times: int) -> None:
        for _ in range(times):
            self.world.exchange()

    @rule(seconds=st.floats(0.1, 1.5))
    def time_passes(self, seconds: float) -> None:
        """Not so much that a daemon which is alive is taken for lost."""
        for daemon in self.world.daemons.values():
            if daemon.alive and not daemon.frozen:
                while self.world.serve(daemon.address) or self.world.hear(daemon.address):
                    pass
        self.world.wait(seconds)

    @rule()
    def a_new_epoch_begins(self) -> None:
        self.world.start_epoch()

    @rule(kind=st.sampled_from([Pause, Resume]))
    def all_are_asked_to_pause_or_resume(self, kind: type[Pause | Resume]) -> None:
        """A pause is always followed by a resume, as the reading service does."""
        self.world.session.request(kind, b"", False, self.world.now)
        self.world.session.request(Resume, b"", False, self.world.now)
        self.world.act()

    @rule(data=st.data(), taken=st.integers(0, 2))
    def others_take_and_free_slots(self, data: st.DataObject, taken: int) -> None:
        daemon = self.daemon(data)
        daemon.taken = min(taken, daemon.slots - daemon.held)

    @rule(data=st.data(), seq=st.integers(0, 3), back=st.integers(1, 2))
    def a_stale_data_message_arrives(self, data: st.DataObject, seq: int, back: int) -> None:
        world = self.world
        worker = world.session.workers[data.draw(st.integers(0, world.session.num_shards - 1))]
        kind = data.draw(st.sampled_from(["epoch", "attempt", "repeated", "opened"]))
        attempt = worker.attempt - back if kind in ("attempt", "opened") else worker.attempt
        epoch = world.session.epoch - back if kind == "epoch" else world.session.epoch
        if kind == "repeated":
            seq = world.merge.received[worker.worker] - back
        if kind == "attempt":  # of a process that was lost before the next was there, more could still arrive
            attempt = min(attempt, world.merge._shards[worker.worker].attempt - 1)
        if min(attempt, epoch, seq) >= 0:
            stream = (SESSION, worker.worker, attempt, epoch, seq)
            world.arrive(Opened(*stream) if kind == "opened" else Batches(*stream, [[1]], {}))

    @rule(data=st.data(), back=st.integers(1, 2))
    def a_stale_control_message_arrives(self, data: st.DataObject, back: int) -> None:
        world = self.world
        worker = data.draw(st.sampled_from(world.session.workers))
        stream = (SESSION, worker.worker, max(0, worker.attempt - back))
        if worker.attempt:
            message: Any = data.draw(
                st.sampled_from(
                    [WorkerReady(*stream, 42, 6000, None), WorkerExited(*stream, "died", None), Done(*stream, 1)]
                )
            )
            world.daemons[worker.address].tell(message)

    # What goes wrong.

    can_fail = precondition(lambda self: self.faults < self.MOST_FAULTS)

    @can_fail
    @rule(data=st.data(), kept=st.integers(0, 3))
    def a_worker_is_killed(self, data: st.DataObject, kept: int) -> None:
        daemons = [daemon for daemon in self.world.daemons.values() if daemon.workers and daemon.ending is None]
        if daemons:
            daemon = data.draw(st.sampled_from(daemons))
            key = data.draw(st.sampled_from(sorted(daemon.workers)))
            worker = daemon.workers[key]
            while len(worker.stream) > kept:  # what the kernel had not sent
                worker.stream.pop()
            daemon.bury(key)
            daemon.tell(WorkerExited(SESSION, *key, "was killed by SIGKILL", worker.at_batch))
            self.faults += 1

    @can_fail
    @rule(data=st.data(), seen=st.booleans(), back=st.booleans())
    def a_daemon_dies(self, data: st.DataObject, seen: bool, back: bool) -> None:
        daemon = self.daemon(data)
        if daemon.alive:
            daemon.die()
            self.faults += 1
            if seen:
                self.world.session.link_dropped(daemon.address, self.world.now)
                self.world.act()
        if back:
            daemon.revive()

    @can_fail
    @rule(data=st.data(), reason=st.sampled_from(["the client is gone", "the daemon got SIGTERM"]))
    def a_daemon_ends_the_session(self, data: st.DataObject, reason: str) -> None:
        daemon = self.daemon(data)
        if daemon.known and daemon.ending is None:
            daemon.end(reason)
            self.faults += 1

    @can_fail
    @rule(data=st.data(), seconds=st.floats(1.0, 2 * SILENCE_S))
    def a_daemon_is_frozen_for_a_while(self, data: st.DataObject, seconds: float) -> None:
        daemon = self.daemon(data)
        daemon.frozen = True
        self.faults += 1
        for _ in range(int(seconds)):
            self.time_passes(1.0)
        daemon.frozen = False

    @can_fail
    @rule(data=st.data(), up=st.integers(0, 3), down=st.integers(0, 3), seen=st.booleans())
    def a_control_connection_breaks_and_heals(self, data: st.DataObject, up: int, down: int, seen: bool) -> None:
        """What was on the wire is lost, both ways; what waited behind it is not."""
        daemon = self.daemon(data)
        for queue, count in (daemon.inbox, up), (daemon.outbox, down):
            for _ in range(min(count, len(queue))):
                queue.popleft()
        self.faults += 1
        if seen:
            self.world.session.link_dropped(daemon.address, self.world.now)
            self.world.act()

    @can_fail
    @rule(data=st.data())
    def a_data_message_is_lost(self, data: st.DataObject) -> None:
        full = [key for key, worker in self.world.streams.items() if len(worker.stream) > 1]
        if full:
            stream = self.world.streams[data.draw(st.sampled_from(sorted(full)))].stream
            if not isinstance(stream[0], Opened):
                stream.popleft()
                self.faults += 1

    # What must hold.

    @invariant()
    def what_came_is_what_was_to_come(self) -> None:
        world = getattr(self, "world", None)
        if world is None:
            return
        assert world.error is None, world.error
        check_delivered(world, complete=False)

    def teardown(self) -> None:
        if not hasattr(self, "world") or self.world.error is not None:
            return
        note("the end: nothing goes wrong any more")
        self.world.settle(lambda: self.world.merge.exhausted)
        assert self.world.error is None, self.world.error
        check_delivered(self.world, complete=True)


def check_delivered(world: World, complete: bool) -> None:
    """Exactly once and in order: all of it, or as much as has come so far."""
    expected = world.expected()
    for worker, received in world.dropped.items():
        expected[worker] = expected[worker][:received]
    shards: list[list[str]] = [[] for _ in expected]
    for name in world.delivered:
        shards[int(name.split("/")[1])].append(name)
    for got, wanted in zip(shards, expected, strict=True):
        assert got == (wanted if complete else wanted[: len(got)])
    if world.in_order and not world.dropped:
        assert world.delivered == round_robin(expected)[: len(world.delivered)]


class DispatchedHistories(Histories):
    """The same of workers that are fed by one of them, and therefore start again together."""

    DISPATCHING = True


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestDispatchedHistories = DispatchedHistories.TestCase
TestDispatchedHistories.settings = TestHistories.settings
