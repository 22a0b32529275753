"""A batch as bytes and back: one small header, and the large buffers beside it.

    Encoded.header    a pickle (protocol 5) of the batch's structure, with every buffer under INLINE_LIMIT inside it;
                      of a plain batch no pickle, but the same in a form that is cheaper to make and to read
    Encoded.buffers   the other buffers, in the order in which the header asks for them: the sender's memory

Pickle gives what the user put there back as he put it there: any type, identity within a batch, the classes' own
reducers. It is slow at one thing only, the bytes of tensors and arrays, so those alone are taken out of it: a dense
tensor or array becomes (buffer, dtype, shape, strides), where the buffer is the span of memory that its elements fill.
No buffer of INLINE_LIMIT or more is copied here, on either side, unless its elements do not lie densely.

A plain batch, the commonest by far, is one dense tensor or array, or a flat tuple, list or dict of a few of these and
of simple values: what the collating of samples yields. Most of its header is the same from batch to batch, and both
sides make that part once; see "plain batches" below. It comes back as its pickle would, or it is pickled.

A class that travelled to the worker by value (from ``__main__``, or local to a function) travels back as its
cloudpickle identity, so that the training process gets its own class and not a copy; that is why the pickler builds
on cloudpickle's.

The decoded tensors and arrays look straight at the buffers given to ``decode`` and keep them alive: these must be
writable, belong to nobody else, and should start at a multiple of 64 bytes, as torch's own allocations do. If a tensor
has lent the memory (see ``pinning``), a decoded tensor is of that tensor's storage, and an array is a copy.
``bytes`` and ``str`` stay in the header whatever their size, at the price of one copy: out of band they would come
back as another type.

An exception travels as text, plus whatever of its type and attributes can be pickled; see ``encode_error``.
"""

import contextlib
import dataclasses
import functools
import io
import itertools
import math
import operator
import pickle
import reprlib
import struct
import traceback
import types
import warnings
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import cloudpickle
import msgspec
import numpy as np
import torch
from cloudpickle import cloudpickle as _cloudpickle
from torch._tensor import _rebuild_from_type_v2
from torch._utils import _rebuild_tensor_v2, _rebuild_tensor_v3

from rpc_reading_service.errors import BatchError, StreamError, WorkerError

PICKLE_PROTOCOL = 5

INLINE_LIMIT = 4096
"""Bytes from which a buffer leaves the header: a frame of its own costs some microseconds, copying 4 KiB under one."""

REMEMBERED = 1024
"""Layouts, and forms, of plain batches that either side remembers."""

FLAT_LIMIT = 16
"""Values of a plain collection: larger ones are mostly numbers, which pickle writes faster than they are looked at."""

_Reduced = Any  # what a pickle reducer returns: a tuple, or NotImplemented for "as you would have done"

# One row a dtype: its name in torch, and the dtype of the same width as which numpy can see its memory. The code on the
# wire is the row's number: only ever append. A row that this torch does not know is left out of the two tables below.
_DTYPES = (
    ("bool", "bool"),
    ("uint8", "uint8"),
    ("int8", "int8"),
    ("int16", "int16"),
    ("int32", "int32"),
    ("int64", "int64"),
    ("float16", "float16"),
    ("float32", "float32"),
    ("float64", "float64"),
    ("complex64", "complex64"),
    ("complex128", "complex128"),
    ("bfloat16", "int16"),
    ("complex32", "int32"),
    ("uint16", "uint16"),
    ("uint32", "uint32"),
    ("uint64", "uint64"),
    ("float8_e4m3fn", "uint8"),
    ("float8_e4m3fnuz", "uint8"),
    ("float8_e5m2", "uint8"),
    ("float8_e5m2fnuz", "uint8"),
    ("float8_e8m0fnu", "uint8"),
    ("float4_e2m1fn_x2", "uint8"),
    ("bits8", "uint8"),
    ("bits16", "int16"),
    ("bits1x8", "uint8"),
    ("bits2x4", "uint8"),
    ("bits4x2", "uint8"),
)
_CODES: dict[torch.dtype, int] = {
    getattr(torch, name): code for code, (name, _) in enumerate(_DTYPES) if hasattr(torch, name)
}
_TORCH_DTYPES: dict[int, torch.dtype] = {code: dtype for dtype, code in _CODES.items()}
_NUMPY_DTYPES = [np.dtype(seen_as) for _, seen_as in _DTYPES]
_CARRIERS: dict[int, torch.dtype] = {
    code: getattr(torch, seen_as) for code, (name, seen_as) in enumerate(_DTYPES) if name != seen_as
}

# Array dtypes that travel as a short string, which pickles ten times as fast as the dtype itself.
_PLAIN_ARRAYS: dict[np.dtype[Any], str] = {
    np.dtype(code): code
    for code in ("|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16")
}

# In a layout their codes follow those of tensors; there, too, only ever append.
_FIRST_ARRAY = 128
_ARRAY_DTYPES = list(_PLAIN_ARRAYS)
_ARRAY_CODES = {dtype: code for code, dtype in enumerate(_ARRAY_DTYPES, _FIRST_ARRAY)}

