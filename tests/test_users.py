"""What users of loaders such as this one have run into, and reported: each here with what is right.

Most run on two one-worker daemons, which the whole test run shares.
"""

import copy
import ctypes
import decimal
import fractions
import functools
import gc
import io
import json
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime, timezone
from itertools import chain, count, islice
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from sameness import assert_same
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torchdata.dataloader2 import DataLoader2, DistributedReadingService, SequentialReadingService
from torchdata.datapipes.iter import IterableWrapper, IterDataPipe

from rpc_reading_service import RPCReadingService, SlotsError, WorkerLostError
from rpc_reading_service.testing import local_workers

N = 20
TIMEOUT_S = 60.0
SOON_S = 10.0
"""Nothing here that must not wait for a batch takes so long, whatever else this machine has to do."""


def service(workers: list[str], **options: Any) -> RPCReadingService:
    """What the workers run travels by value, so that they need not import this file."""
    return RPCReadingService(workers, **{"pickle_by_value": (__name__,), "timeout": TIMEOUT_S, **options})


def load(datapipe: Any, workers: list[str], **options: Any) -> "DataLoader2[Any]":
    return DataLoader2(datapipe, reading_service=service(workers, **options))


def sharded(elements: Any = range(N)) -> Any:
    return IterableWrapper(elements).sharding_filter()


def dispatched(elements: Any = range(N)) -> Any:
    return IterableWrapper(elements).sharding_round_robin_dispatch(SHARDING_PRIORITIES.MULTIPROCESSING)


def assert_serves(workers: list[str]) -> None:
    """All slots are free, and the workers work."""
    with load(sharded(), workers, num_workers=len(workers)) as loader:
        assert list(loader) == list(range(N))


@contextmanager
def soon() -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < SOON_S


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


# What the workers run.


def with_pid(x: Any) -> tuple[Any, int]:
    return x, os.getpid()


def held(fifo: Path, at: int, x: int) -> int:
    """Wait, at one element, until whoever opens the FIFO for writing closes it."""
    if x == at:
        fifo.open("rb").read()
    return x


class Made(IterDataPipe[Any]):
    """The values of a function for 0, 1, ..., each made by the worker to which it belongs."""

    def __init__(self, function: Callable[[int], Any], length: int) -> None:
        self.function = function
        self.length = length
        self.shard = (1, 0)

    def is_shardable(self) -> bool:
        return True

    def apply_sharding(self, num_of_instances: int, instance_id: int, sharding_group: Any = None) -> None:
        self.shard = (num_of_instances, instance_id)

    def __iter__(self) -> Iterator[Any]:
        step, first = self.shard
        for number in range(first, self.length, step):
            yield self.function(number)


