"""A process that has loaded a large graph, and of which the workers that run it are forked: they share its memory.

    daemon                              origin, itself forked from the forkserver
      | == start, with the graph ========>  | loads it, once
      |  <== loaded, or the end ===========  |
      | == arguments and descriptors =====>  | == forks ==> a worker, in which the graph is loaded already
      |  <== process id, later exit code ==  |

A page is copied when a worker writes to it, and Python writes to an object's page whenever it refers to the object:
large arrays, tensors and strings stay shared, a list of small numbers is copied bit by bit as the worker looks at it.

Only what is safe is shared. A graph that opens files or starts threads while it is loaded would have its workers read
from one file position, or miss the threads; then the process ends without a word, and each worker loads a graph of its
own. So it does if loading fails: the workers find out, and say, why.
"""

import contextlib
import fcntl
import gc
import multiprocessing
import os
import pickle
import resource
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from typing import Any

from rpc_reading_service import logs

LOADED = b"loaded"
REQUEST_BYTES = 1 << 20
DESCRIPTORS = 4
"""That come with each request: a worker's channel, its logbook, what it writes to, and where its process id and exit
code go."""

FORK_S = 3.0
"""How long a fork may take, during which the daemon hears nobody; it takes some 10 ms, more for more memory."""

_NUMBER_BYTES = 8


# The daemon's end.


class Origin:
    """Loads a graph, and then forks workers.

    Args:
        forkserver: starts the process
        graph_fd: the pickled graph
        limit: bytes of memory that loading it may take; None if there is no limit
        session: the one in whose name it loads the graph, for the log
    """

    def __init__(self, forkserver: Any, graph_fd: int, limit: int | None, session: str) -> None:
        self.loading = True
        self.loaded = False
        self._has_forked = False
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            self.output = logs.Output(session, None)
            theirs.callback(self.output.started)
            ours.callback(self.output.close)
            self._socket, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            theirs.enter_context(far)
            ours.callback(self._socket.close)
            self._socket.setblocking(False)
            args = DupFd(far.fileno()), DupFd(graph_fd), DupFd(self.output.far), limit
            self._process: BaseProcess = forkserver.Process(target=_serve, args=args, name="rpc-reading-origin")
            self._process.start()
            ours.pop_all()

    def __str__(self) -> str:
        return "loaded once, for all workers" if self.loaded else "loaded by each worker for itself"

    @property
    def raw(self) -> socket.socket:
        """Readable when loading is over."""
        return self._socket

    def listen(self) -> None:
        """Whether workers may be forked, if that is known by now."""
        with contextlib.suppress(BlockingIOError):
            try:
                self.loaded = self._socket.recv(len(LOADED)) == LOADED
            except ConnectionError:
                self.loaded = False
            self.loading = False

    def fork(self, args: Sequence[Any], channel: int, logbook: int, output: int) -> "Forked":
        """A worker, given the arguments of ``worker.main`` after the first three.

        Raises:
            OSError, EOFError: there is no process any more that could be forked.
        """
        reader, writer = os.pipe()
        try:
            try:
                socket.send_fds(self._socket, [pickle.dumps(args)], [channel, logbook, output, writer])
            finally:
                os.close(writer)
            forked = Forked(reader)
        except (OSError, EOFError):
            os.close(reader)
            self.loaded = False
            raise
        self._has_forked = True
        return forked

    def close(self) -> None:
        """No more workers; the process ends when those that it has forked are gone."""
        if not self._has_forked:
            self._process.kill()
        self._socket.close()
        self.output.close()


class Forked:
    """A worker process, as much like multiprocessing's as the daemon needs.

    Args:
        reader: where its process id comes, and its exit code

    Raises:
        EOFError: the process that should have been forked is gone, or does nothing for ``FORK_S``.
    """

    def __init__(self, reader: int) -> None:
        self.sentinel = reader
        """Readable when the process has ended."""
        if not connection.wait([reader], FORK_S):
            raise EOFError(f"the process that has the graph loaded has not forked it within {FORK_S:g} s")
        self.pid = _read_number(reader)
        self._code: int | None = None

    @property
    def exitcode(self) -> int | None:
        """As multiprocessing's; that of a killed process, if the one that could tell is gone as well."""
        if self._code is None and connection.wait([self.sentinel], 0):
            try:
                self._code = _read_number(self.sentinel)
            except EOFError:
                self._code = -signal.SIGKILL
        return self._code

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def close(self) -> None:
        os.close(self.sentinel)


