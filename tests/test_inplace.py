"""``empty`` and ``collate``: batches that are written where they are sent from, unless somebody else holds them."""

import collections
import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate
from torchdata.dataloader2 import DataLoader2
from torchdata.datapipes.iter import IterableWrapper, IterDataPipe

import rpc_reading_service
from rpc_reading_service import RPCReadingService, codec, graph, inplace
from rpc_reading_service.segments import Attachment, Lent, Segments, attach

SHAPE = (64, 1024)
NBYTES = 4 * 64 * 1024

Pair = collections.namedtuple("Pair", "image label")


# ------------------------------------------------------------------------------------------------ outside a worker


def test_empty_is_torch_empty_outside_a_worker() -> None:
    assert inplace._source.lend is None
    for shape, dtype in [((2, 3), torch.int16), ((), torch.float64), (5, torch.bool), ([0, 7], None)]:
        tensor = rpc_reading_service.empty(shape, dtype)
        expected = torch.empty(shape, dtype=dtype)
        assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype)


BATCHES: dict[str, list[Any]] = {
    "tensors": [torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)],
    "large tensors": [torch.full((40, 1024), float(value)) for value in range(3)],
    "0-d": [torch.tensor(1), torch.tensor(2)],
    "empty": [torch.empty(0, 3), torch.empty(0, 3)],
    "non-contiguous": [torch.arange(12).reshape(3, 4).T, torch.arange(12).reshape(3, 4).T],
    "other dtypes together": [torch.ones(2), torch.ones(2, dtype=torch.float64)],
    "bfloat16": [torch.ones(3, dtype=torch.bfloat16)] * 2,
    "arrays": [np.arange(4), np.arange(4)],
    "array scalars": [np.float64(1), np.float64(2)],
    "numbers": [1, 2, 3],
    "floats": [1.5, 2.5],
    "strings": ["a", "b"],
    "dicts": [{"x": torch.ones(2), "y": 1}, {"x": torch.zeros(2), "y": 2}],
    "tuples": [(torch.ones(2), 3, "s"), (torch.zeros(2), 4, "t")],
    "namedtuples": [Pair(torch.ones(2), 0), Pair(torch.zeros(2), 1)],
    "nested": [[{"a": (np.ones(2), 1)}], [{"a": (np.zeros(2), 2)}]],
}


@pytest.fixture
def memory() -> Iterator[Segments]:
    """As in a worker."""
    segments = Segments(16 * NBYTES)
    inplace.lend_from(segments.lend)
    yield segments
    inplace.lend_from(None)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("in_worker", [False, True])
def test_collate_does_what_torch_does(request: pytest.FixtureRequest, name: str, in_worker: bool) -> None:
    if in_worker:
        request.getfixturevalue("memory")
    assert repr(rpc_reading_service.collate(BATCHES[name])) == repr(default_collate(BATCHES[name]))


def test_collate_refuses_what_torch_refuses() -> None:
    for wrong in ([torch.ones(2), torch.ones(3)], [object(), object()], [[1, 2], [3]]):
        with pytest.raises((RuntimeError, TypeError)) as theirs:
            default_collate(wrong)
        with pytest.raises(type(theirs.value)) as ours:
            rpc_reading_service.collate(wrong)
        assert str(ours.value) == str(theirs.value)


# ------------------------------------------------------------------------------------------------ in a worker


def numbers(value: float) -> torch.Tensor:
    tensor: torch.Tensor = rpc_reading_service.empty(SHAPE)
    return tensor.fill_(value)


def handed_out(memory: Segments, batch: list[Any]) -> list[Any]:
    """What a worker does with a batch that the graph has handed out."""
    encoded = codec.Encoder().encode(batch.pop())
    return list(memory.place(encoded.buffers))


def accepted(memory: Segments) -> Attachment:
    attachment = attach(os.getpid(), memory.offer)
    assert attachment is not None
    return attachment


def test_what_nobody_else_holds_is_sent_as_it_is(memory: Segments) -> None:
    accepted(memory)
    batch = [numbers(1.0)]
    address = batch[0].data_ptr()
    (lent,) = handed_out(memory, batch)
    assert isinstance(lent, Lent)
    assert (lent.segment.address + lent.offset, lent.nbytes) == (address, NBYTES)
    assert memory.copied == 0


def test_parts_of_one_tensor_stay_where_they_are(memory: Segments) -> None:
    attachment = accepted(memory)
    whole = numbers(1.0)
    batch = [{"a": whole[:20], "b": whole[20:], "small": whole[0, :3].clone()}]
    del whole
    first, second = handed_out(memory, batch)
    assert first.segment is second.segment
    assert memory.copied == 0
    views = attachment.look({0: first.place, 1: second.place}, [first.nbytes, second.nbytes])
    assert [len(views[0]), len(views[1])] == [20 * 4096, 44 * 4096]
    del views
    assert memory._take(first.segment.size) is first.segment


HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda t: t,
    "view": lambda t: t[3:5],
    "numpy": lambda t: t.numpy(),
    "storage": lambda t: t.untyped_storage(),
    "dlpack": lambda t: np.from_dlpack(t),
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS.keys())
@pytest.mark.parametrize("shared", [True, False])
def test_what_somebody_holds_is_copied(memory: Segments, hold: Callable[[torch.Tensor], Any], shared: bool) -> None:
    """He may change it, or yield it again; and the client may change what it gets."""
    attachment = accepted(memory) if shared else None
    batch = [numbers(1.0)]
    address, held = batch[0].data_ptr(), hold(batch[0])
    (sent,) = handed_out(memory, batch)
    if attachment is not None:
        sent = attachment.look({0: sent.place}, [sent.nbytes])[0]
    copy = np.frombuffer(sent, np.float32)
    assert copy.ctypes.data != address
    assert (copy == 1.0).all()
    assert memory.copied == NBYTES
    assert held is not None