class Stays(IterDataPipe[Any]):
    """Passes on what it gets, in the training process."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def is_replicable(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        yield from self.source


# Values of every kind. The functions make them in the worker, and here again to compare.

Pair = namedtuple("Pair", ["image", "label"])


@dataclass
class Sample:
    image: torch.Tensor
    label: int
    more: dict[str, Any]


def dense_tensors() -> list[Any]:
    cube = torch.arange(24.0).reshape(2, 3, 4)
    z = torch.tensor([1 + 2j, 3 - 4j])
    return [
        *(torch.arange(6).reshape(2, 3).float().to(dtype) for dtype in DTYPES),
        *(torch.empty(0), torch.empty(3, 0, 2, dtype=torch.int64), torch.tensor(3.5), torch.empty(0, 5).bfloat16()),
        *(cube.transpose(0, 2), cube[:, ::2, 1:], torch.arange(3).expand(5, 3), cube.flip(1), torch.zeros(10**6)[8:12]),
        torch.zeros(2, 3, 40, 40).to(memory_format=torch.channels_last),
        *(z.conj(), z.conj().imag, torch.ones(3, requires_grad=True), torch.nn.Parameter(torch.ones(2))),
    ]


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


def other_tensors() -> list[Any]:
    matrix = torch.sparse_coo_tensor([[0, 1, 1], [2, 0, 2]], [3.0, 4.0, 5.0], (2, 3))
    parts = [torch.arange(3.0), torch.arange(5.0)]
    return [
        *(matrix, matrix.coalesce(), torch.sparse_coo_tensor(size=(4, 4))),
        *(matrix.to_dense().to_sparse_csr(), matrix.to_dense().to_sparse_csc()),
        torch.nested.nested_tensor(parts),
    ]


def arrays() -> list[Any]:
    records = np.zeros(2, dtype=[("a", "i4"), ("b", "f8", (2,)), ("s", "U5")])
    records["s"] = "né"
    anything = np.empty(3, object)
    anything[:] = [np.arange(2), "x", None]
    return [
        *(anything, records, np.array(["2024-01-01", "NaT"], "M8[D]"), np.array([3], "m8[h]"), np.array(["žluť", ""])),
        *(np.array([b"a\0b"]), np.array(7), np.empty((0, 4), np.int32), np.float32(1.5), np.arange(3, dtype=">i4")),
        *(np.arange(12).reshape(3, 4)[::-1, ::-2], np.asfortranarray(np.arange(6).reshape(2, 3))),
    ]


def containers() -> list[Any]:
    tensor = torch.arange(4.0)
    return [
        *(Pair(tensor, 1), (tensor, [tensor, (tensor,)]), {"b": tensor, "a": {"z": (1, None)}}, OrderedDict(x=tensor)),
        *([tensor, tensor, tensor[1:3]], [[], (), {}], {1: {2: {3: np.ones(3)}}}),
    ]


def plain_values() -> list[Any]:
    return [
        *(
            decimal.Decimal("1.10"),
            fractions.Fraction(1, 3),
            PurePosixPath("/a/b"),
            {1, 2},
            frozenset("a"),
            slice(1, 2),
        ),
        *(datetime(2024, 2, 29, tzinfo=timezone.utc), date(2024, 2, 29), 2**200, float("inf"), complex(1, -2)),
        *("\U0001f600\0x", b"\0\xff", bytearray(b"ab"), range(3), ..., int, torch.float16, torch.Size([2, 3])),
        *(torch.device("cpu"), signal.SIGTERM, NotImplemented),
    ]


def empty_values() -> list[Any]:
    return [None, 0, "", [], {}, b"", False, (), 0.0, set(), np.zeros(0), torch.zeros(0)]


KINDS = [dense_tensors, other_tensors, arrays, containers, plain_values, empty_values]


@dataclass(frozen=True)
class Nth:
    values: Callable[[], list[Any]]

    def __call__(self, number: int) -> Any:
        return self.values()[number]


@pytest.mark.parametrize("values", KINDS)
@pytest.mark.filterwarnings("ignore:(Sparse|The PyTorch API of nested tensors)")
def test_values_of_every_kind_arrive_in_their_places(two_daemons: list[str], values: Callable[[], list[Any]]) -> None:
    sent = values()
    with load(Made(Nth(values), len(sent)), two_daemons) as loader:
        for _ in range(2):
            for here, arrived in zip(sent, loader, strict=True):
                assert_same(arrived, here)


def sample(number: int) -> Sample:
    return Sample(torch.full((3,), number), number, {"k": np.arange(number)})


def test_dataclasses_arrive_with_what_is_in_them(two_daemons: list[str]) -> None:
    with load(Made(sample, 4), two_daemons) as loader:
        for number, arrived in enumerate(loader):
            assert type(arrived) is Sample
            assert_same(vars(arrived), vars(sample(number)))


def exception_object(number: int) -> Any:
    return [ValueError("sample 0 is corrupt"), StopIteration(1), 2, KeyboardInterrupt(3), WorkerLostError("4")][number]


def test_exceptions_that_are_elements_are_delivered_and_not_raised(two_daemons: list[str]) -> None:
    with load(Made(exception_object, 5), two_daemons) as loader:
        assert [repr(element) for element in loader] == [repr(exception_object(number)) for number in range(5)]


def large(number: int) -> tuple[torch.Tensor, bytes, str]:
    return torch.full((16 << 20,), number, dtype=torch.uint8), bytes([number]) * (8 << 20), "é" * 1_000_000


def test_large_tensors_bytes_and_strings_arrive_whole(two_daemons: list[str]) -> None:
    with load(Made(large, 4), two_daemons, worker_prefetch_cnt=1) as loader:
        for number, (tensor, data, text) in enumerate(loader):
            assert (len(tensor), bool((tensor == number).all())) == (16 << 20, True)
            assert (data.count(number), len(data)) == (8 << 20, 8 << 20)
            assert text == "é" * 1_000_000
    assert number == 3


def zeros(_: int) -> dict[str, Any]:
    return {
        "tensor": torch.zeros(5), "large tensor": torch.zeros(100_000), "view": torch.zeros(8)[2:4],
        "array": np.zeros(5), "large array": np.zeros(100_000),
    }  # fmt: skip


def test_what_a_user_changes_in_place_shows_nowhere_else(two_daemons: list[str]) -> None:
    with load(Made(zeros, 8), two_daemons) as loader:
        for element in chain(loader, loader):
            for value in element.values():
                assert not value.any()
                value += 1


def image(folder: Path, number: int) -> Any:
    from PIL import Image

    return Image.open(folder / f"{number}.png")  # reads its pixels only when it is pickled


def test_an_image_from_a_truncated_file_is_an_error_after_the_good_ones(two_daemons: list[str], tmp_path: Path) -> None:
    from PIL import Image

    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for number in range(3):
        Image.fromarray(noise + number).save(tmp_path / f"{number}.png")
    whole = (tmp_path / "2.png").read_bytes()
    (tmp_path / "2.png").write_bytes(whole[:1000])
    with load(Made(functools.partial(image, tmp_path), 3), two_daemons) as loader:
        images = iter(loader)
        assert np.array_equal(np.asarray(next(images)), noise)
        assert np.array_equal(np.asarray(next(images)), noise + 1)
        with soon(), pytest.raises(OSError, match="image file is truncated"):
            next(images)


def small(number: int) -> dict[str, torch.Tensor]:
    return {"x": torch.full((10,), number), "y": torch.tensor(number)}


def test_batches_that_are_kept_hold_no_file_descriptors(two_daemons: list[str]) -> None:
    with load(Made(small, 600), two_daemons) as loader:
        iterator = iter(loader)
        kept = [next(iterator)]
        descriptors = psutil.Process().num_fds()
        kept += iterator
        assert psutil.Process().num_fds() <= descriptors + 2
    assert [int(batch["y"]) for batch in kept] == list(range(600))
    assert all(batch["x"].tolist() == 10 * [number] for number, batch in enumerate(kept))


def image_and_label(number: int) -> dict[str, Any]:
    return {"image": torch.zeros(2_000_000), "label": torch.tensor(number), "boxes": np.full((1, 4), number)}


def test_a_label_that_is_kept_does_not_keep_its_image(two_daemons: list[str]) -> None:
    with load(Made(image_and_label, 100), two_daemons) as loader:
        iterator = iter(loader)
        kept = [next(iterator)]
        (before,) = resident({os.getpid()})
        kept = [{**batch, "image": None} for batch in chain(kept, iterator)]
        (after,) = resident({os.getpid()})
    assert [(int(batch["label"]), batch["boxes"].tolist()) for batch in kept] == [(x, [4 * [x]]) for x in range(100)]
    assert after - before < 200 << 20, "the images have 800 MB"


def four_megabytes(_: int) -> tuple[torch.Tensor, int]:
    return torch.ones(1_000_000), os.getpid()


def test_memory_does_not_grow_from_epoch_to_epoch(two_daemons: list[str]) -> None:
    with load(Made(four_megabytes, 8), two_daemons) as loader:
        for _ in range(20):
            processes = {os.getpid(), *(pid for _, pid in loader)}
        before = resident(processes)
        for _ in range(20):
            for _ in loader:
                pass
        grown = [after - was for after, was in zip(resident(processes), before, strict=True)]
    assert len(grown) == 3
    assert max(grown) < 60 << 20, "which is less than two epochs of the twenty"


def resident(processes: set[int]) -> list[int]:
    gc.collect()
    return [psutil.Process(pid).memory_info().rss for pid in sorted(processes)]


# Graphs.


def nothing(_: Any) -> bool:
    return False


SOURCES: dict[str, Callable[[], Any]] = {
    "an empty list": lambda: sharded([]),
    "a filter that lets nothing through": lambda: sharded().filter(nothing),
    "batches that are all too short": lambda: sharded().batch(N, drop_last=True),
    "no elements here": lambda: Stays(sharded([])).prefetch(2),
    "no elements to shuffle": lambda: IterableWrapper([]).shuffle().sharding_filter(),
    "one element for two workers": lambda: sharded([0]).filter(bool),
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_source_without_elements_is_an_empty_epoch(two_daemons: list[str], source: str) -> None:
    with load(SOURCES[source](), two_daemons) as loader:
        assert [list(loader), list(loader)] == [[], []]


def test_a_dispatched_source_without_elements_is_an_empty_epoch(two_daemons: list[str]) -> None:
    with load(dispatched([]), two_daemons, num_workers=1) as loader:
        assert [list(loader), list(loader)] == [[], []]


BROKEN_OFF: dict[str, Callable[[], Any]] = {
    "plain": lambda: sharded(range(100)),
    "prefetched by the workers": lambda: sharded(range(100)).prefetch(5),
    "prefetched here": lambda: Stays(sharded(range(100))).prefetch(5),
    "dispatched": lambda: dispatched(range(100)),
    "dispatched and prefetched": lambda: dispatched(IterableWrapper(range(100)).prefetch(3)).prefetch(3),
}


@pytest.mark.parametrize("kind", BROKEN_OFF)
def test_a_second_iter_in_mid_epoch_begins_a_whole_epoch(two_daemons: list[str], kind: str) -> None:
    with load(BROKEN_OFF[kind](), two_daemons, num_workers=1) as loader:
        for taken in (0, 1, 5, 30):
            assert list(islice(iter(loader), taken)) == list(range(taken))
        assert list(loader) == list(range(100))


NAMES = {f"{number:02}.tar" for number in range(50)}

SETS: dict[str, Callable[[], Any]] = {
    "a set": lambda: NAMES,
    "a frozen set": lambda: frozenset(NAMES),
    "a union": lambda: NAMES | {"more.tar"},
}


@pytest.mark.parametrize("kind", SETS)
def test_workers_on_all_daemons_see_a_set_of_strings_in_one_order(two_daemons: list[str], kind: str) -> None:
    """Each takes every other element, by its own count: with a hash seed each, some come twice and others never."""
    with load(sharded(SETS[kind]()), two_daemons) as loader:
        elements = list(loader)
        assert list(loader) == elements
    assert sorted(elements) == sorted(SETS[kind]())


FILTERS = [
    (SHARDING_PRIORITIES.DEFAULT, SHARDING_PRIORITIES.DEFAULT),
    (SHARDING_PRIORITIES.MULTIPROCESSING, SHARDING_PRIORITIES.MULTIPROCESSING),
    (SHARDING_PRIORITIES.DISTRIBUTED, SHARDING_PRIORITIES.MULTIPROCESSING),  # torch refuses this pair, too
]


@pytest.mark.parametrize("priorities", FILTERS, ids=str)
def test_two_filters_on_one_path_are_refused_and_cost_no_slot(two_daemons: list[str], priorities: Any) -> None:
    datapipe = IterableWrapper(range(N))
    for priority in priorities:
        datapipe = datapipe.sharding_filter(priority)
    with load(datapipe, two_daemons) as loader, soon(), pytest.raises(RuntimeError, match="Sharding twice"):
        iter(loader)
    assert_serves(two_daemons)


class Twice(IterDataPipe[Any]):
    """As users write them: its class and functions are those of the script, and refer to each other."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.source = source
        self.steps = [twice, Twice.again]

    @staticmethod
    def again(x: int) -> int:
        return twice(x) if isinstance(x, Twice) else x

    def __iter__(self) -> Iterator[Any]:
        first, second = self.steps
        for element in self.source:
            yield second(first(element))


