"""Losses on real daemons, one of each kind: the epoch is the undisturbed one, or the error says what happened.

``test_protocol.py`` has every order of events without processes, ``test_chaos.py`` many at random.
"""

import contextlib
import ctypes
import functools
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from daemons import until, workers_of
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torchdata.dataloader2 import DataLoader2
from torchdata.datapipes.iter import IterableWrapper

from rpc_reading_service import RPCReadingService, WorkerLostError, client, lanes
from rpc_reading_service.launchers import LocalDaemon, LocalDaemons
from rpc_reading_service.messages import EndOfShard
from rpc_reading_service.testing import local_workers

N = 400
TIMEOUT_S = 60.0
GRACE_S = 30.0
PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalDaemons]:
    """Two daemons with three slots each, which no test ends."""
    daemons = LocalDaemons([3, 3])
    try:
        assert daemons.addresses
        yield daemons
    finally:
        daemons.close()


@pytest.fixture(scope="module")
def draining(pool: LocalDaemons) -> Iterator[list[LocalDaemon]]:
    """Daemons with a grace, one for each test that ends one, the last with a long one; they start together."""
    daemons = [LocalDaemon(2, ["--grace", str(grace)]) for grace in (1, 0, *[GRACE_S] * 3)]
    everyone = list(daemons)
    try:
        assert all(daemon.address for daemon in daemons)
        yield daemons
    finally:
        for daemon in everyone:
            daemon.close()


def load(datapipe: Any, workers: list[str], **options: Any) -> "DataLoader2[Any]":
    options = {"pickle_by_value": (__name__,), "timeout": TIMEOUT_S, **options}
    return DataLoader2(datapipe, reading_service=RPCReadingService(workers, **options))


def sharded(elements: Any = range(N)) -> Any:
    return IterableWrapper(elements).sharding_filter()


def dispatched() -> Any:
    return IterableWrapper(range(N)).sharding_round_robin_dispatch(SHARDING_PRIORITIES.MULTIPROCESSING)


def with_pid(element: int) -> tuple[int, int, bytes]:
    """So large that a window does not hold an epoch: a fault finds it under way."""
    return element, os.getpid(), bytes(30_000)


def elements(batches: Any) -> list[int]:
    return [element for element, *_ in batches]


def pids(batches: Any) -> set[int]:
    return {pid for _, pid, _ in batches}


# A worker.


def once(marker: Path) -> bool:
    """Whether this is the first call of all, in any process."""
    with contextlib.suppress(FileExistsError):
        marker.touch(exist_ok=False)
        return True
    return False


