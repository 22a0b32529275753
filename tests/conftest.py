"""Fixtures for every test, first of all the one that turns whatever a test leaves behind into a failure.

The leak check looks before and after each test at child processes, threads, ZeroMQ sockets and contexts, files in
/dev/shm and listening TCP ports. What was there before the test (a session's or module's daemons) is fine; anything
new has ``leak_grace`` seconds to go. It costs a few milliseconds a test, and only a test that leaks waits.
"""

import functools
import itertools
import os
import select
import socket
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
import zmq.utils.garbage

pytest_plugins = ["pytester"]

SHM = Path("/dev/shm")
MARK = f"LEAK_CHECK_{uuid.uuid4().hex}"
"""An environment variable that descendants inherit, so that one whose parent has died is found as well."""
os.environ[MARK] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("leak_grace", "seconds that what a test started has to be gone after it", default="5.0")


@pytest.fixture(scope="session")
def two_daemons() -> Iterator[list[str]]:
    """The addresses of two one-slot daemons on this machine, which live for the whole session."""
    from rpc_reading_service.testing import local_workers

    with local_workers(2) as addresses:
        yield addresses


@pytest.fixture
def slow_link() -> Iterator[str]:
    """The address of a daemon, to and from which 2 MB/s go on each connection."""
    from daemons import running
    from relays import HOSTS, free_ports, options, relay

    ports = free_ports()
    with running(*options(ports)) as daemon:
        assert daemon.line, daemon.errors
        with relay(ports, pace=2e6):
            yield f"{HOSTS[1]}:{ports[0]}"


