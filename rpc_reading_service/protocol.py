"""A worker's states, the window that bounds what it has in flight, and which versions fit together. No I/O.

Every legal change of a worker's state is a row of ``TRANSITIONS``; the client and the worker hold the same table.

              start            ready             begin             end
    VACANT ---------> STARTING -------> STANDBY -------> RUNNING -------> STANDBY
                                           ^  <--begin--/   |
                                           |                | pause, resume
                                           +----- end --- PAUSED        (on standby, neither changes anything)
    any but CLOSED --- lose ---> VACANT (a new attempt, or the end of the session)
    any ------------- close ---> CLOSED
"""

from collections import deque
from collections.abc import Iterable
from enum import Enum

from rpc_reading_service.errors import RPCReadingError
from rpc_reading_service.messages import PROTOCOL_VERSION

ORPHANED_S = 5.0
"""How long a client has to be heard again after its connection broke, before its slots are freed. Together with the
ZMTP heartbeat that notices a vanished host, less than the 30 s that are promised."""

EXIT_CUT_OFF = 72
"""Exit code of a worker that the dispatching worker does not reach any more."""

SMALL_WINDOW_BYTES = 256 << 10
"""The window in bytes for small batches, so that they can travel together."""

AHEAD_COUNT = 16
AHEAD_BYTES = 8 << 20
"""For each batch that is always allowed so many may be in flight, while they are not more bytes than that. An end that
sleeps between two of 344 KB, and is woken for each, takes longer to wake than to move them. One that has been woken may
wait for a core, some milliseconds, until the scheduler looks: enough is in flight for the other to go on meanwhile."""

AHEAD_AT_MOST = 128
"""However many are always allowed: each takes a segment of shared memory, or one for each tensor that was written in
place, of which a worker has four times as many (``segments.Board.SLOTS``), as the user keeps some, too. What finds none
goes by TCP."""

CREDIT_COUNT = 8
CREDIT_BYTES = 4 << 20
"""What the client tells a worker of at once: little enough for the window to stay open."""

BATCH_OVERHEAD_BYTES = 64
"""What a batch counts for beside its bytes: Python objects of an empty one."""


class WorkerState(Enum):
    """Where a worker is; see the table."""

    VACANT = "vacant"
    STARTING = "starting"
    STANDBY = "on standby"
    RUNNING = "running"
    PAUSED = "paused"
    CLOSED = "closed"


class WorkerEvent(Enum):
    """What moves a worker from one state to another."""

    START = "start"
    READY = "ready"
    BEGIN = "begin"
    END = "end"
    PAUSE = "pause"
    RESUME = "resume"
    LOSE = "lose"
    CLOSE = "close"


_S, _E = WorkerState, WorkerEvent

TRANSITIONS: dict[tuple[WorkerState, WorkerEvent], WorkerState] = {
    (_S.VACANT, _E.START): _S.STARTING,
    (_S.STARTING, _E.READY): _S.STANDBY,
    (_S.STANDBY, _E.BEGIN): _S.RUNNING,
    (_S.RUNNING, _E.BEGIN): _S.RUNNING,
    (_S.PAUSED, _E.BEGIN): _S.RUNNING,
    (_S.RUNNING, _E.END): _S.STANDBY,
    (_S.PAUSED, _E.END): _S.STANDBY,
    (_S.STANDBY, _E.PAUSE): _S.STANDBY,
    (_S.RUNNING, _E.PAUSE): _S.PAUSED,
    (_S.PAUSED, _E.PAUSE): _S.PAUSED,
    (_S.STANDBY, _E.RESUME): _S.STANDBY,
    (_S.RUNNING, _E.RESUME): _S.RUNNING,
    (_S.PAUSED, _E.RESUME): _S.RUNNING,
    (_S.STARTING, _E.LOSE): _S.VACANT,
    (_S.STANDBY, _E.LOSE): _S.VACANT,
    (_S.RUNNING, _E.LOSE): _S.VACANT,
    (_S.PAUSED, _E.LOSE): _S.VACANT,
    **{(state, _E.CLOSE): _S.CLOSED for state in WorkerState},
}


