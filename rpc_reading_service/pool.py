"""Whose slots are whose: how shards are dealt out over daemons, and daemons over the ranks of a training. Pure."""

from dataclasses import dataclass

from rpc_reading_service.errors import SlotsError


@dataclass(frozen=True)
class Pool:
    """The ranks of a distributed training share the daemons out: each the same way, whoever connects first.

    With at least as many daemons as ranks, rank r takes ``daemons[r::world_size]``; with fewer, the slots of each
    daemon are divided evenly among the ranks that share it.
    """

    rank: int
    world_size: int

    def shares(self, slots: dict[str, int], needed: int) -> dict[str, int]:
        """How many slots of each daemon this rank may hold.

        Args:
            slots: of every daemon, in the order given by the user
            needed: by each rank; as many by every one, or their data would overlap

        Raises:
            SlotsError: some rank would get fewer; every rank raises it.
        """
        poorest, most = self._poorest(slots)
        if most < needed:
            pool = ", ".join(f"{address} with {count}" for address, count in slots.items())
            raise SlotsError(
                f"{self.world_size} ranks share {sum(slots.values())} slots ({pool}); rank {poorest} would get {most} "
                f"of the {needed} that each rank needs: start more daemons or more slots, or ask for fewer num_workers"
            )
        return self._of(self.rank, slots)

    def most(self, slots: dict[str, int]) -> int:
        """How many slots every rank can have."""
        return self._poorest(slots)[1]

    def _poorest(self, slots: dict[str, int]) -> tuple[int, int]:
        counts = [sum(self._of(rank, slots).values()) for rank in range(self.world_size)]
        return counts.index(min(counts)), min(counts)

    def _of(self, rank: int, slots: dict[str, int]) -> dict[str, int]:
        addresses = list(slots)
        if len(addresses) >= self.world_size:
            mine = set(addresses[rank :: self.world_size])
            return {address: count if address in mine else 0 for address, count in slots.items()}
        turn = rank % len(addresses)
        sharing = len(range(turn, self.world_size, len(addresses)))
        return {a: count // sharing if i == turn else 0 for i, (a, count) in enumerate(slots.items())}


def deal(slots: dict[str, int], total: int) -> list[str]:
    """The daemon of each shard: one each in turn, as long as they have slots; the same for the same pool.

    Raises:
        SlotsError: there are fewer slots than shards.

    >>> deal({"a": 1, "b": 3}, 4)
    ['a', 'b', 'b', 'b']
    """
    if total > sum(slots.values()):
        raise SlotsError(f"{total} shards need a slot each, but only {sum(slots.values())} are held")
    left = dict(slots)
    dealt: list[str] = []
    while len(dealt) < total:
        for address in left:
            if left[address] > 0 and len(dealt) < total:
                left[address] -= 1
                dealt.append(address)
    return dealt