def test_what_is_sent_in_place_is_used_again_when_the_client_gives_it_back(memory: Segments) -> None:
    attachment = accepted(memory)
    addresses = set()
    for value in range(5):
        batch = [numbers(float(value))]
        addresses.add(batch[0].data_ptr())
        (lent,) = handed_out(memory, batch)
        view = attachment.look({0: lent.place}, [lent.nbytes])[0]
        assert (np.frombuffer(view, np.float32) == value).all()
        del view
    assert len(addresses) == 1


def test_what_is_not_sent_is_used_again(memory: Segments) -> None:
    assert len({numbers(float(value)).data_ptr() for value in range(5)}) == 1


def test_frames_are_sent_from_where_the_batch_was_written(memory: Segments) -> None:
    """The client is on another host: the socket holds the memory until it is sent."""
    batch = [numbers(1.0)]
    address = batch[0].data_ptr()
    (frame,) = handed_out(memory, batch)
    assert np.frombuffer(frame, np.float32).ctypes.data == address
    assert memory.copied == 0
    other = numbers(2.0)
    assert (np.frombuffer(frame, np.float32) == 1.0).all()
    del frame
    assert numbers(3.0).data_ptr() == address
    assert other[0, 0] == 2.0


def test_without_memory_to_lend_it_is_the_ordinary_function(memory: Segments) -> None:
    held = [numbers(float(value)) for value in range(20)]
    assert [float(tensor[5, 5]) for tensor in held] == list(range(20))
    assert len(memory._held) == 16


# ------------------------------------------------------------------------------------------------ in a graph


class Counted(IterDataPipe[Any]):
    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        for value in self.source:
            yield [value]


def by_value() -> Any:
    """A DataPipe whose class travels by value, as one of a script does."""

    class Written(IterDataPipe[Any]):
        def __iter__(self) -> Iterator[Any]:
            for value in range(3):
                yield numbers(value)

    return Written()


def test_the_end_of_a_graph_does_not_hold_what_it_has_handed_out(memory: Segments) -> None:
    attachment = accepted(memory)
    travelled = pickle.loads(graph._pickle(by_value(), lambda nbytes: None))
    ends = IterableWrapper(range(3)).map(numbers), Counted(range(3)).collate(lambda value: numbers(value[0])), travelled
    for end in ends:
        for _ in range(2):
            elements = graph._unheld(end)
            for _ in range(3):
                (lent,) = handed_out(memory, [next(elements)])
                attachment.give_back(lent.place)
            assert next(elements, None) is None
    assert memory.copied == 0


def test_an_exception_at_the_end_of_a_graph_says_what_torch_says() -> None:
    texts = []
    for iterate in (iter, graph._unheld):
        with pytest.raises(ZeroDivisionError) as caught:
            next(iterate(IterableWrapper([0], deepcopy=False).map(lambda value: 1 // value)))
        texts.append(str(caught.value).partition(" at 0x")[0])
    assert texts[0] == texts[1]
    assert "This exception is thrown by __iter__ of Mapper" in texts[1]


def copied() -> int:
    """Bytes that this worker has copied so far."""
    lend: Any = inplace._source.lend
    return int(lend.__self__.copied)


def written(value: int) -> Any:
    return numbers(float(value)), copied()


def loader(pipe: Any, addresses: list[str], **options: Any) -> DataLoader2:
    return DataLoader2(pipe, reading_service=RPCReadingService(addresses, pickle_by_value=[__name__], **options))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_worker_copies_nothing_of_what_the_graph_writes_in_place(two_daemons: list[str], transport: str) -> None:
    dl = loader(IterableWrapper(range(40)).sharding_filter().map(written), two_daemons, transport=transport)
    try:
        for _ in range(2):
            for value, (tensor, bytes_copied) in enumerate(dl):
                assert bool((tensor == value).all())
                assert bytes_copied == 0
    finally:
        dl.shutdown()


def tell(samples: list[Any]) -> Any:
    return default_collate(samples)


@pytest.mark.parametrize("collate_fn", [default_collate, rpc_reading_service.collate])
def test_default_collate_at_the_end_of_a_graph_is_written_in_place(two_daemons: list[str], collate_fn: Any) -> None:
    def sample(value: int) -> Any:
        return torch.full((1024,), float(value)), copied()

    pipe = IterableWrapper(range(640)).sharding_filter().map(sample).batch(64).collate(collate_fn)
    dl = loader(pipe, two_daemons)
    try:
        for number, (tensor, bytes_copied) in enumerate(dl):
            first = number // 2 * 128 + number % 2
            assert tensor[:, 0].tolist() == list(range(first, first + 128, 2))
            assert not bytes_copied.any()
    finally:
        dl.shutdown()


def test_what_the_graph_keeps_is_not_changed_by_what_the_training_loop_does(two_daemons: list[str]) -> None:
    dl = loader(IterableWrapper(range(8)).sharding_filter().map(numbers).in_memory_cache(), two_daemons)
    try:
        for _ in range(3):
            for value, tensor in enumerate(dl):
                assert bool((tensor == value).all())
                tensor.fill_(-1.0)
    finally:
        dl.shutdown()
