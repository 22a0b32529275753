"""Transport without a network: the channel between a daemon and a worker process."""

from collections.abc import Iterator
from multiprocessing import Pipe

import pytest

from rpc_reading_service.transport import Channel

LARGE = bytes(range(256)) * 4096  # more than a socket pair holds


class Ends:
    """A channel's two ends."""

    def __init__(self) -> None:
        self.daemon, self.worker = map(Channel, Pipe())

    def close(self) -> None:
        self.daemon.close()
        self.worker.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


def read(channel: Channel, count: int) -> list[list[bytes]]:
    """That many messages, as they come."""
    found: list[list[bytes]] = []
    while len(found) < count:
        found += channel.receive_all()
    return found


def test_messages_arrive_whole_and_in_order(ends: Ends) -> None:
    sent = [[b"first"], [b"second", b"payload"], [b"", b"payload"]]
    assert all(ends.daemon.send(frames) for frames in sent)
    assert list(ends.worker.receive_all()) == sent
    assert list(ends.worker.receive_all()) == []


def test_what_does_not_fit_waits_for_a_flush(ends: Ends) -> None:
    assert ends.daemon.send([b"large", LARGE])
    assert ends.daemon.send([b"small"])
    assert 0 < ends.daemon.unsent < 2 * len(LARGE)
    found: list[list[bytes]] = []
    while len(found) < 2:
        found += ends.worker.receive_all()
        assert ends.daemon.flush()
    assert found == [[b"large", LARGE], [b"small"]]
    assert ends.daemon.unsent == 0


def test_a_message_that_has_come_in_part_waits_for_the_rest(ends: Ends) -> None:
    ends.worker.send([b"large", LARGE])
    assert ends.worker.unsent
    assert list(ends.daemon.receive_all()) == []
    ends.worker.flush()
    while ends.worker.unsent:
        assert list(ends.daemon.receive_all()) == []
        ends.worker.flush()
    assert read(ends.daemon, 1) == [[b"large", LARGE]]


def test_what_came_before_the_end_is_handed_out_first(ends: Ends) -> None:
    ends.worker.send([b"last words"])
    ends.worker.close()
    received = ends.daemon.receive_all()
    assert next(received) == [b"last words"]
    with pytest.raises(EOFError, match="the other end is gone"):
        next(received)
    assert not ends.daemon.send([b"anybody?"])


def test_whoever_sends_the_whole_of_it_is_told_of_no_end(ends: Ends) -> None:
    ends.daemon.close()
    ends.worker.send_whole([b"last words", LARGE])