# The process.


def _serve(socket_fd: Any, graph_fd: Any, output_fd: Any, limit: int | None) -> None:
    logs.redirect(output_fd.detach())
    from rpc_reading_service import worker

    worker.become_worker()
    channel = socket.socket(fileno=socket_fd.detach())
    with _ended_by_a_hangup(channel):
        parts = _load(graph_fd.detach(), limit)
    logs.flush()
    if parts is not None:
        gc.collect()
        gc.freeze()  # the collector would write to every object
        channel.send(LOADED)
        _Forks(channel, lambda: parts).run()
    os._exit(0)  # whatever threads user code has started


@contextlib.contextmanager
def _ended_by_a_hangup(channel: socket.socket) -> Iterator[None]:
    """If the daemon goes, the kernel ends this process, whatever user code is doing."""
    flags = fcntl.fcntl(channel, fcntl.F_GETFL)
    fcntl.fcntl(channel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(channel, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(channel, fcntl.F_SETFL, flags | os.O_ASYNC)
    yield
    fcntl.fcntl(channel, fcntl.F_SETFL, flags)


def _load(graph_fd: int, limit: int | None) -> Any:
    """What was pickled; None if it cannot be loaded, or not be shared."""
    from rpc_reading_service import worker

    before = _descriptors() - {str(graph_fd)}
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    if limit is not None:
        worker.limit_memory(limit)
    try:
        parts = worker.unpickle(graph_fd)
    except BaseException:  # user code may raise anything; a worker will, too, and tell the client
        return None
    resource.setrlimit(resource.RLIMIT_DATA, limits)
    return parts if _descriptors() == before and _threads() == 1 else None


def _descriptors() -> set[str]:
    return {name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}


def _threads() -> int:
    """Those of libraries, too."""
    return len(os.listdir("/proc/self/task"))


class _Forks:
    """The loop of the process: forks, and passes on how each worker has ended.

    Args:
        channel: to the daemon
        parts: gives what was loaded
    """

    def __init__(self, channel: socket.socket, parts: Callable[[], Any]) -> None:
        self._channel = channel
        self._parts = parts
        self._context = multiprocessing.get_context("fork")
        self._workers: dict[int, tuple[BaseProcess, int]] = {}
        self._open = True

    def run(self) -> None:
        """Until the daemon wants no more workers, and all are gone."""
        while self._open or self._workers:
            ready = connection.wait([*self._workers, *([self._channel] if self._open else [])])
            for sentinel in self._workers.keys() & set(ready):
                self._reap(sentinel)
            if self._channel in ready:
                self._receive()

    def _receive(self) -> None:
        data, descriptors, _, _ = socket.recv_fds(self._channel, REQUEST_BYTES, DESCRIPTORS)
        if not data:
            self._open = False
            return
        *theirs, status = descriptors
        process = self._context.Process(target=self._become, args=(pickle.loads(data), *descriptors))
        try:
            process.start()
        except OSError:  # no memory, no process: the daemon hears of it when its end closes
            os.close(status)
        else:
            self._workers[process.sentinel] = process, status
            _write_number(status, process.pid or 0)
        finally:
            for descriptor in theirs:
                os.close(descriptor)

    def _become(self, args: Sequence[Any], channel: int, logbook: int, output: int, own: int) -> None:
        """In the new process: nothing of the parent's is held on to."""
        from rpc_reading_service import worker

        logs.redirect(output)
        self._channel.close()
        os.close(own)
        for sentinel, (_, status) in self._workers.items():
            os.close(sentinel)
            os.close(status)
        worker.main(connection.Connection(channel), self._parts, logbook, *args)

    def _reap(self, sentinel: int) -> None:
        process, status = self._workers.pop(sentinel)
        process.join()
        with contextlib.suppress(BrokenPipeError):  # the daemon is gone
            _write_number(status, process.exitcode or 0)
        os.close(status)
        process.close()


def _write_number(descriptor: int, number: int) -> None:
    os.write(descriptor, number.to_bytes(_NUMBER_BYTES, "little", signed=True))


def _read_number(descriptor: int) -> int:
    data = os.read(descriptor, _NUMBER_BYTES)
    if len(data) < _NUMBER_BYTES:
        raise EOFError("the process that has the graph loaded is gone")
    return int.from_bytes(data, "little", signed=True)
