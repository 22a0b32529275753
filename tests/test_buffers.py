"""Recycled memory: it comes back when nobody looks at it any more, and never before.

The client's blocks and the shared segments are held to the same: ``Memory`` is either.
"""

import copy
import gc
import os
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rpc_reading_service import codec
from rpc_reading_service.buffers import Logbook, Pool
from rpc_reading_service.messages import Phase, WorkerReport
from rpc_reading_service.recycling import LEAST_BYTES
from rpc_reading_service.segments import Lent, Segments, attach

NBYTES = 96 << 10


def sent(nbytes: int, mark: int) -> tuple[bytes, memoryview]:
    """A batch that a worker encoded: so many bytes, every one of which is ``mark``."""
    marked = torch.full((nbytes,), mark, dtype=torch.uint8).view(torch.int32).reshape(-1, 2)
    header, (buffer,) = codec.Encoder().encode(marked)
    return header, buffer


class Received:
    """What a client receives into its own memory."""

    def __init__(self, keep: int) -> None:
        self.pool = Pool(keep)

    def receive(self, nbytes: int, mark: int) -> torch.Tensor:
        header, buffer = sent(nbytes, mark)
        memory = self.pool.allocate(nbytes)
        memory[:] = buffer
        tensor: torch.Tensor = codec.decode(header, [memory])
        return tensor

    @property
    def lent(self) -> int:
        return len(self.pool._lent)


class Shared:
    """What a worker writes and a client maps; beyond the budget, as in life, what the client receives."""

    def __init__(self, keep: int) -> None:
        self._received = Received(keep)
        self.segments = Segments(2 * keep)
        attachment = attach(os.getpid(), self.segments.offer)
        assert attachment is not None
        self.attachment = attachment
        self._lock = threading.Lock()  # a worker has one main thread

    def receive(self, nbytes: int, mark: int) -> torch.Tensor:
        header, buffer = sent(nbytes, mark)
        with self._lock:
            (lent,) = self.segments.place([buffer])
        if not isinstance(lent, Lent):
            return self._received.receive(nbytes, mark)
        views = self.attachment.look({0: lent.place}, [nbytes])
        tensor: torch.Tensor = codec.decode(header, [views[0]])
        return tensor

    @property
    def lent(self) -> int:
        return len(self.attachment._lent) + self._received.lent


Memory = Received | Shared
KINDS = pytest.mark.parametrize("kind", [Received, Shared])


# Every way that we know to look at a tensor's memory, or to take a copy of it.
LOOKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda t: t,
    "slice": lambda t: t[7:9],
    "one element": lambda t: t[-1, -1],
    "reshape": lambda t: t.reshape(2, -1),
    "transpose": lambda t: t.T,
    "other dtype": lambda t: t.view(torch.uint8)[100:],
    "detach": lambda t: t.detach(),
    "alias": lambda t: torch.ops.aten.alias(t),
    "parameter": lambda t: torch.nn.Parameter(t.view(torch.float32), requires_grad=False),
    "numpy": lambda t: t.numpy(),
    "slice of numpy": lambda t: t.numpy()[3:, 1],
    "view of a view of numpy": lambda t: t.numpy()[3:].view(np.uint8).reshape(-1)[::5],
    "as_tensor of numpy": lambda t: torch.as_tensor(t.numpy()[5:]),
    "from_numpy of a view": lambda t: torch.from_numpy(t.numpy().reshape(-1)[9:11]),
    "memoryview": lambda t: memoryview(t.numpy()),
    "slice of a memoryview": lambda t: memoryview(t.numpy()).cast("B")[64:128],
    "frombuffer": lambda t: np.frombuffer(memoryview(t.numpy()), np.uint8),
    "dlpack to torch": lambda t: torch.from_dlpack(t),
    "dlpack to numpy": lambda t: np.from_dlpack(t),
    "storage": lambda t: t.untyped_storage(),
    "tensor on the storage": lambda t: torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage(), 16, (32,), (1,)),
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "pickle out of band": lambda t: _out_of_band(t.numpy()),
    "deepcopy": lambda t: copy.deepcopy(t),
    "clone": lambda t: t.clone(),
}


