"""A daemon's log: one line an event, which never waits for whoever reads it; what workers write goes there too.

A worker's descriptors 1 and 2 are a pipe to its daemon, so that also what C code and child processes write is caught.
Neither end waits: a worker whose pipe is full drops what it would write, and the daemon reads a bounded piece a turn.
Lines reach the daemon's stderr by a thread of their own, since a terminal that is stopped stops whoever writes to it.
"""

import contextlib
import ctypes
import fcntl
import io
import json
import logging
import os
import queue
import select
import sys
import threading
from datetime import datetime, timezone
from typing import Any

OUTPUT_LOGGER = "rpc_reading_service.output"
"""What workers write, and processes that load a graph for them; always logged, whatever ``--log-level`` is."""

LINE_BYTES = 8192
"""A longer line of a worker's is cut into several."""

PIPE_BYTES = 1 << 20
"""What a worker can write before its daemon reads; as much as Linux allows everybody."""

READ_BYTES = 2 << 10
"""What is read from one worker in one turn: one that floods its pipe must not keep the daemon from the others."""

LAST_LINES = 200
"""So many of those are logged that are left in its pipe when a worker ends."""

PATIENCE_S = 0.2
"""How long Python code in a worker waits for room in the pipe, once, before what it writes is dropped."""

LINES_WAITING = 10_000
"""Lines that wait for whoever reads the log."""

FAREWELL_S = 1.0
"""How long the last lines have when the daemon ends."""

_IOLBF = 1
"""From glibc's stdio.h."""

_CONTROL = {code: f"\\x{code:02x}" for code in [*range(32), *range(127, 160)] if code != ord("\t")}
"""What a terminal would obey instead of showing it, or take for the end of a line."""

_JSON_CONTROL = {code: f"\\u{code:04x}" for code in range(127, 160)}
"""What of that JSON leaves as it is."""


def about(session: str = "", worker: int | None = None) -> dict[str, Any]:
    """``extra`` for a log call: whom the line is about.

    Args:
        session: only its beginning is logged: who knows all of it may use the session
        worker: the shard
    """
    return {"session": session[:8], "worker": worker}


def printable(text: str) -> str:
    """On one line, and without what a terminal would obey."""
    return text.translate(_CONTROL)


# Lines.


class TextFormatter(logging.Formatter):
    """``time level session/worker message``, with ``-`` for whom the line is not about.

    What no worker has written comes from the process that loads the session's graph for all of them: ``session/graph``.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(who)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        session, worker = _whom(record)
        nobody = "graph" if record.name == OUTPUT_LOGGER else "-"
        record.who = f"{session or '-'}/{nobody if worker is None else worker}"
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return "\n".join(map(printable, super().formatException(ei).splitlines()))


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, session, worker, message, exception."""

    def format(self, record: logging.LogRecord) -> str:
        session, worker = _whom(record)
        fields = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "session": session or None,
            "worker": worker,
            "message": record.getMessage(),
            "exception": self.formatException(record.exc_info) if record.exc_info else None,
        }
        return json.dumps(fields, ensure_ascii=False).translate(_JSON_CONTROL)


def _whom(record: logging.LogRecord) -> tuple[str, int | None]:
    return getattr(record, "session", ""), getattr(record, "worker", None)


