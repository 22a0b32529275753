"""The wire itself: what somebody sees, and can do, who sits between a client and its daemon."""

import contextlib
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemons import Daemon, running, until, workers_of
from relays import HOSTS, free_ports, options, relay
from torchdata.dataloader2 import DataLoader2
from torchdata.datapipes.iter import IterableWrapper

from rpc_reading_service import CurveKeys, RPCReadingError, RPCReadingService, security

pytestmark = pytest.mark.slow

MARK = b"the quick brown fox jumps over the lazy dog"
"""In the data."""

BATCHES = [MARK * 500 + b"%06d" % number for number in range(600)]


@pytest.fixture(scope="module")
def ports() -> range:
    return free_ports()


@pytest.fixture(scope="module")
def daemon(folder: Path, ports: range) -> Iterator[Daemon]:
    with running(*options(ports), "--keys", str(folder)) as started:
        assert started.line, started.errors
        yield started


class Labelled:
    """A function whose pickle has words in it that can be looked for."""

    def __init__(self) -> None:
        self.label = "a graph with a secret recipe"

    def __call__(self, batch: bytes) -> bytes:
        return batch


def load(ports: range, keys: Path | None, **more: Any) -> "DataLoader2[Any]":
    pipe = IterableWrapper(BATCHES).sharding_filter().map(Labelled())
    service = RPCReadingService(
        [f"{HOSTS[1]}:{ports[0]}"],
        keys=keys,
        pickle_by_value=(__name__,),
        connect_timeout=20.0,
        timeout=60.0,
        transport="tcp",
        **more,
    )
    return DataLoader2(pipe, reading_service=service)


def words_of(keys: CurveKeys, folder: Path) -> list[bytes]:
    """What must not be read on the wire: data, graph, names, keys as text and as bytes."""
    secrets = [keys.secret, (folder / "server.key").read_text().strip()]
    raw = [security.Pair(secret).raw for secret in secrets]
    return [MARK, b"a graph with a secret recipe", b"IterableWrapper", b"StartWorker", *map(str.encode, secrets), *raw]


def test_what_passes_is_encrypted(daemon: Daemon, ports: range, folder: Path) -> None:
    with relay(ports) as between:
        with load(ports, folder) as loader:
            assert list(loader) == BATCHES
            session = loader.reading_service._client._options
        found = [word for word in words_of(CurveKeys.load(folder), folder) if word in between.captured]
        assert len(between.captured) > sum(map(len, BATCHES))  # it has passed here
        assert not found
        assert session.secret not in between.captured
        assert session.session.encode() not in between.captured


def test_without_keys_it_would_be_read(ports: range, daemon: Daemon) -> None:
    """The test before this one looks at the right place, for the right words."""
    elsewhere = range(ports[0] + 3, ports[0] + 6)
    with running(*options(elsewhere)) as started, relay(elsewhere) as between:
        assert started.line, started.errors
        with load(elsewhere, None) as loader:
            assert list(loader) == BATCHES
        assert MARK in between.captured
        assert b"a graph with a secret recipe" in between.captured


@pytest.mark.parametrize("seed", range(2))
def test_flipped_bits_give_no_wrong_batch(daemon: Daemon, ports: range, folder: Path, seed: int) -> None:
    """The session recovers, or says that it cannot."""
    rng = random.Random(seed)
    got: list[bytes] = []
    with relay(ports, seed) as between, load(ports, folder, worker_prefetch_cnt=2) as loader:
        with contextlib.suppress(RPCReadingError):
            for number, batch in enumerate(loader):
                got.append(batch)
                if number % 150 == 10:
                    between.flips += rng.randrange(1, 3)
            assert len(got) == len(BATCHES)
        assert between.flipped > 0
        assert got == BATCHES[: len(got)]


def say_again(said: list[tuple[int, bytearray]]) -> None:
    """Send recorded bytes to the same ports; whoever is there has to end each connection by himself."""
    for port, recorded in said:
        with contextlib.suppress(ConnectionError), socket.create_connection((HOSTS[0], port), 20.0) as connection:
            connection.sendall(recorded)
            while connection.recv(1 << 16):
                pass


def test_a_recorded_session_that_is_sent_again_changes_nothing(daemon: Daemon, ports: range, folder: Path) -> None:
    with relay(ports) as between, load(ports, folder) as loader:
        assert list(loader) == BATCHES
        said = list(between.said)
    assert {port for port, recorded in said if recorded} == set(ports)  # control channel and both data channels
    with relay(ports), load(ports, folder) as loader:
        iterator = iter(loader)
        batches = [next(iterator)]
        say_again(said)  # to another session at the same ports
        assert [*batches, *iterator] == BATCHES
    until(lambda: not workers_of(daemon.process.pid))
    say_again([(port, recorded) for port, recorded in said if port == ports[0]])
    assert not workers_of(daemon.process.pid)
    assert "Traceback" not in daemon.errors
