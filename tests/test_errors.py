"""Every error that a user can run into, in its own words."""

import contextlib
import functools
import logging
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torchdata.dataloader2 import DataLoader2
from torchdata.dataloader2.random import SeedGenerator
from torchdata.datapipes.iter import IterableWrapper, IterDataPipe

import rpc_reading_service
from rpc_reading_service import (
    AddressError,
    BatchError,
    ClosedError,
    ConnectError,
    GraphError,
    GraphPickleError,
    RPCReadingError,
    RPCReadingService,
    SlotsError,
    VersionError,
    WorkerError,
    WorkerLostError,
    WorkerTimeoutError,
    graph,
    messages,
    transport,
)
from rpc_reading_service.client import Client
from rpc_reading_service.daemon import versions
from rpc_reading_service.messages import Batches
from rpc_reading_service.session import SessionOptions
from rpc_reading_service.transport import Deadline

N = 20
SOON_S = 5.0
HANG_S = 20.0
"""No error takes so long, whatever else this machine has to do."""


@pytest.fixture
def daemon(two_daemons: list[str]) -> list[str]:
    """A daemon with one slot."""
    return two_daemons[:1]


def load(datapipe: Any, workers: Any, **options: Any) -> "DataLoader2[Any]":
    options = {"pickle_by_value": (__name__,), "timeout": 60.0, **options}
    return DataLoader2(datapipe, reading_service=RPCReadingService(workers, **options))


def sharded(elements: Any = range(N)) -> Any:
    return IterableWrapper(elements).sharding_filter()


@contextlib.contextmanager
def refused(error: type[BaseException], *words: str) -> Iterator[None]:
    """The error is raised, soon, and its text has all the words."""
    began = time.monotonic()
    with pytest.raises(error) as caught:
        yield
    assert time.monotonic() - began < HANG_S
    for each in words:
        assert each in str(caught.value)


def assert_slot_is_free(daemon: list[str]) -> None:
    with load(sharded(), daemon) as loader:
        assert list(loader) == list(range(N))


# What the workers run.


def fail_at(at: int, x: int) -> int:
    if x == at:
        raise ValueError(f"element {x} is bad")
    return x


def fail_oddly(x: int) -> int:
    raise OddError(lambda: None, x)


class OddError(Exception):
    """Cannot be rebuilt: it lies about what it is made of."""

    def __init__(self, one: Any, other: Any) -> None:
        super().__init__()

    def __reduce__(self) -> Any:
        raise TypeError("I do not travel")


def kill_at(at: int, x: int) -> int:
    if x == at:
        os.kill(os.getpid(), signal.SIGKILL)
    return x


def leave_at(at: int, x: int) -> int:
    if x == at:
        os._exit(3)
    return x


def exit_at(at: int, x: int) -> int:
    if x == at:
        sys.exit("user code asks for the end")
    return x


def with_lock(x: int) -> dict[str, Any]:
    return {"x": x, "lock": threading.Lock()}


def with_gradient(x: int) -> torch.Tensor:
    return torch.ones(3, requires_grad=True) * x


def hold(fifo: Path, x: int) -> int:
    fifo.open("rb").close()
    return x


