"""Whether what arrived is what was sent: values, types, dtypes, shapes and layouts, bit for bit."""

from typing import Any

import numpy as np
import torch


def bits(tensor: torch.Tensor) -> bytes:
    """The elements in row-major order, as bytes."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[plain.itemsize]
    return plain.view(carrier).numpy().tobytes()


def assert_same(got: Any, sent: Any) -> None:
    """Assert deep equality."""
    assert type(got) is type(sent)
    if isinstance(sent, torch.Tensor):
        assert_same_tensor(got, sent)
    elif isinstance(sent, np.ndarray):
        assert_same_array(got, sent)
    elif isinstance(sent, dict):
        assert list(got) == list(sent)
        assert_same(list(got.values()), list(sent.values()))
    elif isinstance(sent, (list, tuple)):
        assert len(got) == len(sent)
        for a, b in zip(got, sent, strict=True):
            assert_same(a, b)
    else:
        assert got == sent


def assert_same_tensor(got: torch.Tensor, sent: torch.Tensor) -> None:
    assert (got.dtype, got.layout, got.requires_grad) == (sent.dtype, sent.layout, sent.requires_grad)
    assert got.is_nested == sent.is_nested
    if sent.is_nested:
        assert_same(list(got.unbind()), list(sent.unbind()))
        return
    assert got.shape == sent.shape
    if sent.layout is torch.strided:
        assert bits(got) == bits(sent)
    else:
        assert_same(got.to_dense(), sent.to_dense())


def assert_same_array(got: Any, sent: Any) -> None:
    assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
    assert got.flags.writeable
    if sent.dtype.hasobject:
        assert_same(got.ravel().tolist(), sent.ravel().tolist())
    else:
        assert got.tobytes() == sent.tobytes()
