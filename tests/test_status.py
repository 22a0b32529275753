"""``rpc-reading-worker status`` and ``top``: what daemons say of themselves, to whom, and how it is shown."""

import contextlib
import io
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner
from daemons import Daemon, running, until, workers_of
from rich.console import Console
from torchdata.dataloader2 import DataLoader2
from torchdata.datapipes.iter import IterableWrapper

from rpc_reading_service import CurveKeys, RPCReadingService, messages, security, status, transport, usage
from rpc_reading_service.cli import main
from rpc_reading_service.messages import Phase, SessionStatus, Status, Totals, WorkerReport, WorkerStatus
from rpc_reading_service.transport import Deadline

PATIENCE_S = 30.0
NOBODY = 65534


@pytest.fixture(scope="module")
def daemons(folder: Path) -> Iterator[list[Daemon]]:
    """One for most tests, one that is told to end, one with keys, one that is watched; they start together."""
    one = ["--slots", "1"]
    options = [["--slots", "2"], [*one, "--grace", "60"], [*one, "--keys", str(folder)], one]
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(running("--port", "0", *each)) for each in options]
        assert all(each.line for each in started), [each.errors for each in started]
        yield started


@pytest.fixture
def daemon(daemons: list[Daemon]) -> Daemon:
    return daemons[0]


def load(daemon: Daemon, pipe: Any, **options: Any) -> "DataLoader2[Any]":
    service = RPCReadingService([daemon.address], pickle_by_value=(__name__,), timeout=60.0, **options)
    return DataLoader2(pipe, reading_service=service)


def endless() -> Any:
    return IterableWrapper(itertools.count(), deepcopy=False).sharding_filter().map(spin)


def spin(element: int) -> bytes:
    """Takes 5 ms of CPU time."""
    began = time.thread_time()
    while time.thread_time() - began < 0.005:
        pass
    return bytes(1000)


def ask(address: str, keys: CurveKeys | None = None, timeout: float = PATIENCE_S) -> status.Answer:
    return status.ask([address], keys, timeout)[address]


def up(address: str) -> Status:
    answer = ask(address)
    assert isinstance(answer, Status), answer
    return answer


def workers(address: str) -> list[WorkerStatus]:
    (session,) = up(address).sessions
    return session.workers


# What a daemon says.


def test_a_daemon_tells_what_its_sessions_and_workers_do(daemon: Daemon) -> None:
    idle = up(daemon.address)
    assert (idle.slots, idle.free, idle.sessions, idle.draining) == (2, 2, [], "")
    assert (idle.host, idle.pid) == (socket.gethostname(), daemon.process.pid)
    with load(daemon, endless(), prefetch_bytes=20_000) as loader:
        iterator = iter(loader)
        next(iterator)
        busy = up(daemon.address)
        (session,) = busy.sessions
        assert (session.client, session.state, session.slots) == (
            f"{socket.gethostname()} pid {os.getpid()}",
            "open",
            2,
        )
        assert 0 < session.seconds < busy.uptime
        assert session.graph_name == NAMED
        pids = {each.pid for each in workers_of(daemon.process.pid)}
        assert {each.pid for each in session.workers} == pids
        assert [(each.report.worker, each.report.attempt) for each in session.workers] == [(0, 0), (1, 0)]
        assert all(each.seconds > 0 for each in session.workers)
        assert (busy.free, busy.totals.sessions, busy.totals.workers) == (0, 1, 2)
        # Nobody takes batches: the workers come to wait for the training.
        until(lambda: {each.report.phase for each in workers(daemon.address)} <= {Phase.CREDIT, Phase.WIRE}, PATIENCE_S)
        iterator._pause()
        assert {status.doing(each) for each in workers(daemon.address)} == {"awaits resume"}
        iterator.resume()
        assert {each.state for each in workers(daemon.address)} == {"running"}
        made = sum(each.report.batches for each in workers(daemon.address))
    until(lambda: not up(daemon.address).sessions)
    after = up(daemon.address)
    assert after.totals.batches >= made > 0
    assert after.totals.nbytes > 1000 * made
    assert (after.totals.lost, after.free, after.boot) == (0, 2, idle.boot)


