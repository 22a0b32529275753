"""``dns://name:port``: every address that a name has, at the start and at each epoch."""

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from daemons import running, until
from torchdata.dataloader2 import DataLoader2
from torchdata.datapipes.iter import IterableWrapper

from rpc_reading_service import AddressError, RPCReadingService, SlotsError, resolver
from rpc_reading_service.resolver import Resolver
from rpc_reading_service.transport import Deadline

NAME = "workers.invalid"

Answer = list[str] | Exception
Dns = Callable[..., None]


@pytest.fixture
def dns(monkeypatch: pytest.MonkeyPatch) -> Dns:
    """Sets what the system answers for ``NAME``: these one after the other, the last one for ever."""
    ask, answers = socket.getaddrinfo, list[Answer]([socket.gaierror("Name or service not known")])

    def answer(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        if host != NAME:
            return ask(host, port, *args, **kwargs)
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(found, Exception):
            raise found
        return [entry for address in found for entry in ask(address, port, *args, **kwargs)]

    def set_answers(*new: Answer) -> None:
        answers[:] = new

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    return set_answers


def first(seconds: float = 5.0) -> list[str]:
    return Resolver([f"dns://{NAME}:5000"], lambda: None).first(Deadline(seconds))


def test_a_name_stands_for_all_its_addresses_in_one_order(dns: Dns) -> None:
    dns(["10.0.0.2", "fd00::2", "10.0.0.1", "10.0.0.2"])
    assert first() == ["10.0.0.1:5000", "10.0.0.2:5000", "[fd00::2]:5000"]


def test_a_name_that_comes_late_is_waited_for(dns: Dns, caplog: pytest.LogCaptureFixture) -> None:
    dns(socket.gaierror("Name or service not known"), ["10.0.0.1"])
    assert first() == ["10.0.0.1:5000"]
    (line,) = caplog.messages
    assert "the host name 'workers.invalid' does not resolve (Name or service not known); it is asked again" in line


def test_a_name_service_that_does_not_answer_is_waited_for_until_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_kwargs: answered.wait() and [])
    with pytest.raises(AddressError, match=r"^dns://workers\.invalid:5000: no answer from this machine's DNS within"):
        first(0.2)
    answered.set()


def test_a_question_is_answered_once_and_a_failure_changes_nothing(dns: Dns, caplog: pytest.LogCaptureFixture) -> None:
    answered = threading.Event()
    names = Resolver([f"dns://{NAME}:5000"], answered.set)
    assert names.take() is None
    for answer, found in (["10.0.0.1"], ["10.0.0.1:5000"]), (socket.gaierror("gone"), None):
        dns(answer)
        answered.clear()
        names.ask()
        assert answered.wait(5)
        assert names.take() == found
        assert names.take() is None
    assert "does not resolve (gone); the addresses that it had are kept" in caplog.text


def test_a_question_that_is_open_is_not_asked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    let_go, asked = threading.Semaphore(0), list[str]()
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_args, **_kwargs: asked.append(host) or let_go.acquire())
    monkeypatch.setattr(resolver.transport, "resolve", lambda address: [str(socket.getaddrinfo(address, 1))])
    answered = threading.Event()
    names = Resolver([f"dns://{NAME}:5000"], answered.set)
    names.ask()
    names.ask()
    assert names.take() is None
    let_go.release()
    assert answered.wait(5)
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("dns://workers", "worker address 'workers' has no port"),
        ("dns://:5555", "has no valid host name"),
        ("dns://workers:0", "the port must be a number from 1 to 65535"),
        ("dns://a:1,dns://a:1", "workers names dns://a:1 more than once"),
        ("udp://workers:5555", "write an IPv6 address in brackets"),
    ],
)
def test_a_malformed_name_is_refused_at_once(address: str, text: str) -> None:
    with pytest.raises(AddressError, match=text):
        RPCReadingService(address)


# With daemons.


def load(workers: str | list[str] | None, **options: Any) -> "DataLoader2[Any]":
    pipe = IterableWrapper(range(20)).sharding_filter()
    return DataLoader2(pipe, reading_service=RPCReadingService(workers, timeout=60, **options))


def at(host: str, port: int) -> "contextlib.AbstractContextManager[Any]":
    return running("--host", host, "--port", str(port), "--slots", "1")


def test_a_name_that_does_not_resolve_is_one_sentence_within_connect_timeout(dns: Dns) -> None:
    deadline = Deadline(5)
    with (
        load(f"dns://{NAME}:5000", connect_timeout=0.5) as loader,
        pytest.raises(AddressError, match=r"the host name 'workers\.invalid' does not resolve \(Name or service"),
    ):
        iter(loader)
    assert not deadline.expired


def test_daemons_come_and_go_with_the_addresses_of_their_name(
    dns: Dns, free_port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "rpc_reading_service")
    monkeypatch.setenv("RPC_READING_WORKERS", f"dns://{NAME}:{free_port}")
    with at("127.0.0.2", free_port) as old, at("127.0.0.3", free_port) as new:
        assert old.line
        assert new.line
        dns(["127.0.0.2"], ["127.0.0.3"])
        with load(None, num_workers=1) as loader:
            assert list(loader) == list(range(20))  # by the first, which its name has no more
            until(lambda: f"= 127.0.0.3:{free_port}: it answered" in caplog.text)
            assert list(loader) == list(range(20))
            assert f"on 127.0.0.3:{free_port}" not in caplog.text
            old.process.kill()
            assert list(loader) == list(range(20))
            assert f"= worker 0 on 127.0.0.3:{free_port} is starting" in caplog.text
            assert list(loader) == list(range(20))
            until(lambda: list(loader.reading_service._client._session.links) == [f"127.0.0.3:{free_port}"])
    assert "Traceback" not in caplog.text


def test_a_name_may_stand_in_a_list_and_have_two_addresses_of_one_daemon(dns: Dns, free_port: int) -> None:
    with running("--host", "::", "--insecure", "--port", str(free_port), "--slots", "2") as daemon:
        assert daemon.line
        dns(["127.0.0.1", "::1"])
        with load([f"127.0.0.1:{free_port}", f"dns://{NAME}:{free_port}"]) as loader:
            assert sorted(loader) == list(range(20))
        with (
            load(f"dns://{NAME}:{free_port}", num_workers=3) as loader,
            pytest.raises(SlotsError, match=rf"only 2 slots .*: 2 of 2 slots free on 127\.0\.0\.1:{free_port}\. Ask"),
        ):
            iter(loader)
