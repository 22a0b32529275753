"""Page-locked memory: where there is no device, ordinary tensors stand in for what torch's allocator would give."""

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from daemons import running
from torchdata.dataloader2 import DataLoader2
from torchdata.datapipes.iter import IterableWrapper

from rpc_reading_service import RPCReadingService, pinning, recycling

N = 40
LARGE = 3 << 20
"""More than a message of ZeroMQ's holds."""

needs_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def lent(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Address and bytes of all that was taken for page-locked."""
    found: dict[int, int] = {}

    def page_locked(nbytes: int) -> torch.Tensor:
        memory = torch.empty(nbytes, dtype=torch.uint8)
        found[memory.data_ptr()] = nbytes
        return memory

    monkeypatch.setattr(pinning, "_page_locked", page_locked)
    return found


@pytest.fixture
def device(lent: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def where(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data)


def test_what_is_large_is_lent_by_torch(lent: dict[int, int]) -> None:
    least = recycling.LEAST_BYTES
    small, large = pinning.allocate(least - 1), pinning.allocate(least)
    assert (small.nbytes, large.nbytes) == (least - 1, least)
    assert not small.readonly
    assert not large.readonly
    assert lent == {where(large): least}


def test_without_page_locked_memory_it_is_received_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(nbytes: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA error: out of memory")

    monkeypatch.setattr(pinning, "_page_locked", exhausted)
    assert pinning.allocate(LARGE).nbytes == LARGE


def test_the_device_of_whoever_asks_is_the_one_that_begins(device: None, lent: dict[int, int]) -> None:
    """And not that of the thread which receives first."""
    assert pinning.can_pin()
    assert list(lent.values()) == [1]


# Through a session.


@contextlib.contextmanager
def load(pipe: Any, keys: Path | None, **options: Any) -> Iterator["DataLoader2[Any]"]:
    flags = [] if keys is None else ["--keys", str(keys)]
    with running("--port", "0", "--slots", "2", *flags) as daemon:
        service = RPCReadingService(
            [daemon.address], keys=keys, pin_memory=True, timeout=60.0, pickle_by_value=(__name__,), **options
        )
        with DataLoader2(pipe, reading_service=service) as loader:
            yield loader


def sample(nbytes: int, number: int) -> dict[str, Any]:
    return {"image": torch.full((nbytes,), number, dtype=torch.uint8), "label": number}


def samples(nbytes: int) -> Any:
    return IterableWrapper(range(N)).sharding_filter().map(functools.partial(sample, nbytes))


@pytest.mark.parametrize("nbytes", [recycling.LEAST_BYTES, LARGE])
@pytest.mark.parametrize("has_keys", [False, True])
def test_batches_are_received_where_torch_lends(
    nbytes: int, has_keys: bool, device: None, lent: dict[int, int], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[int] = []

    def pin(batch: dict[str, Any]) -> dict[str, Any]:
        pinned.append(batch["label"])
        return batch

    monkeypatch.setattr(pinning, "pin", pin)
    with load(samples(nbytes), folder if has_keys else None, transport="tcp") as loader:
        batches = list(loader)
    assert pinned == [batch["label"] for batch in batches] == list(range(N))
    images = [batch["image"] for batch in batches]
    assert all(torch.equal(image, torch.full_like(image, number)) for number, image in enumerate(images))
    assert {lent[image.untyped_storage().data_ptr()] for image in images} == {nbytes}
    assert len({image.data_ptr() for image in images}) == N


@needs_device
@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("nbytes", [10, LARGE])
def test_all_tensors_of_a_batch_are_pinned(transport: str, nbytes: int) -> None:
    with load(samples(nbytes), None, transport=transport) as loader:
        for number, batch in enumerate(loader):
            assert batch["image"].is_pinned()
            assert torch.equal(batch["image"], torch.full((nbytes,), number, dtype=torch.uint8))


@needs_device
def test_memory_that_a_device_still_reads_is_not_received_into() -> None:
    """The device is busy before it copies each batch, of which nothing is left here by then."""
    with load(samples(LARGE), None, transport="tcp") as loader:
        copies = []
        for batch in loader:
            torch.cuda._sleep(20_000_000)
            copies.append(batch["image"][1:].to("cuda", non_blocking=True))
            del batch
    torch.cuda.synchronize()
    assert [copy.unique().tolist() for copy in copies] == [[number] for number in range(N)]