def test_rates_cpu_and_memory_are_those_of_the_last_second(daemon: Daemon) -> None:
    with load(daemon, endless(), num_workers=1) as loader:
        iterator = iter(loader)

        def is_seen() -> bool:
            for _ in range(20):
                next(iterator)
            (worker,) = workers(daemon.address)
            return worker.cpu > 5 and worker.batches_per_s > 5 and worker.bytes_per_s > 5000 and worker.memory > 10**7

        until(is_seen, PATIENCE_S)
        (worker,) = workers(daemon.address)
        assert worker.cpu < 150
        assert worker.batches_per_s < 200  # 5 ms each
        assert worker.bytes_per_s / worker.batches_per_s == pytest.approx(1000, rel=0.5)


def tensor(_element: int) -> torch.Tensor:
    return torch.zeros(25_000)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_bytes_of_tensors_are_counted_whatever_way_they_travel(daemon: Daemon, transport: str) -> None:
    before = up(daemon.address).totals.nbytes
    with load(daemon, IterableWrapper(range(20)).sharding_filter().map(tensor), transport=transport) as loader:
        assert len(list(loader)) == 20
        until(lambda: up(daemon.address).totals.nbytes - before == pytest.approx(20 * 100_000, rel=0.01))


def test_no_answer_has_a_whole_session_identifier(daemon: Daemon) -> None:
    with load(daemon, endless(), num_workers=1) as loader:
        next(iter(loader))
        answer = up(daemon.address)
        assert len(answer.sessions[0].session) == 8
        printed = json.dumps(status.as_dict(daemon.address, answer))
        assert set(re.findall(r"[0-9a-f]{32}", printed)) == {answer.boot}