def twice(x: Any) -> Any:
    return 2 * x


def test_datapipes_of_the_script_need_no_dill_on_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['dill'] = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    with local_workers(1, slots=2) as workers:
        for graph in (Twice(sharded()), Twice(dispatched().map(lambda x: x)).shuffle()):
            with load(graph, workers, num_workers=1) as loader:
                for _ in range(2):
                    assert sorted(loader) == list(range(0, 2 * N, 2))
                    next(iter(loader))
                    loader._pause()
                    loader._resume()


def draw(_: int) -> tuple[float, float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(())), float(torch.rand(1, dtype=torch.float64))


def test_no_two_workers_and_no_two_epochs_draw_the_same_numbers(two_daemons: list[str]) -> None:
    def two_epochs() -> list[Any]:
        with load(Made(draw, 8), two_daemons) as loader:
            loader.seed(5)
            return [*loader, *loader]

    drawn = two_epochs()
    assert len(set(chain.from_iterable(drawn))) == 4 * 16
    assert two_epochs() == drawn


def threads(_: int) -> tuple[int, str]:
    return torch.get_num_threads(), multiprocessing.current_process().name


def test_a_worker_runs_one_thread_of_torch_and_says_whose_it_is(two_daemons: list[str]) -> None:
    with load(Made(threads, 2), two_daemons) as loader:
        assert [(number, name.startswith("rpc-reading-worker ")) for number, name in loader] == [(1, True), (1, True)]


