"""``rpc-reading-worker`` as a process: how it starts, what it lets strangers do, and how it ends."""

import contextlib
import itertools
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq
from click.testing import CliRunner
from daemons import Daemon, running, until
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torchdata.dataloader2 import DataLoader2
from torchdata.datapipes.iter import IterableWrapper
from zmq.utils.monitor import recv_monitor_message

import rpc_reading_service
from rpc_reading_service import RPCReadingService, WorkerLostError, messages, transport
from rpc_reading_service.cli import main
from rpc_reading_service.daemon import versions

N = 20
SLOTS = 3
STOP_S = 5.0
"""Within which a daemon ends."""


@pytest.fixture(scope="module")
def data_ports() -> range:
    """Ports in a row that are free."""
    for _ in range(100):
        low = random.randrange(20_000, 30_000)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(low, low + SLOTS):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return range(low, low + SLOTS)
    raise AssertionError("no three free ports in a row")


@pytest.fixture(scope="module")
def daemons(data_ports: range) -> Iterator[list[Daemon]]:
    """One daemon for many tests, then seven that a test may end; they start together."""
    ports = f"{data_ports[0]}-{data_ports[-1]}"
    started = [Daemon("--port", "0", "--slots", str(SLOTS), "--data-ports", ports)]
    started += [Daemon("--port", "0", "--slots", "1") for _ in range(7)]
    everyone = list(started)
    try:
        assert all(each.line for each in started), [each.errors for each in started]
        yield started
    finally:
        for each in everyone:
            each.close()


@pytest.fixture
def daemon(daemons: list[Daemon]) -> Daemon:
    """A daemon that no test ends."""
    return daemons[0]


@pytest.fixture
def victim(daemons: list[Daemon]) -> Daemon:
    """A one-slot daemon for this test alone."""
    return daemons.pop()


def load(datapipe: Any, address: str, **options: Any) -> "DataLoader2[Any]":
    options = {"pickle_by_value": (__name__,), "timeout": 60.0, **options}
    return DataLoader2(datapipe, reading_service=RPCReadingService([address], **options))


def sharded(elements: Any = range(N)) -> Any:
    return IterableWrapper(elements).sharding_filter()


def endless() -> Any:
    return IterableWrapper(itertools.count(), deepcopy=False)


# How it starts.


def test_the_ready_line_says_where_and_how_many(daemon: Daemon) -> None:
    assert re.fullmatch(r"rpc-reading-worker ready on 127\.0\.0\.1:[1-9]\d*, 3 slots\n", daemon.line)
    with socket.create_connection(("127.0.0.1", daemon.port)):
        pass


def test_the_workers_take_their_data_ports_from_the_range(daemon: Daemon, data_ports: range) -> None:
    for _ in range(2):  # the ports of the first session are free for the second
        with load(sharded(), daemon.address) as loader:
            next(iter(loader))
            assert sorted(listening_ports(daemon.family())) == list(data_ports)


def test_workers_that_start_again_wait_for_the_ports_of_those_before_them(daemon: Daemon) -> None:
    dispatched = IterableWrapper(range(N)).sharding_round_robin_dispatch(SHARDING_PRIORITIES.MULTIPROCESSING)
    with load(dispatched.map(slowly_with_pid), daemon.address) as loader:
        iterator = iter(loader)
        first, pid = next(iterator)
        os.kill(pid, signal.SIGKILL)
        assert [first, *(element for element, _ in iterator)] == list(range(N))