def test_a_worker_that_builds_its_graph_is_starting_and_is_seen(daemon: Daemon, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    loader = load(daemon, endless(), num_workers=1, worker_init_fn=Gate(str(gate)))
    thread = threading.Thread(target=lambda: next(iter(loader)))
    thread.start()
    until(lambda: [each.state for each in up(daemon.address).sessions for each in each.workers] == ["starting"])
    assert [status.doing(each) for each in workers(daemon.address)] == ["builds graph"]
    gate.write_text("go on")
    thread.join(PATIENCE_S)
    loader.shutdown()


class Gate:
    """Holds a worker up until somebody writes to a pipe."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, pipe: Any, _info: Any) -> Any:
        Path(self.path).read_text()
        return pipe


def test_a_draining_daemon_says_so(daemons: list[Daemon]) -> None:
    victim = daemons[1]
    with load(victim, endless()) as loader:
        next(iter(loader))
        victim.process.send_signal(signal.SIGTERM)
        until(lambda: up(victim.address).draining == "the daemon got SIGTERM")
        result = CliRunner().invoke(main, ["status", victim.address])
        assert result.exit_code == 0
        assert "draining: the daemon got SIGTERM" in " ".join(result.output.split())


# To whom.


def test_with_keys_only_clients_on_the_list_are_told(daemons: list[Daemon], folder: Path, tmp_path: Path) -> None:
    security.create(tmp_path / "other")
    shutil.copy(folder / "server.pub", tmp_path / "other")
    address = daemons[2].address
    assert isinstance(ask(address, CurveKeys.load(folder)), Status)
    assert str(ask(address)).startswith("it wants keys, and none are given here")
    said = str(ask(address, CurveKeys.load(tmp_path / "other")))
    assert said.startswith("it does not let this client in: put its public key")
    environment = {"RPC_READING_KEYS": str(folder)}
    assert CliRunner().invoke(main, ["status", address], env=environment).exit_code == 0
    assert CliRunner().invoke(main, ["status", address, "--keys", str(tmp_path / "other")]).exit_code == 1


def test_keys_that_are_not_there_are_one_line_and_exit_code_2(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["status", "cpu1:5555", "--keys", str(tmp_path)])
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert f"there is no key {tmp_path}/client.key" in result.output


AS_STRANGER = """
import encodings.idna, os, sys
from rpc_reading_service import status
os.setgid({nobody})
os.setuid({nobody})
print(status.ask([sys.argv[1]], None, 20.0)[sys.argv[1]])
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_without_keys_another_user_of_the_machine_is_told_nothing(daemon: Daemon) -> None:
    command = [sys.executable, "-c", AS_STRANGER.format(nobody=NOBODY), daemon.address]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert said.startswith("refused: a process of ")
    assert " may not run code as root, and the daemon has no keys: start it with --keys DIR" in said
    assert "may not ask for the status" in daemon.errors


def test_another_protocol_is_refused_by_version(daemon: Daemon) -> None:
    context = transport.Context()
    try:
        dealer = context.dealer(daemon.address)
        dealer.send([messages.encode(messages.AskStatus(messages.PROTOCOL_VERSION + 1))])
        poller = transport.Poller()
        poller.watch(dealer.raw)
        assert poller.wait(PATIENCE_S)
        ((frame,),) = dealer.receive_all()
    finally:
        context.close()
    refused = messages.decode(frame, messages.ToAsker)
    assert (refused.kind, "install the same version on both sides" in refused.reason) == ("version", True)


# Who does not answer.


def test_daemons_that_are_down_are_told_with_the_reason_and_exit_code_1(daemon: Daemon, free_port: int) -> None:
    down = {
        f"127.0.0.1:{free_port}": "connection refused: nothing listens there; start rpc-reading-worker, or mend",
        "no.such.invalid:5555": "the host name 'no.such.invalid' does not resolve",
        "cpu1": "worker address 'cpu1' has no port: write host:port",
    }
    result = CliRunner().invoke(main, ["status", *down, daemon.address])
    assert result.exit_code == 1
    said = " ".join(result.output.split())
    for address, reason in down.items():
        assert f"{address} down: " in said
        assert reason in said
    assert f"{daemon.address} up " in said
    assert CliRunner().invoke(main, ["status", daemon.address]).exit_code == 0


def test_a_name_server_that_is_silent_is_waited_for_as_long_as_a_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = threading.Event()
    monkeypatch.setattr(transport, "resolve", lambda address: [str(ends.wait(30.0))])
    assert status.expand(["dns://cpu:5555", "dns://cpu2:5555", "cpu1:5555"], 0.1) == [
        "cpu:5555",
        "cpu2:5555",
        "cpu1:5555",
    ]
    ends.set()


def test_a_name_stands_for_all_its_daemons(daemon: Daemon) -> None:
    port = daemon.port
    known = transport.resolve(f"localhost:{port}")
    assert f"127.0.0.1:{port}" in known
    names = [f"dns://localhost:{port}", "cpu1:5555", "dns://no.such.invalid:5555", "dns://cpu1"]
    assert status.expand(names, 30.0) == [*known, "cpu1:5555", "no.such.invalid:5555", "cpu1"]
    said = " ".join(CliRunner().invoke(main, ["status", *names]).output.split())
    assert f"127.0.0.1:{port} up " in said
    assert "no.such.invalid:5555 down: worker address" in said
    assert "cpu1 down: worker address 'cpu1' has no port" in said


def test_a_daemon_that_is_stopped_is_not_waited_for(daemon: Daemon) -> None:
    address, began = daemon.address, time.monotonic()
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        answer = ask(address, timeout=0.5)
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    assert answer == f"no answer within 0.5 s: {status.SILENT}"
    assert time.monotonic() - began < 5.0


def test_top_shows_the_others_at_once_and_who_is_silent_and_for_how_long(daemons: list[Daemon], free_port: int) -> None:
    silent, other, refuses = daemons[0], daemons[3], f"127.0.0.1:{free_port}"
    watch = status.Watch([silent.address, other.address, refuses], None, timeout=PATIENCE_S)
    assert list(map(type, watch.look(PATIENCE_S).values())) == [Status, Status, str]
    silent.process.send_signal(signal.SIGSTOP)
    try:
        first, later = watch.look(1.0), Deadline(10.0)
        assert isinstance(first[silent.address], Status)  # of the last look
        while isinstance(answer := watch.look(0.5)[silent.address], Status):
            assert not later.expired
        began = time.monotonic()
        figures = [watch.look(PATIENCE_S) for _ in range(3)]
        assert time.monotonic() - began < PATIENCE_S / 3  # for which the silent one would be waited for each time
        options = ["--count", "4", "--interval", "0.5", "--timeout", str(PATIENCE_S)]
        printed = CliRunner().invoke(main, ["top", silent.address, other.address, *options]).output
    finally:
        silent.process.send_signal(signal.SIGCONT)
    assert re.fullmatch(r"no answer so far, for \d\.\d s", str(answer))
    uptimes = [each[other.address].uptime for each in (first, *figures)]  # type: ignore[union-attr]
    assert sorted(set(uptimes)) == uptimes
    assert all("connection refused" in str(each[refuses]) for each in figures)
    lines = printed.splitlines()
    assert all(f" {silent.address} down: no answer so far, for " in line for line in lines[::2])
    assert f" {other.address} up " in lines[-1]
    until(lambda: isinstance(watch.look(PATIENCE_S)[silent.address], Status))


def test_a_name_server_that_is_silent_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gone_on = threading.Event()

    def resolve(*_args: Any, **_kwargs: Any) -> list[Any]:
        gone_on.wait(PATIENCE_S)
        raise OSError("it took too long")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    try:
        assert str(ask("cpu1:5555", timeout=0.1)).startswith("no answer so far, for 1.6 s")
    finally:
        gone_on.set()


# How it is shown.


GRAPH = f"{30 * 'S'} -> ... -> E -> {30 * 'E'}"
"""As long as a graph's name can be."""

NAMED = "IterableWrapper -> ShardingFilter -> Mapper"
"""The graph of ``endless``."""


def example(**worker: Any) -> Status:
    """A daemon with one session; its worker has large figures."""
    report = WorkerReport(1023, 12, Phase.CREDIT, 10**9, 10**15, 0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0)
    defaults = {"pid": 4194304, "state": "on standby", "seconds": 5.0, "cpu": 1600.0, "memory": 999 * 10**9}
    rates = {"batches_per_s": 43210.9, "bytes_per_s": 12e9}
    status_ = WorkerStatus(**{"report": report, **defaults, **rates, **worker})
    session = SessionStatus(
        "3fa2c1d0", "\x1b[31mtrainer\n" + 90 * "x", "e5fdd16ba6ba", GRAPH, 10**9, "open", 7384.0, 4096, [status_]
    )
    versions = {"rpc-reading-service": "0.1.0"}
    return Status(4, versions, "0" * 32, "cpu1", 7, 1e6, 4096, 0, "the daemon got SIGTERM", Totals(), [session])


def test_the_table_fits_into_80_columns() -> None:
    console = Console(file=io.StringIO(), width=80)
    assert not status.show({"[2001:db8:85a3::8a2e:370:7334]:5555": example(), "cpu2:5555": "\x1b " * 50}, console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, printed.splitlines())) <= 80
    assert "\x1b" not in printed
    for words in ("1023 (+12)", "4194304", "on standby", "43,210.9", "12,000.0", "1600", "999 GB", f"{GRAPH} ("):
        assert words in " ".join(printed.split()), words


