"""A batch is worth the same after ``decode(encode(batch))``, and what cannot travel is refused with a reason."""

import array as array_module
import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import gc
import io
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from sameness import assert_same

from rpc_reading_service import codec
from rpc_reading_service.codec import INLINE_LIMIT, Encoded, Encoder, decode, decode_error, encode_error
from rpc_reading_service.errors import BatchError, StreamError, WorkerError

ROOT = pathlib.Path(codec.__file__).parents[1]
WHERE = "in worker process 0 on cpu1:5555"
LARGE = INLINE_LIMIT  # elements: more bytes than the limit, whatever the dtype


# ---------------------------------------------------------------------------------------------------- helpers


def wire(encoded: Encoded) -> Any:
    """What the transport does: the buffers arrive in memory of their own."""
    return decode(encoded.header, [bytearray(buffer) for buffer in encoded.buffers])


def bytes_of(encoded: Encoded) -> int:
    return len(encoded.header) + sum(buffer.nbytes for buffer in encoded.buffers)


def travel(batch: Any) -> Any:
    return wire(Encoder().encode(batch))


def refusal(batch: Any) -> str:
    with pytest.raises(BatchError) as caught:
        Encoder().encode(batch)
    assert caught.value.__cause__ is not None
    return str(caught.value)


class Memory(bytearray):
    """A buffer that can be watched."""


Pair = collections.namedtuple("Pair", "image label")


@dataclasses.dataclass
class Sample:
    image: Any
    label: int = 0


@dataclasses.dataclass(frozen=True)
class Slotted:
    __slots__ = ("image",)
    image: Any


class Colour(enum.Enum):
    RED = 1


# -------------------------------------------------------------------------------------- decode(encode(x)) == x

DTYPES = list(codec._CODES)
PARTS = ("b1", "i1", "u2", "i4", "<i8", ">i2", ">f8", "f2", "f4", "c8", "c16", "S3", "U2", "M8[ms]", "m8[D]", "V5")


@st.composite
def tensors(draw: Callable[[Any], Any]) -> torch.Tensor:
    """Any dtype and up to three dimensions; permuted, strided, sliced or expanded."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.sampled_from((0, 1, 2, 3, 17)), max_size=3))
    numbers = np.random.default_rng(draw(st.integers(0, 99))).bytes(int(np.prod(shape)) * dtype.itemsize + 16)
    flat = torch.frombuffer(bytearray(numbers), dtype=torch.uint8)[: int(np.prod(shape)) * dtype.itemsize]
    tensor = flat.view(dtype).reshape(shape) if dtype is not torch.bool else (flat % 2).view(dtype).reshape(shape)
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    if shape and draw(st.booleans()):
        tensor = tensor[draw(st.integers(0, 2)) :: draw(st.integers(1, 2))]
    return tensor.unsqueeze(0).expand(2, *tensor.shape) if draw(st.booleans()) else tensor


@st.composite
def arrays(draw: Callable[[Any], Any]) -> np.ndarray[Any, Any]:
    scalars = st.sampled_from(PARTS).map(np.dtype)
    dtype = draw(
        scalars
        | st.lists(scalars, min_size=1, max_size=3).map(lambda ds: np.dtype([(f"f{i}", d) for i, d in enumerate(ds)]))
    )
    shape = draw(npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=20))
    raw = np.random.default_rng(draw(st.integers(0, 99))).bytes(int(np.prod(shape)) * dtype.itemsize)
    made = (
        np.frombuffer(raw, np.dtype(("V", dtype.itemsize))).view(dtype).reshape(shape)
        if raw
        else np.empty(shape, dtype)
    )
    if dtype == np.dtype("U2"):  # not every four bytes are a character
        made = np.full(shape, "né")
    elif dtype.names and "U2" in str(dtype):
        made = np.zeros(shape, dtype)
    made = made.transpose(draw(st.permutations(range(made.ndim))))
    return made[:: draw(st.sampled_from((-1, 1, 2)))] if made.ndim else made


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=9000)
    | st.complex_numbers(allow_nan=False)
    | st.decimals(allow_nan=False)
    | st.datetimes()
    | st.sampled_from(
        (Colour.RED, torch.float16, torch.Size([2, 3]), torch.device("cpu"), np.float32(1.5), range(3), ...)
    )
)
BATCHES = st.recursive(
    SCALARS | tensors() | arrays(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=4)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=8,
)


@given(BATCHES)
@settings(deadline=None, max_examples=300)
def test_any_batch_arrives_as_it_was(batch: Any) -> None:
    assert_same(travel(batch), batch)


def lent(encoded: Encoded) -> list[memoryview]:
    """The buffers arrive in memory of torch's own, as with ``pin_memory``."""
    views = [torch.empty(buffer.nbytes, dtype=torch.uint8).numpy().data for buffer in encoded.buffers]
    for view, buffer in zip(views, encoded.buffers, strict=True):
        view[:] = buffer
    return views


@given(BATCHES)
@settings(deadline=None, max_examples=300)
def test_any_batch_arrives_as_it_was_in_memory_that_torch_lends(batch: Any) -> None:
    encoded = Encoder().encode(batch)
    assert_same(decode(encoded.header, lent(encoded)), batch)


@given(st.lists(BATCHES, max_size=4))
@settings(deadline=None, max_examples=30)
def test_one_encoder_serves_batch_after_batch(batches: list[Any]) -> None:
    encoder = Encoder()
    encoded = [encoder.encode(batch) for batch in batches]
    assert_same([wire(each) for each in encoded], batches)


# ---------------------------------------------------------------------------------------------- plain batches


def is_pickle(encoded: Encoded) -> bool:
    return encoded.header[0] == pickle.PROTO[0]


def strides(value: Any) -> Any:
    """Of all tensors and arrays in a batch."""
    if isinstance(value, dict):
        return strides(list(value.values()))
    if isinstance(value, (list, tuple)):
        return [strides(each) for each in value]
    if isinstance(value, np.ndarray):
        return value.strides
    return value.stride() if isinstance(value, torch.Tensor) and value.layout is torch.strided else None


def assert_arrives_as_its_pickle_does(batch: Any) -> Encoded:
    encoded = Encoder().encode(batch)
    got, pickled = wire(encoded), wire(Encoder()._dump(batch))
    assert_same(got, pickled)
    assert strides(got) == strides(pickled)
    return encoded


FLAT_VALUES = SCALARS | tensors() | arrays() | st.lists(SCALARS, max_size=3)
FLAT = (
    st.lists(FLAT_VALUES, max_size=4)
    | st.lists(FLAT_VALUES, max_size=4).map(tuple)
    | st.dictionaries(st.text(max_size=3), FLAT_VALUES, max_size=4)
)


@given(BATCHES | FLAT)
@settings(deadline=None, max_examples=300)
def test_a_batch_arrives_as_its_pickle_does(batch: Any) -> None:
    assert_arrives_as_its_pickle_does(batch)


