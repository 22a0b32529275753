"""Keys: who is let in, what is said to everybody else, and what can be read on the wire."""

import contextlib
import hashlib
import os
import pickle
import re
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import zmq
from click.testing import CliRunner
from daemons import Daemon, running, until, workers_of
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torchdata.dataloader2 import DataLoader2
from torchdata.datapipes.iter import IterableWrapper
from zmq.utils.monitor import recv_monitor_message

from rpc_reading_service import CurveKeys, KeysError, RPCReadingService, messages, security, transport
from rpc_reading_service import daemon as daemon_module
from rpc_reading_service.cli import main
from rpc_reading_service.security import Pair

PATIENCE_S = 10.0
"""Less than any connect_timeout here: what is known to be in vain is not waited for."""

NOBODY = 65534


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    """With keys."""
    with running("--port", "0", "--slots", "3", "--keys", str(folder)) as started:
        assert started.line
        yield started


def load(address: str, keys: Any, elements: int = 50, **options: Any) -> "DataLoader2[Any]":
    pipe = IterableWrapper(range(elements)).sharding_filter()
    service = RPCReadingService([address], keys=keys, **{"timeout": 60.0, "connect_timeout": 30.0, **options})
    return DataLoader2(pipe, reading_service=service)


# Files.


def test_keygen_makes_both_pairs_and_says_what_to_type_next(tmp_path: Path) -> None:
    keys = tmp_path / "new" / "keys"
    result = CliRunner().invoke(main, ["keygen", str(keys)])
    assert result.exit_code == 0
    modes = {
        str(each.relative_to(keys)): stat.S_IMODE(each.stat().st_mode) for each in keys.rglob("*") if each.is_file()
    }
    assert modes == {
        "server.key": 0o600,
        "client.key": 0o600,
        "server.pub": 0o644,
        "client.pub": 0o644,
        "allowed/client.pub": 0o644,
    }
    daemon_line, client_line = result.output.splitlines()
    assert daemon_line.startswith(f"rpc-reading-worker --host 0.0.0.0 --keys {keys} ")
    assert client_line.startswith(f"export RPC_READING_KEYS={keys} ")
    secrets = [(keys / name).read_text().strip() for name in ("server.key", "client.key")]
    assert not any(secret in result.output for secret in secrets)


def test_keygen_overwrites_nothing(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*.*")}
    result = CliRunner().invoke(main, ["keygen", str(folder)])
    assert result.exit_code == 2
    assert f"{folder}/server.key is there already, and is not overwritten: name a new folder" in result.output
    assert {path: path.read_bytes() for path in folder.rglob("*.*")} == before


def test_keygen_says_where_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = CliRunner().invoke(main, ["keygen", str(tmp_path / "file" / "keys")])
    assert result.exit_code == 2
    assert "keys cannot be written: Not a directory" in result.output


def ruin(path: Path, what: str) -> None:
    match what:
        case "missing":
            path.unlink()
        case "unreadable":  # also for root, who can read any file
            path.unlink()
            path.mkdir(mode=0o700)
        case "world-readable":
            path.chmod(0o644)
        case "no key":
            path.write_text("-----BEGIN OPENSSH PRIVATE KEY-----\n")


RUINED = {
    "missing": "there is no key {}: make keys with rpc-reading-worker keygen DIR, and copy the file",
    "unreadable": "the key {} cannot be read: Is a directory; it must belong to the user who needs it",
    "world-readable": "the secret key {0} can be used by others than its owner (mode 0644): chmod 600 {0}",
    "no key": "{} holds no key: make keys with rpc-reading-worker keygen DIR, or copy the file again",
}


@pytest.mark.parametrize("what", RUINED)
def test_a_client_says_what_is_wrong_with_its_key(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    security.create(tmp_path)
    ruin(tmp_path / "client.key", what)
    words = RUINED[what].format(tmp_path / "client.key")
    with pytest.raises(KeysError, match=f"^{re.escape(words)}$"):
        RPCReadingService(["cpu1:5555"], keys=tmp_path)
    monkeypatch.setenv("RPC_READING_KEYS", str(tmp_path))
    with pytest.raises(KeysError, match=re.escape(words)):
        iter(load("127.0.0.1:1", None))


@pytest.mark.parametrize("what", RUINED)
def test_a_daemon_says_what_is_wrong_with_its_key(what: str, tmp_path: Path) -> None:
    security.create(tmp_path)
    ruin(tmp_path / "server.key", what)
    result = CliRunner().invoke(main, ["--keys", str(tmp_path)])
    assert result.exit_code == 2
    assert result.output == f"rpc-reading-worker: {RUINED[what].format(tmp_path / 'server.key')}\n"


@pytest.mark.parametrize("key", ["", "x" * 39, "x" * 41, "\x7f" * 40, "#" * 40, "é" * 40])
def test_what_is_no_key_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(KeysError, match=r"^CurveKeys: secret is no key: it must be 40 characters of Z85$"):
        CurveKeys(key, Pair.new().public)


def test_secrets_are_in_no_repr(folder: Path) -> None:
    keys = CurveKeys.load(folder)
    service = RPCReadingService(["cpu1:5555"], keys=keys)
    assert keys.secret not in f"{keys!r} {keys.pair!r} {service!r} {service._options!r}"
    assert Pair.from_raw(keys.pair.raw) == keys.pair


def test_keys_of_another_type_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="keys must be a folder, CurveKeys or None, not 5"):
        RPCReadingService(["cpu1:5555"], keys=5)  # type: ignore[arg-type]


# Where a daemon listens.


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "cpu1"])
def test_off_loopback_a_daemon_wants_keys(host: str) -> None:
    result = CliRunner().invoke(main, ["--host", host])
    user = daemon_module.user_name(os.getuid())
    assert result.exit_code == 2
    assert result.output == (
        f"rpc-reading-worker: without keys whoever can reach {host} could run code here as {user}: give --keys DIR "
        "(made by rpc-reading-worker keygen DIR), or insist with --insecure\n"
    )