@pytest.mark.parametrize("phase", Phase)
def test_every_phase_has_words(phase: Phase) -> None:
    report = msgspec.structs.replace(example().sessions[0].workers[0].report, phase=phase)
    (line,) = status.lines({"cpu1:5555": example(report=report, state="running")})
    assert line.startswith("cpu1:5555 3fa2c1d0 of ")
    assert f", graph {GRAPH}: worker 1023" in line
    assert f": worker 1023 (+12) running, {status.PHASES[phase]}: 43,210.9 batches/s" in line


DURATIONS = {59.4: "59 s", 60.0: "1 min", 3599.0: "59 min", 7384.0: "2 h 3 min", 1e6: "11 d 13 h"}


@pytest.mark.parametrize("seconds", DURATIONS)
def test_durations_are_short(seconds: float) -> None:
    assert status._duration(seconds) == DURATIONS[seconds]


def test_json_has_names_for_everything(daemon: Daemon, free_port: int) -> None:
    with load(daemon, endless(), num_workers=1) as loader:
        next(iter(loader))
        result = CliRunner().invoke(main, ["status", "--json", daemon.address, f"127.0.0.1:{free_port}"])
        printed = CliRunner().invoke(main, ["status", daemon.address]).output
    assert result.exit_code == 1
    there, down = json.loads(result.output)
    assert (there["up"], there["reason"], down["up"], down["status"]) == (True, None, False, None)
    assert "connection refused" in down["reason"]
    assert there["status"]["sessions"][0]["graph_name"] == NAMED
    assert f"graph {NAMED} (" in " ".join(printed.split())
    (worker,) = there["status"]["sessions"][0]["workers"]
    assert worker["report"]["phase"] in {phase.name.lower() for phase in Phase}
    assert set(worker) == set(WorkerStatus.__struct_fields__)


