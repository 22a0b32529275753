"""What need not be copied: a tensor's memory that no user code can reach any more, and nothing else."""

import collections
import queue
import tempfile
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate
from torch.utils.dlpack import to_dlpack
from torchdata.dataloader2 import DataLoader2
from torchdata.datapipes.iter import IterableWrapper, IterDataPipe

from rpc_reading_service import RPCReadingService
from rpc_reading_service.ownership import SOLE_BYTES, sole

COUNT = SOLE_BYTES // 4
"""Elements of the smallest tensor that is looked at."""


def large() -> torch.Tensor:
    return torch.zeros(COUNT)


def addresses(batch: Any) -> set[int]:
    """Of the tensors of a batch that is only here."""
    if isinstance(batch, torch.Tensor):
        return {batch.data_ptr()}
    items = batch.values() if isinstance(batch, dict) else batch
    return {address for item in items for address in addresses(item)}


FRESH: dict[str, Callable[[], Any]] = {
    "a tensor": large,
    "a list": lambda: [large(), large()],
    "a tuple": lambda: (large(), large()),
    "a dict": lambda: {"a": large(), "b": large()},
    "nested": lambda: {"a": [large(), (large(), {"b": large()})], "c": (large(),)},
    "stacked": lambda: torch.stack([torch.zeros(COUNT), torch.ones(COUNT)]),
    "collated": lambda: default_collate([(torch.zeros(COUNT), {"x": torch.ones(COUNT)})] * 2),
    "transposed copy": lambda: torch.zeros(2, COUNT).t().contiguous(),
    "a leaf of a graph to come": lambda: torch.zeros(COUNT, requires_grad=True),
    "a copy of an array": lambda: torch.tensor(np.zeros(COUNT)),
}


@pytest.mark.parametrize("make", FRESH.values(), ids=FRESH)
def test_what_only_the_batch_holds_is_found(make: Callable[[], Any]) -> None:
    holder = [make()]
    found = sole(holder)
    assert found == addresses(holder[0])
    assert found


def test_what_a_generator_makes_and_lets_go_is_found() -> None:
    def batches() -> Iterator[Any]:
        while True:
            yield [torch.zeros(COUNT)]

    holder = [next(batches())]
    assert len(sole(holder)) == 1


def test_a_small_tensor_is_copied() -> None:
    assert sole([torch.zeros(COUNT - 1)]) == set()


class Item:
    """Somebody who keeps something."""

    def __init__(self, value: Any) -> None:
        self.value = value


def gradient(tensor: torch.Tensor) -> Any:
    parameter = torch.zeros(COUNT, requires_grad=True)
    parameter.grad = tensor
    return parameter


def in_a_queue(tensor: torch.Tensor) -> Any:
    kept: queue.SimpleQueue[Any] = queue.SimpleQueue()
    kept.put(tensor)
    return kept


def future(tensor: torch.Tensor) -> Any:
    kept: Any = torch.futures.Future()
    kept.set_result(tensor)
    return kept


def stopped_generator(tensor: torch.Tensor) -> Any:
    def within() -> Iterator[Any]:
        kept = tensor[1:]
        yield 1
        del kept

    generator = within()
    next(generator)
    return generator


