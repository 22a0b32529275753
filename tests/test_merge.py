"""However the messages of the shards interleave, the batches come out in one order, each once."""

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpc_reading_service.errors import StreamError
from rpc_reading_service.merge import Entry, Failure, Item, Merge, Signal
from rpc_reading_service.messages import Batches, Chunk, Data, EndOfShard, Large, ShardError

SESSION = "0" * 32
EPOCH = 5


# ---------------------------------------------------------------------------------------------------- helpers


def entry(worker: int, seq: int) -> Entry:
    """A batch whose header names it."""
    return Entry(f"{worker}/{seq}", [], 1)


def failure(worker: int) -> Failure:
    return Failure(b"%d failed" % worker)


def batches(worker: int, seq: int, count: int = 1, *, attempt: int = 0, epoch: int = EPOCH) -> Batches:
    return Batches(SESSION, worker, attempt, epoch, seq, [[1]] * count, {})


def end(worker: int, seq: int, *, attempt: int = 0, epoch: int = EPOCH) -> EndOfShard:
    return EndOfShard(SESSION, worker, attempt, epoch, seq)


def error(worker: int, seq: int, *, attempt: int = 0, epoch: int = EPOCH) -> ShardError:
    return ShardError(SESSION, worker, attempt, epoch, seq)


def arrive(merge: Merge, header: Data) -> bool:
    """What the client does with a message; whether it was wanted."""
    if not merge.accepts(header):
        return False
    match header:
        case Batches():
            entries = [entry(header.worker, header.seq + i) for i in range(len(header.sizes))]
            merge.add(header.worker, entries)
        case ShardError():
            merge.fail(header.worker, failure(header.worker).payload)
        case EndOfShard():
            merge.end(header.worker)
    return True


def began(num_workers: int, in_order: bool = True) -> Merge:
    merge = Merge(num_workers, in_order)
    merge.begin_epoch(EPOCH)
    return merge


def drain(merge: Merge) -> list[Item]:
    """Every item up to the first signal."""
    items: list[Item] = []
    while not isinstance(item := merge.next(), Signal):
        items.append(item)
    return items


def label(item: Item) -> Any:
    worker, what = item
    return what.header if isinstance(what, Entry) else f"{worker} failed"


def labels(merge: Merge) -> list[Any]:
    return [label(item) for item in drain(merge)]


def round_robin(shards: Sequence[Sequence[str]], turn: int = 0) -> list[str]:
    """The reference: one from each in turn, without those that have no more."""
    queues = deque(deque(shard) for shard in shards)
    queues.rotate(-turn)
    order: list[str] = []
    while any(queues):
        if queues[0]:
            order.append(queues[0].popleft())
        queues.rotate(-1)
    return order


# ---------------------------------------------------------------------------------------------------- any interleaving


@dataclass
class Shard:
    """What one worker sends, whatever happens to its process."""

    worker: int
    length: int
    fails: bool
    start: int = 0
    attempt: int = 0
    sent: int = 0
    closed: bool = False
    history: list[Data] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sent = self.start

    @property
    def items(self) -> list[str]:
        """All that the training loop should get of it."""
        seqs = [entry(self.worker, seq).header for seq in range(self.start, self.length)]
        return seqs + [f"{self.worker} failed"] * self.fails

    def send(self, count: int) -> Data:
        """The next message: up to so many batches, or the end."""
        count = min(count, self.length - self.sent)
        message: Data
        if count:
            message = batches(self.worker, self.sent, count, attempt=self.attempt)
            self.sent += count
        else:
            message = (error if self.fails else end)(self.worker, self.sent, attempt=self.attempt)
            self.closed = True
        self.history.append(message)
        return message

    def run_again(self, received: int) -> None:
        """Another process replays the shard up to there."""
        self.attempt += 1
        self.sent = received
        self.closed = False