class Locked(IterDataPipe[Any]):
    """Has an attribute that cannot be pickled, and hides it from everybody but us."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.guard = lambda: None

    def __iter__(self) -> Iterator[Any]:
        yield from self.source


class Guard:
    """Copies well, and cannot be pickled by value."""

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle a Guard")

    def __deepcopy__(self, _: Any) -> "Guard":
        return self

    def __repr__(self) -> str:
        return "<Guard>"


class Stays(IterDataPipe[Any]):
    def __init__(self, *sources: Any) -> None:
        self.sources = sources

    def is_replicable(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        for source in self.sources:
            yield from source


# Addresses.


MALFORMED = {
    "no list": (5.5, TypeError, "workers must be addresses, a number of local workers, or None, not 5.5"),
    "a bool": (True, TypeError, "not a bool"),
    "none": ([], AddressError, "workers is empty: name at least one host:port"),
    "too few": (0, ValueError, "workers must be at least 1, not 0"),
    "no port": (["127.0.0.1"], AddressError, "worker address '127.0.0.1' has no port: write host:port"),
    "empty port": (["127.0.0.1:"], AddressError, "'127.0.0.1:': the port must be a number from 1 to 65535, not ''"),
    "large port": (["127.0.0.1:99999"], AddressError, "must be a number from 1 to 65535, not '99999'"),
    "port 0": (["127.0.0.1:0"], AddressError, "must be a number from 1 to 65535, not '0'"),
    "port with a path": (["127.0.0.1:5000/x"], AddressError, "must be a number from 1 to 65535, not '5000/x'"),
    "port in letters": (["h:abc"], AddressError, "worker address 'h:abc': the port must be a number"),
    "no host": ([":5000"], AddressError, "worker address ':5000' has no valid host name"),
    "blank in the host": (["my host:5000"], AddressError, "worker address 'my host:5000' has no valid host name"),
    "IPv6 without brackets": (["::1:5000"], AddressError, "write an IPv6 address in brackets, as in [::1]:5555"),
    "no IPv6": (["[::g]:5000"], AddressError, "'::g' is not an IPv6 address"),
    "another scheme": (["udp://h:5000"], AddressError, "worker address 'udp://h:5000'"),
    "a tuple": ([("127.0.0.1", 5000)], TypeError, "must be a string such as 'cpu1:5555', not ('127.0.0.1', 5000)"),
    "one bad string of many": ("h:1,h:x", AddressError, "worker address 'h:x'"),
    "twice": (["a:5000", "b:5000", "a:5000"], AddressError, "workers names a:5000 more than once"),
    "twice, in two ways": (["tcp://a:5000", " a:5000"], AddressError, "workers names a:5000 more than once"),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_address_is_refused_at_once_and_quoted(what: str) -> None:
    workers, error, words = MALFORMED[what]
    with refused(error, words):
        RPCReadingService(workers)  # type: ignore[arg-type]


def test_a_malformed_address_in_the_environment_is_refused_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RPC_READING_WORKERS", "h:1,h:1")
    with load(sharded(), None) as loader, refused(AddressError, "the environment's RPC_READING_WORKERS names h:1 more"):
        iter(loader)


def test_a_host_name_that_does_not_resolve_is_named() -> None:
    with (
        load(sharded(), ["no-such-host.invalid:5000"], connect_timeout=30) as loader,
        refused(AddressError, "'no-such-host.invalid:5000': the host name 'no-such-host.invalid' does not resolve"),
    ):
        iter(loader)


def test_nobody_listening_is_told_by_address_with_the_next_step(free_port: int) -> None:
    with (
        load(sharded(), [f"127.0.0.1:{free_port}"], connect_timeout=1) as loader,
        refused(
            ConnectError,
            f"no answer within connect_timeout=1 s from 127.0.0.1:{free_port}: connection refused",
            "start rpc-reading-worker",
        ),
    ):
        iter(loader)
    assert issubclass(ConnectError, ConnectionError)


def test_one_dead_daemon_of_two_is_told_and_the_other_is_free_at_once(daemon: list[str], free_port: int) -> None:
    with load(sharded(), [*daemon, f"127.0.0.1:{free_port}"], connect_timeout=1) as loader:
        with refused(ConnectError, f"from 127.0.0.1:{free_port}: connection refused"):
            iter(loader)
        assert_slot_is_free(daemon)


@pytest.mark.parametrize(
    "answer",
    [None, b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n", bytes(64)],
    ids=["silent", "http", "zeros"],
)
def test_a_port_where_something_else_answers_is_told_apart(answer: bytes | None) -> None:
    with (
        tcp_server(answer) as address,
        load(sharded(), [address], connect_timeout=1) as loader,
        refused(ConnectError, f"from {address}: something answers TCP there, but it is no rpc-reading-worker"),
    ):
        iter(loader)


@contextlib.contextmanager
def tcp_server(answer: bytes | None) -> Iterator[str]:
    """Accepts any connection, and says the same to all."""
    kept: list[socket.socket] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                kept.append(connection)
                if answer is not None:
                    connection.sendall(answer)
                    connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in kept:
                connection.close()


# Versions.


def client_with(versions_: dict[str, str], daemons: list[str]) -> Client:
    """A client on which other versions are installed than here."""
    payload = graph.dump(graph.split(sharded(), IterableWrapper([])), None, None)
    options = SessionOptions(
        session="0" * 32,
        client="a test",
        versions={**versions(), **versions_},
        num_workers=None,
        prefetch_count=1,
        prefetch_bytes=1,
        on_worker_loss="raise",
        timeout=SOON_S,
        connect_timeout=SOON_S,
        graph_digest=payload.digest,
        graph_chunks=payload.chunks,
        graph_bytes=len(payload.data),
    )
    return Client(daemons, options, in_order=True)


@pytest.mark.parametrize(("name", "theirs"), [("python", "3.9.18"), ("torch", "1.13.1")])
def test_a_version_that_does_not_fit_is_refused_with_both(daemon: list[str], name: str, theirs: str) -> None:
    client = client_with({name: theirs}, daemon)
    try:
        with refused(
            VersionError,
            f"{daemon[0]} refused: the client runs {name} {theirs}, this daemon {name} {versions()[name]}",
            "install the same version on both sides",
        ):
            client.open()
    finally:
        client.close()


def test_a_version_that_merely_differs_is_a_warning(daemon: list[str], caplog: pytest.LogCaptureFixture) -> None:
    client = client_with({"numpy": "0.1"}, daemon)
    try:
        with caplog.at_level(logging.WARNING):
            client.open()
    finally:
        client.close()
    assert f"{daemon[0]}: numpy differs: 0.1 here, {versions()['numpy']} there" in caplog.text


@pytest.mark.parametrize("theirs", [0, messages.PROTOCOL_VERSION + 1])
def test_another_protocol_is_refused_with_both_versions(daemon: list[str], theirs: int) -> None:
    hello = messages.Hello(theirs, {"rpc-reading-service": "9.9"}, "a test")
    answer = talk(daemon[0], messages.encode(hello))
    ours = f"protocol {messages.PROTOCOL_VERSION} (rpc-reading-service {rpc_reading_service.__version__})"
    assert isinstance(answer, messages.Refused)
    assert answer.kind == "version"
    assert f"speaks protocol {theirs} (rpc-reading-service 9.9), this daemon {ours}" in answer.reason


def test_a_client_without_version_fields_is_refused_and_not_ignored(daemon: list[str]) -> None:
    answer = talk(daemon[0], messages.encode(messages.Hello(messages.PROTOCOL_VERSION, {}, "a test")))
    assert isinstance(answer, messages.Refused)
    assert "the client runs python absent" in answer.reason


def talk(address: str, *frames: bytes) -> Any:
    """Send one message to a daemon and return its answer."""
    context = transport.Context()
    try:
        dealer = context.dealer(address)
        poller = transport.Poller()
        poller.watch(dealer.raw)
        dealer.send(frames)
        assert poller.wait(SOON_S)
        (answer,) = dealer.receive_all()
        return messages.decode(answer[0], messages.FromDaemon)
    finally:
        context.close()


@pytest.mark.parametrize("version", ["0.7.1", "0.10.0", "0.11.0", "1.0"])
def test_a_torchdata_without_dataloader2_is_refused_with_those_that_have_it(version: str) -> None:
    words = f"needs torchdata 0.8 or 0.9, which have DataLoader2, but torchdata {version} is installed"
    with refused(ImportError, words, "pip install 'torchdata>=0.8,<0.10'"):
        rpc_reading_service._check_torchdata(version)


@pytest.mark.parametrize("version", ["0.8.0", "0.9.0", "0.9.1+cpu"])
def test_a_torchdata_with_dataloader2_is_taken(version: str) -> None:
    rpc_reading_service._check_torchdata(version)


# Graphs.


def test_an_attribute_that_cannot_be_pickled_is_named_with_its_datapipe(daemon: list[str]) -> None:
    datapipe = Locked(sharded())
    with load(datapipe, daemon) as loader:
        loader.datapipe.guard = threading.Lock()  # after DataLoader2's own copies, which dill makes of almost anything
        with refused(
            GraphPickleError,
            "Locked.guard = <unlocked _thread.lock object",
            "cannot be pickled, so the graph cannot be sent to the workers",
            "create it in the worker, or leave it out in __getstate__",
        ):
            iter(loader)


@pytest.mark.parametrize("name", ["worker_init_fn", "worker_reset_fn"])
def test_a_function_that_cannot_be_pickled_is_named(daemon: list[str], name: str) -> None:
    service = RPCReadingService(daemon, **{name: functools.partial(print, Guard())})  # type: ignore[arg-type]
    with refused(GraphPickleError, f"{name} functools.partial(<built-in function print>, <Guard>) cannot be pickled"):
        service.initialize(sharded())


@pytest.mark.parametrize("name", ["worker_init_fn", "worker_reset_fn"])
def test_a_function_that_cannot_be_pickled_is_named_by_dataloader2_too(daemon: list[str], name: str) -> None:
    with refused(GraphPickleError, f"{name} functools.partial(<built-in function print>, <Guard>) cannot be pickled"):
        load(sharded(), daemon, **{name: functools.partial(print, Guard())})


def test_a_graph_without_a_part_for_workers_is_refused_by_name(daemon: list[str]) -> None:
    with load(Stays(), daemon) as loader, refused(GraphError, "no part of the graph can run on workers: Stays"):
        iter(loader)


def test_a_graph_with_two_parts_for_workers_is_refused_by_name(daemon: list[str]) -> None:
    with (
        load(Stays(sharded(), sharded().map(str)), daemon) as loader,
        refused(GraphError, "2 separate branches for workers", "ShardingFilter", "Mapper", "joined by Stays"),
    ):
        iter(loader)


def test_sharding_twice_is_refused_by_the_worker_that_finds_it(daemon: list[str]) -> None:
    with (
        load(sharded().sharding_filter(), daemon) as loader,
        refused(RuntimeError, "Caught RuntimeError in worker process 0", daemon[0], "Sharding twice"),
    ):
        iter(loader)


def test_an_exception_in_worker_init_fn_has_its_type_worker_and_host(daemon: list[str]) -> None:
    with (
        load(sharded(), daemon, worker_init_fn=lambda datapipe, info: fail_at(0, info.worker_id)) as loader,
        refused(ValueError, f"in worker process 0 on {daemon[0]} ({socket.gethostname()})", "element 0 is bad"),
    ):
        iter(loader)
    assert_slot_is_free(daemon)


@pytest.fixture(scope="module")
def bare_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A daemon in another directory, without our PYTHONPATH, hence without this module."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rpc_reading_service", "--port", "0", "--slots", "1"],
        cwd=tmp_path_factory.mktemp("elsewhere"),
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().partition(" ready on ")[2].partition(",")[0]
        finally:
            process.terminate()


def test_a_module_that_the_worker_lacks_is_named_with_the_remedy(bare_daemon: str) -> None:
    with (
        load(sharded().map(with_lock), [bare_daemon], pickle_by_value=()) as loader,
        refused(
            ModuleNotFoundError,
            f"{bare_daemon} has no module {__name__!r}, which the graph needs: install it there",
            "on PYTHONPATH",
            f"pickle_by_value=({__name__!r},)",
        ),
    ):
        iter(loader)


def test_the_daemon_survives_a_graph_that_it_cannot_load(bare_daemon: str) -> None:
    with load(sharded().map(with_lock), [bare_daemon], pickle_by_value=()) as loader, refused(ModuleNotFoundError):
        iter(loader)
    assert_slot_is_free([bare_daemon])


# User code.


def test_a_users_exception_comes_after_the_batches_before_it(two_daemons: list[str]) -> None:
    taken: list[Any] = []
    with (
        load(sharded().map(functools.partial(fail_at, 11)), two_daemons, pickle_by_value=()) as loader,
        refused(
            ValueError,
            f"Caught ValueError in worker process 1 on {two_daemons[1]} (pid ",
            "in fail_at",
            'raise ValueError(f"element {x} is bad")',
            "ValueError: element 11 is bad",
        ),
    ):
        for element in loader:
            taken.append(element)
    assert taken == list(range(11))


def test_a_loader_is_shut_down_after_a_users_exception(daemon: list[str]) -> None:
    with load(sharded().map(functools.partial(fail_at, 0)), daemon) as loader:
        with refused(ValueError):
            next(iter(loader))
        with refused(RuntimeError, "it has already been shut down"):
            iter(loader)
        assert_slot_is_free(daemon)


def test_an_exception_that_cannot_be_rebuilt_is_told_as_text(daemon: list[str]) -> None:
    with (
        load(sharded().map(fail_oddly), daemon) as loader,
        refused(Exception, "Caught OddError in worker process 0", "in fail_oddly"),
    ):
        next(iter(loader))


def test_system_exit_in_user_code_ends_neither_process(daemon: list[str]) -> None:
    with load(sharded().map(functools.partial(exit_at, 2)), daemon) as loader:
        iterator = iter(loader)
        assert [next(iterator), next(iterator)] == [0, 1]
        with refused(WorkerError, "Caught SystemExit in worker process 0", "user code asks for the end"):
            next(iterator)


def test_stop_iteration_in_user_code_is_an_error_and_not_an_end(daemon: list[str]) -> None:
    with (
        load(sharded().map(stop), daemon) as loader,
        refused(Exception, "in worker process 0", "StopIteration"),
    ):
        list(loader)


def stop(x: int) -> int:
    raise StopIteration(x)


def test_a_batch_that_cannot_be_pickled_is_refused_by_its_place(daemon: list[str]) -> None:
    with (
        load(sharded().map(with_lock), daemon) as loader,
        refused(BatchError, "in worker process 0", "batch['lock'] (_thread.lock) cannot be pickled", "leave it out"),
    ):
        next(iter(loader))


def test_a_tensor_with_a_history_is_refused_with_the_remedy(daemon: list[str]) -> None:
    with load(sharded().map(with_gradient), daemon) as loader, refused(BatchError, "detach"):
        next(iter(loader))


def test_an_exception_in_worker_reset_fn_is_told(daemon: list[str]) -> None:
    with (
        load(sharded(), daemon, worker_reset_fn=lambda datapipe, info, seeds: fail_at(0, 0)) as loader,
        refused(ValueError, "in worker process 0", "element 0 is bad"),
    ):
        next(iter(loader))


# Workers that die, or say nothing.


def test_a_killed_worker_is_told_with_the_signals_name(two_daemons: list[str]) -> None:
    with load(sharded().map(functools.partial(kill_at, 5)), two_daemons, on_worker_loss="raise") as loader:
        iterator = iter(loader)
        with refused_soon(WorkerLostError, f"worker 1 on {two_daemons[1]} (pid ", "was killed by SIGKILL"):
            list(iterator)
        assert_slot_is_free(two_daemons[1:])


def test_a_worker_that_leaves_is_told_with_its_exit_code(daemon: list[str]) -> None:
    with load(sharded().map(functools.partial(leave_at, 5)), daemon, on_worker_loss="raise") as loader:
        iterator = iter(loader)
        with refused_soon(WorkerLostError, f"worker 0 on {daemon[0]}", "exited with code 3"):
            list(iterator)


@contextlib.contextmanager
def refused_soon(error: type[BaseException], *words: str) -> Iterator[None]:
    began = time.monotonic()
    with refused(error, *words):
        yield
    assert time.monotonic() - began < SOON_S


def test_a_worker_that_says_nothing_for_timeout_is_told_with_what_it_does(daemon: list[str], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    held = sharded().map(functools.partial(hold, tmp_path / "fifo"))
    with (
        load(held, daemon, timeout=1, pickle_by_value=()) as loader,
        refused(
            WorkerTimeoutError,
            f"waiting for a batch from worker 0 on {daemon[0]}, busy 1 s in hold, test_errors.py:",
            "gave up after timeout=1 s",
        ),
    ):
        next(iter(loader))


class Impatient(RPCReadingService):
    warn_after = 0.3


def test_a_wait_that_lasts_is_logged_with_whom_it_waits_for_and_what_that_does(
    daemon: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkfifo(tmp_path / "fifo")
    held = sharded().map(functools.partial(hold, tmp_path / "fifo"))
    with DataLoader2(held, reading_service=Impatient(daemon, timeout=60)) as loader, ThreadPoolExecutor(1) as training:
        batch = training.submit(lambda: next(iter(loader)))
        pattern = (
            rf"waiting for a batch from worker 0 on {daemon[0]}, busy \d+ s in hold, test_errors.py:\d+, for \d+ s"
        )
        deadline = Deadline(SOON_S)
        while not re.search(pattern, caplog.text):
            assert not deadline.expired, caplog.text
            wait([batch], 0.1)
        (tmp_path / "fifo").open("wb").close()
        assert batch.result(SOON_S) == 0


def leave_at_reset(datapipe: Any, worker_info: Any, seed_generator: Any) -> Any:
    os._exit(3)


def test_a_client_that_is_closed_before_its_thread_runs_opens_nothing(
    daemon: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As Ctrl-C does, if it comes while the thread is being started."""
    late: list[threading.Thread] = []
    client = client_with({}, daemon)
    monkeypatch.setattr(client._io._thread, "start", lambda: late.append(client._io._thread))
    client._io.start()
    client.close()
    monkeypatch.undo()
    late[0].start()
    late[0].join()
    assert caplog.text == ""