def test_the_same_processes_serve_all_epochs(two_daemons: list[str]) -> None:
    with load(sharded().map(with_pid), two_daemons) as loader:
        epochs = [list(loader) for _ in range(5)]
    assert [[x for x, _ in epoch] for epoch in epochs] == 5 * [list(range(N))]
    assert len({pid for epoch in epochs for _, pid in epoch}) == 2


# The life of a loader.

LIVES: dict[str, Callable[["DataLoader2[Any]"], Any]] = {
    "was never read": lambda loader: None,
    "was begun": iter,
    "is in mid-epoch": lambda loader: next(iter(loader)),
    "was read to its end": list,
    "is paused": lambda loader: (next(iter(loader)), loader._pause()),
}


@pytest.mark.parametrize("life", LIVES)
def test_a_loader_may_be_shut_down_twice_whatever_it_did(two_daemons: list[str], life: str) -> None:
    loader = load(sharded(), two_daemons)
    LIVES[life](loader)
    with soon():
        loader.shutdown()
        loader.shutdown()
    with pytest.raises(RuntimeError, match="it has already been shut down"):
        iter(loader)
    assert_serves(two_daemons)


def test_an_exception_in_the_loop_leaves_the_service_for_another_loader(two_daemons: list[str]) -> None:
    template = service(two_daemons, num_workers=1)

    def train() -> None:
        for _ in DataLoader2(IterableWrapper(count(), deepcopy=False), reading_service=template):
            raise ArithmeticError("the loss is not a number")

    with pytest.raises(ArithmeticError) as kept:
        train()
    with DataLoader2(sharded(), reading_service=template) as loader:  # the other slot: the traceback holds the first
        assert list(loader) == list(range(N))
    assert str(kept.value) == "the loss is not a number"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_service_can_be_copied_before_it_is_used(two_daemons: list[str], copied: Callable[[Any], Any]) -> None:
    original = service(two_daemons, worker_init_fn=lambda datapipe, info: datapipe.map(lambda x: -x))
    with DataLoader2(sharded(range(4)), reading_service=copied(original)) as loader:
        assert list(loader) == [0, -1, -2, -3]


