"""Daemon and client as users who are not root, on a file system that they cannot write to."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from daemons import Daemon
from torchdata.dataloader2 import DataLoader2
from torchdata.datapipes.iter import IterableWrapper

import rpc_reading_service
from rpc_reading_service import RPCReadingService

CAN_MOUNT = os.getuid() == 0 and subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not CAN_MOUNT, reason="only root who may mount can become somebody else with a file system of his"
    ),
]

SERVER, CLIENT = 64_001, 64_002
"""Users that have no name, as in many a container."""
TESTS = Path(__file__).parent
BATCHES = 20
SIZE = 200_000


def confined(uid: int, *folders: Path) -> list[str]:
    """The command, but for the interpreter's arguments."""
    package = Path(rpc_reading_service.__file__).parents[1]
    needed = {Path(sys.prefix), Path(sys.base_prefix), package, TESTS, *folders}
    outermost = [each for each in needed if not any(other in each.parents for other in needed)]
    return [
        sys.executable, str(TESTS / "confined.py"), str(uid), ",".join(map(str, outermost)), sys.executable
    ]  # fmt: skip


def keys_of(uid: int, folder: Path) -> Path:
    for path in (folder, *folder.rglob("*")):
        os.chown(path, uid, uid)
    return folder


@pytest.fixture(scope="module")
def client_keys(other: Path, folder: Path) -> Path:
    """Apart from the daemon's, with which they fit."""
    (folder / "allowed" / "client.pub").write_text((other / "client.pub").read_text())
    (other / "server.pub").write_text((folder / "server.pub").read_text())
    return other


@pytest.fixture(scope="module")
def daemon(folder: Path, client_keys: Path) -> Iterator[Daemon]:
    keys_of(SERVER, folder)
    options = ["--port", "0", "--slots", "2", "--keys", str(folder)]
    started = Daemon(*options, command=confined(SERVER, folder))
    try:
        assert started.line, started.errors
        yield started
    finally:
        started.close()


def loader_of(workers: Any, keys: Path | None) -> "DataLoader2[Any]":
    pipe = IterableWrapper(range(BATCHES)).sharding_filter().map(make)
    service = RPCReadingService(workers, num_workers=2, keys=keys, timeout=60.0, pickle_by_value=(__name__,))
    return DataLoader2(pipe, reading_service=service)


def make(number: int) -> torch.Tensor:
    return torch.full((SIZE,), float(number))


def are_whole(batches: list[torch.Tensor]) -> bool:
    return len(batches) == BATCHES and all(bool((each == n).all()) for n, each in enumerate(batches))


def test_a_daemon_of_another_user_serves_on_a_read_only_file_system(daemon: Daemon, client_keys: Path) -> None:
    with loader_of([daemon.address], client_keys) as loader:
        assert are_whole(list(loader))
    status = Path(f"/proc/{daemon.process.pid}/status").read_text()
    assert f"Uid:\t{SERVER}\t{SERVER}\t{SERVER}\t{SERVER}\n" in status
    assert "CapEff:\t0000000000000000\n" in status
    mounts = Path(f"/proc/{daemon.process.pid}/mounts").read_text().splitlines()
    options = {line.split()[1]: line.split()[3].split(",") for line in mounts}
    assert "ro" in options["/"]
    assert "rw" in options["/tmp"]
    assert "Traceback" not in daemon.errors


AS_CLIENT = """
import os, sys
sys.path.insert(0, {tests!r})
import test_confined as t
assert os.getuid() == t.CLIENT
assert os.statvfs("/").f_flag & os.ST_RDONLY
for workers, keys in (([sys.argv[1]], sys.argv[2]), (2, None)):
    with t.loader_of(workers, keys) as loader:
        iterator = iter(loader)
        batches = [next(iterator)]
        attached = len(loader.reading_service._client.attachments)
        assert t.are_whole(batches + list(iterator))
        print(attached, "workers' memory is shared")
"""


def test_a_client_of_a_third_user_gets_the_stream_and_nobody_elses_memory(daemon: Daemon, client_keys: Path) -> None:
    keys_of(CLIENT, client_keys)
    script = AS_CLIENT.format(tests=str(TESTS))
    command = [*confined(CLIENT, client_keys), "-W", "ignore", "-c", script, daemon.address, str(client_keys)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    # From a worker of another user by TCP; from local workers, which are one's own, through shared memory.
    assert ended.stdout.splitlines() == ["0 workers' memory is shared", "2 workers' memory is shared"]
    assert "Traceback" not in daemon.errors
