"""Which slots of the daemons belong to which rank: the arithmetic alone."""

from itertools import chain

from hypothesis import given, settings
from hypothesis import strategies as st

from rpc_reading_service import SlotsError
from rpc_reading_service.pool import Pool

pools = st.lists(st.integers(0, 9), min_size=1, max_size=6).map(
    lambda counts: {f"cpu{i}:5555": count for i, count in enumerate(counts)}
)
world_sizes = st.integers(1, 8)


def verdict(rank: int, world_size: int, slots: dict[str, int], needed: int) -> dict[str, int] | str:
    """The share of a rank, or the text with which it is refused."""
    try:
        return Pool(rank, world_size).shares(slots, needed)
    except SlotsError as error:
        return str(error)


@given(pools, world_sizes)
@settings(deadline=None)
def test_no_daemon_serves_two_ranks_if_there_is_one_for_each(slots: dict[str, int], world_size: int) -> None:
    shares = [Pool(rank, world_size).shares(slots, 0) for rank in range(world_size)]
    used = [[address for address, count in share.items() if count] for share in shares]
    if len(slots) >= world_size:
        assert sorted(chain(*used)) == sorted(address for address, count in slots.items() if count)
        assert all(share[address] in (0, slots[address]) for share in shares for address in share)
    else:
        assert all(len(addresses) <= 1 for addresses in used)


@given(pools, world_sizes)
@settings(deadline=None)
def test_all_ranks_together_never_hold_more_than_a_daemon_has(slots: dict[str, int], world_size: int) -> None:
    shares = [Pool(rank, world_size).shares(slots, 0) for rank in range(world_size)]
    for address, count in slots.items():
        held = [share[address] for share in shares if share[address]]
        assert sum(held) <= count
        assert count - sum(held) < max(2, world_size)
        assert len(set(held)) <= 1


@given(pools, world_sizes, st.integers(0, 6))
@settings(deadline=None)
def test_either_every_rank_has_what_it_needs_or_all_are_refused_in_the_same_words(
    slots: dict[str, int], world_size: int, needed: int
) -> None:
    verdicts = [verdict(rank, world_size, slots, needed) for rank in range(world_size)]
    if isinstance(verdicts[0], str):
        assert len({str(each) for each in verdicts}) == 1
        assert f"of the {needed} that each rank needs" in verdicts[0]
    else:
        assert all(not isinstance(each, str) and sum(each.values()) >= needed for each in verdicts)


@given(pools, world_sizes)
@settings(deadline=None)
def test_more_slots_are_never_refused_where_fewer_were_enough(slots: dict[str, int], world_size: int) -> None:
    shares = [Pool(rank, world_size).shares(slots, 0) for rank in range(world_size)]
    richer = {address: count + 1 for address, count in slots.items()}
    for rank, share in enumerate(shares):
        more = Pool(rank, world_size).shares(richer, min(sum(each.values()) for each in shares))
        assert all(more[address] >= count for address, count in share.items())


@given(pools, world_sizes)
@settings(deadline=None)
def test_what_every_rank_can_have_is_the_share_of_the_poorest(slots: dict[str, int], world_size: int) -> None:
    shares = [Pool(rank, world_size).shares(slots, 0) for rank in range(world_size)]
    poorest = min(sum(share.values()) for share in shares)
    assert {Pool(rank, world_size).most(slots) for rank in range(world_size)} == {poorest}
