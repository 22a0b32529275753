"""Shared memory between worker and client: who may map it, when it comes back, and what happens when there is none."""

import itertools
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torchdata.dataloader2 import DataLoader2
from torchdata.datapipes.iter import IterableWrapper

from rpc_reading_service import ConnectError, RPCReadingService
from rpc_reading_service.errors import StreamError
from rpc_reading_service.launchers import LocalDaemons
from rpc_reading_service.messages import NONCE_BYTES, Offer, Place
from rpc_reading_service.segments import Attachment, Board, Lent, Segments, attach

NBYTES = 128 << 10
SHAPE = (NBYTES // 4,)


def part(mark: int, nbytes: int = NBYTES) -> memoryview:
    return memoryview(bytearray([mark]) * nbytes)


def pair(budget: int) -> tuple[Segments, Attachment]:
    segments = Segments(budget)
    attachment = attach(os.getpid(), segments.offer)
    assert attachment is not None
    return segments, attachment


def placed(segments: Segments, *parts: memoryview) -> list[Lent] | None:
    """None if they are to travel in frames, which are then copies."""
    result = segments.place(list(parts))
    lent = [each for each in result if isinstance(each, Lent)]
    assert len(lent) in (0, len(result))
    assert lent or [bytes(each) for each in result] == [bytes(part) for part in parts]
    return lent or None


def look(attachment: Attachment, lent: list[Lent] | None) -> list[memoryview]:
    assert lent is not None
    places = {number: each.place for number, each in enumerate(lent)}
    return list(attachment.look(places, [each.nbytes for each in lent]).values())


# ------------------------------------------------------------------------------- who sees the same memory


def test_nothing_is_placed_before_the_client_has_accepted() -> None:
    segments = Segments(NBYTES)
    assert placed(segments, part(1)) is None
    assert attach(os.getpid(), segments.offer) is not None
    assert placed(segments, part(1)) is not None


def test_a_board_with_another_nonce_is_that_of_a_worker_that_merely_looks_alike() -> None:
    ours, other = Segments(NBYTES), Segments(NBYTES)
    assert attach(os.getpid(), Offer(ours.offer.fd, other.offer.nonce)) is None
    assert not ours._board.accepted


def test_a_process_that_is_not_there_has_no_board() -> None:
    assert attach((1 << 22) + 1, Segments(NBYTES).offer) is None


def test_a_descriptor_that_is_something_else_is_not_even_opened(tmp_path: Path) -> None:
    """To open a FIFO would wait for a writer, to open a device would do something."""
    os.mkfifo(tmp_path / "fifo")
    fd = os.open(tmp_path / "fifo", os.O_RDWR)
    try:
        assert attach(os.getpid(), Offer(fd, bytes(NONCE_BYTES))) is None
    finally:
        os.close(fd)


def test_memory_whose_size_is_not_sealed_is_refused_as_it_could_be_cut_off() -> None:
    fd = os.memfd_create("rpc-reading", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        assert attach(os.getpid(), Offer(fd, bytes(NONCE_BYTES))) is None
    finally:
        os.close(fd)


def test_memory_is_private_to_the_user_and_has_no_name() -> None:
    segments, attachment = pair(NBYTES)
    look(attachment, placed(segments, part(1)))
    (segment,) = segments._sent.values()
    status = os.fstat(segment.fd)
    assert status.st_mode & 0o777 == 0o600
    assert status.st_nlink == 0


# ------------------------------------------------------------------------------- taking and giving back


def test_buffers_of_a_batch_share_a_segment_and_start_at_multiples_of_64_bytes() -> None:
    segments, attachment = pair(1 << 20)
    lent = placed(segments, part(1, 70_001), part(2, 5_000), part(3, 64))
    first, second, third = look(attachment, lent)
    assert (set(first), set(second), set(third)) == ({1}, {2}, {3})
    assert [each.offset % 64 for each in lent or ()] == [0, 0, 0]
    assert len({each.segment for each in lent or ()}) == 1


def test_a_segment_comes_back_when_the_last_of_its_buffers_is_gone() -> None:
    segments, attachment = pair(NBYTES + 4096)
    views = look(attachment, placed(segments, part(1, 70_000), part(2, 5_000)))
    del views[0]
    assert placed(segments, part(3, 70_000)) is None
    del views[0]
    assert placed(segments, part(3, 70_000)) is not None


def test_what_the_user_keeps_exhausts_the_budget_and_what_he_drops_restores_it() -> None:
    segments, attachment = pair(3 * NBYTES)
    kept = [look(attachment, placed(segments, part(mark))) for mark in range(3)]
    assert placed(segments, part(9)) is None
    kept.pop(1)
    kept.append(look(attachment, placed(segments, part(9))))
    assert [set(view) for (view,) in kept] == [{0}, {2}, {9}]


def test_free_segments_of_another_size_give_way() -> None:
    segments, attachment = pair(4 * NBYTES)
    for _ in range(3):
        look(attachment, placed(segments, part(1)))
    views = [look(attachment, placed(segments, part(2))) for _ in range(3)]
    views.clear()
    (large,) = look(attachment, placed(segments, part(3, 4 * NBYTES)))
    assert set(large) == {3}
    assert segments._nbytes == 4 * NBYTES


def test_a_batch_larger_than_the_budget_travels_in_frames() -> None:
    segments, _ = pair(NBYTES)
    assert placed(segments, part(1, 2 * NBYTES)) is None


def test_a_small_batch_travels_in_frames() -> None:
    segments, _ = pair(NBYTES)
    assert placed(segments, part(1, 5_000)) is None


def test_without_memory_there_is_a_smaller_budget_and_no_error() -> None:
    segments, attachment = pair(1 << 30)
    kept = look(attachment, placed(segments, part(1)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)  # holds for memory files, too
    resource.setrlimit(resource.RLIMIT_FSIZE, (NBYTES // 2, hard))
    try:
        assert placed(segments, part(2)) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    kept.clear()
    assert look(attachment, placed(segments, part(3)))


def test_what_was_not_sent_after_all_is_free_again() -> None:
    segments, _ = pair(NBYTES)
    lent = placed(segments, part(1, 70_000), part(2, 5_000))
    for each in lent or ():
        segments.take_back(each)
    again = placed(segments, part(3))
    assert again is not None
    for each in lent or ():
        segments.take_back(each)  # an old use, which changes nothing
    assert placed(segments, part(4)) is None


def test_what_is_not_wanted_goes_back_without_being_mapped() -> None:
    segments, attachment = pair(NBYTES)
    (lent,) = placed(segments, part(1)) or ()
    attachment.give_back(lent.place)
    assert placed(segments, part(2)) is not None


def test_descriptors_are_closed_when_segments_give_way_or_are_gone() -> None:
    before = psutil.Process().num_fds()
    segments, attachment = pair(2 * NBYTES)
    for size in (NBYTES, 2 * NBYTES, NBYTES, 2 * NBYTES):
        look(attachment, placed(segments, part(1, size)))
    assert psutil.Process().num_fds() <= before + 3
    segments.close()
    assert psutil.Process().num_fds() == before


@pytest.mark.parametrize(
    "place", [Place(0, 0, 0, NBYTES, 1, 1), Place(0, Board.SLOTS, 0, NBYTES, 1, 0), Place(0, 0, 999_999, NBYTES, 1, 0)]
)
def test_a_place_that_does_not_exist_breaks_the_stream_and_nothing_else(place: Place) -> None:
    _, attachment = pair(NBYTES)
    with pytest.raises(StreamError, match=r"lies outside its segment|cannot be mapped"):
        attachment.look({0: place}, [NBYTES])


# ------------------------------------------------------------------------------- forks of the training process


def forked_view(view: memoryview, proceed: socket.socket) -> int:
    """A child that looks at the view when it is told to, and ends with what it then sees."""
    pid = os.fork()
    if pid == 0:
        proceed.recv(1)
        os._exit(view[0] if len(set(view)) == 1 else 255)
    return pid


def test_what_a_fork_looks_at_is_never_written_again() -> None:
    segments, attachment = pair(2 * NBYTES)
    views = look(attachment, placed(segments, part(1)))
    here, there = socket.socketpair()
    with here, there:
        pid = forked_view(views[0], there)
        views.clear()
        for mark in range(2, 10):
            look(attachment, placed(segments, part(mark)))
        here.send(b"x")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def test_a_fork_gives_nothing_back() -> None:
    segments, attachment = pair(NBYTES)
    views = look(attachment, placed(segments, part(1)))
    pid = os.fork()
    if pid == 0:
        views.clear()
        os._exit(0)
    os.waitpid(pid, 0)
    assert placed(segments, part(2)) is None
    assert set(views[0]) == {1}


# ------------------------------------------------------------------------------- end to end


def numbered(number: int) -> torch.Tensor:
    return torch.full(SHAPE, float(number))


def loader(addresses: list[str], count: int, **options: Any) -> DataLoader2:
    pipe = IterableWrapper(range(count)).sharding_filter().map(numbered)
    service = RPCReadingService(addresses, pickle_by_value=[__name__], **options)
    return DataLoader2(pipe, reading_service=service)


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether its memory is that of a worker."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(end, 16) for end in line.split()[0].split("-"))
        if low <= tensor.data_ptr() < high:
            return "memfd:rpc-reading" in line
    return False


@pytest.fixture
def closing() -> Iterator[list[DataLoader2]]:
    loaders: list[DataLoader2] = []
    yield loaders
    for each in loaders:
        each.shutdown()


@pytest.mark.parametrize(("transport", "shared"), [("auto", True), ("shm", True), ("tcp", False)])
def test_batches_on_one_host_come_through_shared_memory(
    two_daemons: list[str], closing: list[DataLoader2], transport: str, shared: bool
) -> None:
    dl = loader(two_daemons, 8, transport=transport)
    closing.append(dl)
    batches = list(dl)
    assert [int(batch[0]) for batch in batches] == list(range(8))
    assert [is_shared(batch) for batch in batches] == [shared] * 8


def test_who_keeps_every_batch_gets_the_rest_in_frames_and_none_of_them_changes(
    two_daemons: list[str], closing: list[DataLoader2]
) -> None:
    dl = loader(two_daemons, 40, prefetch_bytes=2 * 4 * NBYTES)
    closing.append(dl)
    batches = list(dl)
    dl.shutdown()
    assert all(bool((batch == number).all()) for number, batch in enumerate(batches))
    assert {is_shared(batch) for batch in batches} == {True, False}


def test_epochs_that_are_left_lose_no_segment(two_daemons: list[str], closing: list[DataLoader2]) -> None:
    dl = loader(two_daemons, 40, prefetch_bytes=2 * 4 * NBYTES)
    closing.append(dl)
    for _ in range(20):
        for number, batch in enumerate(itertools.islice(dl, 3)):
            assert is_shared(batch)
            assert bool((batch == number).all())


def test_a_killed_worker_leaves_what_has_arrived_intact(closing: list[DataLoader2]) -> None:
    daemons = LocalDaemons([1])
    try:
        dl = loader(daemons.addresses, 12)
        closing.append(dl)
        batches = iter(dl)
        kept = [next(batches) for _ in range(3)]
        (daemon,) = daemons.processes
        workers = [p for p in psutil.Process(daemon.pid).children(recursive=True) if has_board(p.pid)]
        (worker,) = workers
        worker.send_signal(signal.SIGKILL)
        kept += list(batches)
        assert all(bool((batch == number).all()) for number, batch in enumerate(kept))
        assert len(kept) == 12
        assert all(is_shared(batch) for batch in kept)
    finally:
        for each in closing:
            each.shutdown()
        daemons.close()


def has_board(pid: int) -> bool:
    links = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        links.append(os.readlink(fd))
    return any(link.startswith("/memfd:rpc-reading ") for link in links)


UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


def can_unshare() -> bool:
    try:
        return subprocess.run([*UNSHARE, "true"], capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.fixture(scope="module")
def contained() -> Iterator[str]:
    """A daemon in a PID namespace of its own, as in another container with the same host name and the same /dev/shm."""
    if not can_unshare():
        pytest.skip("takes root, for a PID namespace")
    lifeline, theirs = socket.socketpair()
    command = [*UNSHARE, sys.executable, "-m", "rpc_reading_service", "--port", "0", "--slots", "1"]
    with lifeline:
        with theirs:
            process = subprocess.Popen([*command, "--lifeline", str(theirs.fileno())], pass_fds=[theirs.fileno()])
        yield lifeline.makefile().readline().partition(" ready on ")[2].partition(",")[0]
    process.wait(20)


def test_containers_that_look_alike_do_not_fool_it(contained: str, closing: list[DataLoader2]) -> None:
    dl = loader([contained], 6)
    closing.append(dl)
    batches = list(dl)
    assert [int(batch[0]) for batch in batches] == list(range(6))
    assert not any(is_shared(batch) for batch in batches)


def test_who_insists_on_shared_memory_is_told_that_there_is_none(contained: str) -> None:
    dl = loader([contained], 6, transport="shm")
    text = "do not see the same shared memory, on which transport='shm' insists: that takes one host, one user and"
    with pytest.raises(ConnectError, match=text):
        next(iter(dl))
    dl.shutdown()


def test_nothing_is_left_in_dev_shm_after_any_death() -> None:
    """Training process and daemon killed in mid-epoch, at once."""
    before = set(os.listdir("/dev/shm"))
    script = """
        from rpc_reading_service.launchers import LocalDaemons
        from tests.test_segments import loader
        daemons = LocalDaemons([2])
        batches = iter(loader(daemons.addresses, 1_000_000))
        next(batches)
        print(daemons.processes[0].pid, flush=True)
        for _ in batches: pass
    """
    lines = "\n".join(line.strip() for line in script.strip().splitlines())
    process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", lines], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        daemon = psutil.Process(int(process.stdout.readline()))
        family = [daemon, *daemon.children(recursive=True)]
        for each in (daemon, process):
            each.kill()
        process.wait()
        _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive
    assert set(os.listdir("/dev/shm")) == before


# ------------------------------------------------------------------------------- credit on the board


def test_credit_takes_a_message_only_when_the_worker_waits_and_then_one() -> None:
    segments, attachment = pair(NBYTES)
    assert not attachment.credit(1, 1)
    segments.board.starving = True
    assert attachment.credit(1, 2)
    assert not attachment.credit(1, 3)
    assert segments.board.consumed(1) == 3


def test_credit_of_another_epoch_means_nothing() -> None:
    segments, attachment = pair(NBYTES)
    attachment.credit(7, 5)
    assert [segments.board.consumed(epoch) for epoch in (6, 7, 8)] == [0, 5, 0]


def test_a_worker_that_waits_is_told_once_there_is_room_however_the_two_meet(
    two_daemons: list[str], closing: list[DataLoader2]
) -> None:
    """With one batch in flight each, worker and client wait for each other at every batch."""
    dl = loader(two_daemons, 300, worker_prefetch_cnt=1, timeout=20.0)
    closing.append(dl)
    assert [int(batch[0]) for batch in dl] == list(range(300))