_SCALARS = frozenset((int, float, str, bytes, bool, type(None)))


class Encoded(NamedTuple):
    """A batch ready for the wire."""

    header: bytes
    """What ``decode`` reads."""
    buffers: list[memoryview]
    """Contiguous views of format ``B``; each keeps alive the tensor or array whose memory it shows."""


_encoded: Callable[[tuple[bytes, list[memoryview]]], Encoded] = functools.partial(tuple.__new__, Encoded)
"""What ``Encoded(header, buffers)`` comes to, without its call of a Python function: there is one for each batch."""


class Encoder:
    """Encodes batches one at a time; not for use by two threads at once."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._buffers: list[memoryview] = []
        sink = types.SimpleNamespace(write=self._chunks.append)  # the pickler hands over whole chunks: no file needed
        self._pickler = _Pickler(sink, PICKLE_PROTOCOL, self._keep_in_band)

    def encode(self, batch: Any) -> Encoded:
        """Return header and buffers of ``batch``, which share its memory.

        Raises BatchError for what cannot be pickled. Other exceptions of the batch's own ``__reduce__`` or
        ``__getstate__``, such as the OSError of a truncated image that is read only now, are raised as they are.
        """
        kind = type(batch)
        if kind in _SCALARS:
            return _encoded((pickle.dumps(batch, PICKLE_PROTOCOL), []))
        shortcut = _SHORTCUTS.get(kind)
        encoded = None if shortcut is None else shortcut(kind, batch, self._dump)
        if encoded is not None:
            return encoded
        try:
            return self._dump(batch)
        except (pickle.PicklingError, TypeError, AttributeError) as cause:
            if not _is_about_pickling(cause):
                raise
            raise self._refusal(batch, cause) from cause

    def _dump(self, batch: Any, before: Iterable[bytes] = ()) -> Encoded:
        """Pickle ``batch``; in the header ``before`` comes before that, so that nothing is copied once more."""
        buffers = self._buffers = []
        self._chunks.extend(before)
        try:
            self._pickler.dump(batch)
            return _encoded((b"".join(self._chunks), buffers))
        finally:
            self._buffers = []  # keep nothing of the batch alive
            self._chunks.clear()
            self._pickler.clear_memo()
            self._pickler.globals_ref.clear()

    def _keep_in_band(self, buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < INLINE_LIMIT:
            return True
        self._buffers.append(raw)
        return False

    def _refusal(self, batch: Any, cause: Exception) -> BatchError:
        """Say what in ``batch`` cannot be pickled, where it is, why, and what to do."""
        path, culprit, cause = self._find_culprit(batch, cause)
        what, why = _name_of(type(culprit)), str(cause).rstrip(".")
        return BatchError(f"{path} ({what}) cannot be pickled for the training process: {why}; {_remedy_for(cause)}.")

    def _find_culprit(self, batch: Any, cause: Exception) -> tuple[str, Any, Exception]:
        """Walk down to the innermost part of ``batch`` that fails when it is encoded alone."""
        path, culprit, seen = "batch", batch, {id(batch)}
        step = None if isinstance(cause.__cause__, RecursionError) else self._first_failing(batch, seen)
        while step is not None:
            suffix, culprit, cause = step
            path += suffix
            seen.add(id(culprit))
            step = self._first_failing(culprit, seen)
        return path, culprit, cause

    def _first_failing(self, value: Any, seen: set[int]) -> tuple[str, Any, Exception] | None:
        for suffix, child in _children(value):
            if id(child) not in seen and (failure := self._failure(child)) is not None:
                return suffix, child, failure
        return None

    def _failure(self, value: Any) -> Exception | None:
        try:
            self._dump(value)
        except Exception as failure:
            return failure if _is_about_pickling(failure) else None
        return None


def decode(header: bytes | bytearray | memoryview, buffers: Sequence[bytearray | memoryview]) -> Any:
    """Return the batch; its tensors and arrays show and own ``buffers``, which must be writable and are not copied."""
    tag = header[0]
    if tag == _VECTOR:
        return torch.frombuffer(bytearray(header[2:]), dtype=_TORCH_DTYPES[header[1]])
    if tag == _ALONE:
        return _decode_alone(bytes(header), buffers)
    if tag == _FLAT:
        return _decode_flat(bytes(header), buffers)
    return pickle.loads(header, buffers=buffers)


# --------------------------------------------------------------------------------------------------- pickling


class _UnsendableError(pickle.PicklingError):
    """Something that pickle might take but that must not travel; ``remedy`` says what to do instead."""

    def __init__(self, why: str, remedy: str) -> None:
        super().__init__(why)
        self.remedy = remedy


def _refuse_file(file: io.TextIOWrapper) -> _Reduced:
    """Without this, cloudpickle would read the whole file and send its text in a StringIO."""
    raise _UnsendableError(f"cannot pickle an open file, {file!r}", "read it in the graph, or yield its path")


class _Pickler(cloudpickle.Pickler):
    """cloudpickle's pickler with our own way of taking tensors, arrays, classes and functions."""

    dispatch_table: ClassVar[Mapping[type, Any]] = ChainMap(
        {io.TextIOWrapper: _refuse_file}, cloudpickle.Pickler.dispatch_table
    )

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._classes: weakref.WeakKeyDictionary[type, _Reduced] = weakref.WeakKeyDictionary()

    def reducer_override(self, value: Any) -> _Reduced:
        """Called by the C pickler for everything except the built-in types that it writes by itself."""
        kind = type(value)
        if kind is torch.Tensor:
            return _reduce_tensor(value)
        if kind is np.ndarray:
            return _reduce_array(value)
        if kind is types.FunctionType:
            return NotImplemented if value.__module__ == __name__ else self._reduce_function(value)
        if issubclass(kind, type):
            return self._reduce_class(value)
        if issubclass(kind, torch.Tensor):
            return _reduce_tensor_subclass(value)
        if kind is np.memmap:
            return _reduce_memmap(value)
        return NotImplemented

    def _reduce_function(self, function: types.FunctionType) -> _Reduced:
        reduced = super().reducer_override(function)
        if reduced is not NotImplemented and "<" in function.__qualname__:
            raise _UnsendableError(
                f"cannot pickle {function.__qualname__}, which cannot be imported by its name",
                "define it at the top level of a module, or call it in the graph and yield its result",
            )
        return reduced

    def _reduce_class(self, cls: type) -> _Reduced:
        reduced = self._classes.get(cls)
        if reduced is None:
            reduced = super().reducer_override(cls)
            if reduced is not NotImplemented and len(reduced) > 2:  # it has a state to set, so it goes by value
                by_value = cloudpickle.dumps(cls, PICKLE_PROTOCOL)
                reduced = _class_by_value, (_cloudpickle._get_or_create_tracker_id(cls), by_value)
            self._classes[cls] = reduced
        return reduced


