"""Which shard's batch is next, and what to make of a message that is late, repeated or missing.

Pure: headers and entries go in, entries come out. Per shard there is one stream of batches numbered from 0; every
message names its (attempt, epoch, seq). What belongs to a former epoch or a former process of the shard is stale and
dropped; what repeats a number is dropped; a number that is missing is an error, never silence.

    received   batches of the shard that arrived; a replay begins here
    consumed   batches of the shard that ``next`` handed out; a checkpoint and the worker's credit count these
"""

from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import Any, TypeAlias

import msgspec

from rpc_reading_service.errors import StreamError
from rpc_reading_service.messages import Data, EndOfShard, ShardError


class Entry(msgspec.Struct, frozen=True):
    """One batch as it came from the wire, not decoded yet. A Struct is made in C: there is one for each batch."""

    header: Any
    """Codec header: bytes-like."""
    buffers: Sequence[Any]
    """Writable bytes-like buffers."""
    nbytes: int
    """What it counts for in the window: ``protocol.weight`` of its parts."""


class Failure(msgspec.Struct, frozen=True):
    """The shard's user code raised, after every batch before it."""

    payload: bytes
    """The exception, encoded by ``codec.encode_error``."""


class Signal(Enum):
    """What ``next`` returns in the place of an entry."""

    PENDING = "nothing has arrived yet"
    EXHAUSTED = "every shard has ended"


Item: TypeAlias = tuple[int, Entry | Failure]


class _Shard:
    """One stream: what has arrived and waits for its turn."""

    def __init__(self) -> None:
        self.attempt = 0
        self.received = 0
        self.consumed = 0
        self.ended = False
        self.waiting: deque[Entry | Failure] = deque()

    @property
    def drained(self) -> bool:
        return self.ended and not self.waiting

    def begin(self, consumed: int) -> None:
        self.received = self.consumed = consumed
        self.ended = False
        self.waiting.clear()


class Merge:
    """The batches of all shards of one epoch in one order.

    Args:
        num_workers: number of shards
        in_order: round robin over the shards; otherwise in the order of arrival
    """

    def __init__(self, num_workers: int, in_order: bool = True) -> None:
        self.num_workers = num_workers
        self.in_order = in_order
        self.epoch = 0
        self.turn = 0
        self._shards = [_Shard() for _ in range(num_workers)]
        self._arrivals: deque[int] = deque()

    def __repr__(self) -> str:
        waiting = sum(len(shard.waiting) for shard in self._shards)
        return f"<Merge epoch={self.epoch} turn={self.turn} consumed={self.consumed} waiting={waiting}>"

    # An epoch begins.

    def begin_epoch(self, epoch: int, consumed: Sequence[int] | None = None, turn: int = 0) -> None:
        """Forget what the last epoch left, and expect this one from where ``consumed`` says."""
        self.epoch = epoch
        self.turn = turn
        self._arrivals.clear()
        for shard, start in zip(self._shards, consumed or [0] * self.num_workers, strict=True):
            shard.begin(start)

    def restart(self, worker: int, attempt: int) -> None:
        """From now on only this process of the shard counts; whatever arrived whole from the last one stays."""
        self._shards[worker].attempt = attempt

    # Messages arrive.

    def accepts(self, header: Data) -> bool:
        """Whether the message is the next of its stream; False for what is stale or repeated.

        Raises:
            StreamError: messages between the last one and this are missing, or the shard had ended already.
        """
        if header.worker >= self.num_workers:
            raise StreamError(f"a message names worker {header.worker}, but there are only {self.num_workers}")
        shard = self._shards[header.worker]
        if header.epoch != self.epoch or header.attempt != shard.attempt or header.seq < shard.received:
            return False
        if header.seq > shard.received:
            lost = header.seq - shard.received
            raise StreamError(
                f"worker {header.worker}: {lost} batches are missing, numbers {shard.received} to {header.seq - 1}"
            )
        if shard.ended and isinstance(header, EndOfShard | ShardError):
            return False  # a replay ends as the first run did
        if shard.ended:
            raise StreamError(f"worker {header.worker}: a batch came after the end of its shard")
        return True

    def add(self, worker: int, entries: Sequence[Entry]) -> None:
        """The next batches of a shard, in order."""
        shard = self._shards[worker]
        shard.waiting.extend(entries)
        shard.received += len(entries)
        if not self.in_order:
            self._arrivals.extend([worker] * len(entries))

    def fail(self, worker: int, payload: bytes) -> None:
        """User code raised: the last item of the shard."""
        shard = self._shards[worker]
        shard.waiting.append(Failure(payload))
        shard.ended = True
        if not self.in_order:
            self._arrivals.append(worker)

    def end(self, worker: int) -> None:
        """The shard is exhausted, or given up."""
        self._shards[worker].ended = True

    # The training loop takes.

    def next(self) -> Item | Signal:
        """The next item that is due, or why there is none."""
        worker = self._due() if self.in_order else self._first_arrival()
        if isinstance(worker, Signal):
            return worker
        shard = self._shards[worker]
        item = shard.waiting.popleft()
        if self.in_order:
            self.turn = (worker + 1) % self.num_workers
        shard.consumed += type(item) is Entry
        return worker, item

    def _due(self) -> int | Signal:
        """Round robin: shards that have ended are passed over, one that is late is waited for."""
        for _ in range(self.num_workers):
            worker = self.turn
            shard = self._shards[worker]
            if shard.waiting:
                return worker
            if not shard.ended:
                return Signal.PENDING
            self.turn = (worker + 1) % self.num_workers
        return Signal.EXHAUSTED

    def _first_arrival(self) -> int | Signal:
        if self._arrivals:
            return self._arrivals.popleft()
        return Signal.EXHAUSTED if all(shard.ended for shard in self._shards) else Signal.PENDING

    # Where the epoch stands.

    @property
    def consumed(self) -> list[int]:
        """Batches handed out, per shard."""
        return [shard.consumed for shard in self._shards]

    @property
    def received(self) -> list[int]:
        """Batches arrived, per shard."""
        return [shard.received for shard in self._shards]

    def has_waiting(self, worker: int) -> bool:
        """Whether something of the shard has arrived and waits for its turn."""
        return bool(self._shards[worker].waiting)

    @property
    def unfinished(self) -> list[int]:
        """Shards that have more to send."""
        return [worker for worker, shard in enumerate(self._shards) if not shard.ended]

    @property
    def awaited(self) -> list[int]:
        """Shards that ``next`` is waiting for."""
        if self.in_order:
            return [] if self._shards[self.turn].ended else [self.turn]
        return self.unfinished

    @property
    def exhausted(self) -> bool:
        """Whether every batch of the epoch has been handed out."""
        return all(shard.drained for shard in self._shards)
