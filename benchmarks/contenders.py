"""Who is measured: all deliver the elements of ``FreshTensors`` and shut down at the end of a context.

A contender is started once, for a number of workers (its daemons, its cluster), and then opens one stream for each
``Load``. To add one, write a context manager that yields the function that opens streams, and add a line to
``CONTENDERS``. What the index of packages offers besides torch is in the extra ``[peers]``.
"""

import functools
import itertools
import logging
import math
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.data import IterDataPipe

FORK = multiprocessing.get_context("fork")
"""Quick, and fit for a process that has no threads yet."""
AHEAD = 4
"""Batches asked for in advance of each worker, where the contender leaves that to its user; as torchdata does."""


@dataclass(frozen=True)
class Load:
    """What one stream is made of."""

    workers: int
    shape: Sequence[int] = (8,)
    """Of its float32 batches."""
    wait: float = 0.0
    """Seconds that a worker waits for each batch, as for a disk."""
    held: str = ""
    """What else the graph holds: 200 MB in a list of ``bytes`` or ``arrays``, or nothing."""

    @property
    def batch_bytes(self) -> int:
        return torch.float32.itemsize * math.prod(self.shape)


Stream = AbstractContextManager[Iterator[torch.Tensor]]
Open = Callable[[Load], Stream]
Started = AbstractContextManager[Open]


@functools.cache
def held(kind: str) -> list[bytes] | list[numpy.ndarray]:
    """200 MB in a list; made once, since making it is not what is measured."""
    contents = [bytes([index]) * 10**6 for index in range(200)] if kind else []
    return [numpy.frombuffer(each, numpy.uint8) for each in contents] if kind == "arrays" else contents


class FreshTensors(IterDataPipe[torch.Tensor]):
    """Makes a new tensor for each element, as users do, for ever; element i of the whole stream is filled with i."""

    def __init__(self, load: Load) -> None:
        self.shape = load.shape
        self.wait = load.wait
        self.held = held(load.held)
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

    def __init__(self, load: Load) -> None:
        self.tensors = FreshTensors(load)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.tensors.make(index)

    def __len__(self) -> int:
        return 1 << 40


# torchdata's reading services


@contextmanager
def loaded(pipe: FreshTensors, service: Any) -> Iterator[Iterator[torch.Tensor]]:
    from torchdata.dataloader2 import DataLoader2

    loader = DataLoader2(pipe, reading_service=service)
    try:
        yield iter(loader)
    finally:
        loader.shutdown()


@contextmanager
def ours(workers: int, pipe: type[FreshTensors] = FreshTensors, transport: str = "auto") -> Iterator[Open]:
    from rpc_reading_service import RPCReadingService
    from rpc_reading_service.testing import local_workers

    with local_workers(1, workers) as addresses:
        yield lambda load: loaded(
            pipe(load), RPCReadingService(addresses, num_workers=load.workers, transport=transport)
        )


@contextmanager
def ours_with_keys(workers: int) -> Iterator[Open]:
    """From a daemon that wants keys, over TCP: everything is encrypted."""
    from rpc_reading_service import RPCReadingService, security
    from rpc_reading_service.testing import local_workers

    with tempfile.TemporaryDirectory() as folder:
        security.create(folder)
        with local_workers(1, workers, ["--keys", folder]) as addresses:
            options = {"keys": folder, "transport": "tcp"}
            yield lambda load: loaded(
                FreshTensors(load), RPCReadingService(addresses, num_workers=load.workers, **options)
            )


def mprs(load: Load) -> Stream:
    from torchdata.dataloader2 import MultiProcessingReadingService

    return loaded(FreshTensors(load), MultiProcessingReadingService(num_workers=load.workers))


# torch


@contextmanager
def data_loader(load: Load) -> Iterator[Iterator[torch.Tensor]]:
    pipe = FreshTensors(load)
    yield iter(torch.utils.data.DataLoader(pipe, batch_size=None, num_workers=load.workers, prefetch_factor=AHEAD))


