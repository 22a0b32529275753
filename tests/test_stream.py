"""What a Packer packs, a StreamReader reads; and what is no stream is an error that names the worker, no exception."""

import errno
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from rpc_reading_service import protocol
from rpc_reading_service.errors import StreamError
from rpc_reading_service.merge import Entry
from rpc_reading_service.messages import (
    CHUNK_BYTES,
    Batches,
    Chunk,
    Credit,
    Data,
    EndOfShard,
    FromWorkerData,
    Large,
    Opened,
    ShardError,
    decode,
    encode,
)
from rpc_reading_service.stream import BATCHES_PER_MESSAGE, Arrival, Packer, Parcel, StreamReader
from rpc_reading_service.transport import Copied

SESSION = "0" * 32
WORKER, ATTEMPT, EPOCH = 3, 1, 7


# ---------------------------------------------------------------------------------------------------- helpers


class Scripted:
    """A Receiver that plays messages from memory, as strict as a ZeroMQ socket."""

    def __init__(self, messages: Iterable[Sequence[Any]]) -> None:
        self._messages = deque([bytes(frame) for frame in message] for message in messages)
        self._frames: deque[bytes] = deque()

    def receive(self) -> bytes | None:
        assert not self._frames, "frames of the message before are left over"
        if not self._messages:
            return None
        self._frames.extend(self._messages.popleft())
        return self._frames.popleft()

    @property
    def more(self) -> bool:
        return bool(self._frames)

    def receive_frame(self) -> bytes:
        assert self._frames, "a socket would wait for ever"
        return self._frames.popleft()

    def receive_into(self, place: Any) -> int:
        """As recv_into: what does not fit is cut off, and the frame's own size is returned."""
        frame, view = self.receive_frame(), memoryview(place).cast("B")
        count = min(len(frame), view.nbytes)
        view[:count] = frame[:count]
        return len(frame)

    def skip(self) -> None:
        self._frames.clear()


def wanted(header: Any) -> bool:
    return True


def arrivals(*messages: Sequence[Any]) -> list[Arrival]:
    return list(StreamReader(Scripted(messages), wanted).read(10_000))


def the_error(*messages: Sequence[Any]) -> str:
    """The text of the last message's error, with which nothing else may come."""
    last = arrivals(*messages)[-1]
    assert isinstance(last.error, StreamError)
    assert not last.entries
    return str(last.error)


def batch(seq: int, header: bytes, *buffers: bytes, epoch: int = EPOCH, kind: Any = memoryview) -> Parcel:
    return Parcel(epoch, seq, Batches, header, [kind(buffer) for buffer in buffers])


def test_a_frame_that_finds_no_room_says_how_much_was_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise zmq.ZMQError(errno.ENOMEM)

    monkeypatch.setattr(zmq, "Frame", full)
    with pytest.raises(MemoryError, match=r"^there is no room to send 2,000 bytes$"):
        Copied(memoryview(bytes(2000)))


def copied(data: bytes) -> Copied:
    return Copied(memoryview(data))


def packed(*parcels: Parcel, worker: int = WORKER) -> list[list[Any]]:
    return [message.frames for message in Packer(SESSION, worker, ATTEMPT).pack(parcels)]


def content(entry: Entry) -> tuple[bytes, list[bytes]]:
    return bytes(entry.header), [bytes(buffer) for buffer in entry.buffers]


def headers(messages: Iterable[Sequence[Any]]) -> list[Any]:
    return [decode(message[0], FromWorkerData) for message in messages]


def batches(*sizes: list[int], seq: int = 0) -> bytes:
    return encode(Batches(SESSION, WORKER, ATTEMPT, EPOCH, seq, list(sizes), {}))


def large(*sizes: int, worker: int = WORKER, attempt: int = ATTEMPT, epoch: int = EPOCH, seq: int = 0) -> list[bytes]:
    return [encode(Large(SESSION, worker, attempt, epoch, seq, list(sizes)))]


def chunk(
    part: int, offset: int, *body: bytes, attempt: int = ATTEMPT, epoch: int = EPOCH, seq: int = 0
) -> list[bytes]:
    return [encode(Chunk(SESSION, WORKER, attempt, epoch, seq, part, offset)), *body]


