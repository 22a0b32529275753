"""The daemon's log: its lines, what workers write, and that nobody is ever held up by it."""

import contextlib
import ctypes
import json
import logging
import os
import re
import select
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from daemons import Daemon, running, until
from torchdata.dataloader2 import DataLoader2
from torchdata.datapipes.iter import IterableWrapper

from rpc_reading_service import RPCReadingService, logs, status
from rpc_reading_service.daemon import SHARED_GRAPH_BYTES

N = 20
LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ ([0-9a-f]{8}|-)/(\d+|graph|-) (.*)")


@pytest.fixture(scope="module", autouse=True)
def buffered() -> Iterator[None]:
    """What somebody has set for the tests would hide what buffers do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONUNBUFFERED", raising=False)
        yield


@pytest.fixture(scope="module")
def daemon(buffered: None) -> Iterator[Daemon]:
    with running("--port", "0", "--slots", "2", "--log-level", "info") as started:
        assert started.line
        yield started


def load(address: str, function: Any, elements: int = N) -> "DataLoader2[Any]":
    pipe = IterableWrapper(range(elements)).sharding_filter().map(function)
    return DataLoader2(pipe, reading_service=RPCReadingService([address], pickle_by_value=(__name__,), timeout=60.0))


def parsed(daemon: Daemon) -> list[tuple[str, str, str]]:
    """Session, worker and message of each line of the log."""
    return [found.groups() for found in map(LINE.fullmatch, daemon.errors.splitlines()) if found]  # type: ignore[misc]


def write_in_every_way(element: int) -> int:
    print("printed", element)
    match element:
        case 1:
            print("\x1b[31mred\rover", flush=True)
        case 2:
            warnings.warn("be careful", stacklevel=1)
        case 3:
            ctypes.CDLL(None).puts(b"from C")
        case 4:
            subprocess.run(["echo", "from a child"], check=True)
        case 5:
            logging.getLogger("mine").warning("from a logger")
        case 6:
            sys.stderr.write("no newline")
        case 7:
            os.write(1, b"\xff no text\n")
    return element


# What workers write.


def test_whatever_workers_write_is_in_the_log_with_their_names(daemon: Daemon) -> None:
    with load(daemon.address, write_in_every_way) as loader:
        assert list(loader) == list(range(N))
    until(lambda: "no newline" in daemon.errors)
    lines = parsed(daemon)
    (session,) = {session for session, _, message in lines if message.startswith("printed")}
    for number in range(N):
        assert (session, str(number % 2), f"printed {number}") in lines
    said = {(worker, message) for _, worker, message in lines}
    assert {("1", "\\x1b[31mred"), ("1", "over"), ("1", "from C"), ("0", "from a child")} <= said
    assert {("1", "from a logger"), ("0", "no newline"), ("1", "\\xff no text")} <= said
    assert any(worker == "0" and message.endswith("UserWarning: be careful") for worker, message in said)


def say(element: bytes) -> int:
    print("of length", len(element))
    return len(element)


def test_workers_that_are_forked_with_their_graph_write_to_the_log_as_well(daemon: Daemon) -> None:
    lengths = [SHARED_GRAPH_BYTES, 1]
    pipe = IterableWrapper([bytes(length) for length in lengths], deepcopy=False).sharding_filter().map(say)
    service = RPCReadingService([daemon.address], pickle_by_value=(__name__,), timeout=60.0)
    with DataLoader2(pipe, reading_service=service) as loader:
        assert list(loader) == lengths
    daemon.wait_for_line("loaded once, for all workers")
    until(lambda: {("0", f"of length {lengths[0]}"), ("1", "of length 1")} <= {each[1:] for each in parsed(daemon)})


class Talkative:
    """Writes when it is loaded in another process than the one that made it."""

    def __reduce__(self) -> Any:
        return _talk, (os.getpid(),)

    def __call__(self, element: bytes) -> int:
        return len(element)


def _talk(pid: int) -> Talkative:
    if os.getpid() != pid:
        print("loading")
        warnings.warn("takes long", stacklevel=1)
        subprocess.run(["echo", "a child"], check=True)
        ctypes.CDLL(None).printf(b"C has no newline, ")
        sys.stdout.write("nor has Python")
    return Talkative()


def test_what_modules_write_while_a_graph_is_loaded_for_all_workers_is_in_the_log_once(daemon: Daemon) -> None:
    lengths = [SHARED_GRAPH_BYTES, 1]
    pipe = IterableWrapper([bytes(length) for length in lengths], deepcopy=False).sharding_filter().map(Talkative())
    service = RPCReadingService([daemon.address], pickle_by_value=(__name__,), timeout=60.0)
    with DataLoader2(pipe, reading_service=service) as loader:
        assert list(loader) == lengths
        session = loader.reading_service._client._session.options.session[:8]
    until(lambda: any("Python" in message for _, _, message in parsed(daemon)))
    daemon.wait_for_line(f"= session {session}")
    lines = [(worker, message) for whose, worker, message in parsed(daemon) if whose == session and message[0] != "="]
    written = [message for worker, message in lines if worker == "graph"]
    assert {"loading", "a child"} <= set(written)
    assert any(message.endswith("UserWarning: takes long") for message in written)
    unfinished = [line for line in lines if "newline" in line[1] or "Python" in line[1]]
    assert unfinished == [("graph", "nor has PythonC has no newline, ")]


def test_prints_of_local_workers_reach_the_users_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    pipe = IterableWrapper(range(4)).sharding_filter().map(write_in_every_way)
    service = RPCReadingService(2, pickle_by_value=(__name__,), timeout=60.0)
    with DataLoader2(pipe, reading_service=service) as loader:
        assert list(loader) == list(range(4))
    errors = capfd.readouterr().err
    assert [number for number in range(4) if f"/{number % 2} printed {number}\n" in errors] == list(range(4))


FLOOD = 8 << 20


def flood(element: int) -> int:
    """Much of a line without an end, then many short ones, then in a way that raises if there is no room."""
    sys.stdout.write(FLOOD * "x")
    for number in range(20_000):
        print(number)
    with contextlib.suppress(BlockingIOError):
        os.write(2, bytes(FLOOD))
    return element


def test_a_worker_that_writes_without_end_is_not_held_up_and_holds_nobody_up(daemon: Daemon) -> None:
    with load(daemon.address, flood, 2) as loader:
        assert sorted(loader) == [0, 1]
        assert not isinstance(status.ask([daemon.address], None, 10.0)[daemon.address], str)
    assert max(map(len, daemon.errors.splitlines())) < 4 * logs.LINE_BYTES + 100  # a zero is \x00 there
    assert len(daemon.errors) < 8 * FLOOD


def write_much(element: int) -> int:
    for _ in range(100):
        print(50_000 * "y")
    return element


def test_a_daemon_whose_log_nobody_reads_goes_on_and_json_is_one_object_a_line() -> None:
    """Its stderr is a pipe that is full: as on a terminal that was stopped."""
    receiver, sender = os.pipe()
    options = ["--port", "0", "--slots", "1", "--log-level", "info", "--log-json"]
    command = [sys.executable, "-m", "rpc_reading_service", *options]
    with open(receiver) as log, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=sender, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().partition(" ready on ")[2].partition(",")[0]
            for _ in range(2):
                with load(address, write_much, 5) as loader:
                    assert list(loader) == list(range(5))
            assert select.select([], [sender], [], 0.0)[1] == []
            process.terminate()
            os.close(sender)
            check_json([json.loads(line) for line in log if line.startswith("{") and line.endswith("}\n")])
            assert process.wait(10) == 0
        finally:
            process.kill()


def check_json(records: list[dict[str, Any]]) -> None:
    keys = ["time", "level", "logger", "session", "worker", "message", "exception"]
    assert all(list(record) == keys for record in records)
    printed = next(record for record in records if record["message"].startswith("y"))
    assert (printed["logger"], printed["level"], printed["worker"]) == ("rpc_reading_service.output", "INFO", 0)
    opened = next(record for record in records if "is open, on" in record["message"])
    assert (opened["logger"], opened["worker"]) == ("rpc_reading_service.daemon", None)
    assert opened["session"] == printed["session"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", opened["time"])


# The daemon's own lines.


def test_a_line_has_time_level_session_and_worker(daemon: Daemon) -> None:
    with load(daemon.address, str) as loader:
        list(loader)
    daemon.wait_for_line("is closed")
    lines = {message: (session, worker) for session, worker, message in parsed(daemon)}
    opened = next(
        who for message, who in lines.items() if "is open, on 2 slots, with graph IterableWrapper -> " in message
    )
    started = next(who for message, who in lines.items() if re.search(r"worker 1 \(pid \d+\) started", message))
    assert opened == (opened[0], "-")
    assert started == (opened[0], "1")
    assert len(opened[0]) == 8
    assert [line for line in daemon.errors.splitlines() if not LINE.fullmatch(line)] == []


def record_of(error: BaseException | None = None, **fields: Any) -> logging.LogRecord:
    info = (type(error), error, None) if error else None
    plain = {"name": "rpc_reading_service.x", "levelname": "WARNING", "msg": "of %s", "args": ("a\nb\x9b",)}
    return logging.makeLogRecord({**plain, "exc_info": info, **fields})


def test_a_text_line_cannot_be_forged_and_an_exception_follows_it() -> None:
    line = logs.TextFormatter().format(record_of(ValueError("no"), session="3fa2c1d0", worker=7))
    assert LINE.fullmatch(line.splitlines()[0]).groups() == ("3fa2c1d0", "7", "of a\\x0ab\\x9b")  # type: ignore[union-attr]
    assert line.splitlines()[-1] == "ValueError: no"
    assert logs.about("3fa2c1d0" * 4, 7) == {"session": "3fa2c1d0", "worker": 7}


def test_an_exception_is_a_field_of_json() -> None:
    line = logs.JsonFormatter().format(record_of(ValueError("no")))
    assert line.isprintable()
    fields = json.loads(line)
    assert fields["exception"].splitlines()[-1] == "ValueError: no"
    assert (fields["message"], fields["session"], fields["worker"]) == ("of a\nb\x9b", None, None)


# The parts.


def test_lines_that_nobody_reads_are_dropped_and_counted() -> None:
    receiver, sender = os.pipe()
    log = logs.Log(sender, logging.Formatter())
    line = 1000 * "z"
    began = time.monotonic()
    for _ in range(logs.LINES_WAITING + 500):
        log.handle(record_of(msg=line, args=None))
    assert time.monotonic() - began < 10.0
    lines: list[str] = []
    with open(receiver) as file:
        reader = threading.Thread(target=lines.extend, args=(file,))
        reader.start()
        until(lambda: len(lines) > logs.LINES_WAITING)
        log.handle(record_of(msg="the last", args=None))
        log.close()
        log.close()
        os.close(sender)
        reader.join()
    *_, dropped, last = lines
    assert last == "the last\n"
    found = re.fullmatch(r"(\d+) lines were dropped: whoever reads this log is too slow\n", dropped)
    assert found
    assert len(lines) - 2 + int(found[1]) == logs.LINES_WAITING + 500


def test_a_log_call_that_does_not_fit_its_text_does_no_harm(capsys: pytest.CaptureFixture[str]) -> None:
    receiver, sender = os.pipe()
    log = logs.Log(sender, logging.Formatter())
    log.handle(record_of(msg="%d", args=("no number",)))
    log.handle(record_of(msg="well", args=None))
    log.close()
    os.close(sender)
    with open(receiver) as file:
        assert file.read() == "well\n"
    assert "%d format" in capsys.readouterr().err


def test_long_lines_are_cut_into_pieces(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    output = logs.Output("a" * 32, 3)
    os.write(output.far, b"\n\nshort\r\n" + 3 * logs.LINE_BYTES * b"v" + b"\nrest")
    output.started()
    while output.read():
        pass
    assert output.ended
    output.close()
    assert [len(record.message) for record in caplog.records] == [5, *3 * [logs.LINE_BYTES], 4]
    assert {(record.session, record.worker) for record in caplog.records} == {("aaaaaaaa", 3)}  # type: ignore[attr-defined]


def test_pythons_streams_drop_what_has_no_room_and_say_so() -> None:
    receiver, sender = os.pipe2(os.O_NONBLOCK)
    stream = logs._stream(sender)
    began = time.monotonic()
    for _ in range(100):
        print(9999 * "w", file=stream)
    assert time.monotonic() - began < 5.0
    kept = os.read(receiver, 1 << 20)
    print("heard again", file=stream)
    dropped = 100 * 10_000 - len(kept)
    assert os.read(receiver, 1 << 20).decode() == (
        f"\n{dropped} bytes of output were dropped here: the daemon was too slow to read them\nheard again\n"
    )
    os.close(receiver)
    print("nobody is there", file=stream)
    assert not stream.isatty()
    assert stream.fileno() == sender
    os.close(sender)


def test_the_log_is_set_up_and_taken_down() -> None:
    handlers, level = list(logging.root.handlers), logging.root.level
    receiver, sender = os.pipe()
    log = logs.start("error", as_json=False, fd=sender)
    try:
        logging.getLogger("rpc_reading_service.daemon").warning("less than an error")
        logging.getLogger(logs.OUTPUT_LOGGER).info("printed")
    finally:
        logs.stop(log)
        logging.root.setLevel(level)
        os.close(sender)
    with open(receiver) as file:
        assert [LINE.fullmatch(line.rstrip()).groups() for line in file] == [("-", "graph", "printed")]  # type: ignore[union-attr]
    assert logging.root.handlers == handlers