def _class_by_value(identity: str, by_value: bytes) -> type:
    """Return the class that cloudpickle knows by ``identity``, else make it.

    cloudpickle alone would find it too, but would then set all its attributes to what they were in the worker: methods
    would see copies of the script's globals, and counters kept on the class would jump back with each batch.
    """
    known = _cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(identity)
    return pickle.loads(by_value) if known is None else known  # type: ignore[no-any-return]


# ---------------------------------------------------------------------------------------------- plain batches

# The header's first byte tells these from a pickle, which begins with 0x80:
#
#     _VECTOR  code  data              a small tensor of one dimension
#     layout  [data]                   any other tensor or array, small with its data; a layout begins with _ALONE
#     form  [data ...]  [pickle]       a collection: the data of its small tensors, and its other values as one list
#
# A layout is dtype, shape and strides, a form the collection's type, keys and layouts. Batches of one stream have them
# in common, so both sides look them up: the sender by what they say, the receiver by their bytes.

_VECTOR = 1
_ALONE = 2
_FLAT = 3

_LAYOUT_BYTES = 4
"""What a layout begins with: ``_ALONE``, its length, code, dimensions. Then comes the shape, and unless they are those
of C order the strides, 8 bytes a number."""

_MAX_NDIM = 15
"""With more dimensions the length would not fit into its byte."""

_FORM = struct.Struct("<BI")
"""What a form begins with: ``_FLAT``, its length. Then come which of the next it is, keys and layouts (None: not a
tensor), pickled."""

_COLLECTIONS = (tuple, list, dict)

# What is looked up are plain tuples: unpacking a NamedTuple takes longer, once a tensor.

_Layout = tuple[bytes, bytes, tuple[int, ...] | None, bool]
"""For the sender. The layout, empty for what is not dense; the head, which is what the header of such a tensor alone
begins with; the order in which the dimensions lie in memory, None for C's; whether the data go into the header."""

_Leaf = tuple[Callable[..., Any], Any, tuple[int, ...], tuple[int, ...] | None, int, int]
"""For the receiver, one tensor. Who makes it of its memory and the next three: dtype or code, shape, strides (None for
C order); where in the header its data begin and end, the latter 0 if a buffer holds them."""

_Plan = tuple[type, tuple[str, ...], list[_Leaf | None], int, int]
"""For the receiver, a collection. Its type; keys, of a dict; a leaf, or None, for each value; how many of the leaves
are in buffers; where in the header the pickle of the others begins, 0 if there are none."""

_Dump = Callable[..., Encoded]
"""``Encoder._dump``."""

_Taken = tuple[bytes, bytes, bytes | memoryview]
"""Layout, head, and the memory: bytes if it goes into the header."""

_layouts: dict[tuple[int, tuple[int, ...], tuple[int, ...]], _Layout] = {}
_forms: dict[tuple[Any, ...], bytes] = {}
_leaves: dict[bytes, _Leaf] = {}
_plans: dict[bytes, _Plan] = {}


def _remember(memory: dict[Any, Any], key: Any, value: Any) -> Any:
    if len(memory) >= REMEMBERED:
        memory.clear()
    memory[key] = value
    return value


# To encode; None stands for what is not plain.


