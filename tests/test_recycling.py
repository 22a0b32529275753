"""Size classes and the shelf of free blocks."""

from hypothesis import given
from hypothesis import strategies as st

from rpc_reading_service.recycling import LEAST_BYTES, Shelf, size_class

SIZES = st.integers(1, 1 << 40)


@given(SIZES)
def test_a_class_holds_the_size_and_wastes_less_than_a_quarter_of_it(nbytes: int) -> None:
    size = size_class(nbytes)
    assert nbytes <= size
    assert size == LEAST_BYTES or size < 1.25 * nbytes
    assert size % 4096 == 0


@given(SIZES)
def test_a_class_is_its_own_class(nbytes: int) -> None:
    assert size_class(size_class(nbytes)) == size_class(nbytes)


@given(SIZES, SIZES)
def test_more_bytes_never_have_a_smaller_class(one: int, other: int) -> None:
    assert (size_class(one) <= size_class(other)) or one > other


def test_there_are_four_classes_to_each_doubling() -> None:
    assert len({size_class(nbytes) for nbytes in range((1 << 20) + 1, (1 << 21) + 1, 4096)}) == 4


def test_the_block_used_last_is_used_next() -> None:
    shelf: Shelf[str] = Shelf(100)
    for name in ("first", "second"):
        shelf.put(10, name)
    assert [shelf.take(10), shelf.take(10), shelf.take(10)] == ["second", "first", None]


def test_the_class_not_used_for_the_longest_time_gives_way() -> None:
    shelf: Shelf[str] = Shelf(40)
    shelf.put(10, "old 1")
    shelf.put(10, "old 2")
    shelf.put(20, "new 1")
    assert shelf.put(20, "new 2") == ["old 1", "old 2"]
    assert shelf.nbytes == 40


def test_a_class_without_blocks_is_passed_over() -> None:
    shelf: Shelf[str] = Shelf(40)
    shelf.put(10, "taken")
    assert shelf.take(10) == "taken"
    shelf.put(20, "old")
    assert shelf.put(30, "new") == ["old"]


def test_a_block_larger_than_the_limit_is_not_kept() -> None:
    shelf: Shelf[str] = Shelf(10)
    assert shelf.put(20, "large") == ["large"]
    assert shelf.take(20) is None
    assert shelf.nbytes == 0


@given(st.lists(st.tuples(st.sampled_from([10, 20, 50]), st.booleans())))
def test_bytes_are_counted_and_never_more_than_the_limit(steps: list[tuple[int, bool]]) -> None:
    shelf: Shelf[int] = Shelf(100)
    held: list[int] = []
    for size, puts in steps:
        if puts:
            held.append(size)
            for gone in shelf.put(size, size):
                held.remove(gone)
        elif shelf.take(size) is not None:
            held.remove(size)
        assert shelf.nbytes == sum(held) <= 100


def test_a_shelf_shows_what_is_on_it() -> None:
    shelf: Shelf[bytes] = Shelf(1 << 20)
    shelf.put(size_class(1), b"block")
    assert repr(shelf) == f"<Shelf {LEAST_BYTES} of 1048576 bytes, 1 blocks>"