@contextmanager
def torch_rpc(workers: int, tcp: bool) -> Iterator[Open]:
    """Batches asked for one by one, ``AHEAD`` of each worker at a time, with what torch chooses or over TCP alone."""
    from torch.distributed import rpc

    port = free_port()
    processes = [FORK.Process(target=rpc_worker, args=(rank, workers + 1, port, tcp)) for rank in range(1, workers + 1)]
    for process in processes:
        process.start()
    rpc_join(0, workers + 1, port, tcp)
    try:
        yield lambda load: closing(asked(load, functools.partial(ask_for, load)))
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


def ask_for(load: Load, index: int) -> Any:
    from torch.distributed import rpc

    return rpc.rpc_async(f"rank-{1 + index % load.workers}", make, (load, index))


def make(load: Load, index: int) -> torch.Tensor:
    return FreshTensors(load).make(index)


def asked(load: Load, ask: Callable[[int], Any]) -> Iterator[torch.Tensor]:
    """Each element asked for in good time; in the end nothing is under way that the next stream would wait for."""
    waiting: deque[Any] = deque()
    try:
        for index in itertools.count():
            waiting.append(ask(index))
            if len(waiting) > AHEAD * load.workers:
                yield waiting.popleft().wait()
    finally:
        for each in waiting:
            each.wait()


# rpcdataloader


@contextmanager
def rpcdataloader(workers: int) -> Iterator[Open]:
    import rpcdataloader as package

    def stream(load: Load) -> Stream:
        dataset = package.RPCDataset(addresses[: load.workers], TensorList, load)
        indices = torch.utils.data.SequentialSampler(range(1 << 30))
        options = {"sampler": indices, "collate_fn": the_one, "prefetch_factor": AHEAD}
        return closing(iter(package.RPCDataloader(dataset, 1, **options)))

    ports = [free_port() for _ in range(workers)]
    addresses = [f"127.0.0.1:{port}" for port in ports]
    with ExitStack() as processes:
        for port in ports:
            processes.enter_context(program("-m", "rpcdataloader.launch", "--host", "127.0.0.1", "--port", str(port)))
        for port in ports:
            wait_for(port)
        yield stream


def the_one(values: list[torch.Tensor]) -> torch.Tensor:
    return values[0]


# Ray Data


RAY_STORE = 2 << 30
"""Bytes of shared memory for its batches: by default nearly a third of the machine's memory."""
RAY_NOTE = "Ray Data's tensors are read-only views of its shared memory."
RAY_BLOCKS = 400
RAY_BLOCK = 16 << 20
"""Bytes in each, if that holds a batch at all: what Ray's scheduler hands out at a time. All blocks are one stream."""


@contextmanager
def ray_data(workers: int) -> Iterator[Open]:
    """A cluster on this machine, with as many CPUs as workers; the tensors are read-only views of its shared memory."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        ray.init(num_cpus=workers, object_store_memory=RAY_STORE, _temp_dir=folder, **quiet)
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_options.preserve_order = True
        try:
            yield lambda load: nullcontext(ray_batches(load))
        finally:
            ray.shutdown()


def ray_batches(load: Load) -> Iterator[torch.Tensor]:
    import ray

    rows = max(1, min(4096, RAY_BLOCK // load.batch_bytes))
    numbers = ray.data.range(rows * RAY_BLOCKS, override_num_blocks=RAY_BLOCKS)
    dataset = numbers.map_batches(functools.partial(make_rows, load), batch_size=rows)
    for batch in dataset.iter_batches(batch_size=1, batch_format="numpy"):
        yield torch.from_numpy(batch["tensor"])[0]


def make_rows(load: Load, batch: dict[str, Any]) -> dict[str, Any]:
    return {"tensor": torch.stack([make(load, index) for index in batch["id"]]).numpy()}


# The tf.data service


@contextmanager
def tf_data_service(workers: int) -> Iterator[Open]:
    """A dispatcher and workers; each element is made once, by whichever worker is ready, so that the order is free."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    ports = [free_port() for _ in range(workers + 1)]
    with ExitStack() as processes:
        for port in ports:
            processes.enter_context(program(str(TF_SERVER), str(port), *map(str, ports[:1])))
        for port in ports:
            wait_for(port)
        yield lambda load: nullcontext(tf_batches(load, f"grpc://127.0.0.1:{ports[0]}"))