def slowly_with_pid(element: int) -> tuple[int, int]:
    """A process that is told to end while it makes the sixth has its port for a while."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    threading.Event().wait(1.5 if element == 5 else 0.0)
    return element, os.getpid()


def test_a_daemon_that_cannot_start_a_process_says_why_and_goes_on(victim: Daemon) -> None:
    process = psutil.Process(victim.process.pid)
    before = process.rlimit(psutil.RLIMIT_NOFILE)
    # The connection and the graph can still be had, but no more.
    used = set(map(int, os.listdir(f"/proc/{process.pid}/fd")))
    limit = next(itertools.islice((number for number in itertools.count() if number not in used), 2, None))
    process.rlimit(psutil.RLIMIT_NOFILE, (limit, before[1]))
    with load(sharded(), victim.address) as loader, pytest.raises(WorkerLostError) as error:
        list(loader)
    assert "was not started: [Errno 24] Too many open files" in str(error.value)
    process.rlimit(psutil.RLIMIT_NOFILE, before)
    with load(sharded(), victim.address) as loader:
        assert list(loader) == list(range(N))


def listening_ports(processes: list[psutil.Process]) -> set[int]:
    connections = itertools.chain.from_iterable(process.net_connections("tcp") for process in processes)
    return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}


def test_a_forkserver_that_ends_does_not_end_its_daemon(victim: Daemon) -> None:
    process = psutil.Process(victim.process.pid)
    (forkserver,) = (each for each in process.children() if "forkserver" in " ".join(each.cmdline()))
    idle = len(process.net_connections("unix"))
    with load(sharded(), victim.address) as loader, ThreadPoolExecutor(1) as training:
        forkserver.suspend()
        batches = training.submit(lambda: list(loader))
        until(
            lambda: len(process.net_connections("unix")) > idle + 2, STOP_S
        )  # a worker's channel, and a request for it
        forkserver.kill()
        assert batches.result(60) == list(range(N))
    assert victim.process.poll() is None


def test_it_listens_on_loopback_only_by_default(daemon: Daemon) -> None:
    with load(sharded(), daemon.address) as loader:
        next(iter(loader))
        processes = [psutil.Process(daemon.process.pid), *daemon.family()]
        connections = itertools.chain.from_iterable(process.net_connections("tcp") for process in processes)
        assert {each.laddr.ip.removeprefix("::ffff:") for each in connections if each.status == psutil.CONN_LISTEN} == {
            "127.0.0.1"
        }


def test_a_port_in_use_is_one_line_and_exit_code_2(daemon: Daemon) -> None:
    with running("--port", str(daemon.port)) as second:
        assert second.process.wait(30) == 2
        words = f"rpc-reading-worker: cannot bind {re.escape(daemon.address)}: Address already in use.*\n"
        assert re.fullmatch(words, second.errors)
        assert second.line == ""


def test_a_host_of_another_machine_is_one_line_and_exit_code_2() -> None:
    with running(
        "--host", "192.0.2.1", "--port", "0", "--insecure"
    ) as started:  # an address for documentation, which nobody has
        assert started.process.wait(30) == 2
        assert re.fullmatch(r"rpc-reading-worker: cannot bind 192\.0\.2\.1:.*\n", started.errors)


WRONG_OPTIONS = {
    "fewer ports than slots": (["--slots", "3", "--data-ports", "6000-6001"], "has 2 ports, but 3 slots need one each"),
    "no range": (["--data-ports", "6000"], "'6000' is not a range of ports such as 6000-6015"),
    "a range backwards": (["--data-ports", "6001-6000"], "'6001-6000' is not a range of ports"),
    "a large port": (["--port", "65536"], "'--port': 65536 is not in the range"),
    "no slots": (["--slots", "0"], "'--slots': 0 is not in the range"),
    "an unknown level": (["--log-level", "loud"], "'--log-level': 'loud' is not one of"),
}


@pytest.mark.parametrize("what", WRONG_OPTIONS)
def test_a_wrong_option_is_refused_by_name_with_exit_code_2(what: str) -> None:
    options, words = WRONG_OPTIONS[what]
    result = CliRunner().invoke(main, options)
    assert result.exit_code == 2
    assert words in result.output


def test_help_names_every_option() -> None:
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    for option in ("--host", "--port", "--slots", "--data-ports", "--keys", "--insecure", "--log-level", "--version"):
        assert option in result.output
    assert "--lifeline" not in result.output


def test_the_installed_command_says_its_version() -> None:
    command = Path(sys.executable).with_name("rpc-reading-worker")
    process = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=60)
    assert process.returncode == 0
    assert rpc_reading_service.__version__ in process.stdout


# By which names it is reached.


def test_localhost_finds_a_daemon_that_listens_on_ipv4_alone(daemon: Daemon) -> None:
    with load(sharded(), f"localhost:{daemon.port}") as loader:
        assert list(loader) == list(range(N))


def test_a_daemon_on_ipv6_serves() -> None:
    with running("--host", "::1", "--port", "0", "--slots", "1") as started:
        assert re.fullmatch(r"rpc-reading-worker ready on \[::1\]:\d+, 1 slot\n", started.line)
        with load(sharded(), started.address) as loader:
            assert list(loader) == list(range(N))


# What strangers may do.

RANDOM = random.Random(5)
FOREIGN_BYTES = {
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "tls": bytes.fromhex("16030100a5010000a10303") + RANDOM.randbytes(160),
    "ssh": b"SSH-2.0-OpenSSH_9.6\r\n",
    "zeros": bytes(64),
    "ZMTP/1.0": bytes.fromhex("0100") + bytes.fromhex("0600") + b"hello",
    "ZMTP/1.0, much": bytes.fromhex("0100") + 1000 * (bytes.fromhex("0600") + b"hello"),
    "ZMTP/1.0, forged length": bytes.fromhex("0100ff7fffffffffffffff00"),
    "ZMTP/3.0, cut off": bytes.fromhex("ff00000000000000017f03004e554c4c"),
    **{f"random {number}": RANDOM.randbytes(4096) for number in range(4)},
}


@pytest.mark.parametrize("what", FOREIGN_BYTES)
def test_foreign_bytes_on_the_control_port_disturb_no_session(daemon: Daemon, what: str) -> None:
    with load(sharded(range(200)), daemon.address, num_workers=2) as loader:
        iterator = iter(loader)
        elements = [next(iterator) for _ in range(6)]
        shout(daemon.port, FOREIGN_BYTES[what])
        elements += iterator
        assert elements == list(range(200))
        assert list(loader) == list(range(200))


@pytest.mark.parametrize("what", [*FOREIGN_BYTES, "PULL", "DEALER"])
def test_strangers_on_the_data_ports_take_nothing(daemon: Daemon, data_ports: range, what: str) -> None:
    with load(sharded(range(3000)), daemon.address, on_worker_loss="raise") as loader:
        iterator = iter(loader)
        elements = [next(iterator) for _ in range(6)]
        with contextlib.ExitStack() as stack:
            for port in data_ports:
                if what in FOREIGN_BYTES:
                    shout(port, FOREIGN_BYTES[what])
                else:
                    stack.enter_context(parted(what, port))
            elements += iterator
        assert elements == list(range(3000))


@contextlib.contextmanager
def parted(kind: str, port: int) -> Iterator[None]:
    """A ZeroMQ socket that was shut out by a port."""
    with zmq.Context() as context, context.socket(getattr(zmq, kind)) as stranger:
        stranger.linger = 0
        with stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED) as monitor:
            stranger.connect(f"tcp://127.0.0.1:{port}")
            assert monitor.poll(STOP_S * 1000)
            assert recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED
            yield
            assert not stranger.poll(0)
            stranger.disable_monitor()


def shout(port: int, data: bytes) -> None:
    """Send, and wait until the other end has read it all and has had enough."""
    with socket.create_connection(("127.0.0.1", port), STOP_S) as connection, contextlib.suppress(OSError):
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass


@pytest.mark.parametrize("what", ["an unknown type", "a type of the other direction", "wrong fields", "no message"])
def test_messages_that_make_no_sense_disturb_no_session(daemon: Daemon, what: str) -> None:
    session = "0" * 32
    frames = {
        "an unknown type": [msgspec.msgpack.encode(["Surprise", 5, {"a": "b"}])],
        "a type of the other direction": [messages.encode(messages.HeartbeatReply(session, 0, session, []))],
        "wrong fields": [msgspec.msgpack.encode(["Hello", "one", 2, []]), b"payload"],
        "no message": [b"", b"", b""],
    }[what]
    context = transport.Context()
    try:
        with load(sharded(range(200)), daemon.address, num_workers=2) as loader:
            iterator = iter(loader)
            elements = [next(iterator) for _ in range(6)]
            stranger = context.dealer(daemon.address)
            stranger.send(frames)
            stranger.send([messages.encode(messages.Heartbeat(session, 0))])
            answer = ask(stranger)
            assert isinstance(answer, messages.SessionClosed)
            assert answer.session == session
            elements += iterator
        assert elements == list(range(200))
    finally:
        context.close()


def test_slots_that_are_asked_for_again_before_the_graph_came_do_not_mean_that_it_came(daemon: Daemon) -> None:
    session, digest = "d" * 32, "e" * 64
    context = transport.Context()
    try:
        client = context.dealer(daemon.address)
        client.send([messages.encode(messages.Hello(messages.PROTOCOL_VERSION, versions(), "a test"))])
        ticket = ask(client).ticket
        for count in range(2):
            client.send([messages.encode(messages.OpenSession(session, count, "a test", 1, digest, 5, "", ticket))])
            assert ask(client) == messages.SessionOpened(session, count, 1, has_graph=False)
        client.send([messages.encode(messages.CloseSession(session))])
        assert ask(client) == messages.SessionClosed(session, "")
    finally:
        context.close()


def ask(dealer: transport.Dealer) -> Any:
    """The daemon's one answer to what was sent."""
    poller = transport.Poller()
    poller.watch(dealer.raw)
    assert poller.wait(STOP_S)
    (frames,) = dealer.receive_all()
    return messages.decode(frames[0], messages.FromDaemon)


