"""What worker processes use and make: looked at once a second by their daemon, and summed up when they end."""

import dataclasses
from dataclasses import dataclass

import msgspec
import psutil

from rpc_reading_service.messages import Totals, WorkerReport

SUMMED = ("batches", "nbytes", "replayed", "idle_s", "graph_s", "replay_s", "encoding_s", "credit_s", "wire_s")
"""What ``WorkerReport`` and ``Totals`` both have."""


LEAST_S = 0.5
"""Over less than this, a tick of the clock for CPU time would be several cores."""


@dataclass
class Usage:
    """One process; rates are those between the last two looks.

    Args:
        pid: of the process
        began: when it was started, on the clock of ``time.monotonic``
    """

    pid: int
    began: float
    cpu_s: float = 0.0
    """CPU time so far."""
    cpu: float = 0.0
    """Percent of one core."""
    memory: int = 0
    """Resident bytes."""
    batches_per_s: float = 0.0
    bytes_per_s: float = 0.0
    _process: psutil.Process | None = dataclasses.field(default=None, repr=False)
    _looked: float = dataclasses.field(default=0.0, repr=False)
    _batches: int = dataclasses.field(default=0, repr=False)
    _nbytes: int = dataclasses.field(default=0, repr=False)

    def look(self, report: WorkerReport, now: float) -> str:
        """Bring everything up to date; returns the process's status, as psutil names it.

        Raises:
            psutil.NoSuchProcess: it is gone; what was seen last is kept.
        """
        self._process = self._process or psutil.Process(self.pid)
        with self._process.oneshot():
            status, times, memory = self._process.status(), self._process.cpu_times(), self._process.memory_info()
        elapsed = max(now - (self._looked or self.began), LEAST_S)
        cpu_s = times.user + times.system
        self.cpu = 100 * max(0.0, cpu_s - self.cpu_s) / elapsed
        self.batches_per_s = max(0, report.batches - self._batches) / elapsed
        self.bytes_per_s = max(0, report.nbytes - self._nbytes) / elapsed
        self.cpu_s, self.memory, self._looked = cpu_s, memory.rss, now
        self._batches, self._nbytes = report.batches, report.nbytes
        return str(status)


def add(totals: Totals, report: WorkerReport, usage: Usage, dispatching: bool = False) -> Totals:
    """The totals with one worker more; what a dispatching worker deals out are elements of batches, and not counted."""
    if dispatching:
        report = msgspec.structs.replace(report, batches=0, nbytes=0)
    sums = {name: getattr(totals, name) + getattr(report, name) for name in SUMMED}
    return msgspec.structs.replace(totals, cpu_s=totals.cpu_s + usage.cpu_s, **sums)