def _out_of_band(array: np.ndarray[Any, Any]) -> Any:
    parts: list[pickle.PickleBuffer] = []
    return pickle.loads(pickle.dumps(array, 5, buffer_callback=parts.append), buffers=parts)


def holds_only(look: Any, mark: int) -> bool:
    if isinstance(look, torch.UntypedStorage):
        look = torch.empty(0, dtype=torch.uint8).set_(look)
    data = np.ascontiguousarray(look).reshape(-1).view(np.uint8)
    return bool((data == mark).all())


# ------------------------------------------------------------------------------------------------------- recycling


@KINDS
def test_memory_that_nobody_looks_at_is_used_again(kind: type[Memory]) -> None:
    memory = kind(keep=1 << 20)
    tensor = memory.receive(NBYTES, 1)
    before = tensor.data_ptr()
    del tensor
    assert memory.receive(NBYTES, 2).data_ptr() == before


@KINDS
def test_sizes_of_one_class_share_their_memory(kind: type[Memory]) -> None:
    memory = kind(keep=1 << 20)
    before = memory.receive(NBYTES, 1).data_ptr()
    assert memory.receive(NBYTES - 800, 2).data_ptr() == before


@KINDS
@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS.keys())
def test_memory_that_is_looked_at_is_not_used_again(kind: type[Memory], look: Callable[[torch.Tensor], Any]) -> None:
    memory = kind(keep=1 << 20)
    kept = look(memory.receive(NBYTES, 1))
    gc.collect()
    others = [memory.receive(NBYTES, 2) for _ in range(3)]
    assert holds_only(kept, 1)
    assert all(holds_only(other, 2) for other in others)


def test_no_more_free_memory_is_kept_than_allowed() -> None:
    pool = Pool(keep=3 * NBYTES)
    lent = [pool.allocate(NBYTES) for _ in range(10)]
    lent.clear()
    assert pool._shelf.nbytes <= 3 * NBYTES
    assert not pool._lent


def test_small_buffers_are_not_worth_recycling() -> None:
    pool = Pool(keep=1 << 20)
    assert len(pool.allocate(LEAST_BYTES - 1)) == LEAST_BYTES - 1
    assert not pool._lent


def test_memory_may_be_dropped_by_the_garbage_collector_in_the_midst_of_an_allocation() -> None:
    """In that thread, which holds the lock, so that it must neither wait for it nor forget the block."""
    pool = Pool(keep=1 << 20)
    buffer = [pool.allocate(NBYTES)]
    with pool._lock:
        buffer.clear()
    assert len(pool._returned) == 1
    kept = [pool.allocate(NBYTES)]
    assert not pool._returned
    assert len(pool._lent) == len(kept)


@KINDS
def test_what_was_received_outlives_the_loader(kind: type[Memory]) -> None:
    memory = kind(keep=1 << 20)
    tensor = memory.receive(NBYTES, 3)
    view = tensor[4:]
    del memory, tensor
    gc.collect()
    assert holds_only(view, 3)


# A user is anything that keeps some looks, drops others, in several threads, while batches go on arriving.


class User:
    """Keeps looks at batches; each of its batches has a mark that no other live batch has."""

    def __init__(self, memory: Memory, marks: "list[int]") -> None:
        self._memory = memory
        self._marks = marks
        self._kept: list[tuple[int, Any]] = []

    def take(self, nbytes: int, look: str) -> None:
        mark = self._marks.pop()
        self._kept.append((mark, LOOKS[look](self._memory.receive(nbytes, mark))))

    def drop(self, index: int) -> None:
        if self._kept:
            mark, look = self._kept.pop(index % len(self._kept))
            assert holds_only(look, mark)
            del look
            self._marks.append(mark)

    def check(self) -> None:
        for mark, look in self._kept:
            assert holds_only(look, mark)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.sampled_from([NBYTES, NBYTES // 8 * 7, 2 * NBYTES]), st.sampled_from([*LOOKS])),
        st.tuples(st.just("drop"), st.integers(0, 20)),
    ),
    max_size=40,
)