IMAGES, LABELS = torch.rand(64, 3, 8, 8), torch.arange(64)
LOCKED = np.arange(2.0 * LARGE).reshape(2, LARGE)
LOCKED.flags.writeable = False

PLAIN = {
    "a vector": torch.arange(8.0),
    "a large vector": torch.arange(86_016.0),
    "a matrix": torch.rand(2, 4),
    "large images": IMAGES,
    "a number": torch.tensor(5),
    "bfloat16": torch.rand(3, 5).bfloat16(),
    "large bfloat16": torch.rand(LARGE).bfloat16(),
    "permuted": torch.rand(4, 3, 2).permute(1, 2, 0),
    "large channels last": torch.rand(2, 3, 40, 40).to(memory_format=torch.channels_last),
    "a stride that means nothing": torch.arange(8)[::7][:1],
    "an array": np.arange(8),
    "a large array": np.arange(86_016.0),
    "a large array in Fortran order": np.ones((50, 60), order="F"),
    "a small array that is locked": LOCKED[0, :4],
    "a large array that is locked": LOCKED,
    "images and labels": (IMAGES, LABELS),
    "a list of both": [IMAGES, LABELS],
    "three by name": {"image": IMAGES, "label": LABELS, "weight": torch.ones(64)},
    "a tensor and values of each kind": (
        torch.rand(3, 5),
        1,
        2.5,
        "cat",
        b"\0",
        None,
        True,
        2**100,
        "\ud800",
        [1, "a"],
        (),
    ),
    "tensors and names": {"image": IMAGES, "path": [f"{i}.png" for i in range(64)], "label": LABELS, "": np.ones(3)},
    "one value twice": ("a", torch.ones(3), "a", 5, 5, None, None),
    "only tensors": [torch.full((2,), float(i)) for i in range(codec.FLAT_LIMIT)],
}


@pytest.mark.parametrize("batch", PLAIN.values(), ids=PLAIN)
def test_a_plain_batch_is_not_pickled_and_arrives_all_the_same(batch: Any) -> None:
    for _ in range(2):  # made, and looked up
        encoded = assert_arrives_as_its_pickle_does(batch)
        assert not is_pickle(encoded)
        assert not any(buffer.readonly for buffer in encoded.buffers)


def with_attribute(tensor: torch.Tensor) -> torch.Tensor:
    tensor.path = "a.png"  # type: ignore[attr-defined]
    return tensor


class Text(str):
    __slots__ = ()


ONE, Z = torch.ones(3), torch.tensor([1 + 2j, 3 - 4j])

NOT_PLAIN = {
    "one tensor twice": [ONE, ONE],
    "one array twice": {"a": LOCKED, "b": LOCKED},
    "a tensor that requires grad": torch.ones(3, requires_grad=True),
    "a bfloat16 tensor that requires grad": torch.ones(3, dtype=torch.bfloat16, requires_grad=True),
    "a tensor that requires grad, and another": (ONE, torch.ones(LARGE, requires_grad=True)),
    "a tensor with an attribute": with_attribute(torch.ones(3)),
    "a parameter": torch.nn.Parameter(torch.ones(3)),
    "a conjugate": Z.conj(),
    "a negative": Z.conj().imag,
    "a negative bfloat16": torch._neg_view(torch.ones(3, dtype=torch.bfloat16)),
    "a sparse tensor": torch.eye(3).to_sparse(),
    "no element": torch.ones(3, 0),
    "gaps": torch.arange(9)[::2],
    "more dimensions than fit": torch.ones([1] * 20),
    "an array of records": np.zeros(2, [("a", "i4")]),
    "an array whose dtype has metadata": np.array([1.5], np.dtype("f4", metadata={"unit": "mm"})),
    "an array of the other byte order": np.arange(3, dtype=">i4"),
    "an array of objects": np.array([None, "x"]),
    "a masked array": np.ma.masked_array([1, 2], [0, 1]),
    "a named tuple": Pair(ONE, 0),
    "an ordered dict": collections.OrderedDict(x=ONE),
    "keys that are numbers": {1: ONE},
    "keys that look like others": {True: ONE},
    "a key of another type": {Text("image"): ONE},
    "a value of another type": {"image": ONE, "text": Text("a")},
    "nested": {"image": ONE, "target": {"boxes": torch.ones(2, 4)}},
    "nested lists": [ONE, [ONE, torch.ones(2)]],
    "no tensor": {"a": 1, "b": "c"},
    "too many": [ONE, *range(codec.FLAT_LIMIT)],
}


@pytest.mark.parametrize("batch", NOT_PLAIN.values(), ids=NOT_PLAIN)
def test_what_is_not_plain_is_pickled(batch: Any) -> None:
    travel({"image": ONE, "text": "a"})  # a form that equals some of these, and yet is not theirs
    travel(np.array([1.5], "f4"))
    encoded = Encoder().encode(batch)
    assert is_pickle(encoded)
    assert_same(wire(encoded), batch)


def test_a_tensor_keeps_that_it_requires_grad_while_grad_is_off() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        with torch.no_grad():  # numpy() takes it then
            encoded = Encoder().encode((torch.ones(2, 2, dtype=dtype, requires_grad=True), 0))
        assert wire(encoded)[0].requires_grad


def test_a_list_that_is_twice_in_a_plain_batch_arrives_as_one() -> None:
    names = ["a", "b"]
    encoded = Encoder().encode({"image": ONE, "path": names, "again": names})
    assert not is_pickle(encoded)
    got = wire(encoded)
    assert got["path"] is got["again"]


@pytest.mark.parametrize("batch", PLAIN.values(), ids=PLAIN)
def test_a_header_may_arrive_in_whatever_memory(batch: Any) -> None:
    encoded = Encoder().encode(batch)
    header = memoryview(bytearray(encoded.header))
    assert_same(decode(header, [memoryview(bytearray(buffer)) for buffer in encoded.buffers]), batch)


def test_the_layouts_and_forms_that_are_remembered_are_bounded() -> None:
    for length in range(1, codec.REMEMBERED + 3):
        tensor = torch.full((length, 1), length % 100, dtype=torch.int8)
        assert torch.equal(travel(tensor), tensor)
        assert travel({str(length): tensor, "n": length}).keys() == {str(length), "n"}
    for memory in (codec._layouts, codec._forms, codec._leaves, codec._plans):
        assert 0 < len(memory) <= codec.REMEMBERED


