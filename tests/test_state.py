"""The saved state as bytes, without a loader: what is dumped is loaded, and damage is noticed."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpc_reading_service import CheckpointError, checkpoint

SAVED = checkpoint.State(2, "graph", 1, False, [3, 4], 1, 0, "ab", [[1] * 8, [2] * 8], "cd")


def some_state(**changes: Any) -> checkpoint.State:
    return msgspec.structs.replace(SAVED, **changes)


@given(
    st.builds(
        checkpoint.State,
        num_workers=st.just(3),
        graph=st.text(max_size=20),
        epoch=st.integers(0, 2**40),
        ended=st.booleans(),
        consumed=st.lists(st.integers(0, 2**60), min_size=3, max_size=3),
        turn=st.integers(0, 2),
        skip=st.integers(0, 2**40),
        received=st.text(max_size=20),
        generator=st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=12), min_size=2, max_size=2),
        torch_before=st.text(max_size=20),
    )
)
@settings(deadline=None)
def test_what_is_dumped_is_loaded(state: checkpoint.State) -> None:
    assert checkpoint.load(checkpoint.dump(state)) == state


@given(st.data())
@settings(deadline=None)
def test_damage_is_noticed(data: st.DataObject) -> None:
    good = bytearray(checkpoint.dump(some_state()))
    position = data.draw(st.integers(0, len(good) - 1))
    good[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CheckpointError):
        checkpoint.load(bytes(good))


@given(st.integers(0, 60))
@settings(deadline=None)
def test_what_is_cut_short_is_noticed(length: int) -> None:
    with pytest.raises(CheckpointError):
        checkpoint.load(checkpoint.dump(some_state())[:length])


def test_a_state_of_another_version_names_both() -> None:
    data = bytearray(checkpoint.dump(some_state()))
    data[17] = 9
    with pytest.raises(CheckpointError, match="has version 9, this package reads version 1"):
        checkpoint.load(bytes(data))


@pytest.mark.parametrize("changes", [{"consumed": [1]}, {"turn": 2}])
def test_counts_that_contradict_each_other_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"damaged \(counts do not match num_workers\)"):
        checkpoint.load(checkpoint.dump(some_state(**changes)))


@pytest.mark.parametrize(
    ("num_workers", "graph", "text"),
    [
        (3, "graph", "saved with num_workers=2, but this service has num_workers=3"),
        (None, "another", "saved with another graph"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(num_workers: int | None, graph: str, text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        checkpoint.check(SAVED, num_workers, graph)


@pytest.mark.parametrize("num_workers", [2, None])
def test_a_state_that_fits_is_taken(num_workers: int | None) -> None:
    checkpoint.check(SAVED, num_workers, "graph")


def test_bytes_of_something_else_are_told_apart() -> None:
    with pytest.raises(CheckpointError, match="is not one of RPCReadingService: it was saved with another reading"):
        checkpoint.load(b"x" * 100)
