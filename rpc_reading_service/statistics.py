"""What a session has done, and why its training waits for data: values, and the verdict in words. No I/O, no clock.

Everything is counted over a window: the last ``WINDOW_S`` of the running epoch, or of the one that ended last.

    share        of the window's time
    waiting      the training loop is in ``next``, and the batch that is due is not there
    busy         a worker is in the user's graph, replays or encodes, or what it has sent is on the wire
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rpc_reading_service import protocol
from rpc_reading_service.messages import WorkerReport

WINDOW_S = 60.0
"""Long enough for a few batches of a slow graph, short enough that what was true an hour ago does not count."""

MARK_S = 1.0
"""How far apart the beginnings of possible windows are."""

FEW = 0.05
"""A training that waits for less than this share of its time has no need of a cure."""

BUSY = 0.8
"""From this share on, a worker has no time left."""

REPLAYED = "what had arrived before, after a loss or from a checkpoint; that ends by itself"


@dataclass(frozen=True)
class WorkerStatistics:
    """One worker, over the window."""

    worker: int
    """Number of its shard; the dispatching worker, if there is one, comes after the last."""
    address: str
    """Of its daemon."""
    state: str
    """Of the process that runs the shard now: running, standby, paused, starting, vacant or closed."""
    batches: int
    """Batches of it that the training loop has taken."""
    nbytes: int
    """Size of those that have arrived, encoded."""
    batches_per_s: float
    """``batches`` by the window's time."""
    waited_s: float
    """Seconds that the training loop waited for this worker and no other."""
    graph: float
    """Share of time in the user's graph."""
    replay: float
    """Share of time in the graph for batches that are suppressed, after a loss or from a checkpoint."""
    encoding: float
    """Share of time in which batches were encoded, copied and handed over."""
    credit: float
    """Share of time waiting for the training to take what has arrived."""
    wire: float
    """Share of time waiting for what was sent to arrive."""

    @property
    def busy(self) -> float:
        """Share of time in which it, or its link, had no room for more."""
        return self.graph + self.replay + self.encoding + self.wire


@dataclass(frozen=True)
class Statistics:
    """A session at one moment, and why its training waits for data; ``print`` it.

    Batches, bytes, rates and shares are those of the last ``seconds`` of the running epoch, at most 60, or of the epoch
    that ended last. What workers do with their time is known up to the last heartbeat, that is 2 s ago.
    """

    epoch: int
    """Number of the epoch within the session; 0 before the first."""
    seconds: float
    """Length of the window."""
    batches: int
    """Batches that the training loop has taken."""
    nbytes: int
    """Size of those that have arrived, encoded."""
    batches_per_s: float
    """``batches`` by ``seconds``."""
    waited_s: float
    """Seconds that the training loop waited for data."""
    waiting: float
    """Share of time that it waited."""
    losses: int
    """Workers that were lost since ``initialize``."""
    recoveries: int
    """Lost workers whose shards run again."""
    workers: tuple[WorkerStatistics, ...]
    """In the order of their shards."""
    verdict: str
    """In words: whether the training waits for data, why, and what to do."""

    def __str__(self) -> str:
        if not self.epoch:
            return self.verdict
        rate = f"{self.batches_per_s:,.1f} batches/s, {_mb(self.nbytes, self.seconds):,.1f} MB/s"
        line = f"epoch {self.epoch}, {self.seconds:.0f} s: {self.batches:,} batches, {rate}"
        if self.losses:
            line += f"; {_count(self.losses)} lost, {self.recoveries} recovered"
        return "\n".join([line, self.verdict, *self._table()])

    def _table(self) -> list[str]:
        width = max(len("address"), *(len(each.address) for each in self.workers))
        heads = f"worker  {'address':{width}}  state       batches/s     MB/s  graph  encode  credit   wire"
        return [heads, *(self._row(each, width) for each in self.workers)]

    def _row(self, each: WorkerStatistics, width: int) -> str:
        rates = f"{each.batches_per_s:9,.1f} {_mb(each.nbytes, self.seconds):8,.1f}"
        graph, *others = map(_percent, (each.graph + each.replay, each.encoding, each.credit, each.wire))
        shares = f"{graph:>6}" + "".join(f"{share:>{w}}" for share, w in zip(others, (8, 8, 7), strict=True))
        return f"{each.worker:6}  {each.address:{width}}  {each.state:10}  {rates} {shares}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _count(number: int, what: str = "worker") -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _mb(nbytes: int, seconds: float) -> float:
    return nbytes / 1e6 / seconds if seconds else 0.0