def test_a_sequence_of_services_that_were_never_used_can_be_finalized(two_daemons: list[str]) -> None:
    finalized = []

    class Last(DistributedReadingService):
        def finalize(self) -> None:
            finalized.append(self)

    SequentialReadingService(service(two_daemons), Last()).finalize()
    assert finalized


def test_without_a_process_group_the_workers_are_not_troubled(two_daemons: list[str]) -> None:
    services = SequentialReadingService(DistributedReadingService(), service(two_daemons))
    with (
        DataLoader2(sharded(), reading_service=services) as loader,
        soon(),
        pytest.raises(RuntimeError, match="initialized"),
    ):
        iter(loader)
    assert_serves(two_daemons)


# Leaving the loop while a worker is busy.


class Interrupt:
    """Ctrl-C once a worker has opened the FIFO and this thread waits for it.

    The FIFO stays open, so that the worker goes on waiting.
    """

    def __init__(self, fifo: Path) -> None:
        self._fifo = fifo
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with self._fifo.open("wb"):
            while "__iter__" not in functions_of(threading.main_thread()) and not self._over.wait(0.01):
                pass
            os.kill(os.getpid(), signal.SIGINT)
            self._over.wait(TIMEOUT_S)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def functions_of(thread: threading.Thread) -> list[str]:
    return [entry.name for entry in traceback.extract_stack(sys._current_frames()[thread.ident or 0])]


