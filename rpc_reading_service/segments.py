"""Shared memory between a worker and a client on one host: only descriptions of it travel, never the bytes.

The worker owns the memory: anonymous files (memfd), which have no name that could be guessed or left behind, and are
gone with the last process that maps them, however it ends. Who may read the worker's ``/proc/<pid>/fd``, that is the
same user on the same host, can map them too; nobody else can.

    worker                                                      client
    Segments()     -- WorkerReady: pid, board fd, nonce -->     attach(): maps the board, finds the nonce, accepts
    place(buffers) -- Batches: segment, use, offset ------>     Attachment.look(): maps the segment, once
    take()         <-- board: this use has been returned --     when the user's last tensor in it has died
    starving       <-- board: so much has been consumed ---     Attachment.credit(): says whether a message must wake it

The board is one page that both map. On it stand the nonce, which proves that both see the same memory and not merely
processes that look alike, whether the client accepts, how far it has consumed, and for each segment the last use that
was returned: idempotent, and not to be lost with any connection. A worker that runs out of room says so on the board
and then looks once more; the client notes what it has consumed and then looks whether the worker is starving: whichever
is second sees the other. (The locks that both take in between are memory barriers.) Only then does credit take a
message, one for each time that the worker starves.

Every page of a segment is reserved when it is made, and its size is sealed: neither end can meet a bus error. When the
budget is spent, because the user keeps what he gets or memory is short, batches travel in frames: slower, never stuck.
"""

import ctypes
import fcntl
import functools
import mmap
import os
import resource
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rpc_reading_service import buffers, recycling
from rpc_reading_service.errors import StreamError
from rpc_reading_service.messages import NONCE_BYTES, Offer, Place

ALIGNMENT = 64
"""Of each buffer in a segment, as torch's own allocations have it."""

_NAME = "rpc-reading"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if hasattr(fcntl, "F_SEAL_SHRINK") else 0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value

_COUNT_BITS = 40
_COUNT_MASK = (1 << _COUNT_BITS) - 1
_EPOCH_MASK = (1 << 63 - _COUNT_BITS) - 1
"""A word that counts the batches of an epoch: both, so that one cannot be read without the other."""

RETIRED = (1 << 63) - 1
"""Returned, but never to be used again: a fork of the client may still look at it."""


# The board.


class Board:
    """The page that both ends map.

    Args:
        memory: the page
    """

    _ACCEPTED = 0
    _CONSUMED = 1
    _STARVING = 2
    _RETURNED = 3
    SLOTS = 500
    """Segments at once: each is a descriptor in the worker, and the page has no room for more."""

    def __init__(self, memory: Any) -> None:
        page = memoryview(memory).cast("B")
        self._nonce = page[:NONCE_BYTES]
        self._words = page[NONCE_BYTES:].cast("q")

    @property
    def nonce(self) -> bytes:
        return bytes(self._nonce)

    def write_nonce(self, nonce: bytes) -> None:
        self._nonce[:] = nonce

    @property
    def accepted(self) -> bool:
        """Whether the client has found the nonce, and maps what it is sent."""
        return self._words[self._ACCEPTED] == 1

    def accept(self) -> None:
        self._words[self._ACCEPTED] = 1

    def note_consumed(self, epoch: int, consumed: int) -> None:
        self._words[self._CONSUMED] = (epoch & _EPOCH_MASK) << _COUNT_BITS | consumed & _COUNT_MASK

    def consumed(self, epoch: int) -> int:
        """Batches of the shard that the training loop has consumed in this epoch, as far as is noted here."""
        word = self._words[self._CONSUMED]
        return word & _COUNT_MASK if word >> _COUNT_BITS == epoch & _EPOCH_MASK else 0

    @property
    def starving(self) -> bool:
        """Whether the worker waits for room."""
        return self._words[self._STARVING] == 1

    @starving.setter
    def starving(self, starving: bool) -> None:
        self._words[self._STARVING] = starving

    def returned(self, slot: int) -> int:
        """The last use of this slot's segment that has come back; or ``RETIRED``."""
        return self._words[self._RETURNED + slot]

    def give_back(self, slot: int, use: int) -> None:
        self._words[self._RETURNED + slot] = use

    def clear(self, slot: int) -> None:
        """Another segment has this slot now."""
        self._words[self._RETURNED + slot] = 0


# The worker's end.


class _Segment:
    """One piece of shared memory.

    Raises:
        OSError: so much memory cannot be had.
    """

    def __init__(self, number: int, slot: int, size: int) -> None:
        self.number = number
        self.slot = slot
        self.size = size
        self.use = 0
        self.hold = 0
        self.fd = _create(size)
        try:
            self.memory = _map(self.fd, size)
        except OSError:
            os.close(self.fd)
            raise
        self.address = ctypes.addressof(self.memory)
        self.owner = buffers.Owner(self.memory, size)

    def close(self) -> None:
        os.close(self.fd)


