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

from rpc_reading_service import AddressError, RPCReadingService, SlotsError
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


class Names:
    """A resolver, and the event that tells of its answers."""

    def __init__(self, *names: str) -> None:
        self.answered = threading.Event()
        self.resolver = Resolver([f"dns://{name}:5000" for name in names], self.answered.set)

    def ask(self) -> Any:
        """The next answer."""
        self.answered.clear()
        self.resolver.ask()
        assert self.answered.wait(5)
        return self.resolver.take()


def test_a_name_stands_for_all_its_addresses_in_one_order(dns: Dns) -> None:
    dns(["10.0.0.2", "fd00::2", "10.0.0.1", "10.0.0.2"])
    assert Names(NAME).ask() == (["10.0.0.1:5000", "10.0.0.2:5000", "[fd00::2]:5000"], {})


def test_a_name_that_comes_late_is_told_once(dns: Dns, caplog: pytest.LogCaptureFixture) -> None:
    names, unknown = Names(NAME), socket.gaierror("Name or service not known")
    dns(unknown, unknown, ["10.0.0.1"])
    text = f"the host name '{NAME}' does not resolve (Name or service not known)"
    for _ in range(2):
        addresses, unresolved = names.ask()
        assert addresses == []
        assert unresolved == {f"dns://{NAME}:5000": f"worker address '{NAME}:5000': {text}"}
    assert names.ask() == (["10.0.0.1:5000"], {})
    (line,) = caplog.messages
    assert line.endswith(f"{text}; it is asked again")


def test_a_name_that_is_not_answered_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    ask, let_go = socket.getaddrinfo, threading.Event()

    def answer(host: Any, *args: Any, **kwargs: Any) -> Any:
        assert host != NAME or let_go.wait(5)
        return ask("10.0.0.1" if host == NAME else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    names = Names(NAME, "10.0.0.2")
    assert names.ask() == (["10.0.0.2:5000"], {f"dns://{NAME}:5000": ""})
    names.answered.clear()
    let_go.set()
    assert names.answered.wait(5)
    assert names.resolver.take() == (["10.0.0.1:5000", "10.0.0.2:5000"], {})


def test_a_question_is_answered_once_and_a_failure_changes_nothing(dns: Dns, caplog: pytest.LogCaptureFixture) -> None:
    names = Names(NAME)
    assert names.resolver.take() is None
    for answer in (["10.0.0.1"], socket.gaierror("gone")):
        dns(answer)
        assert names.ask() == (["10.0.0.1:5000"], {})
        assert names.resolver.take() is None
    assert "does not resolve (gone); the addresses that it had are kept" in caplog.text


def test_a_question_that_is_open_is_not_asked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    let_go, asked = threading.Semaphore(0), list[str]()
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *_args, **_kwargs: asked.append(host) or (let_go.acquire() and [])
    )
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


def test_a_name_service_that_does_not_answer_is_waited_for_until_connect_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_kwargs: answered.wait() and [])
    text = r"^dns://workers\.invalid:5000: no answer from this machine's DNS within 0\.2 s"
    with load(f"dns://{NAME}:5000", connect_timeout=0.2) as loader, pytest.raises(AddressError, match=text):
        iter(loader)
    answered.set()


def test_a_name_that_does_not_resolve_leaves_the_others_usable(
    two_daemons: list[str], dns: Dns, caplog: pytest.LogCaptureFixture
) -> None:
    workers = [f"dns://{two_daemons[0]}", f"dns://{NAME}:5000"]
    with load(workers, num_workers=1) as loader:
        assert list(loader) == list(range(20))
    assert f"starting without dns://{NAME}:5000, which has no address" in caplog.text
    text = rf"^the host name '{NAME}' does not resolve".replace("^", r"^worker address '.*': ")
    with load(workers, num_workers=2, connect_timeout=2.0) as loader, pytest.raises(AddressError, match=text):
        iter(loader)


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
