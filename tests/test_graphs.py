"""Graphs as people write them: what comes out of them is what comes out of them without any workers.

Each runs on two one-worker daemons. Where the order over both shards matters, the expected values are written out.
"""

import csv
import gc
import io
import os
import random
import sys
import tarfile
import time
from collections import Counter, namedtuple
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import distributed
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torchdata.dataloader2 import DataLoader2, DistributedReadingService, SequentialReadingService
from torchdata.dataloader2.adapter import CacheTimeout, Shuffle
from torchdata.datapipes.iter import FileLister, IterableWrapper, IterDataPipe
from torchdata.datapipes.map import SequenceWrapper

from rpc_reading_service import RPCReadingService, graph

TIMEOUT_S = 60.0


def service(workers: list[str]) -> RPCReadingService:
    """What the workers run travels by value, so that they need not import this file."""
    return RPCReadingService(workers, pickle_by_value=(__name__,), timeout=TIMEOUT_S)


def load(datapipe: Any, workers: list[str], **options: Any) -> "DataLoader2[Any]":
    return DataLoader2(datapipe, reading_service=service(workers), **options)


def read(datapipe: Any, workers: list[str], **options: Any) -> list[Any]:
    with load(datapipe, workers, **options) as loader:
        return list(loader)


def sharded(elements: Any) -> Any:
    return IterableWrapper(elements).sharding_filter()


def interleaved(*shards: Any) -> list[Any]:
    """Round robin over the shards, whose elements are not None."""
    return [element for turn in zip_longest(*shards) for element in turn if element is not None]


# What the workers run.


def half(x: int) -> float:
    return x / 2


def sample(x: int) -> dict[str, Any]:
    return {"image": torch.full((2, 3), float(x)), "label": x}


def word(length: int) -> str:
    return length * "x"


def with_pid(x: Any) -> tuple[Any, int]:
    return x, os.getpid()


# The usual tail.


def test_batch_and_collate_make_tensors_on_the_workers(two_daemons: list[str]) -> None:
    batches = read(sharded(range(8)).map(half).batch(2).collate(), two_daemons)
    assert [batch.tolist() for batch in batches] == [[0.0, 1.0], [0.5, 1.5], [2.0, 3.0], [2.5, 3.5]]
    assert {batch.dtype for batch in batches} == {torch.float64}


def test_dicts_are_collated_by_key(two_daemons: list[str]) -> None:
    first, second = read(sharded(range(6)).map(sample).batch(3).collate(), two_daemons)
    assert first["label"].tolist() == [0, 2, 4]
    assert second["label"].tolist() == [1, 3, 5]
    assert first["image"].shape == (3, 2, 3)
    assert first["image"][:, 0, 0].tolist() == [0.0, 2.0, 4.0]


def as_column(batch: list[float]) -> torch.Tensor:
    return torch.tensor(batch).unsqueeze(1)


def test_a_collate_function_of_ones_own_runs_on_the_workers(two_daemons: list[str]) -> None:
    batches = read(sharded(range(4)).batch(2).collate(collate_fn=as_column).map(with_pid), two_daemons)
    assert [batch.tolist() for batch, _ in batches] == [[[0], [2]], [[1], [3]]]
    assert len({pid for _, pid in batches} - {os.getpid()}) == 2


# What stays in the training process.


@pytest.fixture
def one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is the only rank of a distributed training."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # init_process_group replaces it for good
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        yield
    finally:
        gc.collect()  # the groups of a loader's DataPipes, which refer to each other, go before the last one
        distributed.destroy_process_group()