def _encode_alone(kind: type, batch: Any, _: _Dump) -> Encoded | None:
    taken = _TAKERS[kind](batch)
    if taken is None:
        return None
    _layout, head, memory = taken
    return _encoded((head + memory, []) if type(memory) is bytes else (head, [memory]))  # type: ignore[list-item]


def _encode_flat(kind: type, batch: Any, dump: _Dump) -> Encoded | None:
    if len(batch) > FLAT_LIMIT:
        return None
    values = batch.values() if kind is dict else batch
    kinds = set(map(type, values))
    if kinds.isdisjoint(_TAKERS) or not kinds <= _FLAT_KINDS:
        return None
    if not kinds.isdisjoint(_SEQUENCES) and not all(map(_is_simple, values)):
        return None
    if len(set(map(id, values))) < len(batch) and _is_one_tensor_twice_in(values):
        return None
    keys = ()
    if kind is dict:
        keys = tuple(batch)
        if not _KEY_KINDS.issuperset(map(type, keys)):
            return None
    return _encode_values(kind, keys, values, dump)


def _is_simple(value: Any) -> bool:
    return type(value) not in _SEQUENCES or _SCALARS.issuperset(map(type, value))


def _is_one_tensor_twice_in(values: Iterable[Any]) -> bool:
    ids = [id(value) for value in values if type(value) in _TAKERS]
    return len(set(ids)) < len(ids)


def _encode_values(kind: type, keys: tuple[str, ...], values: Iterable[Any], dump: _Dump) -> Encoded | None:
    layouts: list[bytes | None] = []
    small: list[bytes] = []
    large: list[memoryview] = []
    others: list[Any] = []
    for value in values:
        take = _TAKERS.get(type(value))
        if take is None:
            layouts.append(None)
            others.append(value)
            continue
        taken = take(value)
        if taken is None:
            return None
        layout, _, memory = taken
        layouts.append(layout)
        (small if type(memory) is bytes else large).append(memory)  # type: ignore[arg-type]
    key = (kind, keys, *layouts)
    form = _forms.get(key) or _remember(_forms, key, _new_form(kind, keys, layouts))
    header = dump(others, (form, *small)).header if others else b"".join((form, *small))
    return _encoded((header, large))


def _new_form(kind: type, keys: tuple[str, ...], layouts: list[bytes | None]) -> bytes:
    content = pickle.dumps((_COLLECTIONS.index(kind), keys, layouts), PICKLE_PROTOCOL)
    return _FORM.pack(_FLAT, _FORM.size + len(content)) + content


def _take_tensor(tensor: torch.Tensor) -> _Taken | None:
    code = _CODES.get(tensor.dtype)
    if code is None or tensor.requires_grad or tensor.__dict__:
        return None
    try:  # torch refuses what is not one strided piece of main memory, or needs a look at its conjugate or negative bit
        array = (tensor.view(_CARRIERS[code]) if code in _CARRIERS else tensor).numpy()
    except (RuntimeError, TypeError):
        return None
    return _take(array, code)


def _take_array(array: np.ndarray[Any, Any]) -> _Taken | None:
    code = _ARRAY_CODES.get(array.dtype)
    return None if code is None or array.dtype.metadata is not None else _take(array, code)


def _take(array: np.ndarray[Any, Any], code: int) -> _Taken | None:
    key = code, array.shape, array.strides
    layout, head, order, small = _layouts.get(key) or _remember(_layouts, key, _new_layout(array, code))
    if not layout:
        return None
    if order is not None:
        array = array.transpose(order)
    if small:
        return layout, head, array.tobytes()
    memory = pickle.PickleBuffer(array).raw()  # type: ignore[arg-type]
    return layout, head, pickle.PickleBuffer(_writable(array)).raw() if memory.readonly else memory


_UNFIT: _Layout = (b"", b"", None, False)


def _new_layout(array: np.ndarray[Any, Any], code: int) -> _Layout:
    shape, strides = array.shape, array.strides
    order = None if array.flags.c_contiguous else _memory_order(array)
    dense = order is None or array.transpose(order).flags.c_contiguous
    if not dense or not array.size or array.ndim > _MAX_NDIM:
        return _UNFIT
    in_c_order = strides == _c_strides(shape, array.itemsize)
    numbers = shape if in_c_order else shape + strides
    length = _LAYOUT_BYTES + 8 * len(numbers)
    layout = struct.pack(f"<BBBB{len(numbers)}q", _ALONE, length, code, array.ndim, *numbers)
    small = array.nbytes < INLINE_LIMIT
    vector = small and in_c_order and array.ndim == 1 and code < _FIRST_ARRAY
    return layout, bytes((_VECTOR, code)) if vector else layout, order, small


def _c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    steps = itertools.accumulate(shape[:0:-1], operator.mul, initial=itemsize)
    return tuple(steps)[::-1][: len(shape)]


# To decode.


