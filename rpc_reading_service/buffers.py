"""Memory that batches pass through: no fresh pages for each batch.

A fresh 38.5 MB tensor costs page faults, not bandwidth: 23.9 ms against 7.3 ms from memory that the process already
has. A worker therefore tells malloc to keep what is freed, and what a client receives lands in blocks of a ``Pool``.
"""

import ctypes
import functools
import mmap
import os
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from rpc_reading_service import recycling
from rpc_reading_service.messages import Phase, WorkerReport

_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_MAX = -4
"""Parameters of mallopt(3), from glibc's malloc.h."""

KEEP_BYTES = 512 << 20
"""What malloc may keep of a worker's freed memory."""


def tune_malloc() -> bool:
    """Serve large allocations from the heap, which keeps its pages, and not from fresh mappings.

    Returns whether this C library knows how; without glibc nothing changes.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return all(
        mallopt(parameter, value)
        for parameter, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, KEEP_BYTES), (_M_TOP_PAD, 16 << 20))
    )


def allocate(nbytes: int) -> memoryview:
    """A writable buffer that nobody else can reach, not zeroed."""
    return np.empty(nbytes, dtype=np.uint8).data


def snapshot(buffer: memoryview) -> memoryview:
    """A copy, for what user code can still reach and change.

    Raises:
        MemoryError: there is no room for it.
    """
    try:
        copy = allocate(buffer.nbytes)
    except MemoryError as error:
        raise MemoryError(f"there is no room to send {buffer.nbytes:,} bytes") from error
    np.frombuffer(copy, dtype=np.uint8)[:] = np.frombuffer(buffer, dtype=np.uint8)
    return copy


class Borrowed(NamedTuple):
    """Memory that user code may reach as soon as it goes on: what has not been sent by then has to be copied."""

    view: memoryview

    @property
    def nbytes(self) -> int:
        return self.view.nbytes


def keep(piece: Any) -> Any:
    """The piece of a message, or a copy, if user code may reach it."""
    return snapshot(piece.view) if isinstance(piece, Borrowed) else piece


class Owner:
    """Lends memory out and learns when nobody looks at it any more.

    The lent buffer's exporter is a ctypes array that nothing else refers to. Whoever looks at the memory, a tensor, a
    view of its storage, an array, a memoryview, a DLPack capsule, keeps the exporter alive; when it dies the memory is
    free. numpy drops intermediate arrays from such a chain, so that an array could not be the one to watch.

    Args:
        memory: the memory, a writable buffer
        nbytes: its size
    """

    def __init__(self, memory: Any, nbytes: int) -> None:
        self._memory = memory
        self.nbytes = nbytes
        self._kind = ctypes.c_ubyte * nbytes
        self._watch: weakref.ref[Any] | None = None

    def lend(self, returned: Callable[[object], object]) -> memoryview:
        """The memory; ``returned`` is called, in whatever thread drops it, when the last look at it is gone.

        It gets a dead weak reference, as all such calls do; one function less to go through for each batch.
        """
        exporter = self._kind.from_buffer(self._memory)
        self._watch = weakref.ref(exporter, returned)
        return memoryview(exporter).cast("B")

    @property
    def lent(self) -> bool:
        """Whether anybody looks at the memory."""
        return self._watch is not None and self._watch() is not None


class Block:
    """Private memory of one size class.

    Args:
        size: in bytes
    """

    def __init__(self, size: int) -> None:
        self.size = size
        # Private: a fork must not see what arrives here later.
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.owner = Owner(memory, size)


class Pool:
    """Memory for what is received, that comes back when nobody looks at it any more.

    A block is never lent while anything that looks at it is alive. If none is free, a fresh one is made: how many are
    lent is bounded by who asks for them (the window) and by who keeps them (the user).

    Args:
        keep: bytes of free blocks that are kept
    """

    def __init__(self, keep: int) -> None:
        self._shelf: recycling.Shelf[Block] = recycling.Shelf(keep)
        self._lent: set[Block] = set()
        self._returned: deque[Block] = deque()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Pool {self._shelf!r}, {len(self._lent)} lent>"

    def allocate(self, nbytes: int) -> memoryview:
        """A writable buffer that nobody else can reach, not zeroed.

        Raises:
            MemoryError, OSError: there is no more memory.
        """
        if nbytes < recycling.LEAST_BYTES:
            return allocate(nbytes)
        size = recycling.size_class(nbytes)
        with self._lock:
            block = self._shelf.take(size)
        block = block or Block(size)
        self._lent.add(block)
        buffer = block.owner.lend(functools.partial(self._take_back, block))
        self._put_away()
        return buffer[:nbytes]

    def _take_back(self, block: Block, _: object) -> None:
        """Called whenever garbage is collected: in any thread, also while that thread holds the lock."""
        self._returned.append(block)
        self._put_away()

    def _put_away(self) -> None:
        """Whoever holds the lock comes here after it, so that nothing stays that is appended meanwhile."""
        while self._returned and self._lock.acquire(blocking=False):
            try:
                if self._returned:  # not taken meanwhile by whoever held the lock before
                    block = self._returned.popleft()
                    self._lent.discard(block)
                    self._shelf.put(block.size, block)
            finally:
                self._lock.release()


class Logbook:
    """What a worker is at and has done, where its daemon can read it even after its death: a page that both map.

    One thread of the worker keeps it up for each batch, of which there may be 40,000 a second. It therefore counts in
    its own memory, and writes that to the page when it begins to wait, and when it asks the graph for a batch and
    ``WRITE_S`` have passed. Up to the next writing the page's phase goes on, by the clock that all processes share.

    Args:
        fd: of ``create``
    """

    WRITE_S = 0.005

    _IDLE = -1
    _COUNTS = struct.Struct(f"=4q{len(Phase)}d")
    """Phase, batches, bytes and batches replayed; then the seconds of each phase."""

    _COUNTS_AT = 16
    _CHANGING = 0.0
    """Stands in the place of the moment since when the phase lasts, while the counts are written."""

    _READINGS = 100
    """A worker that was killed in the middle of a change never ends it."""

    def __init__(self, fd: int) -> None:
        self._page = mmap.mmap(fd, mmap.PAGESIZE)
        page = memoryview(self._page)
        self._batch = page[:8].cast("q")
        self._written = page[8:16].cast("d")
        self._phase = Phase.IDLE
        self._since = 0.0
        self._write_at = 0.0
        self._batches = self._nbytes = self._replayed = 0
        self._seconds = [0.0] * len(Phase)

    @staticmethod
    def create() -> int:
        """A file descriptor of anonymous memory for one logbook."""
        fd = os.memfd_create("rpc-reading-logbook")
        os.ftruncate(fd, mmap.PAGESIZE)
        return fd

    # For the worker.

    def open(self, now: float) -> None:
        """The worker begins; the times count from here."""
        self.idle()
        self._since = now
        self._write(now)

    def idle(self) -> None:
        """The graph is not asked for anything that would count."""
        self._batch[0] = self._IDLE

    def ask(self, phase: Phase, now: float, batch: int = _IDLE) -> None:
        """The graph is asked for something: for this batch, if it would count."""
        self._batch[0] = batch
        self._seconds[self._phase] += now - self._since  # as ``enter``, without the call
        self._phase, self._since = phase, now
        if now >= self._write_at:
            self._write(now)

    def wait(self, phase: Phase, now: float) -> None:
        """The worker waits for something that may never come."""
        self.enter(phase, now)
        self._write(now)

    def enter(self, phase: Phase, now: float) -> None:
        """The next phase begins: the time since the last one began is booked to that one."""
        self._seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def rename(self, phase: Phase) -> None:
        """The running phase turns out to have been another."""
        self._phase = phase

    def produced(self, nbytes: int) -> None:
        """One more batch is ready."""
        self._batches += 1
        self._nbytes += nbytes

    def replayed(self) -> None:
        """One more batch was suppressed."""
        self._replayed += 1

    def _write(self, now: float) -> None:
        counts = (self._phase, self._batches, self._nbytes, self._replayed)
        self._written[0] = self._CHANGING
        self._COUNTS.pack_into(self._page, self._COUNTS_AT, *counts, *self._seconds)
        self._written[0] = now
        self._write_at = now + self.WRITE_S

    # For the daemon.

    def read(self) -> int | None:
        """The batch that the worker is in the middle of."""
        batch = self._batch[0]
        return None if batch == self._IDLE else batch

    def report(self, worker: int, attempt: int, now: float) -> WorkerReport:
        """What this process has done so far; the running phase counts up to ``now``, of ``time.monotonic``."""
        since, (phase, *counts) = self._look()
        seconds = counts[3:]
        # User code can write here, too; it must not be able to stop the daemon.
        phase %= len(Phase)
        if since != self._CHANGING:
            seconds[phase] += max(0.0, now - since)
        counts = [max(0, count) for count in counts[:3]]
        return WorkerReport(worker, attempt, Phase(phase), *counts, *(max(0.0, each) for each in seconds))

    def _look(self) -> tuple[float, tuple[Any, ...]]:
        """Since when, and the counts: of one moment, unless the worker died while it wrote them."""
        for _ in range(self._READINGS):
            since = self._written[0]
            counts = self._COUNTS.unpack_from(self._page, self._COUNTS_AT)
            if since != self._CHANGING and self._written[0] == since:
                break
        return since, counts

    def close(self) -> None:
        self._batch.release()
        self._written.release()
        self._page.close()


class Assembly:
    """A large batch under way: its parts, and how far each has come.

    Args:
        sizes: bytes of each part
        allocate: gives the memory for a part
    """

    def __init__(self, sizes: Sequence[int], allocate: Callable[[int], memoryview] = allocate) -> None:
        self.parts = [allocate(size) for size in sizes]
        self._left = sum(sizes)
        self._filled = [0] * len(sizes)

    @property
    def complete(self) -> bool:
        return self._left == 0

    def place(self, part: int, offset: int) -> memoryview | None:
        """Where the next bytes of a part go; None if they do not follow on what came before."""
        if part >= len(self.parts) or self._filled[part] != offset:
            return None
        return self.parts[part][offset:]

    def filled(self, part: int, nbytes: int) -> None:
        """So many more bytes of a part have arrived."""
        self._filled[part] += nbytes
        self._left -= nbytes