@st.composite
def shards_of_an_epoch(draw: st.DrawFn) -> list[Shard]:
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    return [
        Shard(worker, length, draw(st.booleans()), draw(st.integers(0, length)))
        for worker, length in enumerate(lengths)
    ]


def play(data: st.DataObject, shards: list[Shard], merge: Merge) -> list[str]:
    """Arrivals in any order, with noise and losses between them, taken from in between; returns what came out."""
    out: list[str] = []
    while not all(shard.closed for shard in shards):
        shard = data.draw(st.sampled_from(shards))
        act = data.draw(st.sampled_from(["send", "send", "send", "take", "repeat", "old epoch", "old attempt", "lose"]))
        if act == "send" and not shard.closed:
            assert arrive(merge, shard.send(data.draw(st.integers(1, 3)))) or shard.closed
        elif act == "take" and not isinstance(item := merge.next(), Signal):
            out.append(label(item))
        elif act == "repeat" and shard.history:
            repeated = data.draw(st.sampled_from(shard.history))
            assert repeated.attempt != shard.attempt or repeated.seq < merge.received[shard.worker] or shard.closed
            assert not arrive(merge, repeated)
        elif act == "old epoch":
            assert not arrive(merge, batches(shard.worker, data.draw(st.integers(0, 6)), epoch=EPOCH - 1))
        elif act == "old attempt" and shard.attempt:
            assert not arrive(merge, batches(shard.worker, data.draw(st.integers(0, 6)), attempt=shard.attempt - 1))
        elif act == "lose" and shard.attempt < 3:
            shard.run_again(merge.received[shard.worker])
            merge.restart(shard.worker, shard.attempt)
    return out + labels(merge)


@given(shards=shards_of_an_epoch(), data=st.data())
@settings(max_examples=40, deadline=None)
def test_every_interleaving_merges_to_the_round_robin_order(shards: list[Shard], data: st.DataObject) -> None:
    turn = data.draw(st.integers(0, len(shards) - 1))
    merge = Merge(len(shards))
    merge.begin_epoch(EPOCH, [shard.start for shard in shards], turn)
    assert play(data, shards, merge) == round_robin([shard.items for shard in shards], turn)
    check_is_over(merge, shards)


@given(shards=shards_of_an_epoch(), data=st.data())
@settings(max_examples=40, deadline=None)
def test_without_an_order_each_comes_once_and_each_shard_in_order(shards: list[Shard], data: st.DataObject) -> None:
    merge = Merge(len(shards), in_order=False)
    merge.begin_epoch(EPOCH, [shard.start for shard in shards])
    out = play(data, shards, merge)
    for shard in shards:
        assert [item for item in out if item.startswith(str(shard.worker))] == shard.items
    check_is_over(merge, shards)


def check_is_over(merge: Merge, shards: list[Shard]) -> None:
    assert merge.next() is Signal.EXHAUSTED
    assert merge.exhausted
    assert merge.unfinished == merge.awaited == []
    assert merge.consumed == merge.received == [shard.length for shard in shards]


# ---------------------------------------------------------------------------------------------------- every pair


MESSAGES: dict[str, Callable[..., Data]] = {
    "Batches": batches,
    "Large": lambda worker, seq, **more: Large(
        SESSION, worker, more.get("attempt", 0), more.get("epoch", EPOCH), seq, []
    ),
    "Chunk": lambda worker, seq, **more: Chunk(
        SESSION, worker, more.get("attempt", 0), more.get("epoch", EPOCH), seq, 0, 0
    ),
    "EndOfShard": end,
    "ShardError": error,
}
MISSING = "worker 1: 1 batches are missing, numbers 3 to 3"
AFTER_THE_END = "worker 1: a batch came after the end of its shard"


def shard_that(state: str) -> Merge:
    """Shard 1 of two, in its second attempt, three batches in."""
    merge = began(2)
    merge.restart(1, 1)
    arrive(merge, batches(1, 0, 3, attempt=1))
    if state == "has ended":
        arrive(merge, end(1, 3, attempt=1))
    elif state == "has failed":
        arrive(merge, error(1, 3, attempt=1))
    elif state == "was given up":
        merge.end(1)
    return merge


