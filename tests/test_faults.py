"""What happens on the way from one machine to another: processes that die, come late, or cannot be reached."""

import contextlib
import functools
import hashlib
import itertools
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from daemons import until
from torchdata.dataloader2 import DataLoader2, ReadingServiceInterface, SequentialReadingService
from torchdata.datapipes.iter import IterableWrapper, IterDataPipe

from rpc_reading_service import ConnectError, RPCReadingService, daemon, messages, transport
from rpc_reading_service.launchers import LocalDaemon, LocalDaemons

N = 50
FREE_AFTER_S = 30.0
"""Within which the slots of a training process that was killed are free."""


def load(datapipe: Any, workers: list[str], **options: Any) -> "DataLoader2[Any]":
    options = {"pickle_by_value": (__name__,), "timeout": 60.0, **options}
    return DataLoader2(datapipe, reading_service=RPCReadingService(workers, **options))


def sharded(elements: Any = range(N)) -> Any:
    return IterableWrapper(elements).sharding_filter()


# A training process that is killed.


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalDaemons]:
    """One daemon with four slots."""
    daemons = LocalDaemons([4])
    try:
        assert daemons.addresses
        yield daemons
    finally:
        daemons.close()


@pytest.fixture(scope="module")
def training_processes() -> Callable[..., "contextlib.AbstractContextManager[list[ForkServerProcess]]"]:
    """Starts training processes quickly: by a forkserver that has torch imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rpc_reading_service.reading_service", "pytest"])

    @contextlib.contextmanager
    def start(count: int, *arguments: Any) -> Iterator[list[ForkServerProcess]]:
        pipes = [context.Pipe(duplex=False) for _ in range(count)]
        started = [context.Process(target=train, args=(theirs, *arguments)) for _, theirs in pipes]
        for process, (_, theirs) in zip(started, pipes, strict=True):
            process.start()
            theirs.close()
        try:
            for ours, _ in pipes:
                assert ours.recv() == 0
                ours.close()
            yield started
        finally:
            for process in started:
                process.kill()
                process.join()

    return start


def train(sender: "Connection[Any, Any]", addresses: list[str]) -> None:
    """Take one batch of an endless epoch, say so, and wait for what comes."""
    loader = load(IterableWrapper(itertools.count(), deepcopy=False), addresses, num_workers=1)
    iterator = iter(loader)
    sender.send(next(iterator))
    signal.pause()


def kill(processes: list[ForkServerProcess]) -> None:
    for process in processes:
        process.kill()
        process.join()


def free_slots(address: str) -> int:
    context = transport.Context()
    try:
        dealer = context.dealer(address)
        poller = transport.Poller()
        poller.watch(dealer.raw)
        dealer.send([messages.encode(messages.Hello(messages.PROTOCOL_VERSION, daemon.versions(), "a test"))])
        assert poller.wait(10)
        (frames,) = dealer.receive_all()
        return int(messages.decode(frames[0], messages.FromDaemon).free)
    finally:
        context.close()


class Footprint:
    """What a daemon holds: processes, descriptors, memory."""

    def __init__(self, daemons: LocalDaemons) -> None:
        process = psutil.Process(daemons.processes[0].pid)
        self.family = process.children(recursive=True)
        self.descriptors = process.num_fds()
        self.nbytes = process.memory_info().rss


def test_a_killed_training_process_frees_its_slots_and_leaves_no_process(
    pool: LocalDaemons, training_processes: Any
) -> None:
    (address,) = pool.addresses
    idle = Footprint(pool)
    with training_processes(1, pool.addresses) as processes:
        assert free_slots(address) == 3
        workers = [each for each in Footprint(pool).family if each not in idle.family]
        assert len(workers) == 1
        kill(processes)
        gone, alive = psutil.wait_procs(workers, FREE_AFTER_S)
        assert (len(gone), alive) == (1, [])
    with load(sharded(), pool.addresses) as loader:
        assert list(loader) == list(range(N))
    assert free_slots(address) == 4


@pytest.mark.slow
def test_training_processes_killed_again_and_again_leave_the_daemon_as_it_was(
    pool: LocalDaemons, training_processes: Any
) -> None:
    footprints = []
    for _ in range(2):
        before = Footprint(pool)
        with training_processes(4, pool.addresses) as processes:
            workers = [each for each in Footprint(pool).family if each not in before.family]
            assert len(workers) == 4
            kill(processes)
            assert psutil.wait_procs(workers, FREE_AFTER_S)[1] == []
        assert free_slots(pool.addresses[0]) == 4
        footprints.append(Footprint(pool))
    first, second = footprints
    assert second.family == first.family
    until(lambda: Footprint(pool).descriptors <= first.descriptors)  # the connection of free_slots may linger
    assert second.nbytes - first.nbytes < 8 << 20


# A daemon that comes late.


def test_a_daemon_may_start_after_the_loader(free_port: int) -> None:
    def everything() -> list[int]:
        with load(sharded(), [f"127.0.0.1:{free_port}"], connect_timeout=60) as loader:
            return list(loader)

    with ThreadPoolExecutor(1) as training:
        elements = training.submit(everything)
        until(lambda: any(thread.name == "rpc-reading-client" for thread in threading.enumerate()))
        late = LocalDaemon(1, ["--port", str(free_port)])
        try:
            assert elements.result(60) == list(range(N))
        finally:
            late.close()


# Ports between the two that let nothing through.

ELSEWHERE = "127.0.0.2"
"""Another address of this machine, on which no daemon listens: what is reached there has come through a proxy."""


class Gate:
    """Between a port and its clients: may delay or swallow what the port sends, and break the connections."""

    def __init__(self, delay: float = 0.0) -> None:
        self.delay = delay
        self.swallows = False
        self.swallowed = 0
        self.ends: list[socket.socket] = []

    def lets_through(self, data: bytes) -> bool:
        threading.Event().wait(self.delay)
        self.swallowed += len(data) * self.swallows
        return not self.swallows

    def break_connections(self) -> None:
        for end in self.ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def forwarded(*ports: int, gate: Gate | None = None) -> Iterator[None]:
    """Let these ports through from ELSEWHERE to 127.0.0.1, as a firewall does that is open for them alone."""
    gate = gate or Gate()
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server((ELSEWHERE, port))) for port in ports]
        threads = [threading.Thread(target=accept, args=(server, gate)) for server in servers]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            for server in servers:
                with contextlib.suppress(OSError):
                    server.shutdown(socket.SHUT_RDWR)
            gate.break_connections()
            for thread in threads:
                thread.join()
            for end in gate.ends:
                end.close()


def accept(server: socket.socket, gate: Gate) -> None:
    pumps = []
    with contextlib.suppress(OSError):
        while True:
            outer, _ = server.accept()
            gate.ends.append(outer)
            inner = socket.create_connection(("127.0.0.1", server.getsockname()[1]))
            gate.ends.append(inner)
            pumps += [
                threading.Thread(target=pump, args=(outer, inner, lambda data: True)),
                threading.Thread(target=pump, args=(inner, outer, gate.lets_through)),
            ]
            for thread in pumps[-2:]:
                thread.start()
    for thread in pumps:
        thread.join()


def pump(source: socket.socket, target: socket.socket, lets_through: Callable[[bytes], bool]) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65_536):
            if lets_through(data):
                target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def test_a_data_port_that_cannot_be_reached_is_named_with_the_remedy(pool: LocalDaemons) -> None:
    port = transport.split_address(pool.addresses[0])[1]
    with (
        forwarded(port),
        load(sharded(), [f"{ELSEWHERE}:{port}"], num_workers=1, connect_timeout=1) as loader,
        pytest.raises(ConnectError) as error,
    ):
        iter(loader)
    assert f"worker 0 on {ELSEWHERE}:{port} (pid " in str(error.value)
    assert "cannot be reached on its data port" in str(error.value)
    assert "within 1 s: open that port in the firewall" in str(error.value)
    assert "rpc-reading-worker --data-ports LO-HI" in str(error.value)
    assert free_slots(pool.addresses[0]) == 4


def test_the_control_port_and_the_data_ports_are_all_that_need_be_open(free_port: int) -> None:
    behind = LocalDaemon(1, ["--data-ports", f"{free_port}-{free_port}"])
    try:
        port = transport.split_address(behind.address)[1]
        with forwarded(port, free_port), load(sharded(), [f"{ELSEWHERE}:{port}"]) as loader:
            assert [list(loader), list(loader)] == 2 * [list(range(N))]
    finally:
        behind.close()


# A connection that breaks, and what was on it is lost.


class EndsLate(IterDataPipe[int]):
    """Five elements, and an end when a file is there."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __iter__(self) -> Iterator[int]:
        yield from range(5)
        while not self.marker.exists():
            threading.Event().wait(0.01)


