"""Which connections are shut down for what they bring, and which are not."""

import contextlib
import os
import socket
import time
from collections.abc import Iterator

import pytest

from rpc_reading_service import floods as floods_module
from rpc_reading_service.floods import HANDSHAKE_BYTES, TOO_MANY, TOO_MUCH, Connection, Floods, received

MOST = 300_000
MUCH = 200_000
PEER = "192.0.2.1"


class Connected:
    """Both ends of a TCP connection, of which ours is watched."""

    def __init__(self, floods: Floods, server: socket.socket) -> None:
        self.theirs = socket.create_connection(server.getsockname())
        self.theirs.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.ours, _ = server.accept()
        self.ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * MUCH)
        self.descriptor = self.ours.fileno()
        floods.accepted(self.descriptor, PEER)

    def bring(self, nbytes: int) -> None:
        """Send, and wait until it has arrived here."""
        before = received(self.descriptor)
        self.theirs.sendall(bytes(nbytes))
        while received(self.descriptor) < before + nbytes:
            pass

    @property
    def is_open(self) -> bool:
        self.theirs.setblocking(False)
        try:
            return self.theirs.recv(1) != b""
        except BlockingIOError:
            return True
        except ConnectionError:
            return False


@pytest.fixture
def floods() -> Floods:
    return Floods(MOST)


@pytest.fixture
def pair(floods: Floods) -> Iterator[tuple[Connected, Connected]]:
    with contextlib.ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as server:
        made = Connected(floods, server), Connected(floods, server)
        for each in made:
            stack.callback(each.ours.close)
            stack.callback(each.theirs.close)
        yield made


def test_within_the_bound_nobody_is_shut_down(floods: Floods, pair: tuple[Connected, Connected]) -> None:
    pair[0].bring(MUCH)
    assert floods.cut(trusted=(), now=time.monotonic()) == []
    assert pair[0].is_open


def test_beyond_it_those_are_shut_down_who_bring_most(floods: Floods, pair: tuple[Connected, Connected]) -> None:
    loud, quiet = pair
    loud.bring(2 * MUCH)
    quiet.bring(MUCH)
    assert floods.cut(trusted=(), now=time.monotonic()) == [(PEER, TOO_MUCH)]
    assert (loud.is_open, quiet.is_open) == (False, True)
    assert floods.is_cut(loud.descriptor)
    assert floods.strangers(trusted=()) == [quiet.descriptor]


def test_of_who_is_shut_down_nothing_is_left_to_be_read(floods: Floods, pair: tuple[Connected, Connected]) -> None:
    pair[0].bring(2 * MUCH)
    assert floods.cut(trusted=(), now=time.monotonic()) == [(PEER, TOO_MUCH)]
    with pytest.raises(ConnectionResetError):
        pair[0].ours.recv(1)


def test_all_together_count(floods: Floods, pair: tuple[Connected, Connected]) -> None:
    """Many who bring little each are as bad as one who brings much."""
    for each in pair:
        each.bring(MUCH)
    assert floods.cut(trusted=(), now=time.monotonic()) == [(PEER, TOO_MUCH)]
    assert sorted(each.is_open for each in pair) == [False, True]


def test_what_has_been_read_and_who_is_trusted_do_not_count(floods: Floods, pair: tuple[Connected, Connected]) -> None:
    reader, trusted = pair
    for each in pair:
        each.bring(2 * MUCH)
    floods.read(reader.descriptor, 2 * MUCH)
    assert floods.cut(trusted={trusted.descriptor}, now=time.monotonic()) == []
    assert reader.is_open
    assert trusted.is_open


def test_a_descriptor_that_is_used_again_is_another_connection(
    floods: Floods, pair: tuple[Connected, Connected]
) -> None:
    first = pair[0]
    first.bring(2 * MUCH)
    floods.cut(trusted=(), now=time.monotonic())
    floods.dropped(first.descriptor)
    assert floods.is_cut(first.descriptor)  # what it has left behind may still be read
    floods.accepted(first.descriptor, PEER)
    assert not floods.is_cut(first.descriptor)
    assert first.descriptor in floods.strangers(trusted=())


def test_of_too_many_the_oldest_leave(
    floods: Floods, pair: tuple[Connected, Connected], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(floods_module, "MOST_STRANGERS", 1)
    assert floods.cut(trusted={pair[1].descriptor}, now=time.monotonic()) == []
    floods.accepted(pair[0].descriptor, PEER)  # as if it had just come
    assert floods.cut(trusted=(), now=time.monotonic()) == [(PEER, TOO_MANY)]
    assert (pair[0].is_open, pair[1].is_open) == (True, False)


HEARTBEAT_S, HEARTBEAT_BYTES = 4.0, 16
DAY_S = 86_400


def test_heartbeats_do_not_count_however_many_there_are() -> None:
    connection = Connection(PEER, checked=0.0)
    brought = HANDSHAKE_BYTES // 2
    for beat in range(1, 1000):
        brought += HEARTBEAT_BYTES
        assert connection.unread(brought, now=beat * HEARTBEAT_S) == 0


def test_nor_do_those_of_a_connection_that_was_trusted_before(
    floods: Floods, pair: tuple[Connected, Connected]
) -> None:
    now = time.monotonic()
    for minute in range(400):
        pair[0].bring(900)
        assert floods.cut(trusted={pair[0].descriptor}, now=now + 60 * minute) == []
    assert floods.cut(trusted=(), now=now + 60 * 400) == []
    assert pair[0].is_open


def test_who_is_silent_saves_nothing_up_for_later() -> None:
    connection = Connection(PEER, checked=0.0)
    assert connection.unread(HANDSHAKE_BYTES, now=0.0) == 0
    assert connection.unread(HANDSHAKE_BYTES + MUCH, now=DAY_S) == MUCH - HANDSHAKE_BYTES
    connection = Connection(PEER, checked=0.0)
    connection.read = 5 * MUCH  # of another one that had the descriptor before
    assert connection.unread(0, now=DAY_S) == 0
    assert connection.unread(MUCH, now=DAY_S) == MUCH - HANDSHAKE_BYTES


def test_a_message_that_is_read_soon_takes_nothing_from_the_heartbeats() -> None:
    connection, brought = Connection(PEER, checked=0.0), 0
    for number in range(1, 1000):
        brought += HANDSHAKE_BYTES
        connection.unread(brought, now=number * 0.1)
        connection.read += HANDSHAKE_BYTES
        assert connection.unread(brought, now=number * 0.1) == 0
    assert connection.unread(brought + HANDSHAKE_BYTES, now=200.0) == 0


def test_what_is_no_connection_brings_nothing_and_is_not_shut_down(floods: Floods) -> None:
    near, far = os.pipe()
    floods.accepted(near, PEER)
    assert received(near) == 0
    os.close(near)
    os.close(far)
    assert received(near) == 0
    assert floods.cut(trusted=(), now=time.monotonic()) == []