NOT_INITIALIZED = "this reading service has not been initialized; DataLoader2 uses a copy: ask loader.reading_service"
NOTHING = Statistics(0, 0.0, 0, 0, 0.0, 0.0, 0.0, 0, 0, (), NOT_INITIALIZED)


# Counting.


class Place(NamedTuple):
    """Where a worker is."""

    worker: int
    address: str
    state: str


class _Mark(NamedTuple):
    """The counts at one moment: a window may begin here."""

    at: float
    batches: list[int]
    nbytes: list[int]
    waited: list[float]
    waited_s: float
    reports: dict[int, WorkerReport]


class Recorder:
    """Adds up what a session does. Whoever calls holds the client's lock.

    Args:
        consumed: per shard, batches of the epoch that were handed to the training loop
    """

    def __init__(self, consumed: Callable[[], list[int]]) -> None:
        self._consumed = consumed
        self._epoch = 0
        self._ended: float | None = None
        self._waits_since: float | None = None
        self._waits_for: int | None = None
        self._nbytes: list[int] = []
        self._waited: list[float] = []
        self._waited_s = 0.0
        self._reports: dict[int, WorkerReport] = {}
        self._marks: deque[_Mark] = deque()

    def begin_epoch(self, epoch: int, num_workers: int, now: float) -> None:
        """Count from zero; of the workers, from what they reported last."""
        self._epoch, self._ended, self._waits_since = epoch, None, None
        self._nbytes, self._waited = [0] * num_workers, [0.0] * num_workers
        self._waited_s = 0.0
        self._marks.clear()
        self._marks.append(self._mark(now))

    def end(self, now: float) -> None:
        """The epoch is over, or the session: the window grows no longer."""
        if self._ended is None:
            self._ended = now

    def arrive(self, worker: int, batches: int, weight: int) -> None:
        """Batches arrive, which count for so much in the window."""
        self._nbytes[worker] += weight - batches * protocol.BATCH_OVERHEAD_BYTES

    def wait(self, awaited: Sequence[int], now: float) -> None:
        """The training loop begins to wait for one of these workers."""
        self._waits_since, self._waits_for = now, awaited[0] if len(awaited) == 1 else None

    def go_on(self, now: float) -> None:
        """It waits no longer."""
        if self._waits_since is None:
            return
        seconds = now - self._waits_since
        self._waited_s += seconds
        if self._waits_for is not None:
            self._waited[self._waits_for] += seconds
        self._waits_since = None

    def report(self, reports: Sequence[WorkerReport], now: float) -> None:
        """Some of the workers have told what they do."""
        self._reports.update((report.worker, report) for report in reports)
        if not self._marks or self._ended is not None or now - self._marks[-1].at < MARK_S:
            return
        self._marks.append(self._mark(now))
        while self._marks[1].at <= now - WINDOW_S:
            self._marks.popleft()

    def replayed(self, worker: int, attempt: int) -> int:
        """Batches that this process of a shard has suppressed, as far as is known."""
        report = self._reports.get(worker)
        return report.replayed if report is not None and report.attempt == attempt else 0

    def _mark(self, now: float) -> _Mark:
        """The counts, with as much of a wait as has passed."""
        since = self._waits_since
        self.go_on(now)
        self._waits_since = None if since is None else now
        counts = self._consumed(), [*self._nbytes], [*self._waited], self._waited_s
        return _Mark(now, *counts, dict(self._reports))

    # Reading.

    def snapshot(self, places: Sequence[Place], in_order: bool, losses: int, recoveries: int, now: float) -> Statistics:
        """Everything, from the beginning of the window until now."""
        if not self._marks:
            return replace(NOTHING, losses=losses, recoveries=recoveries, verdict="no epoch has begun")
        end = self._mark(now if self._ended is None else self._ended)
        while len(self._marks) > 1 and self._marks[1].at <= end.at - WINDOW_S:
            self._marks.popleft()
        begin = self._marks[0]
        seconds = end.at - begin.at
        workers = tuple(_of_worker(place, begin, end, seconds) for place in places)
        waited_s = end.waited_s - begin.waited_s
        batches = sum(end.batches) - sum(begin.batches)
        statistics = Statistics(
            epoch=self._epoch,
            seconds=seconds,
            batches=batches,
            nbytes=sum(end.nbytes) - sum(begin.nbytes),
            batches_per_s=_share(batches, seconds),
            waited_s=waited_s,
            waiting=min(1.0, _share(waited_s, seconds)),
            losses=losses,
            recoveries=recoveries,
            workers=workers,
            verdict="",
        )
        return replace(statistics, verdict=judge(statistics, len(end.batches), in_order))


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _of_worker(place: Place, begin: _Mark, end: _Mark, seconds: float) -> WorkerStatistics:
    worker = place.worker
    batches = nbytes = 0
    waited = 0.0
    if worker < len(end.batches):  # the dispatching worker sends the training nothing
        batches = end.batches[worker] - begin.batches[worker]
        nbytes = end.nbytes[worker] - begin.nbytes[worker]
        waited = end.waited[worker] - begin.waited[worker]
    shares = _shares(begin.reports.get(worker), end.reports.get(worker), seconds)
    return WorkerStatistics(*place, batches, nbytes, _share(batches, seconds), waited, *shares)