def test_ctrl_c_while_a_batch_is_read_loses_nothing(two_daemons: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    accepts, interrupted = Client.accepts, []

    def interrupting(client: Client, header: Any) -> bool:
        here = threading.current_thread() is threading.main_thread()
        if here and isinstance(header, Batches) and not interrupted:
            interrupted.append(header)
            signal.raise_signal(signal.SIGINT)
        return accepts(client, header)

    monkeypatch.setattr(Client, "accepts", interrupting)
    service = RPCReadingService(two_daemons, num_workers=2, on_worker_loss="raise", transport="tcp")
    with DataLoader2(IterableWrapper(range(1000)).sharding_filter(), reading_service=service) as loader:
        with pytest.raises(KeyboardInterrupt):
            list(loader)
        (header,) = interrupted
        merge = loader.reading_service._client.merge  # type: ignore[union-attr]
        assert merge.received[header.worker] > header.seq, "it has been read to its end"
        assert list(loader) == list(range(1000))
        assert loader.reading_service.statistics().losses == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT])
def test_a_signal_s_handler_may_close_the_session_in_the_middle_of_a_wait(
    daemon: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr("rpc_reading_service.client.CLOSE_S", 10 * SOON_S)
    os.mkfifo(tmp_path / "fifo")
    loader = load(sharded().map(functools.partial(hold, tmp_path / "fifo")), daemon)
    iterator = iter(loader)
    thread = loader.reading_service._client._io._thread  # type: ignore[union-attr]
    before = signal.signal(number, lambda *_: loader.shutdown())
    timer = threading.Timer(0.5, os.kill, (os.getpid(), number))
    timer.start()
    try:
        with refused_soon(ClosedError, "has been finalized"):
            next(iterator)
        thread.join(SOON_S)
        assert not thread.is_alive()
    finally:
        timer.join()
        signal.signal(number, before)


def test_a_worker_that_crashes_again_and_again_does_not_outlast_timeout(daemon: list[str]) -> None:
    with (
        load(sharded(), daemon, worker_reset_fn=leave_at_reset, timeout=2) as loader,
        refused_soon(
            WorkerLostError,
            f"worker 0 on {daemon[0]} (pid ",
            "exited with code 3, ",
            " times in a row without a batch in between",
        ),
    ):
        next(iter(loader))


# Slots.


def test_more_workers_than_slots_are_refused_with_the_arithmetic(two_daemons: list[str]) -> None:
    one, other = two_daemons
    with (
        load(sharded(), two_daemons, num_workers=3) as loader,
        refused(
            SlotsError,
            "num_workers=3, but only 2 slots are free",
            f"1 of 1 slots free on {one}; 1 of 1 slots free on {other}",
            "Ask for fewer workers, or start more daemons or more slots",
        ),
    ):
        iter(loader)


def test_slots_that_another_session_holds_are_refused_by_address(daemon: list[str]) -> None:
    with load(sharded(), daemon) as holder, load(sharded(), daemon) as loader:
        iter(holder)
        with refused(SlotsError, f"0 of 1 slots free on {daemon[0]}: held by 1 session"):
            iter(loader)
        assert list(holder) == list(range(N))


def test_more_workers_than_local_ones_are_refused_before_any_starts() -> None:
    with refused(ValueError, "num_workers=3, but workers=2 starts only 2"):
        RPCReadingService(2, num_workers=3)


# Arguments.

ARGUMENTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "num_workers 0": ({"num_workers": 0}, ValueError, "num_workers must be at least 1, not 0"),
    "num_workers -1": ({"num_workers": -1}, ValueError, "num_workers must be at least 1, not -1"),
    "num_workers float": ({"num_workers": 2.0}, TypeError, "num_workers must be an int or None, not 2.0"),
    "num_workers bool": ({"num_workers": True}, TypeError, "num_workers must be an int or None, not True"),
    "worker_prefetch_cnt 0": ({"worker_prefetch_cnt": 0}, ValueError, "worker_prefetch_cnt must be at least 1, not 0"),
    "worker_prefetch_cnt None": (
        {"worker_prefetch_cnt": None},
        TypeError,
        "worker_prefetch_cnt must be an int, not None",
    ),
    "prefetch_bytes 0": ({"prefetch_bytes": 0}, ValueError, "prefetch_bytes must be at least 1, not 0"),
    "prefetch_bytes str": ({"prefetch_bytes": "1G"}, TypeError, "prefetch_bytes must be an int or None, not '1G'"),
    "on_worker_loss": (
        {"on_worker_loss": "ignore"},
        ValueError,
        "on_worker_loss must be one of 'recover', 'raise', 'drop', not 'ignore'",
    ),
    "timeout 0": ({"timeout": 0}, ValueError, "timeout must be more than 0 seconds, not 0"),
    "timeout nan": ({"timeout": float("nan")}, ValueError, "timeout must be more than 0 seconds, not nan"),
    "timeout str": ({"timeout": "60"}, TypeError, "timeout must be seconds as a number or None, not '60'"),
    "connect_timeout None": ({"connect_timeout": None}, TypeError, "connect_timeout must be seconds as a number, not"),
    "connect_timeout -1": ({"connect_timeout": -1}, ValueError, "connect_timeout must be more than 0 seconds, not -1"),
    "worker_init_fn": ({"worker_init_fn": 5}, TypeError, "worker_init_fn must be callable or None, not 5"),
    "worker_reset_fn": ({"worker_reset_fn": "f"}, TypeError, "worker_reset_fn must be callable or None, not 'f'"),
    "pickle_by_value str": ({"pickle_by_value": "mine"}, TypeError, "must be a sequence of modules or their names"),
    "pickle_by_value None": ({"pickle_by_value": None}, TypeError, "pickle_by_value"),
    "pickle_by_value int": ({"pickle_by_value": [5]}, TypeError, "pickle_by_value"),
    "keys": ({"keys": 5}, TypeError, "keys must be a folder, CurveKeys or None, not 5"),
    "transport": ({"transport": "udp"}, ValueError, "transport must be one of 'auto', 'tcp', 'shm', not 'udp'"),
    "in_order": ({"in_order": "yes"}, TypeError, "in_order must be a bool, not 'yes'"),
    "pin_memory": ({"pin_memory": "cuda"}, TypeError, "pin_memory must be a bool, not 'cuda'"),
    "unknown": ({"prefetch": 5}, TypeError, "prefetch"),
}