def busy_in_init(fifo: Path, datapipe: Any, info: Any) -> Any:
    held(fifo, 0, 0)
    return datapipe


WAITS: dict[str, Callable[[Any], Any]] = {
    "for a batch": lambda graph: graph,
    "for a prefetch here": lambda graph: Stays(graph).prefetch(2),
    "for a prefetch of a prefetch here": lambda graph: Stays(Stays(graph).prefetch(2)).prefetch(2),
}


@pytest.mark.parametrize("wait", WAITS)
def test_ctrl_c_does_not_wait_for_a_busy_worker(two_daemons: list[str], fifo: Path, wait: str) -> None:
    with load(WAITS[wait](sharded().map(functools.partial(held, fifo, 1))), two_daemons) as loader:
        iterator = iter(loader)
        assert next(iterator) == 0
        with Interrupt(fifo), soon():
            with pytest.raises(KeyboardInterrupt):
                list(iterator)
            loader.shutdown()
    assert_serves(two_daemons)


def test_ctrl_c_does_not_wait_for_a_worker_that_starts(two_daemons: list[str], fifo: Path) -> None:
    with (
        Interrupt(fifo),
        soon(),
        load(sharded(), two_daemons, worker_init_fn=functools.partial(busy_in_init, fifo)) as loader,
        pytest.raises(KeyboardInterrupt),
    ):
        iter(loader)
    assert_serves(two_daemons)


@pytest.mark.parametrize("wait", WAITS)
def test_neither_a_break_nor_the_next_epoch_waits_for_a_busy_worker(
    two_daemons: list[str], fifo: Path, wait: str
) -> None:
    graph = WAITS[wait](sharded().map(functools.partial(held, fifo, 1)))
    with load(graph, two_daemons) as loader, soon():
        for _ in range(3):
            assert list(islice(loader, 1)) == [0]
        loader.shutdown()
    assert_serves(two_daemons)


# Other processes of the user's.


def negated(x: int) -> int:
    return -x


def in_a_pool() -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(negated, range(5)) == [0, -1, -2, -3, -4]


def in_a_forked_child() -> None:
    process = multiprocessing.get_context("fork").Process(target=gc.collect)
    process.start()
    process.join(TIMEOUT_S)
    assert process.exitcode == 0


def in_torchs_own_loader() -> None:
    loader = torch.utils.data.DataLoader(range(4), num_workers=2, multiprocessing_context="fork")
    assert [int(x) for x in loader] == [0, 1, 2, 3]


def in_a_program() -> None:
    assert subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True, check=True).stdout == b"1\n"


@pytest.mark.parametrize("fork", [in_a_pool, in_a_forked_child, in_torchs_own_loader, in_a_program])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_whoever_forks_in_mid_epoch_disturbs_nothing(two_daemons: list[str], fork: Callable[[], None]) -> None:
    with load(sharded(range(5_000)), two_daemons) as loader:
        iterator = iter(loader)
        elements = list(islice(iterator, 3))
        fork()
        elements += iterator
    assert elements == list(range(5_000))


