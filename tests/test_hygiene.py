"""Sessions that end in every way leave nothing in the daemon: 24 here, 500 with ``make soak``."""

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

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
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the daemon, its workers and clients in other processes put temporary files."""
    folder = tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        yield folder


@pytest.fixture(scope="module")
def daemon(folder: Path, temporary: Path) -> Iterator[Daemon]:
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


class Holds(NamedTuple):
    """What the daemon and its family hold."""

    descriptors: int
    threads: int
    children: int
    ports: int

    @classmethod
    def now(cls, daemon: Daemon) -> "Holds":
        process, family = psutil.Process(daemon.process.pid), daemon.family()
        listening = [
            each
            for one in (process, *family)
            for each in one.net_connections("tcp")
            if each.status == psutil.CONN_LISTEN
        ]
        return cls(process.num_fds(), process.num_threads(), len(family), len(listening))


def test_sessions_ended_in_every_way_leave_nothing(daemon: Daemon, folder: Path, temporary: Path) -> None:
    process, ours, shm = psutil.Process(daemon.process.pid), psutil.Process(), Path("/dev/shm")
    for way in itertools.islice(itertools.cycle(WAYS), WARM_UP):
        way(daemon, folder)
    before, memory, files = settled(daemon, None), process.memory_info().rss, set(os.listdir(shm))
    here, kept = (ours.num_fds(), ours.memory_info().rss), sorted(temporary.rglob("*"))
    for number, way in zip(range(SESSIONS), itertools.cycle(WAYS), strict=False):
        (killed_client if number % 20 == 19 else way)(daemon, folder)
        if number % 20 == 19:
            wait_for_slots(daemon, folder)
    with load(daemon, folder, num_workers=SLOTS) as loader:  # all slots are free
        assert len(list(loader)) == 50
    assert settled(daemon, before) == before
    assert process.memory_info().rss - memory < GROWTH_BYTES
    assert ours.num_fds() <= here[0]
    assert ours.memory_info().rss - here[1] < GROWTH_BYTES
    assert set(os.listdir(shm)) <= files
    assert sorted(temporary.rglob("*")) == kept
    assert "Traceback" not in daemon.errors


def wait_for_slots(daemon: Daemon, folder: Path) -> None:
    """The daemon waits for a client that vanished to come back."""
    deadline = transport.Deadline(PATIENCE_S)
    while True:
        try:
            return finished(daemon, folder)
        except SlotsError:
            assert not deadline.expired


def settled(daemon: Daemon, wanted: Holds | None) -> Holds:
    """What the daemon holds, once it is as wanted, or does not change for a second."""
    deadline, held, since = transport.Deadline(10.0), Holds.now(daemon), time.monotonic()
    while held != wanted and not deadline.expired and (wanted is not None or time.monotonic() - since < 1.0):
        time.sleep(0.1)
        if (now := Holds.now(daemon)) != held:
            held, since = now, time.monotonic()
    return held
