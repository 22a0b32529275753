"""Page-locked memory, which a device reads by itself.

What is received lands there at once (``allocate``); what is small, or comes through shared memory, is copied there when
it is handed out (``pin``).

All of it is torch's own, since only torch's allocator knows of copies to a device that are still under way when the
user has let go of the tensor (``non_blocking=True``): it lends a block again when nothing looks at it any more, and the
streams that have read it are past that. It knows a block by the storage of the tensor that it has made, so that
``codec`` makes tensors of that storage, and not of its memory alone.
"""

import contextlib
import warnings
from typing import Any

import torch
from torchdata.datapipes.utils import pin_memory_fn

from rpc_reading_service import buffers, recycling


def can_pin() -> bool:
    """Whether there is a device; its context begins here, on the current device of the thread that asks."""
    if not torch.cuda.is_available():
        warnings.warn("pin_memory=True has no effect: no CUDA device is available", UserWarning, stacklevel=3)
        return False
    _page_locked(1)
    return True


def pin(batch: Any) -> Any:
    """The batch with all its tensors in page-locked memory, as ``DataLoader`` has it; those that are there stay."""
    return pin_memory_fn(batch, torch.cuda.current_device())


def allocate(nbytes: int) -> memoryview:
    """A writable buffer that nobody else can reach, not zeroed; page-locked, unless it is small."""
    if nbytes >= recycling.LEAST_BYTES:
        with contextlib.suppress(RuntimeError):  # there is no more; ``pin`` will say so, if there still is none then
            return _page_locked(nbytes).numpy().data  # which keeps the tensor
    return buffers.allocate(nbytes)


def _page_locked(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