TRAINING = """
import json, sys
from torchdata.dataloader2 import DataLoader2
from torchdata.datapipes.iter import IterableWrapper
from rpc_reading_service import RPCReadingService

first, *workers = sys.argv[1:]
pipe = IterableWrapper(range(int(first), int(first) + 2_000)).sharding_filter()
with DataLoader2(pipe, reading_service=RPCReadingService(workers, num_workers=1)) as loader:
    iterator = iter(loader)
    elements = [next(iterator)]
    print("begun", flush=True)
    sys.stdin.readline()
    print(json.dumps([elements + list(iterator), list(loader)]))
"""


def test_two_training_processes_at_once_each_get_their_own_data(two_daemons: list[str]) -> None:
    command = [sys.executable, "-W", "ignore", "-c", TRAINING, "10000", *two_daemons]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "begun\n"
            with load(sharded(range(2_000)), two_daemons, num_workers=1) as loader:
                ours = list(islice(loader, 5))
                with load(sharded(), two_daemons) as third, pytest.raises(SlotsError, match="held by 1 session"):
                    iter(third)
                theirs, _ = other.communicate("\n", timeout=TIMEOUT_S)
                ours += loader
        finally:
            other.kill()
    assert ours == [0, 1, 2, 3, 4, *range(2_000)]
    assert json.loads(theirs) == 2 * [list(range(10_000, 12_000))]


# Workers that fail, die, or take their time.


class NeedsTwo(Exception):
    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"needs {one} and {other}")
        self.both = one, other