def test_each_tensor_of_a_collection_keeps_its_own_buffer_alive() -> None:
    encoded = Encoder().encode(
        {"a": torch.zeros(64, LARGE // 64), "b": np.zeros(LARGE), "c": torch.zeros(LARGE), "d": 1}
    )
    memory = [Memory(buffer) for buffer in encoded.buffers]
    gone = [weakref.ref(each) for each in memory]
    got = decode(encoded.header, [memoryview(each) for each in memory])
    del memory
    for number, name in enumerate("abc"):
        assert [each() is not None for each in gone] == [False] * number + [True] * (3 - number)
        del got[name]
        gc.collect()
    assert [each() for each in gone] == [None] * 3


def test_a_plain_batch_is_kept_alive_by_its_buffers_alone() -> None:
    arrays = [np.zeros(LARGE), np.zeros((2, LARGE))]
    alive = [weakref.ref(each) for each in arrays]
    encoder = Encoder()
    encoded = [encoder.encode(torch.from_numpy(arrays[0])), encoder.encode((arrays[1], 5))]
    del arrays
    assert all(each() is not None for each in alive)
    del encoded
    assert [each() for each in alive] == [None, None]


# ----------------------------------------------------------------------------------------------- header, buffers


@pytest.mark.parametrize("batch", [None, 0, "", [], {}, b"", False, (), 2**200, float("inf"), "\U0001f600\0x"])
def test_falsy_and_odd_scalars_arrive(batch: Any) -> None:
    assert_same(travel(batch), batch)


@pytest.mark.parametrize(
    "batch",
    [
        decimal.Decimal("1.10"), {1, 2}, frozenset("ab"), bytearray(b"ab"), slice(1, None, 2), int, torch.float16,
        datetime.timedelta(days=1), collections.OrderedDict(x=1), array_module.array("d", [1.5]), np.dtype(">i4"),
        pathlib.PurePosixPath("/a/b"), type(None), type(...), functools.partial(int, base=2).keywords,
    ],
)  # fmt: skip
def test_plain_python_values_arrive(batch: Any) -> None:
    assert_same(travel(batch), batch)


def test_dataclasses_of_every_kind_arrive() -> None:
    for sent in (Sample(torch.arange(3), 1), Sample([torch.ones(LARGE)]), Sample(np.ones(LARGE))):
        got = travel(sent)
        assert type(got) is Sample
        assert_same([got.image, got.label], [sent.image, sent.label])


def test_a_buffer_below_the_limit_stays_in_the_header() -> None:
    encoded = Encoder().encode(torch.zeros(INLINE_LIMIT - 1, dtype=torch.uint8))
    assert encoded.buffers == []
    assert bytes_of(encoded) == len(encoded.header) > INLINE_LIMIT - 1


def test_a_buffer_at_the_limit_leaves_the_header() -> None:
    encoded = Encoder().encode([torch.zeros(INLINE_LIMIT, dtype=torch.uint8), np.zeros(INLINE_LIMIT, np.uint8)])
    assert [buffer.nbytes for buffer in encoded.buffers] == [INLINE_LIMIT, INLINE_LIMIT]
    assert len(encoded.header) < 300
    assert bytes_of(encoded) == len(encoded.header) + 2 * INLINE_LIMIT


def test_the_buffers_are_flat_writable_views_of_bytes() -> None:
    image = torch.zeros(2, 3, 40, 40).to(memory_format=torch.channels_last)
    for buffer in Encoder().encode([image, np.zeros((100, 100), order="F"), np.float16([[1.0] * LARGE])]).buffers:
        assert (buffer.format, buffer.ndim, buffer.contiguous, buffer.readonly) == ("B", 1, True, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_a_large_tensor_is_not_copied_on_either_side(dtype: torch.dtype) -> None:
    tensor = torch.zeros(LARGE, dtype=dtype)
    (buffer,) = Encoder().encode(tensor).buffers
    assert np.frombuffer(buffer, np.uint8).ctypes.data == tensor.data_ptr()
    memory = bytearray(buffer)
    got = decode(Encoder().encode(tensor).header, [memory])
    assert got.data_ptr() == np.frombuffer(memory, np.uint8).ctypes.data


def test_a_large_array_is_not_copied_on_either_side() -> None:
    for sent in (np.zeros(LARGE), np.zeros((9, 10, 11)).swapaxes(0, 2), np.zeros((50, 50), order="F")):
        (buffer,) = Encoder().encode(sent).buffers
        assert np.shares_memory(np.frombuffer(buffer, np.uint8), sent)
        memory = bytearray(buffer)
        got = decode(Encoder().encode(sent).header, [memory])
        assert np.shares_memory(got, np.frombuffer(memory, np.uint8))
        assert got.strides == sent.strides


def test_bytes_stay_in_the_header_whatever_their_size() -> None:
    batch = {"raw": b"x" * 100_000, "text": "é" * 100_000, "buffer": bytearray(100_000)}
    encoded = Encoder().encode(batch)
    assert encoded.buffers == []
    assert_same(wire(encoded), batch)


def test_pickles_own_buffers_leave_the_header_from_the_limit_on() -> None:
    small, large = pickle.PickleBuffer(bytearray(10)), pickle.PickleBuffer(bytearray(LARGE))
    encoded = Encoder().encode([small, large])
    assert [buffer.nbytes for buffer in encoded.buffers] == [LARGE]
    assert wire(encoded) == [bytearray(10), bytearray(LARGE)]


def test_the_encoder_keeps_nothing_of_a_batch_alive() -> None:
    encoder = Encoder()
    array, rest = np.zeros(LARGE), Sample(None)
    alive = [weakref.ref(array), weakref.ref(rest)]
    encoded = encoder.encode([torch.from_numpy(array), array, rest])
    del array, rest
    assert [ref() is not None for ref in alive] == [True, False], "the buffers keep their memory alive, and only that"
    del encoded
    assert alive[0]() is None


@pytest.mark.parametrize("sent", [torch.zeros(LARGE), torch.zeros(64, LARGE // 64), np.zeros(LARGE)])
@pytest.mark.parametrize("wrap", [Memory, lambda raw: memoryview(Memory(raw))])
def test_what_was_decoded_keeps_its_buffer_alive(sent: Any, wrap: Callable[[Any], Any]) -> None:
    encoded = Encoder().encode(sent)
    memory = wrap(encoded.buffers[0])
    gone = weakref.ref(memory)
    got = decode(encoded.header, [memory])
    del memory
    part = got[1:]
    del got
    gc.collect()
    assert gone() is not None
    del part
    gc.collect()
    assert gone() is None


def test_a_mapping_cannot_be_closed_under_a_tensor() -> None:
    import mmap

    encoded = Encoder().encode(np.zeros(LARGE, np.uint8))
    mapping = mmap.mmap(-1, LARGE)
    got = decode(encoded.header, [memoryview(mapping)])
    with pytest.raises(BufferError, match="exported pointers exist"):
        mapping.close()
    del got
    mapping.close()


def test_two_decodings_of_one_header_share_nothing() -> None:
    encoded = Encoder().encode([torch.zeros(3), torch.zeros(LARGE)])
    first, second = wire(encoded), wire(encoded)
    for tensor in first:
        tensor += 1
    assert [float(tensor.sum()) for tensor in second] == [0.0, 0.0]


def test_what_was_decoded_can_be_changed_in_place() -> None:
    locked = np.zeros(LARGE), np.zeros(3), np.zeros((3, 5), order="F"), np.array(7), np.zeros(3, "M8[s]")
    for each in locked:
        each.flags.writeable = False
    batch = [torch.zeros(5), torch.zeros(LARGE), torch.zeros(8)[2:4], *locked, np.broadcast_to(np.zeros(1), (9,))]
    for got in travel(batch):
        got += 1
    assert float(sum(float(each.sum()) for each in locked[:4])) == 7.0


# ---------------------------------------------------------------------------------------------------- tensors


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [3, LARGE])
def test_every_dtype_keeps_its_bits(dtype: torch.dtype, count: int) -> None:
    raw = torch.arange(count * dtype.itemsize, dtype=torch.int64).to(torch.uint8)
    sent = (raw % 2).view(dtype) if dtype is torch.bool else raw.view(dtype)
    assert_same(travel([sent, sent[:0], sent[1], sent[::2]]), [sent, sent[:0], sent[1], sent[::2]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_in_memory_that_torch_lends_is_of_that_storage(dtype: torch.dtype) -> None:
    """By its storage torch knows whether a device still reads from it; arrays have none, and are copied."""
    raw = torch.arange(2 * LARGE * dtype.itemsize, dtype=torch.int64).to(torch.uint8)
    sent = (raw % 2).view(dtype) if dtype is torch.bool else raw.view(dtype)
    across = sent.view(2, LARGE).transpose(0, 1)
    for batch in (sent, across, [sent, across], [sent, [[across]]]):
        encoded = Encoder().encode(batch)
        views = lent(encoded)
        got = decode(encoded.header, views)
        assert_same(got, batch)
        assert {each.untyped_storage().data_ptr() for each in tensors_of(got)} == {address(view) for view in views}
        assert [each.untyped_storage().nbytes() for each in tensors_of(got)] == [sent.nbytes] * len(tensors_of(got))
        storages = {each.untyped_storage()._cdata for each in tensors_of(got)}
        assert storages == {view.obj.base.untyped_storage()._cdata for view in views}  # type: ignore[attr-defined]


def tensors_of(batch: Any) -> list[torch.Tensor]:
    return [batch] if isinstance(batch, torch.Tensor) else [tensor for each in batch for tensor in tensors_of(each)]


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)


@pytest.mark.parametrize("wrap", [lambda array: array, lambda array: [array], lambda array: [[array]]])
def test_an_array_does_not_stay_in_memory_that_torch_lends(wrap: Callable[[Any], Any]) -> None:
    encoded = Encoder().encode(wrap(np.arange(LARGE)))
    (view,) = lent(encoded)
    got = decode(encoded.header, [view])
    view[:] = bytes(view.nbytes)
    assert_same(got, wrap(np.arange(LARGE)))


def test_the_dtype_table_covers_every_dense_dtype_of_this_torch() -> None:
    known = {each for each in vars(torch).values() if isinstance(each, torch.dtype)}
    quantized = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
    no_kernels = {each for each in known if str(each).removeprefix("torch.u").removeprefix("torch.")[3:] in "1234567"}
    assert known - set(DTYPES) == quantized | no_kernels


def test_the_codes_on_the_wire_never_change() -> None:
    names = "bool uint8 int8 int16 int32 int64 float16 float32 float64 complex64 complex128 bfloat16 complex32 uint16"
    assert [name for name, _ in codec._DTYPES][:14] == names.split()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (0, 4), (1,), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_zero_size_and_zero_dimensional_tensors_arrive(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    sent = torch.ones(shape, dtype=dtype)
    got = travel(sent)
    assert_same(got, sent)
    assert got.stride() == sent.stride()


LAYOUTS = [
    torch.arange(24.0).reshape(2, 3, 4).transpose(0, 2),
    torch.zeros(2, 3, 40, 40).to(memory_format=torch.channels_last),
    torch.zeros(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
    torch.empty_strided((2, 1, 3, 4), (12, 1, 4, 1)).zero_(),
    torch.zeros(5, 4, 3, dtype=torch.bfloat16).permute(2, 0, 1),
]


@pytest.mark.parametrize("sent", LAYOUTS)
def test_a_dense_tensor_keeps_its_strides(sent: torch.Tensor) -> None:
    got = travel(sent)
    assert_same(got, sent)
    assert got.stride() == sent.stride()


GAPS = [
    torch.arange(24.0).reshape(2, 3, 4)[:, ::2, 1:],
    torch.arange(3).expand(5, 3),
    torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1)[1:],
    torch.ones(3, dtype=torch.bfloat16).expand(1000, 3),
]


@pytest.mark.parametrize("sent", GAPS)
def test_a_tensor_with_gaps_or_repeats_arrives_contiguous(sent: torch.Tensor) -> None:
    got = travel(sent)
    assert_same(got, sent)
    assert got.is_contiguous()


def test_a_small_view_of_a_large_storage_travels_alone() -> None:
    large = torch.zeros(1_000_000)
    assert bytes_of(Encoder().encode(large[8:12])) < 200
    assert bytes_of(Encoder().encode(large[8 : 8 + LARGE])) < 4 * LARGE + 200
    assert travel(large[8:12]).untyped_storage().nbytes() == 16


def test_conjugate_and_negative_views_are_resolved() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    sent = [z.conj(), torch._neg_view(torch.tensor([1.0, -3.0])), z.conj().imag, z.real, z.conj().conj()]
    got = travel(sent)
    assert_same(got, sent)
    assert not any(each.is_conj() or each.is_neg() for each in got)


def test_a_leaf_that_requires_grad_arrives_so() -> None:
    sent = [torch.ones(3, requires_grad=True), torch.ones(LARGE, requires_grad=True), torch.ones(2, 2).requires_grad_()]
    got = travel(sent)
    assert_same(got, sent)
    (got[0] * 2).sum().backward()
    assert got[0].is_leaf
    assert got[0].grad.tolist() == [2.0, 2.0, 2.0]


def test_a_tensor_keeps_what_the_user_wrote_on_it() -> None:
    sent = torch.ones(3)
    sent.path = "a.png"
    assert travel(sent).path == "a.png"


def test_one_tensor_twice_arrives_as_one_object_and_overlaps_apart() -> None:
    t, a = torch.arange(4.0), np.arange(4.0)
    got = travel([t, t, t[1:3], a, {"again": a}])
    assert got[0] is got[1]
    assert got[3] is got[4]["again"]
    got[0].zero_()
    assert got[2].tolist() == [1.0, 2.0]


COO = torch.sparse_coo_tensor([[0, 1, 1], [2, 0, 2]], [3.0, 4.0, 5.0], (2, 3), check_invariants=True)


def sparse_tensors() -> Iterator[torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "Sparse CSR tensor support is in beta state"
        dense = torch.eye(4)
        yield from (COO, COO.coalesce(), torch.sparse_coo_tensor(size=(4, 4)), torch.eye(3000).to_sparse())
        yield from (dense.to_sparse_csr(), dense.to_sparse_csc())
        yield from (dense.to_sparse_bsr((2, 2)), dense.to_sparse_bsc((2, 2)))
        yield COO.clone().requires_grad_()
        yield dense.to_sparse_csr().requires_grad_()


SPARSE = list(sparse_tensors())


@pytest.mark.parametrize("sent", SPARSE, ids=lambda each: str(each.layout))
def test_sparse_tensors_keep_layout_and_values(sent: torch.Tensor) -> None:
    got = travel(sent)
    assert (got.layout, got.shape, got.dtype, got.requires_grad) == (
        sent.layout, sent.shape, sent.dtype, sent.requires_grad,
    )  # fmt: skip
    assert torch.equal(got.to_dense(), sent.to_dense())
    if sent.layout is torch.sparse_coo:
        assert got.is_coalesced() == sent.is_coalesced()


def test_the_parts_of_a_large_sparse_tensor_leave_the_header() -> None:
    assert len(Encoder().encode(SPARSE[3]).buffers) == 2


def test_decoding_sparse_tensors_does_not_keep_them_for_torch_load_to_check() -> None:
    before = len(torch._utils._sparse_tensors_to_validate)
    travel(SPARSE)
    assert len(torch._utils._sparse_tensors_to_validate) == before


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_nested_tensors_arrive_component_by_component(layout: torch.layout) -> None:
    sent = torch.nested.nested_tensor([torch.arange(3.0), torch.arange(2.0 * LARGE)], layout=layout)
    encoded = Encoder().encode(sent)
    got = wire(encoded)
    assert (type(got), got.layout, got.is_nested) == (type(sent), sent.layout, True)
    assert_same(list(got.unbind()), list(sent.unbind()))
    assert len(encoded.buffers) == 1


@pytest.mark.filterwarnings("ignore:torch.quantize_per_:UserWarning")
def test_quantized_tensors_arrive_without_the_rest_of_their_storage() -> None:
    per_tensor = torch.quantize_per_tensor(torch.arange(90_000.0), 0.5, 0, torch.qint8)
    per_channel = torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.qint8)
    whole = torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2, dtype=int), 0, torch.qint8)
    for sent in (per_tensor, per_tensor[2:5], per_channel, whole):
        got = travel(sent)
        assert (got.dtype, got.qscheme()) == (sent.dtype, sent.qscheme())
        assert torch.equal(got.int_repr(), sent.int_repr())
    assert bytes_of(Encoder().encode(per_tensor[2:5])) < 5000


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_onednn_tensors_arrive_as_such() -> None:
    got = travel(torch.ones(2, 3).to_mkldnn())
    assert got.is_mkldnn
    assert torch.equal(got.to_dense(), torch.ones(2, 3))


def test_a_parameter_arrives_as_a_parameter() -> None:
    encoded = Encoder().encode(torch.nn.Parameter(torch.ones(LARGE)))
    got = wire(encoded)
    assert_same(got, torch.nn.Parameter(torch.ones(LARGE)))
    assert len(encoded.buffers) == 1


class Boxes(torch.Tensor):
    """A dense subclass of a user's, such as torchvision's images and boxes are."""


def test_a_tensor_subclass_travels_as_its_view_alone_and_keeps_its_type() -> None:
    sent = torch.arange(1_000_000.0).as_subclass(Boxes)[10 : 10 + LARGE]
    sent.format = "xyxy"
    encoded = Encoder().encode(sent)
    got = wire(encoded)
    assert_same(got, sent)
    assert got.format == "xyxy"
    assert len(encoded.buffers) == 1
    assert bytes_of(encoded) < 4 * LARGE + 500


def test_a_tensor_subclass_that_requires_grad_arrives_so() -> None:
    sent = torch.ones(3).as_subclass(Boxes).requires_grad_()
    assert_same(travel(sent), sent)


def test_the_default_device_of_the_training_process_is_no_matter() -> None:
    encoded = Encoder().encode([torch.ones(3), torch.empty(0, 2)])
    alone = [Encoder().encode(sent) for sent in (torch.ones(3), torch.ones(2, 2), torch.empty(0, 2), torch.ones(LARGE))]
    views = [lent(each) for each in alone]
    with torch.device("meta"):
        got = [*wire(encoded), *map(wire, alone)]
        got += [decode(each.header, memory) for each, memory in zip(alone, views, strict=True)]
    assert {each.device.type for each in got} == {"cpu"}


# ----------------------------------------------------------------------------------------------------- arrays


def object_array(*elements: Any) -> np.ndarray[Any, Any]:
    made = np.empty(len(elements), object)
    made[:] = elements
    return made


RECORDS = np.zeros(2, dtype=[("a", "i4"), ("b", ">f8", (2,)), ("s", "U5")])
RECORDS["s"] = "né"

ARRAYS = [
    RECORDS,
    np.zeros(3, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    np.array(["2024-01-01", "NaT"], "datetime64[D]"),
    np.array([datetime.timedelta(days=1)], "timedelta64[D]"),
    np.full(LARGE, 3, "datetime64[us]"),
    np.array(["žluť", ""]),
    np.array([b"a\0b"]),
    np.arange(3, dtype=">i4"),
    np.arange(LARGE, dtype=">f8"),
    np.arange(3, dtype=np.longdouble),
    np.array(7),
    np.array("2024-01-01", "M8[D]"),
    np.empty((0, 4), np.int32),
    np.empty((0,), ">c16"),
    np.arange(12).reshape(3, 4)[::-1, ::-2],
    np.arange(24).reshape(2, 3, 4)[:, ::2],
    np.empty((3,), "V0"),
    np.ndarray((3,), "U0"),
    np.empty((3,), "V7"),
    np.zeros(2, np.dtype([("a", "i4"), ("none", "V0")])),
    np.array([1.5], np.dtype("f4", metadata={"unit": "mm"})),
]


@pytest.mark.parametrize("sent", ARRAYS, ids=lambda each: str(each.dtype))
def test_arrays_of_every_kind_arrive(sent: np.ndarray[Any, Any]) -> None:
    assert_same(travel(sent), sent)


def test_the_metadata_of_a_dtype_arrives() -> None:
    assert travel(ARRAYS[-1]).dtype.metadata == {"unit": "mm"}


def test_arrays_keep_their_order_and_gaps_arrive_in_c_order() -> None:
    assert travel(np.ones((3, 4), order="F")).flags.f_contiguous
    assert travel(np.ones((3, 4))).flags.c_contiguous
    assert travel(np.ones((30, 40))[:, ::2]).flags.c_contiguous


def test_object_arrays_carry_anything_and_their_tensors_out_of_band() -> None:
    encoded = Encoder().encode(object_array(np.arange(2), "x", None, torch.ones(LARGE)))
    got = wire(encoded)
    assert got.dtype == object
    assert_same(list(got), [np.arange(2), "x", None, torch.ones(LARGE)])
    assert len(encoded.buffers) == 1


def test_numpys_variable_width_strings_arrive() -> None:
    if not hasattr(np.dtypes, "StringDType"):
        pytest.skip("this numpy has none")
    sent = np.array(["a", "long" * 50], np.dtypes.StringDType())
    assert travel(sent).tolist() == sent.tolist()


@pytest.mark.parametrize("sent", [np.float32(1.5), np.int64(3), np.bool_(True), np.datetime64("2024"), np.str_("é")])
def test_numpy_scalars_arrive(sent: Any) -> None:
    assert_same(travel(sent), sent)


@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_array_subclasses_keep_their_type_and_can_be_changed() -> None:
    matrix, records = np.matrix([[1, 2], [3, 4]]), np.zeros(2, [("a", "i4")]).view(np.recarray)
    matrix.flags.writeable = False
    got = travel([matrix, records])
    assert_same(got, [matrix, records])
    got[0] += 1
    got[1].a += 1


def test_masked_arrays_keep_their_mask() -> None:
    got = travel(np.ma.masked_array(np.arange(4), [0, 1, 0, 0]))
    assert type(got) is np.ma.MaskedArray
    assert got.tolist() == [0, None, 2, 3]


def test_a_read_only_file_mapping_travels_without_a_copy_and_arrives_writable(tmp_path: pathlib.Path) -> None:
    np.arange(LARGE, dtype="<f4").tofile(tmp_path / "data")
    sent = np.memmap(tmp_path / "data", "<f4", "r")
    encoded = Encoder().encode([sent, sent[:3]])
    assert np.shares_memory(np.frombuffer(encoded.buffers[0], np.uint8), sent)
    got = wire(encoded)
    assert_same(got, [sent, sent[:3]])
    got[0] += 1


def test_a_file_mapping_of_objects_is_left_to_numpy() -> None:
    assert travel(object_array(1, "x").view(np.memmap)).tolist() == [1, "x"]


# ---------------------------------------------------------------------------------- classes that go by value


def run_elsewhere(function: Callable[[], Any]) -> Encoded:
    """Call ``function`` in another interpreter, as a worker does, and return what its result was encoded to."""
    script = (
        "import sys, pickle, cloudpickle; from rpc_reading_service.codec import Encoder\n"
        "encoded = Encoder().encode(cloudpickle.load(sys.stdin.buffer)())\n"
        "sys.stdout.buffer.write(pickle.dumps((encoded.header, [bytes(each) for each in encoded.buffers])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input=cloudpickle.dumps(function), stdout=subprocess.PIPE, check=True, cwd=ROOT
    )
    return Encoded(*pickle.loads(done.stdout))


def test_an_instance_of_a_local_class_comes_back_as_the_users_own_class() -> None:
    class TheClass:
        calls = 0

        def __init__(self) -> None:
            self.image, self.large = torch.arange(3), torch.ones(LARGE)

    class Shade(enum.Enum):
        DARK = 1

    encoded = run_elsewhere(lambda: [TheClass(), TheClass(), Shade.DARK])
    method, TheClass.calls = TheClass.__init__, 7
    got = wire(encoded)
    assert [type(got[0]), type(got[1])] == [TheClass, TheClass]
    assert got[2] is Shade.DARK
    assert_same([got[0].image, got[1].large], [torch.arange(3), torch.ones(LARGE)])
    assert (TheClass.__init__, TheClass.calls) == (method, 7), "decoding changed the user's class"


def test_a_class_of_the_main_script_comes_back_as_itself() -> None:
    import __main__

    exec("class InMain:\n    pass\ndef in_main(x):\n    return x + 1\n", __main__.__dict__)
    cls, function = __main__.InMain, __main__.in_main
    try:
        encoded = run_elsewhere(lambda: (cls(), function))
        value, called = wire(encoded)
        assert type(value) is cls
        assert called(1) == 2
    finally:
        del __main__.InMain, __main__.in_main


def test_a_class_that_only_the_worker_has_is_made_once() -> None:
    def made_there() -> Any:
        return type("MadeThere", (), {"answer": 42})()

    encoded = run_elsewhere(made_there)
    first, second = wire(encoded), wire(encoded)
    assert type(first) is type(second)
    assert first.answer == 42


def test_a_class_that_goes_by_value_is_pickled_once_an_encoder() -> None:
    class Local:
        pass

    encoder = Encoder()
    assert encoder.encode(Local()) == encoder.encode(Local())
    assert type(wire(encoder.encode(Local()))) is Local


# ------------------------------------------------------------------------------------- what cannot be encoded


def test_a_tensor_inside_an_autograd_graph_is_refused() -> None:
    text = refusal({"loss": [1, torch.ones(3, requires_grad=True) * 2]})
    assert "batch['loss'][1] (torch.Tensor) cannot be pickled" in text
    assert "requires grad and is not a leaf" in text
    assert text.endswith("yield tensor.detach().")


@pytest.mark.parametrize("make", [lambda t: t.to_sparse(), lambda t: (t * 2).as_subclass(Boxes)])
def test_other_tensors_inside_an_autograd_graph_are_refused_too(make: Callable[[Any], Any]) -> None:
    assert "is not a leaf" in refusal(make(torch.eye(3, requires_grad=True)))


def test_a_tensor_on_a_device_is_refused_by_the_devices_name() -> None:
    text = refusal(Pair(torch.empty(3, device="meta"), 0))
    assert "batch.image (torch.Tensor)" in text
    assert "a tensor on meta" in text
    assert "yield tensor.cpu()" in text


def test_a_subclass_on_a_device_is_refused_as_well() -> None:
    assert "a tensor on meta" in refusal(torch.nn.Parameter(torch.empty(3, device="meta")))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_cuda_tensor_is_refused_by_the_devices_name() -> None:
    assert "a tensor on cuda:0" in refusal([torch.empty(3, device="cuda")])


def test_the_text_says_where_in_the_batch_what_it_is_and_what_to_do() -> None:
    batch = {"image": [torch.ones(3), 1, Sample(image={"lock": threading.Lock()})]}
    text = refusal(batch)
    assert text == (
        "batch['image'][2].image['lock'] (_thread.lock) cannot be pickled for the training process: "
        "cannot pickle '_thread.lock' object; "
        "leave it out of the batch, or turn it into tensors, arrays or plain values in the graph."
    )


def test_the_text_stops_at_an_object_that_pickle_alone_looks_into() -> None:
    class Holder:
        def __init__(self) -> None:
            self.lock = threading.Lock()

    assert "batch[0] (test_codec." in refusal([Holder()]).replace("tests.", "")
    assert refusal({threading.Lock(): 1}).startswith("batch (dict) ")
    assert refusal({threading.Lock()}).startswith("batch (set) ")
    assert refusal(Slotted(threading.Lock())).startswith("batch.image (_thread.lock) ")


def test_a_batch_that_holds_itself_and_a_lock_is_refused() -> None:
    batch: list[Any] = []
    batch += [batch, threading.Lock()]
    assert refusal(batch).startswith("batch[1] (_thread.lock) ")


def test_a_batch_that_holds_itself_arrives() -> None:
    batch: list[Any] = []
    batch.append(batch)
    got = travel(batch)
    assert got[0] is got


def test_a_generator_is_refused() -> None:
    assert "batch[0] (generator) cannot be pickled" in refusal([(each for each in "ab")])


def test_a_lambda_is_refused_as_pickle_itself_does() -> None:
    text = refusal([0, lambda: 1])
    assert "batch[1] (function) cannot be pickled" in text
    assert "<lambda>, which cannot be imported by its name" in text
    assert "define it at the top level of a module" in text


@pytest.mark.parametrize("mode", ["r", "rb"])
def test_an_open_file_is_refused(mode: str) -> None:
    with open(os.devnull, mode) as file:
        assert "batch['file'] (_io." in refusal({"file": file})


def test_in_memory_files_arrive() -> None:
    assert travel(io.StringIO("text")).getvalue() == "text"
    assert travel(io.BytesIO(b"raw")).getvalue() == b"raw"


def test_a_batch_that_is_nested_too_deeply_is_refused() -> None:
    batch: Any = []
    for _ in range(100_000):
        batch = [batch]
    text = refusal(batch)
    assert text.startswith("batch (list) cannot be pickled")
    assert text.endswith("recursion required; flatten the batch.")
    while batch:  # take it apart from outside: freeing it in one go would recurse as deeply
        (batch,) = batch


class FailsInGetstate:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __getstate__(self) -> Any:
        raise self.error


@pytest.mark.parametrize("error", [OSError("image file is truncated"), TypeError("bad state"), AttributeError("no x")])
def test_what_a_users_own_getstate_raises_passes_unchanged(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        Encoder().encode([FailsInGetstate(error)])
    assert caught.value is error


def test_a_part_that_fails_for_reasons_of_its_own_is_not_blamed() -> None:
    class Fickle:
        """Fails in an odd way when it is looked at again."""

        looks = 0

        def __reduce__(self) -> Any:
            Fickle.looks += 1
            raise OSError("gone") if Fickle.looks > 1 else TypeError("cannot pickle this")

    assert refusal([Fickle()]).startswith("batch (list) ")


def test_a_truncated_image_reaches_the_user_as_oserror(tmp_path: pathlib.Path) -> None:
    image = pytest.importorskip("PIL.Image")
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    image.fromarray(noise).save(tmp_path / "whole.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:1000])
    with image.open(tmp_path / "whole.png") as whole:
        assert np.array_equal(np.asarray(travel(whole)), noise)
    with image.open(tmp_path / "cut.png") as cut, pytest.raises(OSError, match="truncated"):
        Encoder().encode({"image": cut})


def test_an_encoder_works_on_after_a_failure() -> None:
    encoder = Encoder()
    with pytest.raises(BatchError):
        encoder.encode([torch.ones(LARGE), "x" * 100_000, threading.Lock()])
    assert_same(wire(encoder.encode([torch.ones(3)])), [torch.ones(3)])


def test_a_header_without_its_buffers_is_an_error() -> None:
    for batch in ({"nested": [torch.ones(LARGE)]}, torch.ones(LARGE), torch.ones(2, LARGE), np.ones(LARGE)):
        with pytest.raises(pickle.UnpicklingError):
            decode(Encoder().encode(batch).header, [])
    header = Encoder().encode((torch.ones(LARGE), np.ones(LARGE))).header
    with pytest.raises(pickle.UnpicklingError, match="a batch came with 1 buffers, but its header asks for 2"):
        decode(header, [bytearray(4 * LARGE)])


@pytest.mark.parametrize("batch", [torch.ones(LARGE), torch.ones(2, LARGE), np.ones(LARGE), (torch.ones(LARGE), 1)])
def test_a_buffer_that_is_too_small_is_an_error(batch: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        decode(Encoder().encode(batch).header, [memoryview(bytearray(LARGE))])


@pytest.mark.parametrize("batch", [torch.ones(2, 2), np.ones(3), (torch.ones(3), np.ones(3))])
def test_a_header_that_is_cut_off_is_an_error(batch: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        decode(Encoder().encode(batch).header[:-4], [])


# ------------------------------------------------------------------------------------------------- exceptions


def caught(error: BaseException) -> BaseException:
    """Return ``error`` with a traceback."""
    try:
        raise error
    except BaseException as raised:
        return raised


def arrive(error: BaseException) -> Exception:
    return decode_error(encode_error(caught(error)), WHERE)


class NeedsTwo(Exception):
    def __init__(self, a: Any, b: Any) -> None:
        super().__init__(f"needs {a} and {b}")
        self.a, self.b = a, b


class NeedsTwoAndPickles(NeedsTwo):
    def __reduce__(self) -> Any:
        return type(self), (self.a, self.b)


def test_an_exception_arrives_as_its_type_with_torchdatas_words() -> None:
    got = arrive(ValueError("bad sample number 5"))
    assert type(got) is ValueError
    lines = str(got).splitlines()
    assert lines[:2] == [f"Caught ValueError {WHERE}.", "Original Traceback (most recent call last):"]
    assert "in caught" in str(got)
    assert lines[-1] == "ValueError: bad sample number 5"
    assert got.__cause__ is None


def test_a_key_error_shows_its_line_breaks() -> None:
    class Missing(KeyError):
        pass

    for kind in (KeyError, Missing):
        assert f"{WHERE}.\nOriginal Traceback" in str(arrive(kind("label")))


def test_an_exception_keeps_its_attributes() -> None:
    error = ValueError("bad")
    error.sample, error.tensor, error.lock = 5, torch.ones(2), threading.Lock()  # type: ignore[attr-defined]
    vars(error)[3] = "not a name"  # type: ignore[index]
    got = arrive(error)
    assert vars(got).keys() == {"sample", "tensor"}
    assert_same(vars(got)["tensor"], torch.ones(2))


def test_an_os_error_keeps_its_number() -> None:
    got = arrive(FileNotFoundError(2, "No such file or directory", "a.png"))
    assert type(got) is FileNotFoundError
    assert got.errno == 2
    assert str(got).startswith("Caught FileNotFoundError")
    assert "'a.png'" in str(got)


def test_an_import_error_keeps_the_modules_name() -> None:
    got = arrive(ModuleNotFoundError("No module named 'x'", name="x"))
    assert (type(got), got.name) == (ModuleNotFoundError, "x")  # type: ignore[attr-defined]


def test_an_exception_that_needs_more_arguments_arrives_as_its_type() -> None:
    got = arrive(NeedsTwo("this", [1]))
    assert type(got) is NeedsTwo
    assert (got.a, got.b) == ("this", [1])
    assert str(got).startswith(f"Caught NeedsTwo {WHERE}.\nOriginal")
    assert "needs this and [1]" in str(got)


def test_an_exception_that_pickles_itself_arrives_as_the_original_with_the_text_as_its_cause() -> None:
    got = arrive(NeedsTwoAndPickles("this", "that"))
    assert type(got) is NeedsTwoAndPickles
    assert (got.a, got.b) == ("this", "that")
    assert f"Caught NeedsTwoAndPickles {WHERE}." in str(got)
    assert type(got.__cause__) is WorkerError
    assert f"Caught NeedsTwoAndPickles {WHERE}." in str(got.__cause__)


def test_an_exception_whose_text_is_not_in_its_arguments_keeps_them() -> None:
    got = arrive(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"))
    assert type(got) is UnicodeDecodeError
    assert got.args == ("utf-8", b"\xff", 0, 1, "invalid start byte")
    assert got.reason == "invalid start byte"
    assert WHERE in str(got.__cause__)


def test_an_exception_that_prints_an_attribute_shows_the_text_as_its_cause() -> None:
    class Printed(Exception):
        def __init__(self, text: str) -> None:
            super().__init__(text)
            self.text = text

        def __str__(self) -> str:
            return self.text

    got = arrive(Printed("short"))
    assert (type(got), str(got)) == (Printed, "short")
    assert f"Caught Printed {WHERE}." in str(got.__cause__)


class Unpicklable(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


def test_an_exception_that_cannot_be_pickled_still_says_what_it_said() -> None:
    got = arrive(Unpicklable("carries a lock"))
    assert type(got) is Unpicklable
    assert "carries a lock" in str(got)


def test_an_exception_whose_pickling_raises_degrades_to_its_type_and_text() -> None:
    class Refuses(ValueError):
        def __reduce__(self) -> Any:
            raise OSError("not now")

    got = arrive(Refuses("no pickle"))
    assert type(got) is Refuses
    assert "no pickle" in str(got)


def test_an_exception_with_a_broken_str_arrives() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    got = arrive(Broken("x"))
    assert type(got) is Broken
    assert f"Caught Broken {WHERE}." in str(got.__cause__)


def test_an_exception_whose_traceback_cannot_be_printed_arrives_with_its_name() -> None:
    class NoChain(Exception):
        @property
        def __cause__(self) -> Any:  # type: ignore[override]
            raise RuntimeError("no chain")

    got = arrive(NoChain("x"))
    assert "NoChain, whose traceback cannot be printed (RuntimeError while trying)" in str(got)


def test_a_type_whose_instances_cannot_take_the_text_becomes_a_worker_error() -> None:
    class ReadOnly(Exception):
        args = property(lambda self: ("fixed",))  # type: ignore[assignment]

        def __str__(self) -> str:
            return "fixed"

    got = arrive(ReadOnly("x"))
    assert type(got) is WorkerError
    assert f"Caught ReadOnly {WHERE}." in str(got)


def test_a_type_that_makes_something_else_becomes_a_worker_error() -> None:
    class Elusive(Exception):
        def __new__(cls, *arguments: Any) -> Any:
            return ValueError(*arguments) if arguments else super().__new__(cls)

    assert type(arrive(Elusive())) is Elusive
    stranger = caught(Elusive())
    stranger.args = ("x",)
    assert type(decode_error(encode_error(stranger), WHERE)) is WorkerError


STOPS = [SystemExit("leaving"), KeyboardInterrupt("leaving"), GeneratorExit("leaving"),
         StopIteration("leaving"), StopAsyncIteration("leaving")]  # fmt: skip


@pytest.mark.parametrize("error", STOPS, ids=lambda each: type(each).__name__)
def test_what_would_end_the_loop_or_the_process_becomes_a_worker_error(error: BaseException) -> None:
    got = arrive(error)
    assert type(got) is WorkerError
    assert str(got).startswith(f"Caught {type(error).__name__} {WHERE}.\n")
    assert "leaving" in str(got)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no exception groups")
def test_an_exception_group_arrives_with_its_members() -> None:
    got = arrive(ExceptionGroup("two", [ValueError("a"), OSError("b")]))  # noqa: F821
    assert [type(each) for each in got.exceptions] == [ValueError, OSError]  # type: ignore[attr-defined]
    assert "ValueError: a" in str(got.__cause__)


def test_the_remote_causes_are_in_the_text() -> None:
    error = ValueError("outer")
    error.__cause__ = caught(KeyError("inner"))
    assert "KeyError: 'inner'" in str(arrive(error))


def test_a_class_that_is_missing_here_degrades_to_a_worker_error() -> None:
    report = msgspec.msgpack.decode(encode_error(caught(ValueError("x"))), type=codec._Report)
    elsewhere = pickle.dumps(signal.SIGTERM).replace(b"signal", b"sigmal")
    for kind in (elsewhere, pickle.dumps(5), b"junk", None):
        payload = msgspec.msgpack.encode(msgspec.structs.replace(report, kind=kind))
        assert type(decode_error(payload, WHERE)) is WorkerError


def test_an_attribute_whose_class_is_missing_here_is_left_out() -> None:
    report = msgspec.msgpack.decode(encode_error(caught(ValueError("x"))), type=codec._Report)
    changed = msgspec.structs.replace(report, attributes={"a": b"junk", "b": pickle.dumps(2)})
    assert vars(decode_error(msgspec.msgpack.encode(changed), WHERE)) == {"b": 2}


def test_names_of_files_that_are_no_utf8_do_not_stop_the_report() -> None:
    assert r"a\udcff.png" in str(arrive(ValueError("a\udcff.png")))


def test_a_report_has_a_bounded_size() -> None:
    error = NeedsTwo("x" * 10_000_000, torch.ones(1_000_000))
    payload = encode_error(caught(error))
    assert len(payload) < 1_000_000
    text = str(decode_error(payload, WHERE))
    assert "characters ...]" in text
    assert f"Caught NeedsTwo {WHERE}.\nOriginal Traceback" in text
    assert type(decode_error(payload, WHERE)) is NeedsTwo


def test_many_small_attributes_are_left_out_together() -> None:
    error = ValueError("x")
    vars(error).update({f"a{i}": "y" * 1000 for i in range(200)})
    assert vars(arrive(error)) == {}


def test_bytes_that_are_no_report_are_a_stream_error() -> None:
    for payload in (b"", b"junk", encode_error(ValueError())[:-3]):
        with pytest.raises(
            StreamError, match="in worker process 0 on cpu1:5555 arrived as bytes that are no exception"
        ):
            decode_error(payload, WHERE)


def test_an_exception_of_a_local_class_comes_back_from_a_worker_as_the_users_own() -> None:
    class Corrupt(ValueError):
        pass

    def fail() -> bytes:
        from rpc_reading_service.codec import encode_error

        return encode_error(Corrupt("sample 3"))

    assert type(decode_error(wire(run_elsewhere(fail)), WHERE)) is Corrupt