def _decode_alone(header: bytes, buffers: Sequence[Any]) -> Any:
    layout = header[: header[1]]
    leaf = _leaves.get(layout) or _remember(_leaves, layout, _new_leaf(layout, len(layout)))
    make, dtype, shape, strides, start, end = leaf
    if not end and not buffers:
        raise _too_few(buffers, 1)
    return make(bytearray(header[start:end]) if end else buffers[0], dtype, shape, strides)


def _decode_flat(header: bytes, buffers: Sequence[Any]) -> Any:
    form = header[: _FORM.unpack_from(header)[1]]
    kind, keys, leaves, apart, rest = _plans.get(form) or _remember(_plans, form, _new_plan(form))
    if len(buffers) < apart:
        raise _too_few(buffers, apart)
    large, others = iter(buffers), iter(pickle.loads(memoryview(header)[rest:]) if rest else ())
    values = []
    for leaf in leaves:
        if leaf is None:
            values.append(next(others))
        else:
            make, dtype, shape, strides, start, end = leaf
            values.append(make(bytearray(header[start:end]) if end else next(large), dtype, shape, strides))
    if kind is dict:
        return dict(zip(keys, values, strict=True))
    return values if kind is list else tuple(values)


def _too_few(buffers: Sequence[Any], wanted: int) -> pickle.UnpicklingError:
    return pickle.UnpicklingError(f"a batch came with {len(buffers)} buffers, but its header asks for {wanted}")


def _new_leaf(layout: bytes, start: int) -> _Leaf:
    """``start`` is where in the header the data would begin."""
    _, _, code, ndim, *numbers = struct.unpack(f"<BBBB{(len(layout) - _LAYOUT_BYTES) // 8}q", layout)
    shape, strides = tuple(numbers[:ndim]), tuple(numbers[ndim:]) or None
    is_array = code >= _FIRST_ARRAY
    dtype = _ARRAY_DTYPES[code - _FIRST_ARRAY] if is_array else _NUMPY_DTYPES[code]
    nbytes = math.prod(shape) * dtype.itemsize
    end = start + nbytes if nbytes < INLINE_LIMIT else 0
    if is_array:
        return _array, dtype, shape, strides, start, end
    if ndim == 1 and strides is None:
        return _vector, _TORCH_DTYPES[code], shape, None, start, end
    return _tensor, code, shape, strides, start, end


def _new_plan(form: bytes) -> _Plan:
    number, keys, layouts = pickle.loads(form[_FORM.size :])
    leaves: list[_Leaf | None] = []
    at, apart = len(form), 0
    for layout in layouts:
        leaf = None if layout is None else _new_leaf(layout, at)
        leaves.append(leaf)
        if leaf is not None:
            *_, end = leaf
            at = end or at
            apart += not end
    return _COLLECTIONS[number], keys, leaves, apart, at if None in leaves else 0


def _vector(buffer: Any, dtype: torch.dtype, shape: tuple[int], _strides: None) -> torch.Tensor:
    if _lender(buffer) is not None:
        return _tensor(buffer, _CODES[dtype], shape, None)
    return torch.frombuffer(buffer, dtype=dtype, count=shape[0])


# Exact types, as pickle alone knows what subclasses add.
_TAKERS: dict[type, Callable[[Any], _Taken | None]] = {torch.Tensor: _take_tensor, np.ndarray: _take_array}
_SEQUENCES = frozenset((tuple, list))
_FLAT_KINDS = _SCALARS | _SEQUENCES | frozenset(_TAKERS)
_KEY_KINDS = frozenset((str,))
_SHORTCUTS: dict[type, Callable[[type, Any, _Dump], Encoded | None]] = {
    **dict.fromkeys(_TAKERS, _encode_alone),
    **dict.fromkeys(_COLLECTIONS, _encode_flat),
}


# ---------------------------------------------------------------------------------------------------- tensors


def _reduce_tensor(tensor: torch.Tensor) -> _Reduced:
    code = _CODES.get(tensor.dtype)
    if tensor.layout is not torch.strided or tensor.is_nested or code is None:
        return _reduce_special(tensor)
    if not tensor.is_cpu:
        raise _UnsendableError(
            f"cannot pickle a tensor on {tensor.device}, as workers send from main memory",
            "yield tensor.cpu(), and move it to the device in the training process",
        )
    if tensor.requires_grad or tensor.__dict__:
        return _reduce_annotated(tensor, code)
    return _tensor, _tensor_parts(tensor, code)


def _reduce_annotated(tensor: torch.Tensor, code: int) -> _Reduced:
    """Reduce a tensor that requires grad or has attributes of the user's on it."""
    _refuse_graph(tensor)
    return _annotated_tensor, (*_tensor_parts(tensor.detach(), code), tensor.requires_grad, tensor.__dict__)


def _refuse_graph(tensor: torch.Tensor) -> None:
    if tensor.requires_grad and not tensor.is_leaf:
        raise _UnsendableError(
            "cannot pickle a tensor that requires grad and is not a leaf, as its autograd graph cannot follow it",
            "yield tensor.detach()",
        )