def _shares(begin: WorkerReport | None, end: WorkerReport | None, seconds: float) -> list[float]:
    """What a worker has done with its time: in the graph, replaying, encoding, waiting for credit and for the wire."""
    if end is None:
        return [0.0] * 5
    after = _seconds(end)
    before = _seconds(begin) if begin is not None and begin.attempt == end.attempt else [0.0] * len(after)
    spent = [max(0.0, late - early) for late, early in zip(after, before, strict=True)]
    # What is known may end before the window does, and may begin in the idle time before the epoch.
    known = min(seconds, sum(spent))
    return [min(1.0, _share(each, known)) for each in spent[1:]]


def _seconds(report: WorkerReport) -> list[float]:
    return [report.idle_s, report.graph_s, report.replay_s, report.encoding_s, report.credit_s, report.wire_s]


# The verdict.


def judge(statistics: Statistics, num_shards: int, in_order: bool) -> str:
    """Whether the training waits for data, why, and what to do about it."""
    waiting = f"training waits for data {_percent(statistics.waiting)} of the time"
    shards, rest = statistics.workers[:num_shards], statistics.workers[num_shards:]
    missing = max(shards, key=lambda each: each.waited_s, default=None)
    if missing is not None and missing.state in ("vacant", "starting") and statistics.waiting >= FEW:
        return f"{waiting}: worker {missing.worker}, lost on {missing.address}, does not run again yet"
    if not any(each.busy + each.credit for each in shards):
        return f"{waiting}: what the workers do is not known yet; they report every 2 s"
    if statistics.waiting < FEW:
        return f"{waiting}: {_kept_up(shards)}"
    for dispatching in rest:
        if dispatching.graph + dispatching.encoding >= BUSY:
            return f"{waiting}: {_dispatching(dispatching)}"
    slow = _slow_shard(statistics.waited_s, shards)
    if slow is not None:
        return f"{waiting}: {_one_slow(slow, in_order)}"
    return f"{waiting}: {_all_alike(statistics, shards)}"


