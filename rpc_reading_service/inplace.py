"""Batches that are written where they are sent from: ``empty`` and ``collate``, for the user's graph.

In a worker ``empty`` gives memory that the client maps, or that the socket sends from. If nobody else holds the batch
when the graph hands it out, it is sent as it is, without the last copy; if somebody does, it is copied as any other.
Elsewhere, in the training process or in a test, both are the ordinary functions of torch.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data._utils import collate as _torch_collate

from rpc_reading_service import recycling


class _Source:
    """Where memory comes from: in a worker, its segments."""

    lend: Callable[[int], memoryview | None] | None = None

    def __reduce__(self) -> Any:
        return _Source, ()  # dill, with which torch may look through a graph, pickles modules with all that is in them


_source = _Source()


def lend_from(lend: Callable[[int], memoryview | None] | None) -> None:
    """Called by a worker: from now on memory comes from there."""
    _source.lend = lend


def empty(shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """As ``torch.empty``: a tensor with nothing in it yet, for a batch or a part of one.

    Args:
        shape: its dimensions
        dtype: torch's default if it is not given
    """
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    nbytes = math.prod(shape) * dtype.itemsize
    lend = _source.lend if nbytes >= recycling.LEAST_BYTES else None
    memory = None if lend is None else lend(nbytes)
    if memory is None:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def collate(batch: Any) -> Any:
    """As ``torch.utils.data.default_collate``, with the stacked tensors in memory from ``empty``."""
    functions = _torch_collate.default_collate_fn_map
    ours: dict[Any, Any] = {**functions, torch.Tensor: _stack}
    return _torch_collate.collate(batch, collate_fn_map=ours)


def _stack(batch: Sequence[torch.Tensor], *, collate_fn_map: dict[Any, Any] | None = None) -> Any:
    """One tensor of several; what is not plain and alike is left to torch."""
    first = batch[0]
    if not all(_is_like(first, tensor) for tensor in batch):
        default = _torch_collate.default_collate_fn_map[torch.Tensor]
        return default(batch, collate_fn_map=collate_fn_map)
    out = empty((len(batch), *first.shape), first.dtype)
    return torch.stack(list(batch), 0, out=out)


def _is_like(first: torch.Tensor, tensor: torch.Tensor) -> bool:
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.is_cpu and not tensor.is_nested
    return plain and not tensor.requires_grad and (tensor.dtype, tensor.shape) == (first.dtype, first.shape)