@pytest.fixture(scope="session")
def make_keys(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Makes folders of keys, of a daemon and of one client."""
    from rpc_reading_service import security

    def make() -> Path:
        folder = tmp_path_factory.mktemp("keys")
        security.create(folder)
        return folder

    return make


@pytest.fixture(scope="module")
def folder(make_keys: Callable[[], Path]) -> Path:
    """Keys of the daemon and of one client."""
    return make_keys()


@pytest.fixture(scope="module")
def other(make_keys: Callable[[], Path]) -> Path:
    """Keys of somebody else."""
    return make_keys()


@pytest.fixture
def free_port() -> int:
    """A loopback TCP port at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaks. Autouse, hence set up before the test's own fixtures and torn down after them."""
    before = Held.now()
    yield
    leaks = before.leaked_since(Grace(float(request.config.getini("leak_grace"))))
    if leaks:
        pytest.fail("this test left behind:\n" + "\n".join(f"  {leak}" for leak in leaks), pytrace=False)


class Grace:
    """The time that is left for things to go away, shared by all of them."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def poll(self, leaks: Callable[[], list[str]]) -> list[str]:
        """Look again until nothing leaks: only for files and ports, whose going away cannot be waited for."""
        while (found := leaks()) and self.left():
            threading.Event().wait(0.02)
        return found


@dataclass(frozen=True)
class Held:
    """What this process and its descendants hold at one moment."""

    processes: frozenset[psutil.Process]
    threads: frozenset[threading.Thread]
    zmq_objects: frozenset[int]
    shm_files: frozenset[str]
    sockets: frozenset[str]

    @classmethod
    def now(cls) -> "Held":
        family = descendants()
        return cls(
            processes=frozenset(family),
            threads=frozenset(threading.enumerate()),
            zmq_objects=frozenset(open_zmq_objects()),
            shm_files=frozenset(shm_files()),
            sockets=frozenset(sockets_of(family)),
        )

    def leaked_since(self, grace: Grace) -> list[str]:
        """One line for each thing that is new and stays: processes and threads first, for they hold the others."""
        return [
            *leaked_processes(self.processes, grace),
            *leaked_threads(self.threads, grace),
            *(repr(each) for serial, each in open_zmq_objects().items() if serial not in self.zmq_objects),
            *leaked_shm_files(self.shm_files, grace),
            *grace.poll(lambda: leaked_ports(self.sockets)),
        ]


# Processes


def descendants() -> set[psutil.Process]:
    """Children of this process at any depth, and those that lost their parent but carry the mark of this run."""
    found = set(psutil.Process().children(recursive=True))
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(OSError, psutil.NoSuchProcess):
            if MARK.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.add(psutil.Process(pid))
    return found - {psutil.Process()}


def leaked_processes(before: frozenset[psutil.Process], grace: Grace) -> list[str]:
    """What is still alive is described, then killed, so that the next test starts clean."""
    new = new_processes(before)
    for each in new:
        wait_for_exit(each, grace)
    alive = new_processes(before) if new else []
    lines = [f"process {describe(each)}" for each in alive]
    for each in alive:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    return lines


def wait_for_exit(process: psutil.Process, grace: Grace) -> None:
    """psutil would also wait until init has buried an orphan, which can take seconds, and take a child's exit code."""
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(process.pid)
        try:
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            poller.poll(1000 * grace.left())
        finally:
            os.close(descriptor)


def new_processes(before: frozenset[psutil.Process]) -> list[psutil.Process]:
    return [each for each in descendants() - before if runs(each) and not is_helper(each, before)]


def runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def is_helper(process: psutil.Process, before: frozenset[psutil.Process]) -> bool:
    """Whether multiprocessing started it for this process, or for one that was there before the test, to keep.

    A worker that was forked from the forkserver has the same command line, but the forkserver for its parent.
    """
    with suppress(psutil.NoSuchProcess):
        command, parent = process.cmdline(), process.parent()
        text = " ".join(command)
        return (
            ("multiprocessing.resource_tracker" in text or "multiprocessing.forkserver" in text)
            and parent is not None
            and parent in before | {psutil.Process()}
            and parent.cmdline() != command
        )
    return False


def describe(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        return f"{process.pid} ({process.name()}, {process.status()}): {' '.join(process.cmdline())}"
    return f"{process.pid} (gone meanwhile)"


# Threads


def leaked_threads(before: frozenset[threading.Thread], grace: Grace) -> list[str]:
    new = [each for each in threading.enumerate() if each not in before and is_ours(each)]
    for each in new:
        each.join(grace.left())
    return [f"thread {each.name!r} at {position(each)}" for each in new if each.is_alive()]


def is_ours(thread: threading.Thread) -> bool:
    """Not pyzmq's garbage collector, not pytest-timeout's timer, and nothing that torch started outside Python."""
    foreign = (zmq.utils.garbage.GarbageCollectorThread, threading._DummyThread)
    return not isinstance(thread, foreign) and not thread.name.startswith("pytest_timeout ")


def position(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}" if frame else "no Python code"


# ZeroMQ: a search through gc.get_objects() takes 30-70 ms with torch loaded, so objects are noted as they are made.

made: dict[int, "weakref.ref[Any]"] = {}
serials = itertools.count()


def note_new_objects(cls: type) -> None:
    original = cls.__init__  # type: ignore[misc]

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        made[next(serials)] = weakref.ref(self)

    cls.__init__ = init  # type: ignore[misc]


note_new_objects(zmq.Context)
note_new_objects(zmq.Socket)


def open_zmq_objects() -> dict[int, Any]:
    """Every open socket and context by serial number, but pyzmq's own, which outlive all others."""
    own = zmq.utils.garbage.gc._context
    objects = {serial: each for serial, ref in list(made.items()) if (each := ref()) is not None}
    return {serial: each for serial, each in objects.items() if is_open(each) and context_of(each) is not own}


def is_open(each: Any) -> bool:
    """A shadow is one more object for a socket or context that another object owns."""
    return not (each.closed or each._shadow)


def context_of(each: Any) -> Any:
    return each if isinstance(each, zmq.Context) else each.context


# Files in /dev/shm


def shm_files() -> set[str]:
    return {str(SHM / name) for name in os.listdir(SHM)} if SHM.exists() else set()


def leaked_shm_files(before: frozenset[str], grace: Grace) -> list[str]:
    """Of the new files at the first look: strangers go on making files meanwhile."""
    new = shm_files() - before
    return [f"shared-memory file {path}" for path in grace.poll(lambda: files_of_ours(new & shm_files()))]


def files_of_ours(paths: set[str]) -> list[str]:
    """Not those which belong to another user, or are in use outside this process tree only."""
    found = {path: status for path in paths if (status := status_of(path)) and status.st_uid == os.getuid()}
    family = {os.getpid(), *(each.pid for each in descendants())} if found else set()
    used = {pid: shm_inodes_in_use(pid) for pid in (psutil.pids() if found else [])}
    ours = {inode for pid, inodes in used.items() for inode in inodes if pid in family}
    others = {inode for pid, inodes in used.items() for inode in inodes if pid not in family}
    return sorted(path for path, status in found.items() if status.st_ino in ours or status.st_ino not in others)


def shm_inodes_in_use(pid: int) -> set[int]:
    """What a process maps or holds open there, by inode: a semaphore is mapped under a name that it had before."""
    opened = [status_of(link) for link, target in open_descriptors(pid).items() if target.startswith(f"{SHM}/")]
    inodes = {status.st_ino for status in opened if status}
    with suppress(OSError):
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
        inodes |= {int(line.split(maxsplit=5)[4]) for line in maps if f" {SHM}/" in line}
    return inodes


def status_of(path: str) -> os.stat_result | None:
    with suppress(OSError):
        return os.stat(path)
    return None


def open_descriptors(pid: int) -> dict[str, str]:
    """The descriptors of a process, as links, and what each points to: a path, ``socket:[inode]``, ..."""
    found, folder = {}, f"/proc/{pid}/fd"
    with suppress(OSError):
        for name in os.listdir(folder):
            with suppress(OSError):
                found[f"{folder}/{name}"] = os.readlink(f"{folder}/{name}")
    return found


# Listening TCP ports: the kernel takes 5 ms to list its TCP sockets, so it is asked only about new ones.


def sockets_of(family: set[psutil.Process]) -> dict[str, psutil.Process]:
    """Every socket of this process and its descendants, by the name ``socket:[inode]`` that descriptors have for it."""
    holders = [*family, psutil.Process()]
    return {
        name: each for each in holders for name in open_descriptors(each.pid).values() if name.startswith("socket:")
    }


def leaked_ports(before: frozenset[str]) -> list[str]:
    new = {name: holder for name, holder in sockets_of(descendants()).items() if name not in before}
    ports = listening_ports() if new else {}
    return [f"listening TCP port {ports[name]} of process {describe(new[name])}" for name in new.keys() & ports.keys()]


def listening_ports() -> dict[str, int]:
    """The port of every listening TCP socket of the machine."""
    rows = (line.split() for table in ("tcp", "tcp6") for line in lines_of(Path("/proc/net") / table)[1:])
    return {f"socket:[{row[9]}]": int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