def test_an_insecure_daemon_warns_and_serves() -> None:
    with running("--host", "0.0.0.0", "--port", "0", "--slots", "1", "--insecure") as started:
        user = daemon_module.user_name(os.getuid())
        started.wait_for_line(f"--insecure: whoever can reach 0.0.0.0:{started.port} runs code as {user}")
        with load(f"127.0.0.1:{started.port}", None) as loader:
            assert list(loader) == list(range(50))


# With keys.


def test_with_keys_the_stream_is_the_same(daemon: Daemon, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(daemon.address, folder) as loader:
        assert list(loader) == list(range(50))
    monkeypatch.setenv("RPC_READING_KEYS", str(folder))
    dealt = IterableWrapper(range(50)).sharding_round_robin_dispatch(SHARDING_PRIORITIES.MULTIPROCESSING).map(str)
    with DataLoader2(dealt, reading_service=RPCReadingService([daemon.address], num_workers=2)) as loader:
        assert sorted(map(int, loader)) == list(range(50))


@dataclass
class Trouble:
    """Keys that do not fit, and what either end says of them."""

    client: str
    daemon: str
    daemon_has_keys: bool = True


TROUBLES = {
    "wrong server key": Trouble(
        "it has another key than {server} (server.pub): copy server.pub from the daemon's keys",
        "it has no keys, or expects another than this daemon's: give it client.key and server.pub",
    ),
    "not on the list": Trouble(
        "it does not let this client in: put its public key {public} (client.pub) into the folder allowed of the "
        "daemon's keys",
        "127.0.0.1 was not let in: its public key {public} is in no *.pub file of {allowed}",
    ),
    "no keys": Trouble(
        "it wants keys, and none are given here: give keys=DIR, or set RPC_READING_KEYS",
        "it has no keys, or expects another than this daemon's: give it client.key and server.pub",
    ),
    "keys for an open daemon": Trouble(
        "it has no keys, and keys are given here: start it with --keys DIR, or leave them out here",
        "it comes with keys, and this daemon has none: start it with --keys DIR",
        daemon_has_keys=False,
    ),
}


@pytest.fixture(scope="module")
def open_daemon() -> Iterator[Daemon]:
    with running("--port", "0", "--slots", "2") as started:
        assert started.line
        yield started


@pytest.mark.parametrize("what", TROUBLES)
def test_both_ends_say_which_keys_do_not_fit(
    what: str, daemon: Daemon, open_daemon: Daemon, folder: Path, other: Path
) -> None:
    ours, theirs = CurveKeys.load(folder), CurveKeys.load(other)
    keys = {
        "wrong server key": CurveKeys(ours.secret, theirs.server),
        "not on the list": CurveKeys(theirs.secret, ours.server),
        "keys for an open daemon": ours,
    }.get(what)
    trouble = TROUBLES[what]
    asked = daemon if trouble.daemon_has_keys else open_daemon
    names = {"server": theirs.server, "public": theirs.pair.public, "allowed": folder / "allowed"}
    began = time.monotonic()
    with pytest.raises(KeysError) as caught:
        iter(load(asked.address, keys))
    assert time.monotonic() - began < PATIENCE_S
    # The constructor of a DataPipe's iterator may add a line of its own.
    assert str(caught.value).startswith(f"no session with {asked.address}: {trouble.client.format(**names)}")
    # Whichever end finds out first tells the other nothing; a few more tries, and both know.
    deadline = transport.Deadline(PATIENCE_S)
    while trouble.daemon.format(**names) not in asked.errors:
        assert not deadline.expired, asked.errors
        with pytest.raises(KeysError):
            iter(load(asked.address, keys))
    assert ours.secret not in asked.errors
    assert theirs.secret not in asked.errors


def test_the_allow_list_is_read_again_when_it_changes(daemon: Daemon, folder: Path, other: Path) -> None:
    guest = CurveKeys(CurveKeys.load(other).secret, CurveKeys.load(folder).server)
    entry = folder / "allowed" / "guest.pub"
    with pytest.raises(KeysError):
        iter(load(daemon.address, guest))
    entry.write_text(guest.pair.public)
    with load(daemon.address, guest, elements=1_000_000, num_workers=1, on_worker_loss="raise") as loader:
        iterator = iter(loader)
        assert next(iterator) == 0
        entry.unlink()
        with pytest.raises(Exception, match="its client's key is not on the allow-list any more"):
            for _ in iterator:
                pass
    with pytest.raises(KeysError):
        iter(load(daemon.address, guest))


def test_an_allow_list_with_a_broken_entry_lets_the_others_in(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    security.create(tmp_path)
    (tmp_path / "allowed" / "broken.pub").write_text("no key")
    (tmp_path / "allowed" / "notes.txt").write_text(Pair.new().public)
    allowed = security.AllowList(tmp_path / "allowed")
    assert CurveKeys.load(tmp_path).pair.public in allowed
    assert (tmp_path / "allowed" / "notes.txt").read_text() not in allowed
    assert "broken.pub holds no key" in caplog.text
    for path in (tmp_path / "allowed").iterdir():
        path.unlink()
    (tmp_path / "allowed").rmdir()
    assert CurveKeys.load(tmp_path).pair.public not in allowed
    assert "the allow-list cannot be read, so that nobody is let in" in caplog.text


def handshake(address: str, keys: CurveKeys | None) -> bool:
    """Whether a ZeroMQ socket with these keys comes together with the one at an address."""
    done = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer, dealer.get_monitor_socket(done) as monitor:
        dealer.linger = 0
        if keys is not None:
            transport.Lock(keys.pair, keys.server).put_on(dealer)
        dealer.connect(f"tcp://{address}")
        assert monitor.poll(PATIENCE_S * 1000)
        event = recv_monitor_message(monitor)
        dealer.disable_monitor()
        return bool(event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED)


def test_a_data_port_is_open_to_its_own_session_alone(daemon: Daemon, folder: Path) -> None:
    client = CurveKeys.load(folder)
    with load(daemon.address, folder, elements=1000, num_workers=1) as loader:
        iterator = iter(loader)
        elements = [next(iterator)]
        rpc_client = loader.reading_service._client
        (worker,) = rpc_client._session.workers
        pair = Pair.from_raw(rpc_client._options.secret)
        address = f"127.0.0.1:{worker.port}"
        assert not handshake(address, None)
        assert not handshake(address, client)  # the daemon's key is not the session's
        assert not handshake(address, CurveKeys(client.secret, pair.public))  # nor is the client's own
        assert handshake(address, CurveKeys(pair.secret, pair.public))
        elements += iterator
    assert elements == list(range(1000))


@contextlib.contextmanager
def dealer_to(address: str, keys: CurveKeys | None) -> Iterator[transport.Dealer]:
    context = transport.Context()
    dealer = context.dealer(address, keys)
    try:
        yield dealer
    finally:
        dealer.close()
        context.close()


def ask(dealer: transport.Dealer, message: messages.Message, kind: Any = messages.FromDaemon) -> Any:
    """A daemon's one answer."""
    dealer.send([messages.encode(message)])
    (answer,) = receive(dealer, 1, kind)
    return answer


def test_another_client_that_is_let_in_cannot_touch_a_session(daemon: Daemon, folder: Path, other: Path) -> None:
    guest = CurveKeys(CurveKeys.load(other).secret, CurveKeys.load(folder).server)
    entry = folder / "allowed" / "guest.pub"
    entry.write_text(guest.pair.public)
    try:
        with load(daemon.address, folder, num_workers=1) as loader, dealer_to(daemon.address, guest) as dealer:
            iterator = iter(loader)
            session = loader.reading_service._client._session.options.session
            assert ask(dealer, messages.Heartbeat(session, 0)) == messages.SessionClosed(session, daemon_module.UNKNOWN)
            assert ask(dealer, messages.CloseSession(session)) == messages.SessionClosed(session, "")
            assert list(iterator) == list(range(50))
    finally:
        entry.unlink()


# Nothing of a stranger's is unpickled.


class Bomb:
    """Whoever unpickles it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return open, (str(self._path), "w")


def throw(dealer: transport.Dealer, bomb: bytes, ticket: str = "", secret: bytes = b"") -> str:
    """All that a client sends until its graph is loaded, and a pickle alone; returns the session's name."""
    session, digest = os.urandom(16).hex(), hashlib.sha256(bomb).hexdigest()
    dealer.send([messages.encode(messages.OpenSession(session, 0, "a test", 1, digest, len(bomb), "", ticket))])
    dealer.send([messages.encode(messages.GraphChunk(session, 0)), bomb])
    dealer.send([messages.encode(messages.StartWorker(session, 0, 0, 2, 1, 1, 1000)), secret])
    dealer.send([bomb])
    return session


def test_what_somebody_sends_who_is_not_let_in_is_never_unpickled(
    daemon: Daemon, open_daemon: Daemon, folder: Path, other: Path, tmp_path: Path
) -> None:
    ours, bomb = CurveKeys.load(folder), pickle.dumps(Bomb(tmp_path / "made"))
    with contextlib.ExitStack() as stack, load(daemon.address, folder, num_workers=1) as loader:
        iterator = iter(loader)
        (worker,) = loader.reading_service._client._session.workers
        for address in (daemon.address, f"127.0.0.1:{worker.port}"):
            for keys in (None, CurveKeys(CurveKeys.load(other).secret, ours.server)):
                stranger = stack.enter_context(dealer_to(address, keys))
                throw(stranger, bomb, secret=Pair.new().raw)
                until(lambda stranger=stranger: stranger.events() != (False, None))  # it is turned away
        unasked = stack.enter_context(dealer_to(open_daemon.address, None))
        answers = [messages.SessionClosed(throw(unasked, bomb), daemon_module.UNKNOWN)] * 3
        assert receive(unasked, 3) == answers
        assert list(iterator) == list(range(50))
    assert not (tmp_path / "made").exists()
    assert not workers_of(open_daemon.process.pid)
    # Of whoever is let in it is unpickled: this is where to look.
    with dealer_to(daemon.address, ours) as dealer:
        session = throw(dealer, bomb, ask(dealer, hello()).ticket, Pair.new().raw)
        until((tmp_path / "made").exists)
        dealer.send([messages.encode(messages.CloseSession(session))])
        until(lambda: not workers_of(daemon.process.pid))


def receive(dealer: transport.Dealer, count: int, kind: Any = messages.FromDaemon) -> list[Any]:
    """So many answers."""
    answers: list[Any] = []
    poller = transport.Poller()
    poller.watch(dealer.raw)
    while len(answers) < count:
        assert poller.wait(PATIENCE_S)
        answers += [messages.decode(frames[0], kind) for frames in dealer.receive_all()]
    return answers


# Without keys, on one machine.

HOSTILE = "\x1b[2Jgraph\n" + 85 * "\x9b"
"""The name of a graph, as long as it may be."""

HARMLESS = ("\\x1b[2Jgraph\\x0a" + 85 * "\\x9b")[:100]


def hello() -> messages.Hello:
    return messages.Hello(messages.PROTOCOL_VERSION, daemon_module.versions(), "a test")


def test_a_session_is_opened_only_by_whom_the_daemon_has_looked_at(open_daemon: Daemon) -> None:
    session = "a" * 32
    with dealer_to(open_daemon.address, None) as first, dealer_to(open_daemon.address, None) as second:
        ticket = ask(first, hello()).ticket
        wanted = messages.OpenSession(session, 0, "a test", 1, "0" * 64, 5, HOSTILE, ticket)
        assert ask(second, wanted) == messages.SessionClosed(session, daemon_module.UNKNOWN)
        assert isinstance(ask(first, wanted), messages.SessionOpened)
        status = ask(first, messages.AskStatus(messages.PROTOCOL_VERSION), messages.ToAsker)
        assert [each.graph_name for each in status.sessions] == [HARMLESS]
        assert ask(first, messages.CloseSession(session)) == messages.SessionClosed(session, "")


def test_the_kernel_says_whose_a_connection_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for host, family in (("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)):
        with socket.create_server((host, 0), family=family) as server:
            with socket.create_connection(server.getsockname()[:2]):
                ours, _ = server.accept()
                assert security.owner(ours.fileno()) == os.getuid()
            with ours:  # the other end is closed: whose it was is not known any more
                assert security.owner(ours.fileno()) is None
            assert security.owner(ours.fileno()) is None


AS_STRANGER = """
import encodings.idna, os, sys
from rpc_reading_service import daemon, messages, transport
hello = messages.Hello(messages.PROTOCOL_VERSION, daemon.versions(), "a stranger")
os.setgid({nobody})
os.setuid({nobody})
context = transport.Context()
dealer = context.dealer(sys.argv[1])
dealer.send([messages.encode(hello)])
poller = transport.Poller()
poller.watch(dealer.raw)
poller.wait(20.0)
((frame, *_),) = dealer.receive_all()
print(messages.decode(frame, messages.FromDaemon).reason)
dealer.close()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_another_user_of_the_machine_cannot_run_code_as_the_daemons_user(open_daemon: Daemon) -> None:
    command = [sys.executable, "-c", AS_STRANGER.format(nobody=NOBODY), open_daemon.address]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert said.strip() == (
        f"a process of {daemon_module.user_name(NOBODY)} may not run code as root, and the daemon has no keys: start "
        "it with --keys DIR, or with --insecure if everybody on that machine may"
    )
    assert "a stranger was refused" in open_daemon.errors


# Logs.


def test_of_each_peer_one_line_is_logged_and_the_memory_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    strangers = security.Strangers()
    for _ in range(1000):
        strangers.note("192.0.2.1", "sent nonsense")
    assert [record.message for record in caplog.records] == [
        "! 192.0.2.1 sent nonsense; more of the kind is not logged"
    ]
    for number in range(3000):
        strangers.note(f"192.0.2.{number}", "sent nonsense")
    assert len(strangers.counts) == security.PEERS_REMEMBERED


# Documents.


def documented(heading: str) -> list[re.Pattern[str]]:
    """The texts of a section of errors.md; ``...`` is anything there, and the examples' names are too."""
    section = (ROOT / "docs/errors.md").read_text().partition(f"## `{heading}`")[2].partition("\n## ")[0]
    texts = re.findall(r"^\| (`.+?`) \|", section, re.MULTILINE)
    return [re.compile(VARIES.sub(".*", re.escape(text.strip("`").replace("...", "VARIES")))) for text in texts]


VARIES = re.compile(r"VARIES|keys/\\?[a-z]+\\?\.?[a-z]*|10\\\.0\\\.0\\\.7|cpu1:5555|alice|bob|Permission\\ denied")
ROOT = Path(__file__).parents[1]


def test_the_texts_in_errors_md_are_the_codes() -> None:
    patterns = documented("KeysError")
    texts = [words.format("keys/client.key") for words in RUINED.values()]
    texts += [f"no session with a: {trouble.client}" for trouble in TROUBLES.values()]
    said = [trouble.daemon for trouble in TROUBLES.values()]
    connecting = [each if "was not let in" in each else f"10.0.0.9 could not connect: {each}" for each in said]
    texts += [f"! {each}; more of the kind is not logged" for each in connecting]
    for text in texts:
        assert any(pattern.search(text) for pattern in patterns), text