@pytest.mark.slow
def test_the_end_of_a_shard_that_is_lost_is_noticed(free_port: int, tmp_path: Path) -> None:
    behind, gate = LocalDaemon(1, ["--data-ports", f"{free_port}-{free_port}"]), Gate()
    try:
        port = transport.split_address(behind.address)[1]
        with (
            forwarded(port),
            forwarded(free_port, gate=gate),
            load(EndsLate(tmp_path / "end"), [f"{ELSEWHERE}:{port}"]) as loader,
        ):
            iterator = iter(loader)
            elements = [next(iterator) for _ in range(5)]
            gate.swallows = True
            (tmp_path / "end").touch()
            until(lambda: gate.swallowed > 60)  # more than a heartbeat
            gate.swallows = False
            gate.break_connections()
            assert elements + list(iterator) == list(range(5))
            assert list(loader) == list(range(5))
    finally:
        behind.close()


@pytest.mark.slow
def test_batches_of_an_old_epoch_that_come_late_are_dropped(free_port: int) -> None:
    behind, gate = LocalDaemon(1, ["--data-ports", f"{free_port}-{free_port}"]), Gate(delay=0.5)
    try:
        port = transport.split_address(behind.address)[1]
        with forwarded(port), forwarded(free_port, gate=gate), load(sharded(), [f"{ELSEWHERE}:{port}"]) as loader:
            for _ in range(3):
                assert list(itertools.islice(loader, 3)) == [0, 1, 2]
            assert [list(loader), list(loader)] == 2 * [list(range(N))]
    finally:
        behind.close()