def test_a_large_batch_that_was_broken_off_is_forgotten_with_the_next_message() -> None:
    reader = StreamReader(Scripted([*packed(batch(0, b"x" * (CHUNK_BYTES + 1)))[:2], *packed(batch(0, b"x"))]), wanted)
    assert len(list(reader.read(10))) == 3
    assert reader._assemblies == {}


# ---------------------------------------------------------------------------------------------------- there and back

sizes = st.one_of(
    st.integers(0, 300),
    st.integers(0, 300),
    st.integers(0, CHUNK_BYTES),
    st.sampled_from([CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES, 2 * CHUNK_BYTES + 7]),
)


@given(st.lists(st.tuples(sizes, st.lists(sizes, max_size=3)), max_size=6), st.sampled_from([memoryview, copied]))
@settings(max_examples=80, deadline=None)
def test_whatever_is_packed_comes_out_equal(shapes: list[tuple[int, list[int]]], kind: Any) -> None:
    contents = [
        (bytes([65 + seq]) * size, [bytes([97 + seq + part]) * n for part, n in enumerate(more)])
        for seq, (size, more) in enumerate(shapes)
    ]
    parcels = [batch(seq, header, *more, kind=kind) for seq, (header, more) in enumerate(contents)]
    messages = packed(*parcels)
    assert all(len(frame) <= CHUNK_BYTES for message in messages for frame in message[1:])
    arrived = arrivals(*messages)
    assert [arrival.error for arrival in arrived] == [None] * len(messages)
    entries = [entry for arrival in arrived for entry in arrival.entries]
    assert [content(entry) for entry in entries] == contents
    assert [entry.nbytes for entry in entries] == [protocol.weight(parcel.sizes) for parcel in parcels]


def test_each_message_says_which_batch_is_its_first() -> None:
    parcels = [batch(seq, b"x" * size) for seq, size in enumerate([10, 10, CHUNK_BYTES + 1, 10])]
    positions = [(type(header), header.seq) for header in headers(packed(*parcels))]
    assert positions == [(Batches, 0), (Large, 2), (Chunk, 2), (Chunk, 2), (Batches, 3)]


def test_every_header_names_the_stream() -> None:
    parcels = [batch(0, b"x"), batch(1, b"x" * (CHUNK_BYTES + 1)), Parcel(EPOCH, 2, EndOfShard)]
    streams = {(h.session, h.worker, h.attempt, h.epoch) for h in headers(packed(*parcels))}
    assert streams == {(SESSION, WORKER, ATTEMPT, EPOCH)}


def test_small_batches_travel_together_up_to_a_chunk() -> None:
    half = CHUNK_BYTES // 2
    parcels = [batch(seq, b"x" * 10, b"y" * (half - 10)) for seq in range(3)]
    assert [len(header.sizes) for header in headers(packed(*parcels))] == [2, 1]


def test_no_message_has_more_batches_than_the_limit() -> None:
    parcels = [batch(seq, b"x") for seq in range(BATCHES_PER_MESSAGE + 1)]
    assert [len(header.sizes) for header in headers(packed(*parcels))] == [BATCHES_PER_MESSAGE, 1]


def test_the_end_of_a_shard_stays_behind_its_batches() -> None:
    messages = packed(batch(0, b"a"), batch(1, b"b"), Parcel(EPOCH, 2, EndOfShard))
    last = arrivals(*messages)[-1]
    assert last == Arrival(EndOfShard(SESSION, WORKER, ATTEMPT, EPOCH, 2))


def test_an_exception_stays_behind_its_batches_and_keeps_its_body() -> None:
    messages = packed(batch(0, b"a"), Parcel(EPOCH, 1, ShardError, b"the exception"))
    first, last = arrivals(*messages)
    assert [content(entry) for entry in first.entries] == [(b"a", [])]
    assert last == Arrival(ShardError(SESSION, WORKER, ATTEMPT, EPOCH, 1), body=b"the exception")


def test_the_first_message_opens_the_channel_and_has_no_body() -> None:
    message = Packer(SESSION, WORKER, ATTEMPT).opened().frames
    assert arrivals(message) == [Arrival(Opened(SESSION, WORKER, ATTEMPT, 0, 0))]


def test_nothing_packed_is_nothing_sent() -> None:
    assert packed() == []