def _reduce_tensor_subclass(tensor: torch.Tensor) -> _Reduced:
    """Do as torch does, but where it would put the whole storage into the pickle let the dense tensor travel alone."""
    _refuse_graph(tensor)
    reduced = _torch_reduced(tensor)
    if reduced[0] is not _rebuild_from_type_v2 or reduced[1][0] not in _STORAGE_REBUILDERS:
        return reduced
    _, kind, _, state = reduced[1]
    with torch._C.DisableTorchFunctionSubclass():
        plain = tensor.detach().as_subclass(torch.Tensor).requires_grad_(tensor.requires_grad)
    return _rebuild_from_type_v2, (_same, kind, (plain,), state)


_STORAGE_REBUILDERS = (_rebuild_tensor_v2, _rebuild_tensor_v3)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _torch_reduced(tensor: torch.Tensor) -> _Reduced:
    return tensor.__reduce_ex__(PICKLE_PROTOCOL)  # type: ignore[no-untyped-call]


def _reduce_special(tensor: torch.Tensor) -> _Reduced:
    """Reduce a tensor that is not one dense span: its dense parts come back to ``_reduce_tensor``."""
    _refuse_graph(tensor)
    if tensor.layout is torch.sparse_coo:
        plain = tensor.detach()
        parts = plain._indices(), plain._values(), tuple(plain.shape), plain.is_coalesced()
        return _coo_tensor, (*parts, tensor.requires_grad)
    if tensor.layout in _COMPRESSED:
        return _compressed_tensor, (*_compressed_parts(tensor.detach()), tensor.layout, tensor.requires_grad)
    if tensor.is_mkldnn:
        return _mkldnn_tensor, (tensor.to_dense(),)
    if tensor.is_quantized:
        return _reduce_quantized(tensor)
    return _torch_reduced(tensor)


_COMPRESSED = (torch.sparse_csr, torch.sparse_bsr, torch.sparse_csc, torch.sparse_bsc)


def _compressed_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, ...]]:
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        outer, inner = tensor.crow_indices(), tensor.col_indices()
    else:
        outer, inner = tensor.ccol_indices(), tensor.row_indices()
    return outer, inner, tensor.values(), tuple(tensor.shape)


def _reduce_quantized(tensor: torch.Tensor) -> _Reduced:
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_channel_affine):  # the others have no clone()
        tensor = tensor.clone()  # torch pickles the whole storage, however small a view of it this is
    return _quantized_tensor, tuple(_torch_reduced(tensor))


def _tensor_parts(tensor: torch.Tensor, code: int) -> tuple[Any, int, tuple[int, ...], tuple[int, ...]]:
    if tensor.is_neg() or tensor.is_conj():
        tensor = tensor.resolve_conj().resolve_neg()
    carrier = _CARRIERS.get(code)
    array = (tensor if carrier is None else tensor.view(carrier)).numpy()
    buffer, strides = _span(array)
    return buffer, code, array.shape, strides


def _tensor(buffer: Any, code: int, shape: tuple[int, ...], strides: tuple[int, ...] | None) -> torch.Tensor:
    lender = _lender(buffer)
    if lender is not None:
        tensor = _of_storage(lender, _CARRIERS.get(code, _TORCH_DTYPES[code]), shape, strides)
    else:
        array = _array(buffer, _NUMPY_DTYPES[code], shape, strides)
        tensor = torch.from_numpy(array)
        if not array.size:
            tensor = tensor.new_empty(shape)  # numpy has no use for the strides of an empty array, and made them zero
    return tensor.view(_TORCH_DTYPES[code]) if code in _CARRIERS else tensor


def _lender(buffer: Any) -> torch.Tensor | None:
    """The tensor whose memory the buffer shows, from its start; see ``pinning``."""
    exporter: Any = buffer.obj if type(buffer) is memoryview else None
    base: Any = exporter.base if type(exporter) is np.ndarray else None
    return base if type(base) is torch.Tensor else None


def _of_storage(
    lender: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...] | None
) -> torch.Tensor:
    steps = [stride // dtype.itemsize for stride in strides or _c_strides(shape, dtype.itemsize)]
    return torch.empty(0, dtype=dtype, device="cpu").set_(lender.untyped_storage(), 0, shape, steps)


def _annotated_tensor(
    buffer: Any,
    code: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    requires_grad: bool,
    attributes: dict[str, Any],
) -> torch.Tensor:
    tensor = _tensor(buffer, code, shape, strides).requires_grad_(requires_grad)
    tensor.__dict__.update(attributes)
    return tensor


# The next two build what torch's own reducer would, minus its list of sparse tensors yet to be validated: only
# torch.load ever empties that, so with pickle it keeps every batch alive.


def _coo_tensor(
    indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], is_coalesced: bool, requires_grad: bool
) -> torch.Tensor:
    tensor = torch.sparse_coo_tensor(indices, values, shape, check_invariants=False, is_coalesced=is_coalesced)
    return tensor.requires_grad_(requires_grad)


def _compressed_tensor(
    outer: torch.Tensor,
    inner: torch.Tensor,
    values: torch.Tensor,
    shape: tuple[int, ...],
    layout: torch.layout,
    requires_grad: bool,
) -> torch.Tensor:
    tensor = torch.sparse_compressed_tensor(outer, inner, values, shape, layout=layout, check_invariants=False)
    return tensor.requires_grad_(requires_grad)