def verdict(state: str, kind: str, seq: int) -> bool | str:
    """What must be said of a message of the right epoch and attempt: wanted or not, or the words of the error."""
    if seq < 3:
        return False
    if seq > 3:
        return MISSING
    if state == "is under way":
        return True
    return False if kind in ("EndOfShard", "ShardError") else AFTER_THE_END


@pytest.mark.parametrize("seq", [0, 2, 3, 4])
@pytest.mark.parametrize("kind", MESSAGES)
@pytest.mark.parametrize("state", ["is under way", "has ended", "has failed", "was given up"])
def test_every_message_in_every_state_of_its_shard(state: str, kind: str, seq: int) -> None:
    merge = shard_that(state)
    header = MESSAGES[kind](1, seq, attempt=1)
    expected = verdict(state, kind, seq)
    if isinstance(expected, str):
        with pytest.raises(StreamError, match=f"^{expected}$"):
            merge.accepts(header)
    else:
        assert merge.accepts(header) is expected


@pytest.mark.parametrize("kind", MESSAGES)
@pytest.mark.parametrize("state", ["is under way", "has ended", "has failed", "was given up"])
def test_a_message_of_another_epoch_or_process_is_dropped_whatever_its_number(state: str, kind: str) -> None:
    for epoch, attempt, seq in itertools.product([EPOCH - 1, EPOCH, EPOCH + 1], [0, 1, 2], [0, 3, 9]):
        if (epoch, attempt) != (EPOCH, 1):
            assert not shard_that(state).accepts(MESSAGES[kind](1, seq, attempt=attempt, epoch=epoch))


def test_a_gap_is_an_error_that_counts_what_is_missing() -> None:
    merge = began(2)
    with pytest.raises(StreamError, match=r"^worker 1: 4 batches are missing, numbers 0 to 3$"):
        merge.accepts(batches(1, 4))


def test_an_end_after_a_gap_is_an_error() -> None:
    merge = began(1)
    with pytest.raises(StreamError, match=r"^worker 0: 2 batches are missing, numbers 0 to 1$"):
        merge.accepts(end(0, 2))


def test_a_worker_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(StreamError, match=r"^a message names worker 2, but there are only 2$"):
        began(2).accepts(batches(2, 0))


# ---------------------------------------------------------------------------------------------------- in order


def test_a_late_shard_is_waited_for_in_its_turn() -> None:
    merge = began(2)
    arrive(merge, batches(1, 0, 2))
    assert merge.next() is Signal.PENDING
    assert merge.awaited == [0]
    arrive(merge, batches(0, 0))
    assert labels(merge) == ["0/0", "1/0"]
    assert merge.awaited == [0]


def test_a_shard_that_has_ended_is_passed_over() -> None:
    merge = began(3)
    arrive(merge, end(1, 0))
    arrive(merge, batches(0, 0))
    arrive(merge, batches(2, 0))
    assert labels(merge) == ["0/0", "2/0"]


def test_an_error_comes_after_every_batch_before_it_and_in_its_turn() -> None:
    merge = began(2)
    arrive(merge, batches(0, 0, 2))
    arrive(merge, error(0, 2))
    arrive(merge, batches(1, 0, 3))
    arrive(merge, end(1, 3))
    assert labels(merge) == ["0/0", "1/0", "0/1", "1/1", "0 failed", "1/2"]
    assert merge.consumed == [2, 3]


def test_the_shards_after_one_that_failed_go_on() -> None:
    merge = began(2)
    arrive(merge, error(0, 0))
    assert label(next_item(merge)) == "0 failed"
    assert merge.next() is Signal.PENDING
    assert merge.awaited == [1]


def next_item(merge: Merge) -> Item:
    item = merge.next()
    assert not isinstance(item, Signal)
    return item