class Lent(NamedTuple):
    """A buffer of a batch that lies in a segment."""

    segment: _Segment
    use: int
    offset: int
    nbytes: int

    @property
    def place(self) -> Place:
        """For the client."""
        segment = self.segment
        return Place(segment.number, segment.slot, segment.fd, segment.size, self.use, self.offset)


class Segments:
    """A worker's shared memory. The main thread takes it; what is not sent after all may come back from any thread.

    Args:
        budget: bytes of all segments together
        copy: copies what does not go into a segment
    """

    def __init__(self, budget: int, copy: Callable[[memoryview], Any] = buffers.snapshot) -> None:
        self._budget = budget
        self._copy = copy
        self._nbytes = 0
        self.copied = 0
        """Bytes that were not written in place."""
        self._made = 0
        self._uses = 0
        self._lock = threading.Lock()
        self._shelf: recycling.Shelf[_Segment] = recycling.Shelf(budget)
        self._sent: dict[int, _Segment] = {}
        self._held: dict[int, _Segment] = {}
        self._holds = 0
        self._dropped: deque[tuple[_Segment, int]] = deque()
        self._slots = list(range(_affordable(Board.SLOTS)))
        self._fd = _create(mmap.PAGESIZE)
        self.board = self._board = Board(_map(self._fd, mmap.PAGESIZE))
        self._board.write_nonce(secrets.token_bytes(NONCE_BYTES))

    def __repr__(self) -> str:
        return f"<Segments {self._nbytes} of {self._budget} bytes, {len(self._sent)} sent, free {self._shelf!r}>"

    @property
    def offer(self) -> Offer:
        """What the client needs to find the board."""
        return Offer(self._fd, self._board.nonce)

    def lend(self, nbytes: int) -> memoryview | None:
        """Memory for user code to write a batch into, from any of its threads; None if there is none."""
        segment = self._take(recycling.size_class(nbytes))
        return None if segment is None else self._hold(segment)[:nbytes]

    @property
    def accepted(self) -> bool:
        """Whether the client maps it."""
        return self._board.accepted

    def place(self, parts: list[memoryview], shared: bool = True, sole: Container[int] = ()) -> Sequence[Any]:
        """Put a batch's buffers where user code cannot reach them, though it goes on.

        What was written into lent memory that nobody looks at any more stays where it is. Everything else is copied.

        Args:
            parts: the buffers; emptied, so that the caller does not count as one who still looks
            shared: whether they may travel in shared memory, and not in frames alone
            sole: addresses of those that user code cannot reach anyway; they stay where they are

        Returns:
            For each buffer a ``Lent``, a view of lent memory, or what ``copy`` made of it.
        """
        if not self._held:  # nothing was written in place: the quick way
            copies = self._copies(parts, shared and self._board.accepted, sole)
            parts.clear()
            return copies
        spots = self._spots(parts)
        nbytes = [part.nbytes for part in parts]
        for index in spots:
            parts[index] = memoryview(b"")
        shared = shared and self._board.accepted
        placed: dict[int, Any] = {}
        whole: dict[int, Any] = {}
        for index, (segment, offset) in spots.items():
            if segment.slot not in whole and segment.owner.lent:
                parts[index] = memoryview(segment.memory).cast("B")[offset : offset + nbytes[index]]
                continue
            if segment.slot not in whole:
                whole[segment.slot] = self._send(segment) if shared else self._hold(segment)
            mine = whole[segment.slot]
            placed[index] = Lent(segment, mine, offset, nbytes[index]) if shared else mine[offset:][: nbytes[index]]
        rest = [index for index in range(len(parts)) if index not in placed]
        placed.update(zip(rest, self._copies([parts[index] for index in rest], shared, sole), strict=True))
        parts.clear()
        return [placed[index] for index in range(len(nbytes))]

    def _spots(self, parts: Sequence[memoryview]) -> dict[int, tuple[_Segment, int]]:
        """Which buffers lie in lent memory: by their index the segment and the offset."""
        held = list(self._held.values())
        spots = {}
        for index, part in enumerate(parts):
            address = _address(part)
            for segment in held:
                if 0 <= address - segment.address < segment.size:
                    spots[index] = segment, address - segment.address
        return spots

    def _copies(self, parts: Sequence[memoryview], shared: bool, sole: Container[int]) -> Sequence[Any]:
        self.copied += sum([part.nbytes for part in parts])
        offsets, nbytes = _layout(parts) if shared else ((), 0)
        segment = self._take(recycling.size_class(nbytes)) if nbytes >= recycling.LEAST_BYTES else None
        if segment is None:
            return [part if sole and _address(part) in sole else self._copy(part) for part in parts]
        target = np.frombuffer(segment.memory, np.uint8)
        for offset, part in zip(offsets, parts, strict=True):
            target[offset : offset + part.nbytes] = np.frombuffer(part, np.uint8)
        use = self._send(segment)
        return [Lent(segment, use, offset, part.nbytes) for offset, part in zip(offsets, parts, strict=True)]

    def take_back(self, lent: Lent) -> None:
        """It was not sent after all; safe to say for each buffer of a batch."""
        with self._lock:
            if self._sent.get(lent.segment.slot) is lent.segment and lent.segment.use == lent.use:
                self._free(lent.segment)

    def close(self) -> None:
        """Close every descriptor; what the client has mapped lives on there."""
        with self._lock:
            for segment in [*self._sent.values(), *self._held.values(), *self._shelf.shrink(0)]:
                segment.close()
            self._sent.clear()
            self._held.clear()
            os.close(self._fd)

    def _send(self, segment: _Segment) -> int:
        with self._lock:
            self._held.pop(segment.slot, None)
            segment.hold = 0
            self._uses += 1
            segment.use = self._uses
            self._sent[segment.slot] = segment
            return segment.use

    def _hold(self, segment: _Segment) -> memoryview:
        """The memory, for somebody in this process; it is free when nobody looks at it any more."""
        with self._lock:
            self._holds += 1
            hold = segment.hold = self._holds
            self._held[segment.slot] = segment
        return segment.owner.lend(lambda _: self._dropped.append((segment, hold)))

    def _take(self, size: int) -> _Segment | None:
        with self._lock:
            segment = self._shelf.take(size)
            if segment is not None and not self._dropped:
                return segment
            self._collect()
            return segment or self._shelf.take(size) or self._make(size)

    def _collect(self) -> None:
        """What the client has given back is free, and what nobody here looks at."""
        while self._dropped:
            segment, hold = self._dropped.popleft()
            if segment.hold == hold:
                segment.hold = 0
                self._shelf.put(segment.size, self._held.pop(segment.slot))
        for slot, segment in list(self._sent.items()):
            returned = self._board.returned(slot)
            if returned == segment.use:
                self._free(segment)
            elif returned == RETIRED:
                del self._sent[slot]
                self._close(segment)

    def _free(self, segment: _Segment) -> None:
        del self._sent[segment.slot]
        self._shelf.put(segment.size, segment)

    def _make(self, size: int) -> _Segment | None:
        """None if there is no memory for one, though free ones of other sizes have given way."""
        spare = self._budget - self._nbytes
        if size > spare + self._shelf.nbytes:
            return None
        for segment in self._shelf.shrink(min(self._shelf.nbytes, self._shelf.nbytes + spare - size)):
            self._close(segment)
        if not self._slots:
            return None
        try:
            segment = _Segment(self._made, self._slots[-1], size)
        except OSError:
            self._budget = self._nbytes  # memory is short: what there is must do
            return None
        self._board.clear(self._slots.pop())
        self._made += 1
        self._nbytes += size
        return segment

    def _close(self, segment: _Segment) -> None:
        self._slots.append(segment.slot)
        self._nbytes -= segment.size
        segment.close()