# How it ends.

SIGNALS: dict[str, Callable[[int], None]] = {
    "SIGTERM": lambda pid: os.kill(pid, signal.SIGTERM),
    "SIGINT": lambda pid: os.killpg(pid, signal.SIGINT),  # Ctrl-C in its terminal reaches the workers too
}


@pytest.mark.parametrize("name", SIGNALS)
def test_an_idle_daemon_ends_cleanly(victim: Daemon, name: str) -> None:
    family = victim.family()
    assert_ends(victim, family, name)


@pytest.mark.parametrize("name", SIGNALS)
def test_a_daemon_ends_cleanly_in_mid_epoch_and_its_client_is_told(victim: Daemon, name: str) -> None:
    with load(endless(), victim.address, on_worker_loss="raise") as loader:
        iterator = iter(loader)
        next(iterator)
        family = victim.family()
        assert_ends(victim, family, name)
        began = time.monotonic()
        with pytest.raises(WorkerLostError) as error:
            for _ in iterator:
                pass
        assert time.monotonic() - began < 2.0
    assert f"{victim.address} ended the session: the daemon got {name}" in str(error.value)


def assert_ends(daemon: Daemon, family: list[psutil.Process], name: str) -> None:
    SIGNALS[name](daemon.process.pid)
    assert daemon.process.wait(STOP_S) == 0
    assert "Traceback" not in daemon.errors
    assert psutil.wait_procs(family, STOP_S)[1] == []


def test_a_killed_daemon_leaves_no_process_and_its_port_can_be_taken_at_once(victim: Daemon) -> None:
    with load(sharded(range(5000)).map(str), victim.address) as loader:
        iterator = iter(loader)
        elements = [next(iterator) for _ in range(6)]
        family = victim.family()
        victim.process.kill()
        victim.process.wait()
        with running("--port", str(victim.port), "--slots", "1") as restarted:
            assert restarted.address == victim.address
            assert psutil.wait_procs(family, STOP_S)[1] == []
            elements += iterator  # the client finds the new daemon, and runs the rest there
            assert elements == [str(x) for x in range(5000)]