def test_the_batches_of_many_workers_come_apart() -> None:
    one = packed(batch(0, b"a" * (CHUNK_BYTES + 1)), worker=1)
    two = packed(batch(0, b"b" * (CHUNK_BYTES + 2)), worker=2)
    mixed = [message for pair in zip(one, two, strict=True) for message in pair]
    entries = {a.header.worker: bytes(e.header) for a in arrivals(*mixed) if a.header for e in a.entries}
    assert entries == {1: b"a" * (CHUNK_BYTES + 1), 2: b"b" * (CHUNK_BYTES + 2)}


def test_received_buffers_are_writable_and_nobody_elses() -> None:
    (arrival,) = arrivals(*packed(batch(0, b"h", b"abc"), batch(1, b"h", b"abc")))
    first, second = (entry.buffers[0] for entry in arrival.entries)
    first[0] = 0
    assert bytes(second) == b"abc"


# ---------------------------------------------------------------------------------------------------- what is wanted


def test_no_more_messages_are_read_than_asked_for() -> None:
    reader = StreamReader(Scripted(message for seq in range(3) for message in packed(batch(seq, b"x"))), wanted)
    assert len(list(reader.read(2))) == 2
    assert len(list(reader.read(2))) == 1
    assert list(reader.read(2)) == []


def test_what_is_not_wanted_is_skipped_whole() -> None:
    reader = StreamReader(
        Scripted([*packed(batch(0, b"old", b"buffer")), *packed(batch(1, b"new"))]), lambda header: header.seq == 1
    )
    (arrival,) = reader.read(10)
    assert [content(entry) for entry in arrival.entries] == [(b"new", [])]


def test_what_the_question_raises_comes_with_the_message() -> None:
    def refuse(header: Data) -> bool:
        raise StreamError("worker 3: 2 batches are missing, numbers 0 to 1")

    (arrival,) = StreamReader(Scripted(packed(batch(2, b"x"))), refuse).read(10)
    assert isinstance(arrival.header, Batches)
    assert str(arrival.error) == "worker 3: 2 batches are missing, numbers 0 to 1"
    assert not arrival.entries


def test_a_batch_whose_worker_is_gone_is_never_completed() -> None:
    opening, first, second = packed(batch(0, b"a" * (CHUNK_BYTES + 1)))
    reader = StreamReader(Scripted([opening, first, second]), wanted)
    assert len(list(reader.read(2))) == 2
    reader.forget(WORKER)
    reader.forget(WORKER)
    (arrival,) = reader.read(1)
    assert not arrival.entries
    assert arrival.error is None


@pytest.mark.parametrize("other", [{"seq": 1}, {"epoch": EPOCH - 1}, {"attempt": ATTEMPT - 1}], ids=str)
def test_a_chunk_of_another_batch_changes_nothing(other: dict[str, int]) -> None:
    body = b"a" * (CHUNK_BYTES + 1)
    arrived = arrivals(
        large(len(body)),
        chunk(0, 0, body[:CHUNK_BYTES]),
        chunk(0, CHUNK_BYTES, b"b", **other),
        chunk(0, CHUNK_BYTES, b"a"),
    )
    assert [len(arrival.entries) for arrival in arrived] == [0, 0, 0, 1]
    assert bytes(arrived[-1].entries[0].header) == body


def test_a_replay_of_a_large_batch_starts_over() -> None:
    body = b"a" * (CHUNK_BYTES + 1)
    again = packed(batch(0, body))
    arrived = arrivals(*again[:2], *again)
    assert [bytes(entry.header) for arrival in arrived for entry in arrival.entries] == [body]


# ---------------------------------------------------------------------------------------------------- malformed


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"GET / HTTP/1.1\r\n",
        encode(Credit(SESSION, 0, 0, 0, 0, False)),
        batches([1])[:-1],
        batches([1]) + b"\0",
    ],
    ids=["empty", "garbage", "http", "control message", "truncated", "too long"],
)
def test_a_header_that_cannot_be_read_is_an_error_without_a_header(frame: bytes) -> None:
    (arrival,) = arrivals([frame, b"body"])
    assert arrival.header is None
    assert not arrival.entries
    assert str(arrival.error).startswith("a data message cannot be read: ")


def test_batches_without_a_body_are_an_error() -> None:
    assert the_error([batches([1])]) == "worker 3: a message with batches has no body"


@pytest.mark.parametrize(
    "buffers", [[], [b"abcd"], [b"ab"], [b""]], ids=["missing", "longer than announced", "shorter", "empty"]
)
def test_a_buffer_of_another_size_is_an_error(buffers: list[bytes]) -> None:
    missing = "worker 3: a buffer is missing, or larger than a message may be"
    size = "worker 3: a buffer has not the size that was announced"
    assert the_error([batches([1, 3]), b"h", *buffers]) == (size if buffers else missing)


