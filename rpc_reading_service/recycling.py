"""Which size a block of recycled memory has, and which free block is used next. No I/O.

Blocks come in size classes, four to each doubling, so that batches of nearly one size share them and at most a fifth of
a block, which is never touched, stays unused.
"""

import functools
from collections import OrderedDict
from typing import Generic, TypeVar

LEAST_BYTES = 64 << 10
"""Below this fresh memory from malloc is as fast: it has no page faults worth saving."""

T = TypeVar("T")


@functools.lru_cache(maxsize=1024)  # batches of one stream have few sizes, and each is asked for
def size_class(nbytes: int) -> int:
    """The smallest class that holds so many bytes: 4, 5, 6 or 7 times a power of two, in whole pages."""
    if nbytes <= LEAST_BYTES:
        return LEAST_BYTES
    step = 1 << ((nbytes - 1).bit_length() - 3)
    return -(-nbytes // step) * step


class Shelf(Generic[T]):
    """Free blocks, last in first out within a class: what was used last is still in the caches.

    Args:
        limit: bytes of all blocks on it
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self._classes: OrderedDict[int, list[T]] = OrderedDict()  # the class that was used last is the last one

    def __repr__(self) -> str:
        return f"<Shelf {self.nbytes} of {self.limit} bytes, {sum(map(len, self._classes.values()))} blocks>"

    def take(self, size: int) -> T | None:
        """A block of this class; None if there is none."""
        blocks = self._classes.get(size)
        if not blocks:
            return None
        self._classes.move_to_end(size)
        self.nbytes -= size
        return blocks.pop()

    def put(self, size: int, block: T) -> list[T]:
        """Keep a block; returns those that have to go for it, of the class that was not used for the longest time."""
        self._classes.setdefault(size, []).append(block)
        self._classes.move_to_end(size)
        self.nbytes += size
        return self.shrink(self.limit)

    def shrink(self, limit: int) -> list[T]:
        """The blocks that have to go for no more than ``limit`` bytes to be left, which are on it no more."""
        gone: list[T] = []
        while self.nbytes > limit:
            size = next(iter(self._classes))
            blocks = self._classes[size]
            if blocks:
                gone.append(blocks.pop(0))
                self.nbytes -= size
            if not blocks:
                del self._classes[size]
        return gone