class WherePid(IterDataPipe[Any]):
    """Adds the number of the process that it runs in, and may run in any."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        for element in self.source:
            yield element, os.getpid()


class Stays(WherePid):
    """As ``WherePid``, in the training process."""

    def is_replicable(self) -> bool:
        return False


def test_what_follows_a_datapipe_that_stays_here_stays_here(two_daemons: list[str]) -> None:
    elements = read(WherePid(Stays(WherePid(sharded(range(4)))).prefetch(2)), two_daemons)
    assert [x for (((x, _), _), _) in elements] == [0, 1, 2, 3]
    assert len({worker for (((_, worker), _), _) in elements} - {os.getpid()}) == 2
    assert {here for (((_, _), here), _) in elements} == {os.getpid()}
    assert {here for ((_, _), here) in elements} == {os.getpid()}


@pytest.mark.usefixtures("one_rank")
def test_fullsync_and_prefetch_at_the_end_stay_here(two_daemons: list[str]) -> None:
    tail = WherePid(sharded(range(5)).batch(1).collate().map(with_pid).fullsync().prefetch(2))
    with load(tail, two_daemons) as loader:
        for _ in range(2):
            elements = list(loader)
            assert [int(x) for ((x, _), _) in elements] == [0, 1, 2, 3, 4]
            assert os.getpid() not in {worker for ((_, worker), _) in elements}
            assert {here for (_, here) in elements} == {os.getpid()}


@pytest.mark.usefixtures("one_rank")
def test_fullsync_stays_here_behind_the_service_that_adds_it(two_daemons: list[str]) -> None:
    services = SequentialReadingService(DistributedReadingService(), service(two_daemons))
    with DataLoader2(sharded(range(6)).shuffle().map(with_pid), reading_service=services) as loader:
        for epoch in range(2):
            loader.seed(epoch)
            elements = list(loader)
            assert sorted(x for x, _ in elements) == [0, 1, 2, 3, 4, 5]
            assert os.getpid() not in {pid for _, pid in elements}


def test_a_prefetch_that_has_not_begun_is_no_obstacle(two_daemons: list[str]) -> None:
    left, right = Stays(sharded(range(20)).map(slowly)).fork(2)
    with load(left.concat(right.prefetch(2)), two_daemons) as loader:
        assert [x for x, _ in loader] == 2 * list(range(20))


def slowly(x: int) -> int:
    time.sleep(0.02)
    return x


class ReadsOn(Stays):
    """Takes one more element when it is broken off, as the thread of a prefetch may: the next epoch has begun then."""

    def __iter__(self) -> Iterator[Any]:
        elements = iter(self.source)
        try:
            yield from iter(elements.__next__, None)
        finally:
            with suppress(Exception):
                next(elements)


def test_whoever_still_reads_the_last_epoch_takes_nothing_from_the_next(two_daemons: list[str]) -> None:
    with load(ReadsOn(sharded(range(20))), two_daemons) as loader:
        for _ in range(3):
            assert list(islice(loader, 3)) == [0, 1, 2]


def test_a_prefetch_here_may_be_broken_off(two_daemons: list[str]) -> None:
    with load(Stays(sharded(range(100))).prefetch(5), two_daemons) as loader:
        for count in (1, 2, 3, 50, 1, None):
            assert [x for x, _ in islice(loader, count)] == list(range(100))[:count]


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory can be pinned here")
def test_pin_memory_without_cuda_is_refused_by_torchdata() -> None:
    with pytest.raises(RuntimeError, match="can only be used when CUDA is available"):
        sharded(range(4)).pin_memory()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pin_memory_at_the_end_stays_here(two_daemons: list[str]) -> None:
    batches = read(WherePid(sharded(range(8)).batch(2).collate().prefetch(2).pin_memory()), two_daemons)
    assert [batch.tolist() for batch, _ in batches] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert all(batch.is_pinned() and pid == os.getpid() for batch, pid in batches)


# Sources without an end.


def test_a_loop_that_counts_its_steps_may_read_a_source_that_cycles_for_ever(two_daemons: list[str]) -> None:
    with load(sharded(range(4)).shuffle().cycle().batch(2).collate(), two_daemons) as loader:
        steps = [batch.tolist() for batch in islice(loader, 50)]
    assert Counter(chain.from_iterable(steps)) == {0: 25, 1: 25, 2: 25, 3: 25}


def test_a_cycle_without_end_may_be_begun_again(two_daemons: list[str]) -> None:
    with load(sharded(range(6)).cycle().prefetch(4), two_daemons) as loader:
        for _ in range(3):
            assert list(islice(loader, 8)) == [0, 1, 2, 3, 4, 5, 0, 1]


# Caches.


class Noted(IterDataPipe[Any]):
    """Leaves a note in a file for every element that is made."""

    def __init__(self, source: Any, notes: Path) -> None:
        self.source = source
        self.notes = notes

    def __iter__(self) -> Iterator[Any]:
        for element in self.source:
            with self.notes.open("a") as file:
                file.write(f"{element}\n")
            yield element


def test_in_memory_cache_lives_as_long_as_its_worker(two_daemons: list[str], tmp_path: Path) -> None:
    with load(Noted(sharded(range(10)), tmp_path / "notes").in_memory_cache(), two_daemons) as loader:
        for _ in range(3):
            assert list(loader) == list(range(10))
    assert sorted((tmp_path / "notes").read_text().split(), key=int) == [str(x) for x in range(10)]


@dataclass(frozen=True)
class CachedAs:
    """The file that an element is cached in."""

    folder: Path

    def __call__(self, element: Any) -> str:
        return str(self.folder / f"{element}.txt")


def as_text(element: int) -> tuple[int, list[str]]:
    return element, [f"text {element}"]


def cached_on_disk(folder: Path) -> Any:
    name = CachedAs(folder / "cache")
    downloaded = Noted(sharded(range(6)).on_disk_cache(filepath_fn=name), folder / "notes").map(as_text)
    return downloaded.end_caching(mode="t", filepath_fn=name).open_files().readlines(return_path=False)


def test_on_disk_cache_is_written_by_the_workers_and_read_by_their_successors(
    two_daemons: list[str], tmp_path: Path
) -> None:
    pytest.importorskip("portalocker")
    texts = [f"text {x}" for x in range(6)]
    with load(cached_on_disk(tmp_path), two_daemons, datapipe_adapter_fn=CacheTimeout(30)) as loader:
        assert sorted(loader) == texts
        assert sorted(loader) == texts
    assert sorted(read(cached_on_disk(tmp_path), two_daemons)) == texts
    assert sorted((tmp_path / "notes").read_text().split(), key=int) == [str(x) for x in range(6)]


# Buckets.


def bucket_of(batch: list[Any]) -> list[Any]:
    return sorted(batch)


def test_bucketbatch_sorts_within_the_buckets_of_each_worker(two_daemons: list[str]) -> None:
    lengths = [5, 3, 8, 1, 9, 2, 7, 4]
    pipe = sharded(lengths).bucketbatch(batch_size=2, batch_num=2, bucket_num=1, sort_key=bucket_of)
    with load(pipe, two_daemons) as loader:
        for epoch in range(2):
            loader.seed(epoch)
            batches = [list(batch) for batch in loader]
            assert sorted(batches) == [[1, 2], [3, 4], [5, 7], [8, 9]]
            assert {tuple(batch) for batch in batches[0::2]} == {(5, 7), (8, 9)}


def test_max_token_bucketize_keeps_to_its_bound(two_daemons: list[str]) -> None:
    def bucketized(lengths: Any) -> Any:
        return lengths.map(word).max_token_bucketize(max_token_count=5, buffer_size=4)

    lengths = [3, 1, 4, 1, 5, 2, 2, 3, 1, 1]
    shards = [bucketized(IterableWrapper(lengths[shard::2])) for shard in range(2)]
    batches = read(bucketized(sharded(lengths)), two_daemons)
    assert batches == interleaved(*shards)
    assert all(sum(map(len, batch)) <= 5 for batch in batches)
    assert sorted(map(len, chain.from_iterable(batches))) == sorted(lengths)


# Adapters and seeds.


def test_the_shuffle_adapter_adds_one_and_takes_it_away(two_daemons: list[str]) -> None:
    unshuffled, shuffled = IterableWrapper(range(40)), IterableWrapper(range(40)).shuffle().sharding_filter()
    assert read(shuffled, two_daemons, datapipe_adapter_fn=[Shuffle(False)]) == list(range(40))
    with pytest.warns(UserWarning, match="`shuffle=True` was set, but the datapipe does not contain a `Shuffler`"):
        loader = load(unshuffled, two_daemons, datapipe_adapter_fn=[Shuffle(True)])
    with loader:
        elements = list(loader)
    assert elements != sorted(elements)
    assert Counter(elements) == dict.fromkeys(range(40), 2)


def test_seeding_with_the_epochs_number_makes_every_epoch_repeatable(two_daemons: list[str]) -> None:
    def epochs() -> list[list[int]]:
        found = []
        with load(IterableWrapper(range(30)).shuffle().sharding_filter(), two_daemons) as loader:
            for epoch in range(3):
                loader.seed(epoch)
                found.append(list(loader))
        return found

    first, second = epochs(), epochs()
    assert first == second
    assert len(set(map(tuple, first))) == 3
    assert all(sorted(epoch) == list(range(30)) for epoch in first)


# Files.


def put_into_tar(path: Path, keys: range) -> None:
    with tarfile.open(path, "w") as tar:
        for key in keys:
            for suffix, data in (("txt", f"caption {key}"), ("cls", str(key % 3))):
                info = tarfile.TarInfo(f"{key:04}.{suffix}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data.encode()))


def read_member(member: tuple[str, Any]) -> tuple[str, str]:
    name, stream = member
    text = stream.read().decode()
    stream.close()
    return name, text


def caption_and_class(element: dict[str, str]) -> tuple[str, int]:
    return element[".txt"], int(element[".cls"])


def test_webdataset_tars_are_read_on_the_workers(two_daemons: list[str], tmp_path: Path) -> None:
    for number in range(4):
        put_into_tar(tmp_path / f"{number}.tar", range(5 * number, 5 * number + 5))
    tars = FileLister(str(tmp_path), "*.tar").shuffle().sharding_filter()
    elements = tars.open_files("rb").load_from_tar().map(read_member).webdataset().map(caption_and_class)
    with load(elements.shuffle().batch(4), two_daemons) as loader:
        for _ in range(2):
            assert sorted(chain.from_iterable(loader)) == sorted((f"caption {key}", key % 3) for key in range(20))


@pytest.fixture
def tables(tmp_path: Path) -> list[str]:
    """Three csv files of 4, 1 and 3 rows under a heading."""
    paths = []
    for number, rows in enumerate((4, 1, 3)):
        paths.append(str(tmp_path / f"{number}.csv"))
        with open(paths[-1], "w", newline="") as file:
            csv.writer(file).writerows([["name", "value"], *([f"row {number}.{row}", row] for row in range(rows))])
    return paths


NAMES = [f"row {number}.{row}" for number, rows in enumerate((4, 1, 3)) for row in range(rows)]


def test_csv_files_are_parsed_on_the_workers(two_daemons: list[str], tables: list[str]) -> None:
    rows = read(sharded(tables).open_files().parse_csv(skip_lines=1, return_path=True), two_daemons)
    assert rows[:3] == [(tables[0], ["row 0.0", "0"]), (tables[1], ["row 1.0", "0"]), (tables[0], ["row 0.1", "1"])]
    assert sorted(row[0] for _, row in rows) == NAMES


def test_csv_files_may_be_parsed_into_dicts(two_daemons: list[str], tables: list[str]) -> None:
    rows = read(sharded(tables).open_files().parse_csv_as_dict(), two_daemons)
    assert sorted(row["name"] for row in rows) == NAMES
    assert rows[0] == {"name": "row 0.0", "value": "0"}


def test_lines_of_files_are_read_on_the_workers_and_a_break_leaves_no_file_open(
    two_daemons: list[str], tables: list[str]
) -> None:
    lines = IterableWrapper(tables).shuffle().open_files().readlines(skip_lines=1, return_path=False).sharding_filter()
    with load(lines, two_daemons) as loader:
        for _ in range(3):
            assert len(list(islice(loader, 3))) == 3
        assert sorted(line.partition(",")[0] for line in loader) == NAMES


def rows_of(path: str) -> Iterator[dict[str, Any]]:
    """Row group by row group, so that a worker never holds a whole file."""
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=2, columns=["key", "image", "caption"]):
            yield from batch.to_pylist()


def decoded(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "image": torch.tensor(row["image"], dtype=torch.uint8)}


def test_parquet_files_are_read_on_the_workers(two_daemons: list[str], tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    for number, keys in enumerate((range(5), range(5, 6), range(6, 9))):
        columns = {"key": list(keys), "image": [[key, key + 1] for key in keys], "unused": list(keys)}
        table = pyarrow.table({**columns, "caption": [f"caption {key}" for key in keys]})
        parquet.write_table(table, tmp_path / f"{number}.parquet", row_group_size=2)
    files = FileLister(str(tmp_path), "*.parquet").shuffle().sharding_filter()
    with load(files.flatmap(rows_of).shuffle().map(decoded).batch(2).collate(), two_daemons) as loader:
        for _ in range(2):
            batches = list(loader)
            rows = [row for batch in batches for row in zip(*map(list, batch.values()), strict=True)]
            assert batches[0]["image"].dtype == torch.uint8
            assert sorted((int(key), image.tolist(), caption) for key, image, caption in rows) == [
                (key, [key, key + 1], f"caption {key}") for key in range(9)
            ]


# As the recommender library freerec builds its loaders (see docs/recipes.md).


@dataclass(frozen=True)
class Column:
    """A key of the batches, which the training loop makes again and looks up."""

    name: str
    tags: frozenset[str]

    def tagged(self, tag: str) -> "Column":
        return Column(self.name, self.tags | {tag})


USER, ITEM, SIZE = (Column(name, frozenset({"id"})) for name in ("user", "item", "size"))
BOUGHT, NOT_BOUGHT = ITEM.tagged("bought"), ITEM.tagged("not bought")
USERS, ITEMS = 10, 6


class Purchases:
    """One object for all splits, which says what it is in by its mode: each source sets the mode that it needs."""

    def __init__(self) -> None:
        self.mode = "train"
        self.bought = {
            "train": {user: {user % ITEMS, (user + 1) % ITEMS} for user in range(USERS)},
            "valid": {user: {(user + 2) % ITEMS} for user in range(USERS)},
        }

    def of(self, user: int) -> set[int]:
        return self.bought[self.mode][user]


class Seeded:
    """Draws from a generator of its own, which torchdata seeds."""

    def __init__(self) -> None:
        self.random = random.Random(0)

    def set_seed(self, seed: int) -> None:
        self.random.seed(seed)


class Numbers(Seeded, IterDataPipe[int]):
    def __init__(self, count: int, shuffled: bool) -> None:
        super().__init__()
        self.numbers = list(range(count))
        self.shuffled = shuffled

    def __iter__(self) -> Iterator[int]:
        if self.shuffled:
            self.random.shuffle(self.numbers)
        yield from self.numbers


class Step(IterDataPipe[Any]):
    """Shows torchdata only what it reads from when the graph is traversed, for the data in it is large."""

    def __init__(self, source: Any, purchases: Purchases) -> None:
        self.source = source
        self.purchases = purchases

    def __getstate__(self) -> Any:
        return self.__dict__ if IterDataPipe.getstate_hook is None else self.source


class Users(Step):
    def __init__(self, purchases: Purchases, mode: str) -> None:
        super().__init__(Numbers(USERS, mode == "train").sharding_filter(), purchases)
        self.mode = mode

    def __iter__(self) -> Iterator[Any]:
        self.purchases.mode = self.mode
        for user in self.source:
            yield {USER: user}


class Sampled(Seeded, Step):
    def __init__(self, source: Any, purchases: Purchases) -> None:
        Step.__init__(self, source, purchases)
        Seeded.__init__(self)

    def __iter__(self) -> Iterator[Any]:
        for row in self.source:
            bought = self.purchases.of(row[USER])
            others = sorted(set(range(ITEMS)) - bought)
            yield row | {BOUGHT: self.random.choice(sorted(bought)), NOT_BOUGHT: self.random.choice(others)}


class Columns(Step):
    def __iter__(self) -> Iterator[Any]:
        for rows in self.source.batch(2):
            columns = {column: torch.tensor([row[column] for row in rows]).unsqueeze(1) for column in rows[0]}
            yield columns | {SIZE: len(rows)}


def purchases_of(purchases: Purchases, mode: str) -> Any:
    return Columns(Sampled(Users(purchases, mode), purchases), purchases)


def assert_purchases(batches: list[dict[Column, Any]], purchases: Purchases, mode: str) -> None:
    assert sorted(user for batch in batches for user in batch[USER].flatten().tolist()) == list(range(USERS))
    assert sum(batch[Column("size", frozenset({"id"}))] for batch in batches) == USERS
    for batch in batches:
        purchases.mode = mode
        for user, bought, other in zip(batch[USER], batch[BOUGHT], batch[ITEM.tagged("not bought")], strict=True):
            assert int(bought) in purchases.of(int(user))
            assert int(other) not in purchases.of(int(user))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("behind_ddp", [False, True], ids=["one process", "behind DistributedReadingService"])
def test_three_loaders_take_turns_as_freerec_lets_them(two_daemons: list[str], behind_ddp: bool) -> None:
    def loader(mode: str, address: str) -> "DataLoader2[Any]":
        services = [DistributedReadingService(), service([address])] if behind_ddp else [service([address])]
        return DataLoader2(purchases_of(purchases, mode), reading_service=SequentialReadingService(*services))

    purchases, (one, other) = Purchases(), two_daemons
    train, valid, test = loader("train", one), loader("valid", other), loader("valid", other)
    epochs = []
    for _ in range(2):
        epochs.append(list(train))
        assert_purchases(epochs[-1], purchases, "train")
        assert_purchases(list(valid), purchases, "valid")
    valid.shutdown()
    assert_purchases(list(test), purchases, "valid")
    for each in (train, valid, test):
        each.shutdown()
    assert [batch[USER].tolist() for batch in epochs[0]] != [batch[USER].tolist() for batch in epochs[1]]


# How DataLoader2 is used.


def test_a_with_block_shuts_the_loader_down(two_daemons: list[str]) -> None:
    with load(sharded(range(5)), two_daemons) as loader:
        assert next(iter(loader)) == 0
    with pytest.raises(RuntimeError, match="it has already been shut down"):
        iter(loader)
    assert read(sharded(range(5)), two_daemons) == [0, 1, 2, 3, 4]  # all slots are free again


def test_of_two_iterators_the_older_is_invalid(two_daemons: list[str]) -> None:
    with load(sharded(range(9)), two_daemons) as loader:
        older = iter(loader)
        assert [next(older), next(older)] == [0, 1]
        newer = iter(loader)
        with pytest.raises(RuntimeError, match="This iterator has been invalidated because another iterator has been"):
            next(older)
        assert list(newer) == list(range(9))


def test_the_state_may_be_asked_for_at_any_time(two_daemons: list[str]) -> None:
    with load(sharded(range(9)).shuffle(), two_daemons) as loader:
        loader.state_dict()
        iterator = iter(loader)
        loader.state_dict()
        elements = [next(iterator)]
        loader.state_dict()
        elements += iterator
        loader.state_dict()
        assert sorted(elements) == list(range(9))


def test_a_sanity_check_of_two_batches_is_followed_by_whole_epochs(two_daemons: list[str]) -> None:
    with load(sharded(range(12)).batch(2).collate(), two_daemons) as loader:
        check = iter(loader)
        assert [next(check).tolist() for _ in range(2)] == [[0, 2], [1, 3]]
        for _ in range(2):
            assert sorted(torch.cat(list(iter(loader))).tolist()) == list(range(12))


# What functions hold, and what comes back.


def looks_up(table: torch.Tensor) -> Callable[[int], float]:
    return lambda x: table[x].item()


def test_a_closure_over_a_big_tensor_travels_with_it(two_daemons: list[str]) -> None:
    table = torch.arange(5_000_000, dtype=torch.float64)
    assert read(sharded(range(4)).map(looks_up(table)), two_daemons) == [0.0, 1.0, 2.0, 3.0]


@dataclass
class Example:
    image: torch.Tensor
    label: int


class Labelled(NamedTuple):
    image: torch.Tensor
    label: int


Pair = namedtuple("Pair", ["image", "label"])


@dataclass(frozen=True)
class Make:
    """Makes an element of a class."""

    kind: type

    def __call__(self, label: int) -> Any:
        return self.kind(torch.full((2,), label), label)


@pytest.mark.parametrize("kind", [Example, Labelled, Pair])
def test_an_element_comes_back_as_its_own_class(two_daemons: list[str], kind: Any) -> None:
    elements = read(sharded(range(3)).map(Make(kind)), two_daemons)
    assert [type(each) for each in elements] == 3 * [kind]
    assert [(each.image.tolist(), each.label) for each in elements] == [([x, x], x) for x in range(3)]


@pytest.mark.parametrize("kind", [Labelled, Pair])
def test_namedtuples_are_collated_as_such(two_daemons: list[str], kind: Any) -> None:
    first, second = read(sharded(range(4)).map(Make(kind)).batch(2).collate(), two_daemons)
    assert type(first) is kind
    assert [first.label.tolist(), second.label.tolist()] == [[0, 2], [1, 3]]
    assert second.image.tolist() == [[1, 1], [3, 3]]


# What those who run the daemons see of a graph.


class ReaderOfPhotographsOnManyOldDisksMapDataPipe(IterDataPipe[Any]):
    """Its name is longer than there is room for."""


def of_odd_name() -> IterDataPipe[Any]:
    odd: IterDataPipe[Any] = type("\x1b[2J\u202eOdd\n", (IterDataPipe,), {})()
    return odd


def long_line(times: int) -> Any:
    pipe: Any = ReaderOfPhotographsOnManyOldDisksMapDataPipe()
    for _ in range(times):
        pipe = pipe.shuffle().map(half)
    return pipe.collate()


def dispatched() -> Any:
    return IterableWrapper([]).map(half).sharding_round_robin_dispatch(SHARDING_PRIORITIES.MULTIPROCESSING)


LONG = "ReaderOfPhotographsOnManyOl..."

NAMED: dict[str, Callable[[], Any]] = {
    "IterableWrapper": lambda: IterableWrapper([]),
    "SequenceWrapper -> Mapper": lambda: SequenceWrapper([]).map(half),
    "IterableWrapper -> FileLister -> ShardingFilter -> Batcher": lambda: FileLister(".").sharding_filter().batch(2),
    "IterableWrapper -> Zipper": lambda: IterableWrapper([]).zip(IterableWrapper([1]).map(half)),
    "IterableWrapper -> ShardingFilter": lambda: sharded([]).fullsync().prefetch(2),
    "IterableWrapper -> Mapper -> ShardingRoundRobinDispatcher": dispatched,
    "IterableWrapper -> Mapper -> ShardingRoundRobinDispatcher -> Batcher": lambda: dispatched().batch(2),
    f"{LONG} -> Shuffler -> Mapper -> Collator": lambda: long_line(1),
    f"{LONG} -> ... -> Shuffler -> Mapper -> Collator": lambda: long_line(3),
    "[2JOdd": of_odd_name,
}


@pytest.mark.parametrize("name", NAMED)
def test_a_graph_is_named_by_its_datapipes_up_to_the_last_on_the_workers(name: str) -> None:
    assert graph.split(NAMED[name](), IterableWrapper([])).name == name
    assert len(name) <= graph.MOST_OF_NAME