def _quantized_tensor(rebuild: Callable[..., torch.Tensor], arguments: tuple[Any, ...]) -> torch.Tensor:
    with warnings.catch_warnings():  # torch warns of storages that it has itself put into the pickle
        warnings.simplefilter("ignore", UserWarning)
        return rebuild(*arguments)


def _mkldnn_tensor(dense: torch.Tensor) -> torch.Tensor:
    return dense.to_mkldnn()


# ----------------------------------------------------------------------------------------------------- arrays


def _reduce_array(array: np.ndarray[Any, Any]) -> _Reduced:
    dtype = array.dtype
    if dtype.hasobject or not dtype.itemsize:  # its memory holds pointers, or nothing
        return array.__reduce_ex__(PICKLE_PROTOCOL)
    plain = _PLAIN_ARRAYS.get(dtype) if dtype.metadata is None else None
    buffer, strides = _span(array)
    return _array, (buffer, plain or dtype, array.shape, strides)


def _reduce_memmap(array: np.memmap[Any, Any]) -> _Reduced:
    """Arrives as numpy's own pickle of a memmap does: of that type, but in memory."""
    rebuild, parts = _reduce_array(array.view(np.ndarray))[:2]
    return (_memmap, parts) if rebuild is _array else NotImplemented


def _span(array: np.ndarray[Any, Any]) -> tuple[Any, tuple[int, ...]]:
    """Return the memory of ``array`` as one buffer and the strides to read it with.

    A dense array in whatever order of dimensions keeps it and is not copied; any other is copied into C order.
    """
    flat = array
    if not array.flags.c_contiguous:
        flat = array.transpose(_memory_order(array))
        if not flat.flags.c_contiguous:
            flat = array = array.copy("C")
    if flat.nbytes < INLINE_LIMIT:
        return bytearray(flat.tobytes()), array.strides
    if flat.dtype not in _ARRAY_CODES:  # datetimes, say, show nobody their memory
        flat = flat.reshape(-1).view(np.uint8)
    return pickle.PickleBuffer(_writable(flat)), array.strides


def _memory_order(array: np.ndarray[Any, Any]) -> tuple[int, ...]:
    return tuple(sorted(range(array.ndim), key=array.strides.__getitem__, reverse=True))


def _writable(array: np.ndarray[Any, Any]) -> Any:
    """Return ``array``, or a view of it that calls itself writable, so that the receiver's buffer is not locked."""
    return array if array.flags.writeable else np.asarray(_Unlocked(array))


