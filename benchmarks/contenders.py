"""Who is measured: all deliver the elements of ``FreshTensors``, in order, and shut down at the end of a context.

To add a contender, write a context manager that yields the stream of a ``Case``, and add a line to ``CONTENDERS``. What
the index of packages offers besides torch is in the extra ``[peers]``.
"""

import functools
import itertools
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib import util
from typing import Any

import torch
from torch.utils.data import IterDataPipe

AHEAD = 4
"""Batches asked for in advance of each worker, where the contender leaves that to its user; as torchdata does."""


@dataclass(frozen=True)
class Case:
    """One measurement: which contender, on what, for how long."""

    contender: str
    shape: tuple[int, ...]
    workers: int
    seconds: float
    warm_up: float
    bound: float
    """Seconds from the start of the process to the figure: longer is a hang."""
    wait: float = 0.0
    """Seconds that a worker waits for each batch, as for a disk."""


class FreshTensors(IterDataPipe[torch.Tensor]):
    """Makes a new tensor for each element, as users do, for ever; element i of the whole stream is filled with i."""

    def __init__(self, shape: tuple[int, ...], wait: float = 0.0) -> None:
        self.shape = shape
        self.wait = wait
        self.shards, self.shard = 1, 0

    def apply_sharding(self, num_of_instances: int, instance_id: int, sharding_group: Any = None) -> None:
        """What ``sharding_filter`` does, but without making the other shards' elements."""
        self.shards, self.shard = num_of_instances, instance_id

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in itertools.count(self.shard, self.shards):
            yield self.make(index)

    def make(self, index: int) -> torch.Tensor:
        if self.wait:
            time.sleep(self.wait)
        return torch.full(self.shape, float(index))


class WrittenTensors(FreshTensors):
    """The same, but written where they are sent from."""

    def make(self, index: int) -> torch.Tensor:
        from rpc_reading_service import empty

        return empty(self.shape).fill_(float(index))


class TensorList(torch.utils.data.Dataset[torch.Tensor]):
    """The same for those who ask by index."""

    def __init__(self, shape: tuple[int, ...], wait: float) -> None:
        self.tensors = FreshTensors(shape, wait)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.tensors.make(index)

    def __len__(self) -> int:
        return 1 << 40


Stream = AbstractContextManager[Iterator[torch.Tensor]]


# torchdata's reading services


@contextmanager
def loaded(pipe: FreshTensors, service: Any) -> Iterator[Iterator[torch.Tensor]]:
    from torchdata.dataloader2 import DataLoader2

    loader = DataLoader2(pipe, reading_service=service)
    try:
        yield iter(loader)
    finally:
        loader.shutdown()


def ours(case: Case, pipe: type[FreshTensors] = FreshTensors, transport: str = "auto") -> Stream:
    from rpc_reading_service import RPCReadingService

    return loaded(pipe(case.shape, case.wait), RPCReadingService(workers=case.workers, transport=transport))


@contextmanager
def ours_with_keys(case: Case) -> Iterator[Iterator[torch.Tensor]]:
    """From a daemon that wants keys, over TCP: everything is encrypted."""
    from rpc_reading_service import RPCReadingService, security
    from rpc_reading_service.testing import local_workers

    with tempfile.TemporaryDirectory() as folder:
        security.create(folder)
        with local_workers(1, case.workers, ["--keys", folder]) as addresses:
            service = RPCReadingService(addresses, keys=folder, transport="tcp")
            with loaded(FreshTensors(case.shape, case.wait), service) as batches:
                yield batches


def mprs(case: Case) -> Stream:
    from torchdata.dataloader2 import MultiProcessingReadingService

    service = MultiProcessingReadingService(num_workers=case.workers)
    return loaded(FreshTensors(case.shape, case.wait), service)


# torch


@contextmanager
def data_loader(case: Case) -> Iterator[Iterator[torch.Tensor]]:
    pipe = FreshTensors(case.shape, case.wait)
    yield iter(torch.utils.data.DataLoader(pipe, batch_size=None, num_workers=case.workers, prefetch_factor=AHEAD))


@contextmanager
def torch_rpc(case: Case, tcp: bool) -> Iterator[Iterator[torch.Tensor]]:
    """Batches asked for one by one, ``AHEAD`` of each worker at a time, with what torch chooses or over TCP alone."""
    from torch.distributed import rpc

    spawn, port = multiprocessing.get_context("spawn"), free_port()
    ranks = range(1, case.workers + 1)
    processes = [spawn.Process(target=rpc_worker, args=(rank, case.workers + 1, port, tcp)) for rank in ranks]
    for process in processes:
        process.start()
    rpc_join(0, case.workers + 1, port, tcp)
    try:
        what = case.shape, case.wait
        yield asked(case, lambda worker, index: rpc.rpc_async(f"rank-{worker + 1}", make, (*what, index)))
    finally:
        rpc.shutdown(graceful=False)
        for process in processes:
            process.kill()
            process.join()


def rpc_worker(rank: int, world: int, port: int, tcp: bool) -> None:
    from torch.distributed import rpc

    torch.set_num_threads(1)
    rpc_join(rank, world, port, tcp)
    rpc.shutdown()