def test_a_shard_given_up_yields_what_had_arrived_of_it() -> None:
    merge = began(2)
    arrive(merge, batches(0, 0, 2))
    merge.end(0)
    arrive(merge, end(1, 0))
    assert labels(merge) == ["0/0", "0/1"]
    assert merge.exhausted


def test_no_shards_have_nothing_to_give() -> None:
    merge = Merge(0)
    assert merge.next() is Signal.EXHAUSTED
    assert merge.exhausted


# ---------------------------------------------------------------------------------------------------- as they arrive


def test_a_slow_shard_holds_nobody_back_without_an_order() -> None:
    merge = began(2, in_order=False)
    arrive(merge, batches(1, 0, 2))
    assert labels(merge) == ["1/0", "1/1"]
    assert merge.next() is Signal.PENDING
    assert merge.awaited == [0, 1]


def test_every_unfinished_shard_is_awaited_without_an_order() -> None:
    merge = began(3, in_order=False)
    arrive(merge, end(1, 0))
    assert merge.awaited == merge.unfinished == [0, 2]


# ---------------------------------------------------------------------------------------------------- epochs


@pytest.mark.parametrize("in_order", [True, False])
def test_a_new_epoch_forgets_what_the_last_one_left(in_order: bool) -> None:
    merge = began(2, in_order)
    arrive(merge, batches(0, 0, 2))
    arrive(merge, end(1, 0))
    merge.begin_epoch(EPOCH + 1)
    assert merge.next() is Signal.PENDING
    assert merge.unfinished == [0, 1]
    assert merge.received == merge.consumed == [0, 0]


def test_an_epoch_goes_on_where_a_checkpoint_says() -> None:
    merge = Merge(2)
    merge.begin_epoch(EPOCH, [3, 2], turn=1)
    assert not merge.accepts(batches(0, 2))
    arrive(merge, batches(0, 3))
    arrive(merge, batches(1, 2))
    assert labels(merge) == ["1/2", "0/3"]
    assert merge.consumed == [4, 3]


def test_a_checkpoint_of_another_number_of_shards_is_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        Merge(3).begin_epoch(EPOCH, [1, 2])


def test_what_arrived_whole_from_a_lost_process_stays() -> None:
    merge = began(1)
    arrive(merge, batches(0, 0, 2))
    merge.restart(0, 1)
    arrive(merge, batches(0, 2, attempt=1))
    assert labels(merge) == ["0/0", "0/1", "0/2"]


def test_a_shard_keeps_its_attempt_over_epochs() -> None:
    merge = began(1)
    merge.restart(0, 2)
    merge.begin_epoch(EPOCH + 1)
    assert merge.accepts(batches(0, 0, attempt=2, epoch=EPOCH + 1))


# ---------------------------------------------------------------------------------------------------- where it stands


def test_received_counts_arrivals_and_consumed_what_was_handed_out() -> None:
    merge = began(2)
    arrive(merge, batches(0, 0, 3))
    arrive(merge, batches(1, 0, 1))
    next_item(merge)
    assert merge.received == [3, 1]
    assert merge.consumed == [1, 0]


def test_a_shard_has_something_waiting_from_its_arrival_until_its_turn() -> None:
    merge = began(2)
    merge.add(0, [Entry("a", (), 1)])
    assert [merge.has_waiting(worker) for worker in range(2)] == [True, False]
    merge.next()
    assert not merge.has_waiting(0)


def test_nothing_is_exhausted_while_an_item_waits() -> None:
    merge = began(1)
    arrive(merge, batches(0, 0))
    arrive(merge, end(0, 1))
    assert not merge.exhausted
    assert merge.unfinished == []
    next_item(merge)
    assert merge.exhausted


def test_the_repr_shows_where_the_epoch_stands() -> None:
    merge = began(2)
    arrive(merge, batches(0, 0, 3))
    next_item(merge)
    assert repr(merge) == "<Merge epoch=5 turn=1 consumed=[1, 0] waiting=2>"
