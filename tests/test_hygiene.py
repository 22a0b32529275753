"""Sessions that end in every way leave nothing in the daemon: 24 here, 500 with ``make soak``."""

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from daemons import Daemon, running
from torchdata.dataloader2 import DataLoader2
from torchdata.datapipes.iter import IterableWrapper

from rpc_reading_service import RPCReadingService, SlotsError, WorkerLostError, transport

pytestmark = pytest.mark.slow

SESSIONS = int(os.environ.get("SOAK_SESSIONS", "24"))
WARM_UP = 12
SLOTS = 2
GROWTH_BYTES = 16 << 20
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    with running("--port", "0", "--slots", str(SLOTS), "--keys", str(folder)) as started:
        assert started.line
        yield started


def fail(_: Any) -> Any:
    raise KeyError("on purpose")


def kill(_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def load(daemon: Daemon, folder: Path, function: Callable[[Any], Any] = str, **more: Any) -> "DataLoader2[Any]":
    pipe = IterableWrapper(range(50)).sharding_filter().map(function)
    service = RPCReadingService([daemon.address], keys=folder, pickle_by_value=(__name__,), timeout=PATIENCE_S, **more)
    return DataLoader2(pipe, reading_service=service)


def finished(daemon: Daemon, folder: Path) -> None:
    with load(daemon, folder) as loader:
        assert len(list(loader)) == 50


def broken_off(daemon: Daemon, folder: Path) -> None:
    with load(daemon, folder) as loader:
        next(iter(loader))


def failed(daemon: Daemon, folder: Path) -> None:
    with load(daemon, folder, fail) as loader, pytest.raises(KeyError):
        next(iter(loader))


def killed_worker(daemon: Daemon, folder: Path) -> None:
    with load(daemon, folder, kill, on_worker_loss="raise") as loader, pytest.raises(WorkerLostError):
        next(iter(loader))


def refused(daemon: Daemon, folder: Path) -> None:
    with pytest.raises(SlotsError):
        iter(load(daemon, folder, num_workers=SLOTS + 1))


KILLED_CLIENT = """
import itertools, os, signal, sys
from torchdata.dataloader2 import DataLoader2
from torchdata.datapipes.iter import IterableWrapper
from rpc_reading_service import RPCReadingService

pipe = IterableWrapper(range(50)).sharding_filter()
next(iter(DataLoader2(pipe, reading_service=RPCReadingService([sys.argv[1]], keys=sys.argv[2]))))
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed_client(daemon: Daemon, folder: Path) -> None:
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", KILLED_CLIENT, daemon.address, str(folder)])
    assert ended.returncode == -signal.SIGKILL


WAYS = [finished, broken_off, failed, killed_worker, refused]


def holds(daemon: Daemon) -> tuple[int, int, int]:
    """Descriptors, threads and children of the daemon once the last session's slots are free."""
    process = psutil.Process(daemon.process.pid)
    return process.num_fds(), process.num_threads(), len(daemon.family())


def test_sessions_ended_in_every_way_leave_nothing(daemon: Daemon, folder: Path) -> None:
    process, shm = psutil.Process(daemon.process.pid), Path("/dev/shm")
    for way in itertools.islice(itertools.cycle(WAYS), WARM_UP):
        way(daemon, folder)
    before, memory, files = settled(daemon, None), process.memory_info().rss, set(os.listdir(shm))
    for number, way in zip(range(SESSIONS), itertools.cycle(WAYS), strict=False):
        (killed_client if number % 20 == 19 else way)(daemon, folder)
        if number % 20 == 19:
            wait_for_slots(daemon, folder)
    assert settled(daemon, before) == before
    assert process.memory_info().rss - memory < GROWTH_BYTES
    assert set(os.listdir(shm)) <= files
    assert "Traceback" not in daemon.errors


def wait_for_slots(daemon: Daemon, folder: Path) -> None:
    """The daemon waits for a client that vanished to come back."""
    deadline = transport.Deadline(PATIENCE_S)
    while True:
        try:
            return finished(daemon, folder)
        except SlotsError:
            assert not deadline.expired


def settled(daemon: Daemon, wanted: tuple[int, int, int] | None) -> tuple[int, int, int]:
    """What the daemon holds, once it is as wanted, or does not change for a second."""
    deadline, held, since = transport.Deadline(10.0), holds(daemon), time.monotonic()
    while held != wanted and not deadline.expired and (wanted is not None or time.monotonic() - since < 1.0):
        time.sleep(0.1)
        if (now := holds(daemon)) != held:
            held, since = now, time.monotonic()
    return held
