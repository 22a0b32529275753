"""Save anywhere in an epoch, kill everything, go on elsewhere: the stream is that of an undisturbed run."""

import functools
import itertools
import pickle
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torchdata.dataloader2 import DataLoader2
from torchdata.datapipes.iter import IterableWrapper, IterDataPipe

from rpc_reading_service import CheckpointError, RPCReadingService, codec
from rpc_reading_service.launchers import LocalDaemons
from rpc_reading_service.protocol import CreditMeter
from rpc_reading_service.testing import local_workers

ELEMENTS = 23
EPOCHS = 4


class Stays(IterDataPipe[Any]):
    """Stays in the training process."""

    def __init__(self, source: IterDataPipe[Any]) -> None:
        self.source = source

    def is_replicable(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        yield from self.source


def draw(element: int) -> tuple[int, float]:
    return element, random.random()


def shards() -> IterDataPipe[Any]:
    return IterableWrapper(range(ELEMENTS)).shuffle().sharding_filter().map(draw)


GRAPHS = {
    "workers only": shards,
    "prefetch here": lambda: Stays(shards()).prefetch(3),
    "shuffle here": lambda: Stays(shards()).shuffle(),
}


@pytest.fixture(scope="module")
def addresses() -> Iterator[list[str]]:
    with local_workers(2, slots=6) as addresses:
        yield addresses


def service(addresses: list[str], num_workers: int | None = 3, **more: Any) -> RPCReadingService:
    return RPCReadingService(addresses, num_workers=num_workers, pickle_by_value=(__name__,), **more)


def loader(addresses: list[str], graph: str, seeded: bool) -> DataLoader2[Any]:
    made: DataLoader2[Any] = DataLoader2(GRAPHS[graph](), reading_service=service(addresses))
    if seeded:
        made.seed(3)
    else:
        torch.manual_seed(11)
    return made


def saved_after(addresses: list[str], graph: str, seeded: bool, epoch: int, count: int) -> tuple[list[Any], Any]:
    """The first batches of an epoch, and the state after them; count above ELEMENTS reads to the end and once more."""
    with loader(addresses, graph, seeded) as first:
        for _ in range(epoch):
            list(first)
        iterator = iter(first)
        head = list(itertools.islice(iterator, count))
        return head, first.state_dict()


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("seeded", [True, False], ids=["dl.seed", "global seed"])
def test_every_point_of_an_epoch_can_be_gone_on_from(addresses: list[str], graph: str, seeded: bool) -> None:
    with loader(addresses, graph, seeded) as undisturbed:
        whole = [list(undisturbed) for _ in range(EPOCHS)]
    assert whole[0] != whole[1]
    for count in range(0, ELEMENTS + 1, 1 if graph == "workers only" else 4):
        epoch = count % 2
        head, state = saved_after(addresses, graph, seeded, epoch, count)
        if not seeded:
            torch.manual_seed(11)
            for _ in range(epoch):
                torch.empty((), dtype=torch.int64).random_()
        elsewhere = addresses[:1] if count % 3 else addresses[::-1]
        with DataLoader2.from_state(state, service(elsewhere, None)) as second:
            assert head + list(second) == whole[epoch]
            assert list(second) == whole[epoch + 1]
            assert list(second) == whole[epoch + 2]


@pytest.mark.parametrize("seed", range(2))
def test_random_points_of_a_large_epoch_can_be_gone_on_from_when_everything_was_killed(
    addresses: list[str], seed: int
) -> None:
    def large(state: Any, where: list[str]) -> DataLoader2[Any]:
        if state is not None:
            return DataLoader2.from_state(state, service(where, None))
        made: DataLoader2[Any] = DataLoader2(
            IterableWrapper(range(8_000)).shuffle().sharding_filter().map(draw).batch(10),
            reading_service=service(where),
        )
        made.seed(seed)
        return made

    with large(None, addresses) as undisturbed:
        whole = [list(undisturbed) for _ in range(3)]
    counts = random.Random(seed).sample(range(len(whole[0])), 2)
    saved, victims = [], LocalDaemons([6])
    try:
        for count in counts:
            killed = large(None, victims.addresses)
            saved.append((list(itertools.islice(killed, count)), killed.state_dict(), killed))
        victims.processes[0].kill()
        for count, (head, state, _) in zip(counts, saved, strict=True):
            with large(state, addresses[count % 2 :]) as resumed:
                assert [head + list(resumed), list(resumed), list(resumed)] == whole
    finally:
        for _, _, killed in saved:
            killed.shutdown()
        victims.close()


class Counted:
    """An element that notes each time that it is encoded."""

    def __init__(self, number: int, notes: Path) -> None:
        self.number, self.notes = number, notes

    def __reduce__(self) -> Any:
        with self.notes.open("ab") as file:
            file.write(b".")
        return int, (self.number,)


def test_what_a_replay_skips_is_not_encoded(addresses: list[str], tmp_path: Path) -> None:
    datapipe = (
        IterableWrapper(range(ELEMENTS)).sharding_filter().map(functools.partial(Counted, notes=tmp_path / "notes"))
    )
    with DataLoader2(datapipe, reading_service=service(addresses)) as first:
        head, state = list(itertools.islice(first, 15)), first.state_dict()
    (tmp_path / "notes").unlink()
    with DataLoader2.from_state(state, service(addresses)) as second:
        assert head + list(second) == list(range(ELEMENTS))
    assert (tmp_path / "notes").stat().st_size == ELEMENTS - 15


def test_a_state_of_an_epoch_that_is_over_goes_on_with_the_whole_next_one(addresses: list[str]) -> None:
    with loader(addresses, "workers only", True) as undisturbed:
        whole = [list(undisturbed) for _ in range(3)]
        assert len({str(epoch) for epoch in whole}) == 3
    with loader(addresses, "workers only", True) as first:
        list(first)
        state = first.state_dict()
    with DataLoader2.from_state(state, service(addresses)) as second:
        assert [list(second), list(second)] == whole[1:]


def test_a_resumed_epoch_can_be_saved_and_resumed_again(addresses: list[str]) -> None:
    with loader(addresses, "workers only", True) as undisturbed:
        whole = [list(undisturbed), list(undisturbed)]
    head, state = saved_after(addresses, "workers only", True, 0, 5)
    with DataLoader2.from_state(state, service(addresses)) as second:
        assert second.state_dict() is state
        iterator = iter(second)
        head += [next(iterator) for _ in range(6)]
        state = second.state_dict()
    with DataLoader2.from_state(state, service(addresses)) as third:
        assert head + list(third) == whole[0]
        assert list(third) == whole[1]


def test_saving_twice_or_before_the_first_iterator_is_fine(addresses: list[str]) -> None:
    with loader(addresses, "workers only", True) as undisturbed:
        before = undisturbed.state_dict()
        whole = list(undisturbed)
    with loader(addresses, "workers only", True) as first:
        next(iter(first))
        assert first.state_dict()["reading_service_state"] == first.state_dict()["reading_service_state"]
    with DataLoader2.from_state(before, service(addresses)) as second:
        assert list(second) == whole


def test_the_saved_epoch_can_be_begun_again(addresses: list[str]) -> None:
    with loader(addresses, "workers only", True) as undisturbed:
        whole = list(undisturbed)
    _, state = saved_after(addresses, "workers only", True, 0, 7)
    with DataLoader2.from_state(state, service(addresses)) as second:
        second._restore_checkpoint_beginning_of_epoch()
        assert list(second) == whole


def test_in_the_order_of_arrival_nothing_is_lost_or_repeated_either(addresses: list[str]) -> None:
    graph = IterableWrapper(range(ELEMENTS)).sharding_filter()
    with DataLoader2(graph, reading_service=service(addresses, in_order=False)) as first:
        head = list(itertools.islice(first, 9))
        state = first.state_dict()
    with DataLoader2.from_state(state, service(addresses, in_order=False)) as second:
        assert sorted(head + list(second)) == list(range(ELEMENTS))


@pytest.mark.parametrize(("where", "name"), [(codec, "decode"), (CreditMeter, "consume")], ids=["decode", "consume"])
def test_what_an_interrupted_call_did_not_hand_out_comes_next(
    where: Any, name: str, addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C may come while a batch has been taken and is not there yet."""
    with loader(addresses, "workers only", seeded=True) as undisturbed:
        whole = list(undisturbed)
    act, calls = getattr(where, name), itertools.count()

    def interrupted(*args: Any) -> Any:
        if next(calls) == 7:
            raise KeyboardInterrupt
        return act(*args)

    head: list[Any] = []
    with loader(addresses, "workers only", seeded=True) as first:
        monkeypatch.setattr(where, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            read_into(head, first)
        state = first.state_dict()
    assert len(head) == 7
    with DataLoader2.from_state(state, service(addresses)) as second:
        assert head + list(second) == whole


def test_a_state_after_an_error_of_the_graph_goes_on_behind_what_came_before_it(addresses: list[str]) -> None:
    """The error is none of the batches that are counted."""
    graph = IterableWrapper(range(ELEMENTS)).sharding_filter().map(refuse_ten)
    head: list[Any] = []
    with DataLoader2(graph, reading_service=service(addresses)) as first:
        client = iter(first) and first.reading_service._client
        with pytest.raises(ValueError, match="ten"):
            read_into(head, first)
        assert head == list(range(10))
        assert client.position() == ([4, 3, 3], 2)


def read_into(head: list[Any], batches: Iterable[Any]) -> None:
    for batch in batches:
        head.append(batch)


def refuse_ten(element: int) -> int:
    if element == 10:
        raise ValueError("ten")
    return element


def test_the_state_is_small(addresses: list[str]) -> None:
    with DataLoader2(shards(), reading_service=service(addresses, 12)) as first:
        first.seed(2**63)
        next(iter(first))
        assert len(first.state_dict()["reading_service_state"]) < 300


# Refusals: none of them unpickles anything.


class Trap:
    """Does not like to be unpickled."""

    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('unpickled')",)


@pytest.mark.parametrize("data", [b"x", b"\x80\x04N.", pickle.dumps(Trap())])
def test_a_state_that_is_not_ours_is_refused_and_not_unpickled(addresses: list[str], data: bytes) -> None:
    with pytest.raises(CheckpointError, match="is not one of RPCReadingService: it was saved with another reading"):
        service(addresses).restore(shards(), data)


def test_another_number_of_workers_is_refused_with_both_numbers(addresses: list[str]) -> None:
    _, state = saved_after(addresses, "workers only", True, 0, 2)
    with pytest.raises(CheckpointError, match="saved with num_workers=3, but this service has num_workers=2"):
        service(addresses, 2).restore(shards(), state["reading_service_state"])


def test_another_graph_is_refused(addresses: list[str]) -> None:
    _, state = saved_after(addresses, "workers only", True, 0, 2)
    with pytest.raises(CheckpointError, match="saved with another graph"):
        service(addresses).restore(shards().batch(2), state["reading_service_state"])