KEPT: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda tensor: tensor,
    "in a list": lambda tensor: [tensor],
    "as an attribute": Item,
    "in a closure": lambda tensor: lambda: tensor,
    "a bound method": lambda tensor: tensor.add_,
    "an iterator": lambda tensor: iter([tensor]),
    "in a queue": in_a_queue,
    "in a stopped generator": stopped_generator,
    "a view": lambda tensor: tensor.view(2, -1),
    "a slice": lambda tensor: tensor[3:4],
    "expanded": lambda tensor: tensor.expand(2, COUNT),
    "strided": lambda tensor: tensor.as_strided((1,), (1,)),
    "of another dtype": lambda tensor: tensor.view(torch.int32),
    "detached": lambda tensor: tensor.detach(),
    "data": lambda tensor: tensor.data,
    "an array": lambda tensor: tensor.numpy(),
    "a slice of an array": lambda tensor: tensor.detach().numpy()[1:2],
    "a memoryview": lambda tensor: memoryview(tensor.numpy()),
    "a capsule": to_dlpack,
    "an array of a capsule": lambda tensor: np.from_dlpack(tensor),  # type: ignore[arg-type]
    "its storage": lambda tensor: tensor.untyped_storage(),
    "its typed storage": lambda tensor: tensor.storage(),
    "set to it": lambda tensor: torch.empty(0).set_(tensor),
    "set to its storage": lambda tensor: torch.empty(0).set_(tensor.untyped_storage()),
    "a weak reference": weakref.ref,
    "a proxy": weakref.proxy,
    "a weak reference to its storage": lambda tensor: weakref.ref(tensor.untyped_storage()),
    "shared with processes": lambda tensor: tensor.share_memory_().shape,
    "a gradient": gradient,
    "in a graph": lambda tensor: torch.ones(COUNT, requires_grad=True) * tensor,
    "the leaf of a graph": lambda tensor: tensor.requires_grad_() * 1,
    "in a future": future,
    "values of a sparse one": lambda tensor: torch.sparse_coo_tensor(
        torch.arange(COUNT)[None], tensor, (COUNT,), check_invariants=False
    ),
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT)
def test_what_somebody_could_still_reach_is_copied(keep: Callable[[torch.Tensor], Any]) -> None:
    holder = [large()]
    kept = keep(holder[0])
    assert sole(holder) == set()
    assert sole([holder]) == set()
    del kept


def test_the_result_of_a_graph_that_is_kept_is_copied() -> None:
    result = torch.ones(COUNT, requires_grad=True).exp()
    graph = result.sum()
    holder = [result]
    del result
    assert sole(holder) == set()
    holder = [holder.pop().detach()]
    assert sole(holder) == set()
    del graph


class Subclass(torch.Tensor):
    """A tensor of which nobody knows what it holds."""


def in_its_own_attribute() -> Any:
    tensor: Any = large()
    tensor.me = tensor
    return tensor


def with_a_view_of_itself() -> Any:
    tensor: Any = large()
    tensor.part = tensor[1:]
    return tensor


def twice(second: Callable[[Any], Any]) -> Any:
    tensor = large()
    return [tensor, second(tensor)]


ARRAY = np.zeros(COUNT, np.float32)
BYTES = bytearray(4 * COUNT)
WHOLE = torch.zeros(4 * COUNT)
Pair = collections.namedtuple("Pair", "first second")

NOT_ITS_OWN: dict[str, Callable[[], Any]] = {
    "of an array": lambda: torch.from_numpy(ARRAY),
    "as of an array": lambda: torch.asarray(ARRAY),
    "of an array that is gone": lambda: torch.from_numpy(np.zeros(COUNT)),
    "of bytes": lambda: torch.frombuffer(BYTES, dtype=torch.float32),
    "of an array's capsule": lambda: torch.from_dlpack(ARRAY),
    "a slice": lambda: WHOLE[:COUNT],
    "a slice of what is gone": lambda: torch.zeros(4 * COUNT)[:COUNT],
    "expanded": lambda: torch.zeros(1).expand(COUNT),
    "a parameter": lambda: torch.nn.Parameter(large()),
    "a subclass": lambda: large().as_subclass(Subclass),
    "in a container of its own kind": lambda: Pair(large(), large()),
    "in its own attribute": in_its_own_attribute,
    "with a view of itself": with_a_view_of_itself,
    "twice": lambda: twice(lambda tensor: tensor),
    "twice, and once as a view": lambda: twice(lambda tensor: tensor[1:]),
    "sparse": lambda: torch.sparse_coo_tensor(torch.arange(COUNT)[None], large(), (COUNT,), check_invariants=False),
    "mkldnn": lambda: large().to_mkldnn(),
    "on no device": lambda: torch.empty(COUNT, device="meta"),
    "an array": lambda: np.zeros(COUNT),
    "no tensor": lambda: b"x" * SOLE_BYTES,
}