@pytest.mark.parametrize("what", ARGUMENTS)
def test_a_wrong_argument_is_refused_by_name(what: str) -> None:
    arguments, error, words = ARGUMENTS[what]
    with refused(error, words):
        RPCReadingService(["h:1"], **arguments)


def test_arguments_after_workers_are_by_keyword_only() -> None:
    with refused(TypeError, "positional argument"):
        RPCReadingService(["h:1"], 4)  # type: ignore[misc]


# Use at the wrong time.


def test_len_of_the_loaders_datapipe_says_why_there_is_none(daemon: list[str]) -> None:
    with load(sharded(), daemon) as loader:
        iter(loader)
        with refused(TypeError, "the number of batches is not known here", "before it is given to DataLoader2"):
            len(loader.datapipe)


def test_use_before_initialize_is_refused() -> None:
    with refused(ClosedError, "has not been initialized"):
        RPCReadingService(["h:1"]).initialize_iteration(SeedGenerator(1))


@pytest.fixture
def finalized(daemon: list[str]) -> tuple[RPCReadingService, Iterator[Any]]:
    """A service after its end, and an iterator that it left in mid-epoch."""
    service = RPCReadingService(daemon)
    iterator = iter(service.initialize(sharded()))
    service.initialize_iteration(SeedGenerator(1))
    assert next(iterator) == 0
    service.finalize()
    return service, iterator


