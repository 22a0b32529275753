"""A worker's mailbox: where its two threads meet."""

import itertools
import threading
import time
from collections.abc import Iterator

import pytest

from rpc_reading_service.buffers import Logbook
from rpc_reading_service.messages import Batches, Credit, StartEpoch
from rpc_reading_service.protocol import Window
from rpc_reading_service.segments import Segments
from rpc_reading_service.stream import Parcel
from rpc_reading_service.transport import Waker
from rpc_reading_service.worker import Mailbox

SESSION = "0" * 32
LARGE = bytes(1 << 20)


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    """Of a worker with room for two batches."""
    waker, logbook = Waker(), Logbook(Logbook.create())
    logbook.open(time.monotonic())
    yield Mailbox(Window(2, 1 << 30), waker, Segments(0).board, lambda parcel: None, logbook)
    waker.close()
    logbook.close()


def begin(mailbox: Mailbox, epoch: int, skip: int = 0, consumed: int = 0) -> None:
    mailbox.command(StartEpoch(SESSION, 0, 0, epoch, skip, consumed), b"")
    assert mailbox.take(producing=False, replaying=False)


def produced(mailbox: Mailbox, epoch: int, first: int = 0) -> int:
    """How many batches there is room for."""
    for count in itertools.count():
        if not mailbox._has_room():
            return count
        mailbox.put(Parcel(epoch, first + count, Batches, LARGE))
    raise AssertionError


def test_a_window_opens_with_credit(mailbox: Mailbox) -> None:
    begin(mailbox, 1)
    assert produced(mailbox, 1) == 2
    mailbox.command(Credit(SESSION, 0, 0, 1, 1, False), None)
    assert produced(mailbox, 1, 2) == 1


def test_credit_that_overtakes_the_beginning_of_its_epoch_counts(mailbox: Mailbox) -> None:
    mailbox.command(Credit(SESSION, 0, 0, 1, 5, False), None)
    begin(mailbox, 1, skip=6, consumed=4)
    assert produced(mailbox, 1, 6) == 1, "one of six is not consumed"


def test_credit_for_another_epoch_means_nothing(mailbox: Mailbox) -> None:
    mailbox.command(Credit(SESSION, 0, 0, 1, 5, False), None)
    begin(mailbox, 2)
    assert produced(mailbox, 2) == 2


def test_whoever_waits_for_room_goes_on_when_credit_comes(mailbox: Mailbox) -> None:
    begin(mailbox, 1)
    produced(mailbox, 1)
    taken = threading.Thread(target=mailbox.take, args=(True, False))
    taken.start()
    mailbox.command(Credit(SESSION, 0, 0, 1, 1, False), None)
    taken.join(10.0)
    assert not taken.is_alive()
