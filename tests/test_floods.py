"""Which connections are shut down for what they bring, and which are not."""

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest

from rpc_reading_service.floods import HARMLESS_BYTES, Floods, received

MOST = 300_000
MUCH = 200_000
PEER = "192.0.2.1"


class Connected:
    """Both ends of a TCP connection, of which ours is watched."""

    def __init__(self, floods: Floods, server: socket.socket) -> None:
        self.theirs = socket.create_connection(server.getsockname())
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
    assert floods.cut(trusted=()) == []
    assert pair[0].is_open


def test_beyond_it_those_are_shut_down_who_bring_much(floods: Floods, pair: tuple[Connected, Connected]) -> None:
    loud, quiet = pair
    loud.bring(2 * MUCH)
    quiet.bring(HARMLESS_BYTES // 2)
    assert floods.cut(trusted=()) == [PEER]
    assert (loud.is_open, quiet.is_open) == (False, True)
    assert floods.is_cut(loud.descriptor)
    assert floods.strangers(trusted=()) == [quiet.descriptor]


def test_all_together_count(floods: Floods, pair: tuple[Connected, Connected]) -> None:
    for each in pair:
        each.bring(MUCH)
    assert floods.cut(trusted=()) == [PEER, PEER]


def test_what_has_been_read_and_who_is_trusted_do_not_count(floods: Floods, pair: tuple[Connected, Connected]) -> None:
    reader, trusted = pair
    for each in pair:
        each.bring(2 * MUCH)
    floods.read(reader.descriptor, 2 * MUCH)
    assert floods.cut(trusted={trusted.descriptor}) == []
    assert reader.is_open
    assert trusted.is_open


def test_what_is_left_behind_counts_until_it_is_read(floods: Floods, pair: tuple[Connected, Connected]) -> None:
    first, second = pair
    first.bring(2 * MUCH)
    assert floods.cut(trusted=()) == [PEER]
    second.bring(MUCH)  # not too much by itself
    floods.dropped(first.descriptor)
    assert floods.cut(trusted=()) == [PEER]
    floods.everything_is_read()
    floods.accepted(first.descriptor, PEER)
    assert not floods.is_cut(first.descriptor)
    assert floods.cut(trusted=()) == [PEER]  # the same connection, as if it had just come


def test_what_is_no_connection_brings_nothing_and_is_not_shut_down(floods: Floods) -> None:
    near, far = os.pipe()
    floods.accepted(near, PEER)
    assert received(near) == 0
    os.close(near)
    os.close(far)
    assert received(near) == 0
    assert floods.cut(trusted=()) == []