TF_SERVER = Path(__file__).parent / "tf_server.py"
TF_NOTE = (
    "The tf.data service sends no Python to its workers: theirs are tensors of the same size from TensorFlow's own "
    "`fill`, each made once, in no fixed order."
)


def tf_batches(load: Load, service: str) -> Iterator[torch.Tensor]:
    """Made by TensorFlow's own ``fill``: the service sends no Python to its workers."""
    import tensorflow as tf

    distribute, policy = tf.data.experimental.service.distribute, tf.data.experimental.service.ShardingPolicy
    made = tf.data.Dataset.range(1 << 40).map(lambda index: tf.fill(load.shape, tf.cast(index, tf.float32)))
    for batch in made.apply(distribute(processing_mode=policy.DYNAMIC, service=service)):
        yield torch.from_dlpack(batch)


# Processes and ports


@contextmanager
def program(*arguments: str) -> Iterator[None]:
    """A Python program that finds what this one finds, until the end of the context."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, *arguments], env=environment, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


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
def raw_tcp(load: Load) -> Iterator[Iterator[torch.Tensor]]:
    """A socket to each worker, received into one buffer that is used again."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        arguments = (load.batch_bytes, server.getsockname()[1])
        processes = [FORK.Process(target=send_for_ever, args=arguments, daemon=True) for _ in range(load.workers)]
        for process in processes:
            process.start()
        sockets = [server.accept()[0] for _ in range(load.workers)]
    try:
        yield received(sockets, torch.zeros(load.shape))
    finally:
        for each in sockets:
            each.close()
        for process in processes:
            process.kill()
            process.join()


def send_for_ever(size: int, port: int) -> None:
    data = b"\1" * size  # no tensor: a fork must not use the threads of torch that its parent had
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
def memcpy(load: Load) -> Iterator[Iterator[torch.Tensor]]:
    torch.set_num_threads(1)
    source, target = torch.zeros(load.shape), torch.zeros(load.shape)
    yield (target.copy_(source) for _ in itertools.count())


# All of them


def at_once(stream: Open) -> Callable[[int], Started]:
    """For those who need nothing before the first stream."""
    return lambda workers: nullcontext(stream)


@dataclass(frozen=True)
class Contender:
    """One row of the table."""

    name: str
    start: Callable[[int], Started]
    package: str = "torch"
    is_ordered: bool = True
    is_limit: bool = False
    """It moves the right number of bytes, but always the same."""
    is_slow: bool = False
    """To start: half a minute goes into each round."""
    note: str = ""
    """What the reader of a table has to know."""

    @property
    def installed(self) -> bool:
        return util.find_spec(self.package) is not None


CONTENDERS = {
    "mprs": Contender("MultiProcessingReadingService", at_once(mprs)),
    "loader": Contender("torch DataLoader", at_once(data_loader)),
    "torchrpc": Contender("torch.distributed.rpc", functools.partial(torch_rpc, tcp=False)),
    "torchrpc-tcp": Contender("torch.distributed.rpc, TCP", functools.partial(torch_rpc, tcp=True)),
    "rpcdataloader": Contender("rpcdataloader", rpcdataloader, "rpcdataloader", is_slow=True),
    "ray": Contender("Ray Data", ray_data, "ray", is_slow=True, note=RAY_NOTE),
    "tfdata": Contender("tf.data service", tf_data_service, "tensorflow", is_ordered=False, is_slow=True, note=TF_NOTE),
    "ours-tcp": Contender("RPCReadingService, TCP", functools.partial(ours, transport="tcp")),
    "ours-keys": Contender("RPCReadingService, TCP, keys", ours_with_keys),
    "ours": Contender("RPCReadingService, shared memory", functools.partial(ours, transport="shm")),
    "ours-tcp-written": Contender(
        "RPCReadingService, TCP, in place", functools.partial(ours, pipe=WrittenTensors, transport="tcp")
    ),
    "ours-written": Contender(
        "RPCReadingService, shared memory, in place", functools.partial(ours, pipe=WrittenTensors, transport="shm")
    ),
    "raw-tcp": Contender("limit: raw TCP socket", at_once(raw_tcp), is_limit=True),
    "memcpy": Contender("limit: memcpy", at_once(memcpy), is_limit=True),
}