class Locked(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def raise_needs_two() -> None:
    raise NeedsTwo("this", "that")


def raise_locked() -> None:
    raise Locked("carries a lock")


def raise_key_error() -> None:
    raise KeyError("no such key")


def raise_decode_error() -> None:
    b"\xff".decode()


def raise_os_error() -> None:
    Path("/nowhere/at/all").read_bytes()


def raise_json_error() -> None:
    json.loads("{")


def raise_assertion() -> None:
    assert io is None, "a bare assert"


def raise_with_a_cause() -> None:
    try:
        raise_key_error()
    except KeyError as error:
        raise RuntimeError("could not read the sample") from error


FAILURES: dict[Callable[[], None], tuple[type[Exception], str]] = {
    raise_needs_two: (NeedsTwo, "needs this and that"),
    raise_locked: (Locked, "carries a lock"),
    raise_key_error: (KeyError, "no such key"),
    raise_decode_error: (UnicodeDecodeError, "invalid start byte"),
    raise_os_error: (FileNotFoundError, "/nowhere/at/all"),
    raise_json_error: (json.JSONDecodeError, "Expecting property name"),
    raise_assertion: (AssertionError, "a bare assert"),
    raise_with_a_cause: (RuntimeError, "no such key"),
}


def fail_at_5(fail: Callable[[], None], x: int) -> int:
    if x == 5:
        fail()
    return x


@pytest.mark.parametrize("fail", FAILURES, ids=lambda each: each.__name__)
def test_an_exception_comes_as_its_type_with_its_words_after_the_good_batches(
    two_daemons: list[str], fail: Callable[[], None]
) -> None:
    kind, words = FAILURES[fail]
    taken: list[int] = []
    with (
        load(sharded().map(functools.partial(fail_at_5, fail)), two_daemons) as loader,
        soon(),
        pytest.raises(kind) as error,
    ):
        taken.extend(loader)
    assert taken == [0, 1, 2, 3, 4]
    assert words in str(error.value)
    assert fail.__name__ in str(error.value), "the worker's traceback"


TAILS: dict[str, Callable[[Any], Any]] = {
    "a prefetch here": lambda graph: Stays(graph).prefetch(3),
    "a prefetch of a prefetch here": lambda graph: Stays(Stays(graph).prefetch(3)).prefetch(3),
    "a prefetch on the workers": lambda graph: graph.prefetch(3),
    "batches here": lambda graph: Stays(graph).batch(1).unbatch(),
}


@pytest.mark.parametrize("tail", TAILS)
def test_an_exception_passes_whatever_stands_behind_in_the_graph(two_daemons: list[str], tail: str) -> None:
    taken: list[int] = []
    with (
        load(TAILS[tail](sharded().map(functools.partial(fail_at_5, raise_key_error))), two_daemons) as loader,
        soon(),
        pytest.raises(KeyError, match="no such key"),
    ):
        taken.extend(loader)
    assert taken == [0, 1, 2, 3, 4]
    assert_serves(two_daemons)


class Fails(IterDataPipe[Any]):
    """Raises at one point of its life."""

    def __init__(self, at: str) -> None:
        self.at = at
        self.owner = os.getpid()

    def check(self, at: str) -> None:
        if self.at == at and os.getpid() != self.owner:
            raise FileNotFoundError(f"no shard-000.tar: {at}")

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.check("unpickled")

    def is_shardable(self) -> bool:
        return True

    def apply_sharding(self, *_: Any) -> None:
        self.check("sharded")

    def set_seed(self, _: int) -> "Fails":
        self.check("seeded")
        return self

    def set_shuffle(self, _: bool = True) -> "Fails":
        return self

    def reset(self) -> None:
        self.check("reset")

    def __iter__(self) -> Iterator[int]:
        self.check("begun")
        yield 0
        self.check("over")


@pytest.mark.parametrize("at", ["unpickled", "sharded", "seeded", "reset", "begun", "over"])
def test_wherever_a_graph_fails_the_same_service_serves_another_loader(two_daemons: list[str], at: str) -> None:
    template = service(two_daemons)
    with (
        DataLoader2(Fails(at), reading_service=template) as loader,
        soon(),
        pytest.raises(FileNotFoundError, match=f"no shard-000.tar: {at}"),
    ):
        list(loader)
    with DataLoader2(sharded(), reading_service=template) as loader:
        assert list(loader) == list(range(N))


def by_signal(number: int) -> None:
    os.kill(os.getpid(), number)


def by_exit(code: int) -> None:
    os._exit(code)


def by_a_wild_pointer() -> None:
    ctypes.string_at(0)


DEATHS: dict[str, tuple[Callable[[], None], str]] = {
    "abort": (functools.partial(by_signal, signal.SIGABRT), "was killed by SIGABRT"),
    "bus error": (functools.partial(by_signal, signal.SIGBUS), "was killed by SIGBUS"),
    "segmentation fault": (by_a_wild_pointer, "was killed by SIGSEGV"),
    "exit with success": (functools.partial(by_exit, 0), "exited with code 0"),
    "exit code 13": (functools.partial(by_exit, 13), "exited with code 13"),
}


@pytest.mark.parametrize("death", DEATHS)
def test_a_worker_that_dies_is_told_with_how_it_died(two_daemons: list[str], death: str) -> None:
    die, words = DEATHS[death]
    graph = sharded().map(functools.partial(fail_at_5, die))
    with (
        load(graph, two_daemons, on_worker_loss="raise") as loader,
        soon(),
        pytest.raises(WorkerLostError, match=words),
    ):
        list(loader)
    assert_serves(two_daemons)


def slow_with_the_gil(seconds: int, x: int) -> int:
    """Python code of this process stands still: ``PyDLL`` keeps the GIL, as a compiled extension may."""
    ctypes.PyDLL(None).usleep(seconds * 1_000_000)
    return x


def slow_without_the_gil(seconds: float, x: int) -> int:
    time.sleep(seconds)
    return x


@pytest.mark.slow
def test_a_batch_that_takes_longer_than_any_heartbeat_is_no_loss(
    two_daemons: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """One worker holds the GIL for 16 s, the other sleeps for as long: connections are given up after 14 s."""
    with load(Made(slowly, 2), two_daemons, on_worker_loss="raise") as loader:
        assert list(loader) == [0, 1]
    assert "lost" not in caplog.text


def slowly(x: int) -> int:
    return slow_with_the_gil(16, x) if x == 0 else slow_without_the_gil(16, x)
