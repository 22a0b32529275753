"""Daemons on this machine, owned by the process that starts them."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

from rpc_reading_service.errors import ConnectError

READY_S = 120.0
"""A daemon is ready when its forkserver has imported torch: seconds, or many on a cold disk."""

STOP_S = 6.0
"""A daemon ends within 5 s of SIGTERM."""


class LocalDaemon:
    """One ``rpc-reading-worker`` process on a free loopback port; it ends with this process, however that ends.

    Args:
        slots: workers that may run at once
        options: further options of the command line
    """

    def __init__(self, slots: int, options: Sequence[str] = ()) -> None:
        # One socket pair: the daemon writes its ready line to it, and ends when our end is closed, by whatever death.
        self._lifeline, theirs = socket.socketpair()
        command = [sys.executable, "-m", "rpc_reading_service", "--port", "0", "--slots", str(slots)]
        with theirs:
            self.process = subprocess.Popen(
                [*command, *options, "--lifeline", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=_environment(),
                start_new_session=True,  # Ctrl-C in the terminal is the training process's to handle
            )
        self._owner = os.getpid()
        self._address: str | None = None

    @property
    def address(self) -> str:
        """``127.0.0.1:port``; waits until the daemon is ready.

        Raises:
            ConnectError: it ended instead, or took too long.
        """
        if self._address is None:
            self._lifeline.settimeout(READY_S)
            try:
                line = self._lifeline.makefile().readline()
            except TimeoutError as error:
                raise ConnectError(f"a local rpc-reading-worker was not ready within {READY_S:g} s") from error
            if not line:
                code = self.process.wait(STOP_S)
                raise ConnectError(f"a local rpc-reading-worker ended with code {code}; its own message is above")
            self._address = line.partition(" ready on ")[2].partition(",")[0]
        return self._address

    def close(self) -> None:
        """End the daemon and everything it started; a fork of the owner has nothing to end."""
        self._lifeline.close()
        if os.getpid() != self._owner or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class LocalDaemons:
    """Several daemons, started together: their imports overlap.

    Args:
        slots: of each daemon
    """

    def __init__(self, slots: Sequence[int], options: Sequence[str] = ()) -> None:
        self._daemons = [LocalDaemon(count, options) for count in slots]

    @property
    def addresses(self) -> list[str]:
        return [daemon.address for daemon in self._daemons]

    @property
    def processes(self) -> "list[subprocess.Popen[bytes]]":
        return [daemon.process for daemon in self._daemons]

    def close(self) -> None:
        threads = [threading.Thread(target=daemon.close) for daemon in self._daemons[1:]]
        for thread in threads:
            thread.start()
        for daemon in self._daemons[:1]:
            daemon.close()
        for thread in threads:
            thread.join()


def local_slots() -> int:
    """Workers for this machine: one per core that this process may use."""
    return len(os.sched_getaffinity(0))


def _environment() -> dict[str, str]:
    """What the training process can import, local workers can."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path}