ENDS: dict[str, tuple[Callable[[], Any], str]] = {
    "SIGKILL": (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
    "segmentation fault": (lambda: ctypes.string_at(0), "was killed by SIGSEGV"),
    "os._exit": (lambda: os._exit(3), "exited with code 3"),
    "abort": (os.abort, "was killed by SIGABRT"),
}


def end_at(at: int, marker: Path | None, how: str, element: int) -> int:
    """In the middle of one element the process ends; only once, if there is a marker."""
    if element == at and (marker is None or once(marker)):
        ENDS[how][0]()
    return element


@pytest.mark.parametrize("how", ENDS)
def test_a_worker_that_dies_is_replaced(
    pool: LocalDaemons, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    datapipe = sharded().map(functools.partial(end_at, N // 2, tmp_path / "died", how))
    with load(datapipe, pool.addresses, num_workers=3) as loader:
        assert [list(loader), list(loader)] == 2 * [list(range(N))]
    assert (tmp_path / "died").exists()
    (loss,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert ENDS[how][1] in loss


@pytest.mark.parametrize("policy", ["recover", "raise", "drop"])
def test_a_batch_that_always_kills_its_worker(
    pool: LocalDaemons, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    datapipe = sharded().map(functools.partial(end_at, 101, None, "os._exit"))
    with load(datapipe, pool.addresses, num_workers=2, on_worker_loss=policy) as loader:
        if policy == "drop":
            found = list(loader)
            rest = [element for element in found if element % 2]  # what it had made and not sent died with it
            assert [element for element in found if element % 2 == 0] == list(range(0, N, 2))
            assert rest == list(range(1, 101, 2))[: len(rest)]
            assert "going on without the rest of shard 1: worker 1 on" in caplog.text
            return
        with pytest.raises(WorkerLostError, match=r"^worker 1 on .* exited with code 3") as error:
            list(loader)
    assert ("for the 3rd time at batch 50 of its shard in epoch 1" in str(error.value)) == (policy == "recover")


def test_a_connection_that_took_all_there_was_with_it_is_noticed_at_once(
    pool: LocalDaemons, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing more comes that would show a gap. To ask whoever is silent takes twice ``DATA_SILENCE_S``."""
    monkeypatch.setattr(client, "DATA_SILENCE_S", 2 * TIMEOUT_S)
    read, lost = lanes.Lanes.read, []

    def read_once_all_is_lost(self: lanes.Lanes, at_most: int) -> Iterator[Any]:
        for lane in () if lost else list(self._open.values()):
            if EndOfShard.__name__.encode() not in unread(lane):
                return iter(())
            lost.append(lane)
            self._break(lane, "it was cut off")
        return read(self, at_most)

    with load(sharded(range(20)), pool.addresses[:1], num_workers=1, transport="tcp") as loader:
        assert list(loader) == list(range(20))
        monkeypatch.setattr(lanes.Lanes, "read", read_once_all_is_lost)
        assert list(loader) == list(range(20))
    assert len(lost) == 1
    assert "20 batches are missing, numbers 0 to 19" in caplog.text


def unread(lane: Any) -> bytes:
    try:
        return bytes(lane._socket.recv(1 << 20, socket.MSG_PEEK))
    except BlockingIOError:
        return b""


def test_a_worker_that_dies_while_it_is_set_up_is_replaced(pool: LocalDaemons, tmp_path: Path) -> None:
    def init_fn(datapipe: Any, worker_info: Any) -> Any:
        if worker_info.worker_id == 1 and once(tmp_path / "died"):
            os.kill(os.getpid(), signal.SIGKILL)
        return datapipe

    with load(sharded(), pool.addresses, num_workers=2, worker_init_fn=init_fn) as loader:
        assert list(loader) == list(range(N))
    assert (tmp_path / "died").exists()


@pytest.mark.parametrize("victim", ["fed", "dispatching"])
def test_workers_that_are_fed_start_again_together(pool: LocalDaemons, victim: str) -> None:
    with load(dispatched().map(with_pid), pool.addresses, num_workers=2) as loader:
        iterator = iter(loader)
        first = [next(iterator) for _ in range(4)]
        fed = pids(first)
        workers = {worker.pid for daemon in pool.processes for worker in workers_of(daemon.pid)}
        assert len(fed) == 2
        (dispatching,) = workers - fed
        os.kill(min(fed) if victim == "fed" else dispatching, signal.SIGKILL)
        assert elements(first) + elements(iterator) == list(range(N))
        assert elements(loader) == list(range(N))


def pids_of(daemon: LocalDaemon) -> set[int]:
    return {worker.pid for worker in workers_of(daemon.process.pid)}


# A daemon.


def test_a_daemon_that_is_stopped_is_replaced_and_used_again(pool: LocalDaemons) -> None:
    daemon = psutil.Process(pool.processes[0].pid)
    with load(sharded().map(with_pid), pool.addresses, num_workers=2, on_worker_loss="recover") as loader:
        iterator = iter(loader)
        first = [next(iterator) for _ in range(3)]
        daemon.suspend()
        for worker in workers_of(daemon.pid):
            worker.suspend()
        try:
            assert elements(first) + elements(iterator) == list(range(N))
            assert elements(loader) == list(range(N))
        finally:
            for process in (*workers_of(daemon.pid), daemon):
                process.resume()
        assert elements(loader) == list(range(N))
    until(lambda: not workers_of(daemon.pid), PATIENCE_S)


def test_with_nowhere_to_go_the_error_lists_every_address() -> None:
    with local_workers(2) as addresses:
        loader = load(sharded(itertools.count()), addresses, timeout=3.0)
        iterator = iter(loader)
        next(iterator)
    began = time.monotonic()  # both have ended
    with loader, pytest.raises(WorkerLostError) as error:
        list(iterator)
    assert time.monotonic() - began < 3.0 + 15.0
    assert "no slot was found for its shard within 3 s" in str(error.value)
    assert all(address in str(error.value) for address in addresses)
    assert "Start daemons at these addresses, or resume from a checkpoint with others" in str(error.value)


# A daemon that drains.


def terminate(daemon: LocalDaemon) -> None:
    daemon.process.send_signal(signal.SIGTERM)


def test_a_draining_daemon_lets_its_shards_move_on_between_epochs(
    pool: LocalDaemons, draining: list[LocalDaemon], caplog: pytest.LogCaptureFixture
) -> None:
    daemon = draining.pop()
    with load(sharded().map(with_pid), [daemon.address, *pool.addresses], num_workers=2) as loader:
        iterator = iter(loader)
        first = next(iterator)
        moving = pids_of(daemon)
        assert moving
        terminate(daemon)
        until(lambda: "is ending within 30 s: the daemon got SIGTERM" in caplog.text, PATIENCE_S)
        assert elements([first, *iterator]) == list(range(N))
        second = list(loader)
        assert elements(second) == list(range(N))
        assert not moving & pids(second)
        assert daemon.process.wait(GRACE_S) == 0


@pytest.mark.parametrize("grace", [1, 0])
def test_a_daemon_whose_grace_is_over_lets_its_shards_move_on_in_mid_epoch(
    pool: LocalDaemons, draining: list[LocalDaemon], grace: int
) -> None:
    daemon = draining.pop(0)
    with load(sharded().map(with_pid), [daemon.address, *pool.addresses], num_workers=2) as loader:
        iterator = iter(loader)
        first = [next(iterator) for _ in range(10)]
        moving = pids_of(daemon)
        terminate(daemon)
        assert daemon.process.wait(GRACE_S) == 0  # while the loop stands still: the window does not hold the epoch
        rest = list(iterator)
        assert elements(first) + elements(rest) == list(range(N))
        assert moving
        assert not moving & pids(rest[-10:])


def test_a_draining_daemon_takes_no_more_sessions(pool: LocalDaemons, draining: list[LocalDaemon]) -> None:
    daemon = draining.pop()
    with load(sharded(), [daemon.address], num_workers=1) as loader:
        iterator = iter(loader)
        first = next(iterator)
        terminate(daemon)
        until(lambda: refuses(daemon.address), PATIENCE_S)
        assert [first, *iterator] == list(range(N))
    assert daemon.process.wait(GRACE_S) == 0


def refuses(address: str) -> bool:
    """Whether a daemon opens no session any more, because it is ending."""
    try:
        with load(sharded(), [address], num_workers=1, connect_timeout=5.0) as loader:
            next(iter(loader))
    except ConnectionError as error:
        return "the daemon is ending: the daemon got SIGTERM" in str(error)
    return False


# Daemons that were down at first.


def test_a_daemon_that_was_down_is_used_once_it_answers(
    draining: list[LocalDaemon], free_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    first, late_address = draining.pop(), f"127.0.0.1:{free_port}"
    with load(sharded().map(with_pid), [late_address, first.address], num_workers=2) as loader:
        iterator = iter(loader)
        taken = [next(iterator)]
        assert f"starting without {late_address}, which does not answer; it is used once it does" in caplog.text
        late = LocalDaemon(2, ["--port", str(free_port)])
        try:
            assert late.address == late_address
            first.process.kill()
            first.process.wait()
            taken += iterator
            assert elements(taken) == list(range(N))
            assert pids(taken[-2:]) <= pids_of(late)
        finally:
            loader.shutdown()
            late.close()


# Ctrl-C.

SCRIPT = """
import os, signal, sys, threading, time, traceback
from torchdata.dataloader2 import DataLoader2
from torchdata.datapipes.iter import IterableWrapper
from rpc_reading_service import RPCReadingService

def wait(*args):
    time.sleep(60)

def slow(element):
    wait()
    return element

def slow_init(datapipe, worker_info):
    wait()
    return datapipe

when, address = sys.argv[1:]
datapipe = IterableWrapper(range(100)).sharding_filter()
options = {"worker_init_fn": slow_init} if when == "initialize" else {}
datapipe = datapipe.map(slow) if when == "next" else datapipe
loader = DataLoader2(datapipe, reading_service=RPCReadingService([address], **options))
pressed = []

def press():
    pressed.append(time.monotonic())
    os.kill(os.getpid(), signal.SIGINT)

def later():
    # Once the main thread is where it is to be: at its wait, which shows in its stack.
    while where not in "".join(traceback.format_stack(sys._current_frames()[threading.main_thread().ident])):
        time.sleep(0.01)
    press()

places = {"connect": "client.open()", "initialize": "client.open()", "next": "_wait_for_item"}
where = places.get(when, "time.sleep(61)")
threading.Thread(target=later, daemon=True).start()
try:
    if when == "between":
        list(loader)
    iterator = iter(loader)
    next(iterator)
    time.sleep(61)
except KeyboardInterrupt:
    print("interrupted", flush=True)
loader.shutdown()
print(f"{time.monotonic() - pressed[0]:.2f}")
"""


@pytest.mark.parametrize("when", ["connect", "initialize", "next", "epoch", "between"])
def test_ctrl_c_ends_the_training_process_at_any_point(
    pool: LocalDaemons, free_port: int, tmp_path: Path, when: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    address = f"127.0.0.1:{free_port}" if when == "connect" else pool.addresses[0]
    command = [sys.executable, "-W", "ignore", str(script), when, address]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ended.returncode == 0, ended.stderr
    word, seconds = ended.stdout.split()
    assert word == "interrupted"
    assert float(seconds) < 4.0  # 2 s are promised; the rest is for a busy machine
    assert "Traceback" not in ended.stderr
    until(lambda: not [worker for daemon in pool.processes for worker in workers_of(daemon.pid)], PATIENCE_S)