def _affordable(slots: int) -> int:
    """So many that user code can open files, too."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return slots if limit == resource.RLIM_INFINITY else min(slots, limit // 4)


def _address(part: memoryview) -> int:
    if part.readonly:  # ctypes does not show that; numpy does, in five times as long
        return int(np.frombuffer(part, np.uint8).__array_interface__["data"][0])
    return ctypes.addressof(ctypes.c_char.from_buffer(part))


def _layout(parts: Sequence[memoryview]) -> tuple[Sequence[int], int]:
    """Where each buffer begins, and how many bytes they take in all."""
    offsets, end = [], 0
    for part in parts:
        offsets.append(end)
        end += -(-part.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, end


def _create(size: int) -> int:
    """Anonymous memory, every page of it reserved; its size never changes.

    Raises:
        OSError: so much memory cannot be had.
    """
    fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.posix_fallocate(fd, 0, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def _map(fd: int, size: int) -> Any:
    """The memory as a ctypes array, which is unmapped when that and all that was made from it is gone.

    Not an ``mmap.mmap``, which would hold a descriptor for each segment: hundreds, in a training process.

    Raises:
        OSError: it cannot be mapped.
    """
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), f"{size} bytes cannot be mapped: {os.strerror(ctypes.get_errno())}")
    memory = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, size).atexit = False  # user code may run after us
    return memory


# The client's end.


class Attachment:
    """One worker's shared memory, as the client maps it.

    Args:
        pid: of the worker
        board: checked by ``attach``
    """

    def __init__(self, pid: int, board: Board) -> None:
        self._pid = pid
        self._board = board
        self._mapped: dict[int, tuple[int, buffers.Owner]] = {}
        self._lent: dict[int, int] = {}
        self._lock = threading.Lock()
        self._mine = True
        with _forks.lock:
            _forks.attachments.add(self)

    def look(self, places: Mapping[int, Place], sizes: Sequence[int]) -> dict[int, memoryview]:
        """Buffers of one message by their number; a segment comes back when nobody looks at any of its buffers.

        Args:
            places: by the buffer's number
            sizes: of all buffers of the message

        Raises:
            StreamError: there is no such memory.
        """
        whole: dict[int, memoryview] = {}
        views = {}
        for number, place in places.items():
            if number >= len(sizes) or place.offset + sizes[number] > place.size or place.slot >= Board.SLOTS:
                raise StreamError(f"buffer {number} lies outside its segment")
            if place.slot not in whole:
                whole[place.slot] = self._lend(place)
            views[number] = whole[place.slot][place.offset : place.offset + sizes[number]]
        return views

    def credit(self, epoch: int, consumed: int) -> bool:
        """Note how far the training loop is; whether the worker waits, and has not been told yet, by a message."""
        self._board.note_consumed(epoch, consumed)
        starving = self._board.starving
        if starving:
            self._board.starving = False
        return starving

    def give_back(self, place: Place) -> None:
        """The batch in it is not wanted."""
        if place.slot < Board.SLOTS:
            self._board.give_back(place.slot, place.use)

    def _lend(self, place: Place) -> memoryview:
        with self._lock:
            owner = self._owner(place)
            self._lent[place.slot] = place.use
            return owner.lend(functools.partial(self._returned, place.slot))

    def _returned(self, slot: int, _: object) -> None:
        """In any thread, at any time; in a fork nothing is ours to give back."""
        use = self._lent.pop(slot, 0)
        if self._mine:
            self._board.give_back(slot, use)

    def _owner(self, place: Place) -> buffers.Owner:
        number, owner = self._mapped.get(place.slot, (-1, None))
        if owner is None or number != place.number:
            try:
                owner = buffers.Owner(_map_of(self._pid, place.fd, place.size), place.size)
            except OSError as error:
                raise StreamError(f"a segment of {place.size} bytes cannot be mapped: {error}") from error
            self._mapped[place.slot] = place.number, owner
        return owner

    # A fork shares these pages with its parent: what it may look at must never be written again.

    def before_fork(self) -> None:
        self._lock.acquire()
        for slot in list(self._lent):
            self._lent[slot] = RETIRED
            self._mapped.pop(slot, None)

    def after_fork(self, in_child: bool) -> None:
        self._mine = not in_child
        self._lock.release()


class _Forks:
    """Tells every attachment of this process when it forks."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.attachments: weakref.WeakSet[Attachment] = weakref.WeakSet()
        self._held: list[Attachment] = []
        os.register_at_fork(
            before=self._before,
            after_in_parent=lambda: self._after(in_child=False),
            after_in_child=lambda: self._after(in_child=True),
        )

    def _before(self) -> None:
        self.lock.acquire()
        self._held = list(self.attachments)
        for attachment in self._held:
            attachment.before_fork()

    def _after(self, in_child: bool) -> None:
        for attachment in self._held:
            attachment.after_fork(in_child)
        self._held = []
        self.lock.release()


_forks = _Forks()


def attach(pid: int, offer: Offer) -> Attachment | None:
    """Map a worker's board and accept; None if it is on another host, or belongs to another user."""
    try:
        board = Board(_map_of(pid, offer.fd, mmap.PAGESIZE))
    except OSError:
        return None
    if not secrets.compare_digest(board.nonce, offer.nonce):
        return None
    board.accept()
    return Attachment(pid, board)


def _map_of(pid: int, fd: int, size: int) -> Any:
    """Memory of another process by its descriptor there.

    Raises:
        OSError: there is no such process or descriptor here, it is not ours to open, or it is no memory of ours.
    """
    path = f"/proc/{pid}/fd/{fd}"
    if not os.readlink(path).startswith(f"/memfd:{_NAME} "):  # to open a device, or a pipe, would do something
        raise OSError(f"{path} is no shared memory of a worker")
    opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(opened).st_size != size or fcntl.fcntl(opened, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise OSError(f"{path} is not what was announced")
        return _map(opened, size)
    finally:
        os.close(opened)