class Log(logging.Handler):
    """Writes lines by a thread of its own; what it cannot write in time is dropped, and counted in the next line.

    Args:
        fd: where to write
        formatter: makes a line of a record
    """

    def __init__(self, fd: int, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._fd = fd
        self._lines: queue.Queue[bytes | None] = queue.Queue(LINES_WAITING)
        self._dropped = 0
        self._thread = threading.Thread(target=self._write, name="rpc-reading-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        if self._lines.full():
            self._dropped += 1
            return
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            self._put(logging.makeLogRecord({"name": __name__, "levelname": "WARNING", "msg": _dropped_lines(dropped)}))
        self._put(record)

    def _put(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record).encode(errors="backslashreplace") + b"\n")
        except queue.Full:
            self._dropped += 1
        except (TypeError, ValueError):  # the call and its text do not fit together
            self.handleError(record)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                while line:
                    line = line[os.write(self._fd, line) :]
            except OSError:
                pass  # nobody reads it any more

    def close(self) -> None:
        """The last lines are written, unless whoever should read them does not."""
        if self._thread.is_alive():
            try:
                self._lines.put(None, timeout=FAREWELL_S)
            except queue.Full:
                pass
            else:
                self._thread.join(FAREWELL_S)
        super().close()


def _dropped_lines(count: int) -> str:
    return f"{count} lines were dropped: whoever reads this log is too slow"


def start(level: str, as_json: bool, fd: int = 2) -> Log:
    """Log to a descriptor from now on; ``stop`` is the way back."""
    log = Log(fd, JsonFormatter() if as_json else TextFormatter())
    logging.root.addHandler(log)
    logging.root.setLevel(level.upper())
    logging.getLogger(OUTPUT_LOGGER).setLevel(logging.INFO)
    return log


def stop(log: Log) -> None:
    logging.root.removeHandler(log)
    log.close()


# What a worker writes: the daemon's end.


class Output:
    """What one worker, or a graph that is loaded, writes, line by line into the log.

    Args:
        session: of the worker
        worker: the shard; None for the process that loads the session's graph for all of them
    """

    def __init__(self, session: str, worker: int | None) -> None:
        self._extra = about(session, worker)
        self._logger = logging.getLogger(OUTPUT_LOGGER)
        self._rest = b""
        self.ended = False
        self.fd, self.far = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # the user has too many of them: 64 KiB must do
            fcntl.fcntl(self.far, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def started(self) -> None:
        """The process has its end."""
        os.close(self.far)

    def read(self, nbytes: int = READ_BYTES) -> bool:
        """Log a piece of what has come; False at its end, when nobody has the other end any more."""
        try:
            data = os.read(self.fd, nbytes)
        except BlockingIOError:
            return True
        self.ended = not data
        *lines, self._rest = (self._rest + data.replace(b"\r", b"\n")).split(b"\n")
        for line in lines:
            self._log(line)
        while len(self._rest) >= LINE_BYTES:
            self._log(self._rest[:LINE_BYTES])
            self._rest = self._rest[LINE_BYTES:]
        return not self.ended

    def _log(self, line: bytes) -> None:
        for start in range(0, len(line), LINE_BYTES):  # nothing for an empty one
            self._logger.info(line[start : start + LINE_BYTES].decode(errors="backslashreplace"), extra=self._extra)

    def close(self) -> None:
        """Log the end of what is left; a child process of the worker's may still write, and is not heard any more."""
        with contextlib.suppress(BlockingIOError):
            self._rest += os.read(self.fd, PIPE_BYTES)
        lines = self._rest.replace(b"\r", b"\n").split(b"\n")
        if len(lines) > LAST_LINES:
            self._log(_dropped_lines(len(lines) - LAST_LINES).encode())
        for line in lines[-LAST_LINES:]:
            self._log(line)
        os.close(self.fd)


# The worker's end.


def redirect(fd: int) -> None:
    """From now on what this process writes to stdout and stderr goes to the daemon."""
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdout, sys.stderr = _stream(1), _stream(2)
    libc = ctypes.CDLL(None)
    libc.setvbuf(
        ctypes.c_void_p.in_dll(libc, "stdout"), None, _IOLBF, 0
    )  # or C code's lines would end with the process


def flush() -> None:
    """Let go of what is not a whole line yet: each fork of this process would write it once more."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # user code may have replaced or closed it
            stream.flush()
    ctypes.CDLL(None).fflush(None)


def _stream(fd: int) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BufferedWriter(_Pipe(fd)), "utf-8", "backslashreplace", line_buffering=True)


class _Pipe(io.RawIOBase):
    """A non-blocking pipe for Python's own streams, which would raise where it is full."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._patience = PATIENCE_S
        self._dropped = 0

    def fileno(self) -> int:
        return self._fd

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """All of it, or what there is room for; the rest is counted in the next line for which there is."""
        with memoryview(data).cast("B") as view:
            if self._dropped and self._write_whole(_dropped_bytes(self._dropped)) == 0:
                self._dropped = 0
            self._dropped += self._write_whole(view)
            return len(view)

    def _write_whole(self, data: memoryview | bytes) -> int:
        """How many bytes there was no room for."""
        written = 0
        while written < len(data) and (count := self._write_some(data[written:])):
            written += count
        return len(data) - written

    def _write_some(self, data: memoryview | bytes) -> int:
        """0 if there is no room, which is waited for once."""
        try:
            count = os.write(self._fd, data)
        except BlockingIOError:
            return self._write_some(data) if self._wait_for_room() else 0
        except OSError:
            return 0  # the daemon is gone, and so will this process be
        self._patience = PATIENCE_S
        return count

    def _wait_for_room(self) -> bool:
        patience, self._patience = self._patience, 0.0
        poller = select.poll()
        poller.register(self._fd, select.POLLOUT)
        return patience > 0 and bool(poller.poll(int(patience * 1000)))


def _dropped_bytes(count: int) -> bytes:
    return f"\n{count} bytes of output were dropped here: the daemon was too slow to read them\n".encode()