@pytest.mark.parametrize("make", NOT_ITS_OWN.values(), ids=NOT_ITS_OWN)
def test_what_is_more_than_a_tensor_of_its_own_is_copied(make: Callable[[], Any]) -> None:
    assert sole([make()]) == set()


@pytest.mark.parametrize("shared", [True, False])
def test_what_is_mapped_from_a_file_is_copied(shared: bool) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(SOLE_BYTES)
        assert sole([torch.from_file(file.name, shared, COUNT)]) == set()
        storage = torch.UntypedStorage.from_file(file.name, shared, SOLE_BYTES)
        holder = [torch.empty(0).set_(storage)]
        del storage
        assert sole(holder) == set()


KEPT_CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda container: container,
    "an iterator": iter,
    "its values": lambda container: container.values() if isinstance(container, dict) else reversed(container),
}


@pytest.mark.parametrize("keep", KEPT_CONTAINERS.values(), ids=KEPT_CONTAINERS)
@pytest.mark.parametrize("make", [lambda: [large()], lambda: {"a": large()}], ids=["list", "dict"])
def test_what_lies_in_a_container_that_is_kept_is_copied(make: Callable[[], Any], keep: Callable[[Any], Any]) -> None:
    holder = [[make(), large()]]
    kept = keep(holder[0][0])
    assert sole(holder) == {holder[0][1].data_ptr()}
    del kept


def test_in_inference_mode_a_view_counts_as_elsewhere() -> None:
    with torch.inference_mode():
        holder = [large()]
        view = holder[0][1:]
    assert sole(holder) == set()
    del view


def test_however_deep_a_batch_is_nested_it_is_no_error() -> None:
    batch: Any = large()
    for _ in range(5000):
        batch = [batch]
    holder = [batch]
    del batch
    assert sole(holder) == set()


# From a worker's pipeline to the training loop.


class Overwriting(IterDataPipe):
    """Keeps each batch, and writes over it before it makes the next: all of it, or a view of a part."""

    def __init__(self, source: Any, count: int) -> None:
        self.source = source
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        memory = torch.zeros(self.count)
        for number in self.source:
            memory.fill_(number)
            fresh = torch.full((self.count,), float(number))
            yield {"kept": memory, "view": fresh[:-1], "own": torch.full((self.count,), float(number))}
            memory.fill_(-1)
            fresh.fill_(-1)


@pytest.mark.parametrize("count", [40_000, COUNT, 6 << 20 >> 2])
def test_what_arrives_is_what_was_yielded_though_the_pipeline_writes_over_it(
    count: int, two_daemons: list[str]
) -> None:
    """The worker is ahead of the training, which looks at each batch only when the next has come."""
    pipe = Overwriting(IterableWrapper(range(12)).sharding_filter(), count)
    service = RPCReadingService(two_daemons[:1], transport="tcp", pickle_by_value=(__name__,))
    loader = DataLoader2(pipe, reading_service=service)
    try:
        before = None
        for number, batch in enumerate([*loader]):
            for name, tensor in batch.items():
                assert tensor.eq(number).all(), name
            assert before is None or before["own"].eq(number - 1).all()
            before = batch
        assert number == 11
    finally:
        loader.shutdown()


def test_a_sparse_batch_travels_by_tcp(two_daemons: list[str]) -> None:
    pipe = IterableWrapper([3]).sharding_filter().map(sparse)
    service = RPCReadingService(two_daemons[:1], transport="tcp", pickle_by_value=(__name__,))
    loader = DataLoader2(pipe, reading_service=service)
    try:
        (batch,) = loader
        assert batch.to_dense().eq(3).all()
    finally:
        loader.shutdown()


def sparse(value: int) -> torch.Tensor:
    return torch.full((100, 100), float(value)).to_sparse()