@KINDS
@given(steps=STEPS)
@settings(max_examples=40, deadline=None)
def test_nothing_that_is_kept_ever_changes(kind: type[Memory], steps: list[tuple[Any, ...]]) -> None:
    user = User(kind(keep=4 * NBYTES), list(range(1, 100)))
    for name, *args in steps:
        getattr(user, name)(*args)
        user.check()


@KINDS
def test_nothing_that_is_kept_ever_changes_while_threads_take_and_drop_at_once(kind: type[Memory]) -> None:
    memory = kind(keep=4 * NBYTES)
    start = threading.Barrier(4)

    def use(thread: int) -> None:
        choose = random.Random(thread)
        user = User(memory, list(range(thread * 60 + 1, thread * 60 + 60)))
        start.wait()
        for _ in range(80):
            user.take(choose.choice([NBYTES, 2 * NBYTES]), choose.choice([*LOOKS]))
            if choose.random() < 0.8:
                user.drop(choose.randrange(100))
            if choose.random() < 0.1:
                gc.collect(0)
            user.check()

    with ThreadPoolExecutor(4) as threads:
        for result in [threads.submit(use, thread) for thread in range(4)]:
            result.result()
    gc.collect()
    assert not memory.lent


# ---------------------------------------------------------------------------------------------------- the logbook


@pytest.fixture
def two_ends() -> Iterator[tuple[Logbook, Logbook]]:
    """A worker's and its daemon's view of one page."""
    fd = Logbook.create()
    worker, daemon = Logbook(fd), Logbook(fd)
    os.close(fd)
    yield worker, daemon
    worker.close()
    daemon.close()


def test_the_daemon_reads_what_the_worker_has_done(two_ends: tuple[Logbook, Logbook]) -> None:
    worker, daemon = two_ends
    assert daemon.report(3, 1, 99.0) == WorkerReport(3, 1, Phase.IDLE, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    worker.open(100.0)
    worker.ask(Phase.REPLAY, 101.0)
    worker.replayed()
    worker.ask(Phase.GRAPH, 103.0)
    worker.enter(Phase.ENCODING, 106.0)
    worker.produced(70)
    worker.wait(Phase.CREDIT, 110.0)
    assert daemon.report(3, 1, 115.0) == WorkerReport(3, 1, Phase.CREDIT, 1, 70, 1, 1.0, 3.0, 2.0, 4.0, 5.0, 0.0)
    worker.rename(Phase.WIRE)
    worker.wait(Phase.IDLE, 116.0)
    assert daemon.report(3, 1, 117.0) == WorkerReport(3, 1, Phase.IDLE, 1, 70, 1, 2.0, 3.0, 2.0, 4.0, 0.0, 6.0)


def test_a_quick_worker_does_not_write_for_every_batch(two_ends: tuple[Logbook, Logbook]) -> None:
    worker, daemon = two_ends
    worker.open(100.0)
    for batch in range(1, 11):
        worker.ask(Phase.GRAPH, 100.0 + batch * 0.0009)
        worker.enter(Phase.ENCODING, 100.0 + batch * 0.0009)
        worker.produced(1)
    assert [daemon.report(0, 0, 100.0).batches, worker._batches] == [5, 10]


def test_a_worker_that_dies_while_it_writes_is_still_read(two_ends: tuple[Logbook, Logbook]) -> None:
    worker, daemon = two_ends
    worker.open(99.0)
    worker.wait(Phase.GRAPH, 100.0)
    worker.wait(Phase.CREDIT, 103.0)
    worker._written[0] = Logbook._CHANGING
    assert daemon.report(0, 0, 1e6).graph_s == 3.0
    assert daemon.report(0, 0, 1e6).credit_s == 0.0


@given(page=st.binary(min_size=128, max_size=128))
def test_whatever_user_code_writes_there_the_daemon_reads_on(page: bytes) -> None:
    fd = Logbook.create()
    logbook = Logbook(fd)
    os.close(fd)
    logbook._page[:128] = page
    try:
        report = logbook.report(0, 0, 100.0)
        assert report.batches >= 0
        assert not report.graph_s < 0
    finally:
        logbook.close()