class _Unlocked:
    """Shows numpy the memory of a read-only array as writable, and keeps the array alive; nobody here writes to it."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        interface = array.__array_interface__
        self.array = array
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def _array(buffer: Any, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...] | None) -> np.ndarray[Any, Any]:
    if _lender(buffer) is not None:
        buffer = bytearray(buffer)  # of an array's tensor torch would not know when a device has read it
    if type(buffer) is not bytearray:  # of a memoryview numpy would keep only the owner, this keeps the view as well
        buffer = pickle.PickleBuffer(buffer)
    array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, buffer, 0, strides)
    return array


def _memmap(buffer: Any, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.memmap[Any, Any]:
    return _array(buffer, dtype, shape, strides).view(np.memmap)


# --------------------------------------------------------------------------------- why something cannot be sent


def _is_about_pickling(error: Exception) -> bool:
    """Tell the machinery's "cannot pickle '_thread.lock' object" from a user's own TypeError in his ``__reduce__``."""
    if isinstance(error, pickle.PicklingError):
        return True
    return isinstance(error, (TypeError, AttributeError)) and "pickle" in str(error).lower()


def _remedy_for(cause: Exception) -> str:
    if isinstance(cause, _UnsendableError):
        return cause.remedy
    if isinstance(cause.__cause__, RecursionError):
        return "flatten the batch"
    return "leave it out of the batch, or turn it into tensors, arrays or plain values in the graph"


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what ``value`` holds, each with how to write its place: ``['image']``, ``[2]``, ``.label``."""
    if isinstance(value, dict):
        yield from ((f"[{reprlib.repr(key)}]", child) for key, child in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from ((f".{name}", child) for name, child in zip(value._fields, value, strict=False))
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", child) for index, child in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        yield from ((f".{name}", getattr(value, name)) for name in names if hasattr(value, name))


def _name_of(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


# ------------------------------------------------------------------------------------------------- exceptions


class _Report(msgspec.Struct, frozen=True, array_like=True):
    """An exception on the wire."""

    name: str
    """Name of its type."""
    text: str
    """Its traceback, as Python prints it."""
    kind: bytes | None
    """Its pickled type, if that can be pickled."""
    original: bytes | None
    """The pickled exception itself, if it can be pickled."""
    attributes: dict[str, bytes]
    """Those of its attributes that can be pickled, each on its own, so that one lock does not lose the others."""


ERROR_PART_LIMIT = 64 * 1024
"""Bytes or characters of each part of an exception, so that a tensor in an attribute does not swell the report."""

# Attributes that live outside __dict__ and can be set on a new instance without changing its text.
_HIDDEN_ATTRIBUTES: dict[type, tuple[str, ...]] = {OSError: ("errno",), ImportError: ("name", "path")}


class _Verbatim(str):
    """A text that is its own repr: KeyError prints the repr of its argument, and a traceback needs its line breaks."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def encode_error(error: BaseException) -> bytes:
    """Return ``error`` for ``decode_error``, in less than 1 MiB.

    Never raises: what cannot be pickled or printed, or is too large, is left out.
    """
    report = _Report(
        name=_clean(type(error).__name__),
        text=_shortened(_clean(_traceback_of(error))),
        kind=_pickled(type(error)),
        original=_pickled(error),
        attributes=_pickled_attributes(error),
    )
    return msgspec.msgpack.encode(report)


def _traceback_of(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception as problem:
        return f"{type(error).__name__}, whose traceback cannot be printed ({type(problem).__name__} while trying)\n"


def _shortened(text: str) -> str:
    """Cut out the middle of a text that is too long: where it began and what it came to matter most."""
    half = ERROR_PART_LIMIT // 2
    return (
        text if len(text) <= 2 * half else f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
    )


def _clean(text: str) -> str:
    """Escape lone surrogates, as in names of files that are not UTF-8: MessagePack takes none."""
    return text.encode("utf-8", "backslashreplace").decode()


def _hidden_attributes(error: BaseException) -> list[str]:
    return [name for kind, names in _HIDDEN_ATTRIBUTES.items() if isinstance(error, kind) for name in names]


def _pickled_attributes(error: BaseException) -> dict[str, bytes]:
    attributes = vars(error) | {name: getattr(error, name) for name in _hidden_attributes(error)}
    pickled = {_clean(name): _pickled(value) for name, value in attributes.items() if isinstance(name, str)}
    kept = {name: value for name, value in pickled.items() if value is not None}
    return kept if sum(map(len, kept.values())) <= ERROR_PART_LIMIT else {}


def _pickled(value: Any) -> bytes | None:
    sink = io.BytesIO()
    try:
        _Pickler(sink, PICKLE_PROTOCOL).dump(value)
    except Exception:  # whatever a user's __reduce__ may raise
        return None
    return sink.getvalue() if sink.tell() <= ERROR_PART_LIMIT else None


def decode_error(payload: bytes, where: str) -> Exception:
    """Return an exception of the type it had, whose text says ``where`` it was raised and shows the traceback there.

    ``where`` completes "Caught ValueError ...", for example ``in worker process 0 on cpu1:5555``. The result is a
    WorkerError when the type cannot be rebuilt here, and when raising it would end more than the caller's loop body:
    SystemExit, KeyboardInterrupt, StopIteration and their like. Raises StreamError if ``payload`` is none of
    ``encode_error``'s.
    """
    try:
        report = msgspec.msgpack.decode(payload, type=_Report)
    except msgspec.DecodeError as cause:
        raise StreamError(f"An exception {where} arrived as bytes that are no exception: {cause}.") from cause
    text = f"Caught {report.name} {where}.\nOriginal {report.text}"
    error = None
    with contextlib.suppress(Exception):  # whatever a user's class may raise while it is rebuilt
        error = _rebuilt(report, text)
    return WorkerError(text) if error is None else error


def _rebuilt(report: _Report, text: str) -> Exception | None:
    kind = pickle.loads(report.kind or b"")
    if not issubclass(kind, Exception) or issubclass(kind, (StopIteration, StopAsyncIteration)):
        return None
    message = _Verbatim(text) if issubclass(kind, KeyError) else text
    error = _instance(kind, message, report.original)
    if error is not None:
        _restore_attributes(error, report.attributes)
        _show(error, message)
    return error


def _instance(kind: type[Exception], message: str, original: bytes | None) -> Exception | None:
    """Make an instance with ``message``; else, as other arguments are wanted, the original; else one without init."""
    makers = (lambda: kind(message), lambda: pickle.loads(original or b""), lambda: kind.__new__(kind, message))
    for make in makers:
        with contextlib.suppress(Exception):
            error = make()
            if isinstance(error, kind):
                return error
    return None


def _restore_attributes(error: Exception, attributes: dict[str, bytes]) -> None:
    hidden = _hidden_attributes(error)
    for name, pickled in attributes.items():
        with contextlib.suppress(Exception):  # of a class that is missing here, say: the others are still worth having
            value = pickle.loads(pickled)
            if name in hidden:
                setattr(error, name, value)
            else:
                vars(error)[name] = value


def _show(error: Exception, message: str) -> None:
    """See to it that ``str(error)``, or at least its cause, shows ``message``."""
    if message in _text_of(error):
        return
    error.__cause__ = WorkerError(str(message))
    arguments = error.args
    error.args = (message,)
    if message not in _text_of(error):
        error.args = arguments


def _text_of(error: Exception) -> str:
    try:
        return str(error)
    except Exception:
        return ""
