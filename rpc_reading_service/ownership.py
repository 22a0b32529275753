"""Whose memory a batch is: what user code can still reach must be copied before it goes on; nothing else need be."""

import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch

SOLE_BYTES = 64 << 10
"""A smaller tensor is copied sooner than it is found out whose it is; ``lanes.TOGETHER_BYTES`` is that, too."""

_CAN_TELL = hasattr(torch._C, "_storage_Use_Count") and hasattr(torch.Tensor, "_use_count")
"""How torch's own CUDA graph trees count who holds a tensor. Where torch cannot, all tensors count as shared."""


def sole(holder: list[Any]) -> set[int]:
    """Addresses of the large tensors of a batch that nobody else holds: no user code can reach their memory.

    Args:
        holder: holds the batch, and nobody else does
    """
    found: set[int] = set()
    try:
        if _CAN_TELL:
            _search(holder, found)
    except RecursionError:  # so deep that only the encoder may say whether it is too deep
        return set()
    return found


def _search(container: Any, found: set[int]) -> None:
    for item in _items(container):
        if sys.getrefcount(item) != _REFERENCES:
            continue
        if type(item) is not torch.Tensor:
            _search(item, found)
        elif _owns_its_memory(item):
            found.add(item.data_ptr())


def _items(container: Any) -> Iterable[Any]:
    kind = type(container)
    items: Iterable[Any] = container.values() if kind is dict else container
    return items if kind in (list, tuple, dict) else ()


def _owns_its_memory(tensor: torch.Tensor) -> bool:
    """Whether it is large, and only this object leads to it: no view, array or capsule, nothing that torch holds."""
    is_plain = tensor.layout is torch.strided and tensor.device.type == "cpu"  # others may not even have a size
    return is_plain and tensor.nbytes >= SOLE_BYTES and _holders(tensor) == _HOLDERS


def _holders(tensor: Any) -> tuple[Any, ...]:
    """Who holds a tensor and its storage, in C++ and in Python."""
    storage = tensor.untyped_storage()
    uses = torch._C._storage_Use_Count(storage._cdata)
    references = weakref.getweakrefcount(tensor), weakref.getweakrefcount(storage), sys.getrefcount(storage)
    return *references, tensor._use_count(), uses, storage.resizable(), storage.is_shared()


def _of_a_sole_one() -> tuple[int, tuple[Any, ...]]:
    """What the counts are of a tensor that only a container holds: that depends on the versions of Python and torch."""
    for item in _items([torch.empty(1)]):
        return sys.getrefcount(item), _holders(item)
    raise AssertionError


_REFERENCES, _HOLDERS = _of_a_sole_one() if _CAN_TELL else (0, ())