def rpc_join(rank: int, world: int, port: int, tcp: bool) -> None:
    from torch.distributed import rpc

    only = {"_transports": ["uv"], "_channels": ["basic"]} if tcp else {}
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", **only)
    rpc.init_rpc(f"rank-{rank}", rank=rank, world_size=world, rpc_backend_options=options)


def make(shape: tuple[int, ...], wait: float, index: int) -> torch.Tensor:
    return FreshTensors(shape, wait).make(index)


def asked(case: Case, ask: Callable[[int, int], Any]) -> Iterator[torch.Tensor]:
    """Element k from worker k % n, each asked for in good time."""
    waiting: deque[Any] = deque()
    for index in itertools.count():
        waiting.append(ask(index % case.workers, index))
        if len(waiting) > AHEAD * case.workers:
            yield waiting.popleft().wait()


# rpcdataloader


@contextmanager
def rpcdataloader(case: Case) -> Iterator[Iterator[torch.Tensor]]:
    import rpcdataloader as package

    ports = [free_port() for _ in range(case.workers)]
    command = [sys.executable, "-m", "rpcdataloader.launch", "--host", "127.0.0.1", "--port"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [subprocess.Popen([*command, str(port)], env=environment, stdout=subprocess.DEVNULL) for port in ports]
    try:
        for port in ports:
            wait_for(port)
        dataset = package.RPCDataset([f"127.0.0.1:{port}" for port in ports], TensorList, case.shape, case.wait)
        indices = torch.utils.data.SequentialSampler(range(1 << 30))
        yield iter(package.RPCDataloader(dataset, 1, sampler=indices, collate_fn=the_one, prefetch_factor=AHEAD))
    finally:
        for process in processes:
            process.kill()
            process.wait()


def the_one(values: list[torch.Tensor]) -> torch.Tensor:
    return values[0]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def wait_for(port: int) -> None:
    for _ in range(600):
        try:
            return socket.create_connection(("127.0.0.1", port), 1.0).close()
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"nothing listens on port {port}")


# Limits: what nobody who moves bytes so can be faster than. Nothing is made; the same bytes are moved again and again.


@contextmanager
def raw_tcp(case: Case) -> Iterator[Iterator[torch.Tensor]]:
    """A socket to each worker, received into one buffer that is used again."""
    spawn = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as server:
        arguments = (case.shape, server.getsockname()[1])
        processes = [spawn.Process(target=send_for_ever, args=arguments, daemon=True) for _ in range(case.workers)]
        for process in processes:
            process.start()
        sockets = [server.accept()[0] for _ in range(case.workers)]
    try:
        yield received(sockets, torch.zeros(case.shape))
    finally:
        for each in sockets:
            each.close()
        for process in processes:
            process.kill()
            process.join()


def send_for_ever(shape: tuple[int, ...], port: int) -> None:
    data = memoryview(torch.zeros(shape).numpy()).cast("B")
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while True:
            connection.sendall(data)


def received(sockets: list[socket.socket], buffer: torch.Tensor) -> Iterator[torch.Tensor]:
    place = memoryview(buffer.numpy()).cast("B")
    for each in itertools.cycle(sockets):
        left = place
        while left:
            left = left[each.recv_into(left) :]
        yield buffer


@contextmanager
def memcpy(case: Case) -> Iterator[Iterator[torch.Tensor]]:
    torch.set_num_threads(1)
    source, target = torch.zeros(case.shape), torch.zeros(case.shape)
    yield (target.copy_(source) for _ in itertools.count())


# All of them


@dataclass(frozen=True)
class Contender:
    """One row of the table."""

    name: str
    stream: Callable[[Case], Stream]
    package: str = "torch"
    is_limit: bool = False
    """It moves the right number of bytes, but always the same."""

    @property
    def installed(self) -> bool:
        return util.find_spec(self.package) is not None


CONTENDERS = {
    "mprs": Contender("MultiProcessingReadingService", mprs),
    "loader": Contender("torch DataLoader", data_loader),
    "torchrpc": Contender("torch.distributed.rpc", functools.partial(torch_rpc, tcp=False)),
    "torchrpc-tcp": Contender("torch.distributed.rpc, TCP", functools.partial(torch_rpc, tcp=True)),
    "rpcdataloader": Contender("rpcdataloader", rpcdataloader, "rpcdataloader"),
    "ours-tcp": Contender("RPCReadingService, TCP", functools.partial(ours, transport="tcp")),
    "ours-keys": Contender("RPCReadingService, TCP, keys", ours_with_keys),
    "ours": Contender("RPCReadingService, shared memory", functools.partial(ours, transport="shm")),
    "ours-tcp-written": Contender(
        "RPCReadingService, TCP, in place", functools.partial(ours, pipe=WrittenTensors, transport="tcp")
    ),
    "ours-written": Contender(
        "RPCReadingService, shared memory, in place", functools.partial(ours, pipe=WrittenTensors, transport="shm")
    ),
    "raw-tcp": Contender("limit: raw TCP socket", raw_tcp, is_limit=True),
    "memcpy": Contender("limit: memcpy", memcpy, is_limit=True),
}