def test_top_without_a_terminal_prints_a_line_for_each_worker_and_interval(daemon: Daemon, free_port: int) -> None:
    with load(daemon, endless()) as loader:
        next(iter(loader))
        options = ["--count", "2", "--interval", "0.1"]
        result = CliRunner().invoke(main, ["top", daemon.address, f"127.0.0.1:{free_port}", *options])
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert len(lines) == 2 * 3
    for worker in ("0", "1"):
        pattern = (
            rf"\d\d:\d\d:\d\d {daemon.address} [0-9a-f]{{8}} of .+, graph {NAMED}: worker {worker} \w+, .+: "
            r".* batches/s, .* MB/s, .* % CPU, .* MB"
        )
        assert sum(bool(re.fullmatch(pattern, line)) for line in lines) == 2
    assert sum("down: connection refused" in line for line in lines) == 2


def test_top_on_a_terminal_shows_the_table_in_place() -> None:
    console = Console(file=io.StringIO(), width=80, height=24, force_terminal=True)
    answers = iter([{"cpu1:5555": example()}, {"cpu1:5555": "connection refused"}])
    status.top(lambda _patience: next(answers), console, interval=0.01, count=2)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "43,210.9" in printed
    assert "down: connection refused" in printed
    assert "\x1b[1A" in printed  # back to where it was before


def test_top_sums_workers_up_if_the_terminal_is_not_high_enough_for_all() -> None:
    console = Console(file=io.StringIO(), width=80, height=20, force_terminal=True)
    worker = example().sessions[0].workers[0]
    workers = [worker, worker, msgspec.structs.replace(worker, state="starting", memory=10**9)]
    session = msgspec.structs.replace(example().sessions[0], workers=workers, client="trainer", graph_bytes=5437)
    answers = {f"cpu{n}:5555": msgspec.structs.replace(example(), draining="", sessions=[session]) for n in range(3)}
    status.top(lambda _patience: answers, console, interval=0.01, count=1)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    plain = " ".join(re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", printed).split())
    assert "43,210.9" not in plain
    figures = "129,632.7 batches/s, 36,000.0 MB/s, 4,800 % CPU, 1,999 GB"
    assert plain.count(f"3 workers (2 awaits training, 1 builds graph): {figures}") >= 3
    assert plain.count("graph " + GRAPH + " (e5fdd16ba6ba, 5 KB)") >= 3
    assert "cpu2:5555 up" in plain


def test_a_daemon_without_workers_has_a_line_of_its_own() -> None:
    idle = msgspec.structs.replace(example(), sessions=[], free=4096)
    (line,) = status.lines({"cpu1:5555": idle})
    assert line.startswith("cpu1:5555 up 11 d 13 h, 0 of 4096 slots held, version 0.1.0")


# What is summed up.


def test_totals_add_workers_up() -> None:
    report = WorkerReport(0, 0, Phase.IDLE, 10, 2000, 3, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    totals = usage.add(usage.add(Totals(lost=1), report, usage.Usage(1, 0.0, cpu_s=0.5)), report, usage.Usage(1, 0.0))
    assert totals == Totals(0, 0, 1, 0, 20, 4000, 6, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 0.5)
