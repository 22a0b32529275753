"""``rpc-reading-worker`` as a process of its own, for tests that look at it from outside."""

import contextlib
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence

import psutil

from rpc_reading_service import transport

PATIENCE_S = 10.0


class Daemon:
    """One ``rpc-reading-worker``, started now; it ends at the latest with this process, by way of the lifeline.

    Args:
        command: what runs Python
    """

    def __init__(self, *options: str, command: Sequence[str] = (sys.executable,)) -> None:
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._lifeline, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [*command, "-m", "rpc_reading_service", *options, "--lifeline", str(theirs.fileno())],
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                text=True,
            )
        self._line = ""

    @property
    def line(self) -> str:
        """The first line that it prints, when it is ready."""
        assert self.process.stdout is not None
        self._line = self._line or self.process.stdout.readline()
        return self._line

    @property
    def address(self) -> str:
        return self.line.partition(" ready on ")[2].partition(",")[0]

    @property
    def port(self) -> int:
        return transport.split_address(self.address)[1]

    @property
    def errors(self) -> str:
        """What it wrote to stderr."""
        # Opened anew: the position of ours is the daemon's, too, which would write over what is there.
        with open(f"/proc/self/fd/{self._stderr.fileno()}") as file:
            return file.read()

    def wait_for_line(self, words: str) -> str:
        """The first line on stderr with these words, once it is there."""
        deadline = transport.Deadline(PATIENCE_S)
        while not (found := [line for line in self.errors.splitlines() if words in line]):
            assert not deadline.expired, self.errors
            threading.Event().wait(0.01)
        return found[0]

    def family(self) -> list[psutil.Process]:
        """Forkserver, workers and whatever else it started."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self._lifeline.close()
        self._stderr.close()


@contextlib.contextmanager
def running(*options: str) -> Iterator[Daemon]:
    daemon = Daemon(*options)
    try:
        yield daemon
    finally:
        daemon.close()


def until(condition: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
    """Look again and again: for what no event tells of, or one in another process."""
    deadline = transport.Deadline(seconds)
    while not condition():
        assert not deadline.expired
        threading.Event().wait(0.01)


def workers_of(pid: int) -> list[psutil.Process]:
    """The worker processes of a daemon: grandchildren, for the forkserver is their parent."""
    return [worker for child in psutil.Process(pid).children() for worker in child.children()]