USES: dict[str, Callable[[RPCReadingService, Iterator[Any]], Any]] = {
    "next": lambda service, iterator: next(iterator),
    "a new epoch": lambda service, iterator: service.initialize_iteration(SeedGenerator(1)),
    "pause": lambda service, iterator: service._pause(),
    "resume": lambda service, iterator: service._resume(),
}


@pytest.mark.parametrize("use", USES)
def test_use_after_finalize_is_refused(finalized: tuple[RPCReadingService, Iterator[Any]], use: str) -> None:
    with refused(ClosedError, "has been finalized"):
        USES[use](*finalized)


def test_a_wait_in_another_thread_ends_with_finalize(daemon: list[str], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    service = RPCReadingService(daemon, pickle_by_value=(__name__,))
    iterator = iter(service.initialize(sharded().map(functools.partial(hold, tmp_path / "fifo"))))
    service.initialize_iteration(SeedGenerator(1))
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            next(iterator)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    service.finalize()
    thread.join(SOON_S)
    assert [type(error) for error in errors] == [ClosedError]


# All of them.


def test_every_error_of_ours_pickles_with_its_text_and_has_one_base() -> None:
    kinds = [
        kind for name in rpc_reading_service.__all__ if isinstance(kind := getattr(rpc_reading_service, name), type)
    ]
    errors = [kind for kind in kinds if issubclass(kind, Exception)]
    assert len(errors) >= 13
    for kind in errors:
        assert issubclass(kind, RPCReadingError)
        assert re.fullmatch("the text", str(pickle.loads(pickle.dumps(kind("the text")))))