@pytest.mark.parametrize("size", [CHUNK_BYTES + 1, 1 << 62])
def test_a_buffer_larger_than_a_message_is_an_error_before_anything_is_allocated(size: int) -> None:
    text = the_error([batches([1, size]), b"h", b"abc"])
    assert text == "worker 3: a buffer is missing, or larger than a message may be"


@pytest.mark.parametrize(
    ("sizes", "body"),
    [([[5]], b"abc"), ([[2], [2]], b"abc"), ([[2], [2]], b"ab"), ([[1]], b""), ([[1]], b"abc"), ([[1 << 62]], b"abc")],
    ids=["short", "second short", "second missing", "empty", "long", "absurd"],
)
def test_batches_whose_headers_are_not_the_body_are_an_error(sizes: list[list[int]], body: bytes) -> None:
    assert the_error([batches(*sizes), body]).startswith("worker 3: ")


def test_a_batch_without_even_a_header_is_an_error() -> None:
    assert the_error([batches([]), b"abc"]).startswith("worker 3: ")


@pytest.mark.parametrize("size", [1 << 62, (1 << 63) - 1])
def test_a_large_batch_larger_than_memory_is_an_error(size: int) -> None:
    assert the_error(large(1, size)).startswith("worker 3: ")


PIECE = "worker 3: a piece of a batch is missing, or has the wrong size"


@pytest.mark.parametrize(
    "piece",
    [
        chunk(0, 0),
        chunk(0, 0, b""),
        chunk(0, 0, b"abcdef"),
        chunk(0, 1, b"a"),
        chunk(2, 0, b"a"),
        chunk(1, 0, b"a" * (CHUNK_BYTES + 10)),
        chunk((1 << 63) - 1, (1 << 63) - 1, b"a"),
    ],
    ids=["no body", "empty", "too long for its part", "gap", "no such part", "over a chunk", "absurd"],
)
def test_a_piece_that_does_not_fit_is_an_error_and_ends_its_batch(piece: list[bytes]) -> None:
    assert the_error(large(5, CHUNK_BYTES), piece) == PIECE
    after = arrivals(large(5, CHUNK_BYTES), piece, chunk(0, 0, b"abcde"), chunk(1, 0, b"a" * CHUNK_BYTES))
    assert not any(arrival.entries for arrival in after)


def test_a_piece_that_comes_twice_is_an_error() -> None:
    assert the_error(large(5, 5), chunk(0, 0, b"abcde"), chunk(0, 0, b"abcde")) == PIECE


def test_an_error_without_a_body_has_an_empty_one() -> None:
    (arrival,) = arrivals([encode(ShardError(SESSION, WORKER, ATTEMPT, EPOCH, 0))])
    assert arrival.body == b""


def test_after_a_malformed_message_the_next_is_read() -> None:
    arrived = arrivals([b"garbage", b"more", b"still more"], [batches([1, 3]), b"h", b"x"], *packed(batch(0, b"good")))
    assert [arrival.error is None for arrival in arrived] == [False, False, True]
    assert content(arrived[-1].entries[0]) == (b"good", [])


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_tampered_messages_never_give_a_wrong_number_of_bytes_nor_an_exception(data: st.DataObject) -> None:
    """Frames lost, repeated, cut or swapped: what comes out has the sizes that its header announces."""
    messages = packed(batch(0, b"ab", b"cde"), batch(1, b"f"), batch(2, b"g", b"h" * CHUNK_BYTES))
    for _ in range(data.draw(st.integers(1, 3))):
        message = data.draw(st.sampled_from([message for message in messages if message]))
        place = data.draw(st.integers(0, len(message) - 1))
        match data.draw(st.sampled_from(["lose", "repeat", "cut", "empty"])):
            case "lose" if len(message) > 1:
                del message[place]
            case "repeat":
                message.insert(place, message[place])
            case "cut":
                message[place] = bytes(message[place])[:-1]
            case "empty":
                message[place] = b""
    for arrival in arrivals(*messages):
        if arrival.error is not None:
            assert not arrival.entries
        for entry in arrival.entries:
            assert entry.nbytes == protocol.weight([len(entry.header), *(len(buffer) for buffer in entry.buffers)])