# A consumer that stops.


@pytest.mark.parametrize("nbytes", [100, 100_000, 3_000_000])
def test_a_consumer_that_stops_for_a_while_loses_nothing(pool: LocalDaemons, nbytes: int, tmp_path: Path) -> None:
    made = tmp_path / "made"
    datapipe = sharded(range(12)).map(functools.partial(noise, made, nbytes))
    with load(datapipe, pool.addresses, num_workers=2, worker_prefetch_cnt=2) as loader:
        iterator = iter(loader)
        arrived = [next(iterator)]
        until(lambda: made.stat().st_size >= 4)  # as many as the two windows let through
        arrived += iterator
    assert [hashlib.sha256(data).hexdigest() for data, _ in arrived] == [digest for _, digest in arrived]
    assert len({digest for _, digest in arrived}) == 12


def noise(made: Path, nbytes: int, seed: int) -> tuple[Any, str]:
    with made.open("ab") as file:
        file.write(b".")
    data = np.random.default_rng(seed).bytes(nbytes)
    return np.frombuffer(data, dtype=np.uint8).copy(), hashlib.sha256(data).hexdigest()


def test_a_name_that_does_not_resolve_for_a_moment_costs_nothing(
    pool: LocalDaemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = transport.split_address(pool.addresses[0])[1]
    resolve, asked = socket.getaddrinfo, itertools.count()

    def fail_once(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host == "cpu1.invalid" and next(asked) == 1:  # first for the control channel, then for a data channel
            raise socket.gaierror("the name server is down")
        return resolve("127.0.0.1" if host == "cpu1.invalid" else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", fail_once)
    with load(sharded(), [f"cpu1.invalid:{port}"], num_workers=1) as loader:
        assert list(loader) == list(range(N))
    assert next(asked) > 1


# A worker that is stopped, and much that is sent to it.


class InFront(ReadingServiceInterface):
    """A reading service whose ``iter_reset_fn`` is larger than a socket pair holds."""

    def initialize(self, datapipe: Any) -> Any:
        return datapipe

    def initialize_iteration(self, seed_generator: Any, iter_reset_fn: Any = None) -> Any:
        return functools.partial(last, bytes(900_000))


def last(*args: Any) -> Any:
    return args[-1]


def test_a_stopped_worker_that_is_sent_much_holds_up_nobody(pool: LocalDaemons) -> None:
    service = RPCReadingService(pool.addresses, num_workers=1, pickle_by_value=(__name__,), timeout=60)
    with (
        DataLoader2(sharded().map(with_pid), reading_service=SequentialReadingService(InFront(), service)) as stopped,
        load(sharded(), pool.addresses, num_workers=1) as other,
    ):
        ((_, pid), *_) = list(stopped)
        assert next(iter(other)) == 0
        worker = psutil.Process(pid)
        worker.suspend()
        iterator = iter(stopped)
        assert list(other) == list(range(N))
        assert [element for element, _ in iterator] == list(range(N))


def with_pid(element: int) -> tuple[int, int]:
    return element, os.getpid()