def advance(state: WorkerState, event: WorkerEvent) -> WorkerState:
    """The state after the event.

    Raises:
        RPCReadingError: the table has no such row; a bug in whoever reports the event.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise RPCReadingError(f"a worker that is {state.value} cannot {event.value}") from None


# The window: what bounds memory. The worker holds it, the client's credit moves it.


def weight(sizes: Iterable[int]) -> int:
    """What a batch with parts of these sizes counts for in the window, in bytes."""
    return BATCH_OVERHEAD_BYTES + sum(sizes)


def _has_room(in_flight: int, in_flight_bytes: int, largest: int, count: int, nbytes: int) -> bool:
    """Whether one more batch may be in flight, no larger than the largest so far; count and bytes as of ``Window``."""
    if in_flight <= 0:
        return True
    if in_flight_bytes + largest > nbytes:
        return False
    if in_flight < count or in_flight_bytes < SMALL_WINDOW_BYTES:
        return True
    return in_flight < min(AHEAD_COUNT * count, AHEAD_AT_MOST) and in_flight_bytes < AHEAD_BYTES * count


class Window:
    """Whether a worker may produce one more batch.

    Args:
        count: batches in flight that are always allowed
        nbytes: this worker's share of ``prefetch_bytes``; one batch may always move
    """

    def __init__(self, count: int, nbytes: int) -> None:
        self.count = count
        self.nbytes = nbytes
        self.begin(0)

    def begin(self, produced: int, consumed: int = 0) -> None:
        """An epoch begins, or is replayed up to ``produced`` batches, of which so many are consumed."""
        self.produced = produced
        self.consumed = min(consumed, produced)
        self.in_flight_bytes = 0
        self._weights: deque[int] = deque()  # of the last batches produced; those before a replay are not known
        self._largest = 0
        self.is_open = self._has_room()
        """Known, not asked: it is looked at more often than it changes."""

    def _has_room(self) -> bool:
        in_flight = self.produced - self.consumed
        return _has_room(in_flight, self.in_flight_bytes, self._largest, self.count, self.nbytes)

    def produce(self, batch_weight: int) -> None:
        """A batch is on its way."""
        self._weights.append(batch_weight)
        if batch_weight > self._largest:
            self._largest = batch_weight
        self.in_flight_bytes += batch_weight
        self.produced += 1
        self.is_open = self._has_room()

    def credit(self, consumed: int) -> None:
        """The training loop has consumed so many in all; older news changes nothing."""
        self.consumed = max(self.consumed, min(consumed, self.produced))
        while len(self._weights) > self.produced - self.consumed:
            self.in_flight_bytes -= self._weights.popleft()
        self.is_open = self._has_room()


class CreditMeter:
    """When the client should tell a worker what was consumed.

    A quarter of a window of small batches; of others ``CREDIT_COUNT``, or half of what may be in flight.

    Args:
        nbytes: the worker's share of ``prefetch_bytes``
        count: batches that the window always allows
    """

    def __init__(self, nbytes: int, count: int = 1) -> None:
        self._nbytes = nbytes
        self._count_always = count
        self._least_bytes = min(SMALL_WINDOW_BYTES, nbytes) // 4
        self._least_count = max(1, count // 2)
        self._due_bytes = min(CREDIT_BYTES, nbytes // 2)
        self._due_count = max(CREDIT_COUNT, self._least_count)
        self._largest = 0
        self._since = 0
        self._count = 0

    def consume(self, batch_weight: int) -> bool:
        """Count a consumed batch; True if the worker should be told now."""
        self._since += batch_weight
        self._count += 1
        if batch_weight > self._largest:
            self._largest = batch_weight
        if self._since < self._least_bytes or self._count < self._least_count:
            return False
        if self._since < self._due_bytes and self._count < self._due_count:
            return False
        self._since = self._count = 0
        return True

    def leaves_room(self, untold: int) -> bool:
        """Whether a worker that has not been told of its last ``untold`` batches may surely produce one more.

        Provided that all that it has sent has been consumed: then its window holds those, none larger than the largest.
        """
        at_most = untold * self._largest
        return _has_room(untold, at_most, self._largest, self._count_always, self._nbytes)


# Which versions fit together.


def compare_versions(ours: dict[str, str], theirs: dict[str, str]) -> list[tuple[str, str]]:
    """Name and text for every version that merely differs; ``incompatible`` tells of those that matter."""
    names = sorted({*ours, *theirs})
    return [
        (name, f"{ours.get(name, 'absent')} here, {theirs.get(name, 'absent')} there")
        for name in names
        if ours.get(name) != theirs.get(name)
    ]


def incompatible(protocol: int, theirs: dict[str, str], ours: dict[str, str]) -> str | None:
    """Why a daemon cannot serve a client with these versions; None if it can.

    Functions that travel by value are bytecode, which one minor version of Python does not share with the next.
    """
    package = "rpc-reading-service"
    if protocol != PROTOCOL_VERSION:
        return (
            f"the client speaks protocol {protocol} ({package} {theirs.get(package, 'unknown')}), this daemon protocol "
            f"{PROTOCOL_VERSION} ({package} {ours.get(package, 'unknown')}): install the same version on both sides"
        )
    for name, parts in (("python", 2), ("torch", 1)):
        here, there = ours.get(name, "absent"), theirs.get(name, "absent")
        if here.split(".")[:parts] != there.split(".")[:parts]:
            return f"the client runs {name} {there}, this daemon {name} {here}: install the same version on both sides"
    return None