def _mean(shares: Sequence[float]) -> float:
    return sum(shares) / len(shares)


def _kept_up(shards: Sequence[WorkerStatistics]) -> str:
    credit = _mean([each.credit for each in shards])
    if credit < 0.2:
        return "the workers keep up, with little to spare"
    enough = max(1, math.ceil(len(shards) * min(1.0, _mean([each.busy for each in shards])) / BUSY))
    fewer = f"; about {enough} of these {_count(len(shards))} would keep up" if enough < len(shards) else ""
    return f"the training step keeps the workers waiting {_percent(credit)} of their time{fewer}"


def _dispatching(worker: WorkerStatistics) -> str:
    return (
        f"the dispatching worker on {worker.address}, through which every element goes, is busy "
        f"{_percent(worker.graph + worker.encoding)} of its time: let less be done before "
        "sharding_round_robin_dispatch, and more after it"
    )


def _slow_shard(waited_s: float, shards: Sequence[WorkerStatistics]) -> WorkerStatistics | None:
    """The one worker that most of the waiting is for, while the others have time left."""
    if len(shards) < 2:
        return None
    slow = max(shards, key=lambda each: each.waited_s)
    others = [each.busy for each in shards if each is not slow]
    mostly = slow.waited_s >= (1 + 1 / len(shards)) / 2 * waited_s
    return slow if mostly and _mean(others) < 0.7 * slow.busy else None


def _one_slow(slow: WorkerStatistics, in_order: bool) -> str:
    if slow.replay > max(slow.graph, slow.encoding, slow.wire):
        return f"worker {slow.worker} on {slow.address} replays {REPLAYED}"
    doing = "its batches are long under way" if slow.wire > slow.graph else f"it is {_busy_in(slow)}"
    advice = ": in_order=False does not wait for it" if in_order else ""
    return (
        f"one slow shard, worker {slow.worker} on {slow.address}, holds the others up ({doing}); its part of the data, "
        f"its machine or its link is slower than the others'{advice}"
    )


def _busy_in(worker: WorkerStatistics) -> str:
    where = {"in the graph": worker.graph, "replaying": worker.replay, "encoding": worker.encoding}
    return f"busy {max(where, key=lambda each: where[each])}"


def _all_alike(statistics: Statistics, shards: Sequence[WorkerStatistics]) -> str:
    shares = {name: _mean([getattr(each, name) for each in shards]) for name in ("graph", "replay", "encoding", "wire")}
    most = max(shares, key=lambda each: shares[each])
    credit = _mean([each.credit for each in shards])
    if credit > shares[most] and credit > 0.4:
        return (
            f"although the workers wait for credit {_percent(credit)} of theirs: batches come unevenly, or the window "
            "is too small: raise worker_prefetch_cnt, or prefetch_bytes"
        )
    if most == "replay":
        return f"workers replay {REPLAYED}"
    if most == "wire":
        rate = _mb(statistics.nbytes, statistics.seconds)
        return (
            f"the network brings {rate:,.1f} MB/s, and batches are under way for {_percent(shares['wire'])} of the "
            "workers' time: send less (uint8 instead of float32, crops instead of images), or have a faster link"
        )
    where = "in the graph" if most == "graph" else "encoding batches: fewer, larger tensors are encoded faster"
    return f"workers are busy {where}; {_more(statistics, shards)}"


def _more(statistics: Statistics, shards: Sequence[WorkerStatistics]) -> str:
    """So many workers would do what these do in the time that the training needs without waiting."""
    busy = min(1.0, _mean([each.busy for each in shards]))
    if statistics.waiting > 0.95:
        return f"the training needs far more than {_count(len(shards))}"
    more = max(1, math.ceil(len(shards) * (busy / (1 - statistics.waiting) - 1)))
    return f"about {_count(more, 'more worker')} would keep up"
