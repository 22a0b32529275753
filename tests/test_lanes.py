"""Lanes: what a worker packs is what a client reads, whatever the connection, or whoever else connects, does to it."""

import errno
import math
import os
import select
import signal
import socket
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rpc_reading_service import buffers, messages, segments, transport
from rpc_reading_service import lanes as lanes_module
from rpc_reading_service.buffers import Borrowed
from rpc_reading_service.errors import AddressError, StreamError
from rpc_reading_service.lanes import LanePacker, Lanes, Listener
from rpc_reading_service.messages import (
    Batches,
    Chunk,
    Credit,
    Data,
    EndOfShard,
    Large,
    Opened,
    Place,
    ShardError,
)
from rpc_reading_service.stream import Arrival, Parcel
from rpc_reading_service.transport import DATA_BYTES

SESSION = "0123456789abcdef" * 2
HELLO = lanes_module.hello(SESSION)
PREFIX = struct.Struct("<IQ")
LONG_S = 20.0
"""Longer than any wait here that ends as it should."""

MB = 1 << 20


class Client:
    """The client's end, which keeps what arrives."""

    def __init__(self, *ports: int, host: str = "127.0.0.1", accepts: Callable[[Any], bool] = lambda header: True):
        self.lanes = Lanes(SESSION, accepts)
        self.arrived: list[Arrival] = []
        for worker, port in enumerate(ports):
            self.lanes.connect(worker, 0, f"tcp://{transport.join_address(host, port)}")

    def turn(self, now: float | None = None) -> None:
        if now is not None:
            self.lanes.tend(now)
        self.arrived += self.lanes.read(256)

    @property
    def raw(self) -> int:
        return self.lanes.raw

    @property
    def whole(self) -> list[Arrival]:
        """Without those that only tell that something is on its way."""
        return [each for each in self.arrived if each.entries or each.error or not isinstance(each.header, Batches)]

    @property
    def seqs(self) -> list[int]:
        return [each.header.seq for each in self.arrived if each.header is not None and each.entries]

    def is_open(self, worker: int = 0) -> bool:
        return self.lanes._lanes[worker, 0].is_open

    @property
    def is_quiet(self) -> bool:
        """Whether nobody would be woken, nor looks by himself."""
        return self.lanes.drained and not is_readable(self.raw, 0.0)

    def close(self) -> None:
        self.lanes.close()


class Worker(Listener):
    """The worker's end, which keeps what it hears."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__(SESSION, host, [port])
        self.heard: list[bytes] = []

    def turn(self) -> None:
        self.heard += self.receive_all()


def is_readable(raw: Any, seconds: float) -> bool:
    poller = select.poll()
    poller.register(raw, select.POLLIN)
    return bool(poller.poll(seconds * 1000))


def until(done: Callable[[], bool], *ends: Any) -> None:
    """Give both ends their turns whenever something has come for one of them."""
    deadline = transport.Deadline(LONG_S)
    poller = select.poll()
    for end in ends:
        poller.register(end.raw, select.POLLIN)
    while not done():
        assert not deadline.expired
        poller.poll(20)
        for end in ends:
            end.turn()


class Fake:
    """A worker's port, and a plain socket that plays the worker."""

    def __init__(self) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.server.settimeout(LONG_S)
        self.port = int(self.server.getsockname()[1])
        self.connection: socket.socket | None = None

    def accept(self, client: Client) -> bytes:
        """Let the client in; returns what it has shown."""
        self.hang_up()
        self.connection, _ = self.server.accept()
        self.connection.settimeout(LONG_S)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        until(lambda: is_readable(self.connection, 0.0), client)
        return self.connection.recv(4096)

    def send(self, data: Any) -> None:
        """Not more than any system holds, as long as nobody reads."""
        assert self.connection is not None
        self.connection.sendall(data)

    def send_to(self, client: Client, data: Any) -> None:
        """However much it is: the client reads meanwhile."""
        assert self.connection is not None
        deadline, left = transport.Deadline(LONG_S), memoryview(data)
        self.connection.setblocking(False)
        while left:
            assert not deadline.expired
            left = left[sent(self.connection, left) :]
            client.turn()
        self.connection.settimeout(LONG_S)

    def hang_up(self) -> None:
        if self.connection is not None:
            self.connection.close()

    def close(self) -> None:
        self.hang_up()
        self.server.close()


@pytest.fixture
def worker() -> Iterator[Worker]:
    with closing(Worker()) as worker:
        yield worker


@pytest.fixture
def ends(worker: Worker) -> Iterator[tuple[Worker, Client]]:
    """Both, connected."""
    with closing(Client(worker.port)) as client:
        meet(worker, client)
        yield worker, client


def meet(worker: Worker, client: Client) -> None:
    until(lambda: worker._client is not None, client, worker)


@pytest.fixture
def fake() -> Iterator[Fake]:
    with closing(Fake()) as fake:
        yield fake


@pytest.fixture
def told(fake: Fake) -> Iterator[Client]:
    """A client of the fake worker, connected."""
    with closing(Client(fake.port)) as client:
        assert fake.accept(client) == HELLO
        yield client


def packed(*parcels: Parcel) -> list[list[Any]]:
    return [message.frames for message in LanePacker(SESSION, 0, 0).pack(parcels)]


def wire(*parcels: Parcel) -> bytes:
    return b"".join(bytes(lanes_module._view(frame)) for frames in packed(*parcels) for frame in frames)


def batch(seq: int, *buffers: Any, header: bytes = b"header") -> Parcel:
    return Parcel(1, seq, Batches, header, [memoryview(buffer) for buffer in buffers])


def message(header: Any, *rest: bytes, nbytes: int | None = None) -> bytes:
    frame = header if isinstance(header, bytes) else messages.encode(header)
    body = b"".join(rest)
    return PREFIX.pack(len(frame), len(body) if nbytes is None else nbytes) + frame + body


def batches(sizes: list[list[int]], places: dict[int, Place] | None = None) -> Batches:
    return Batches(SESSION, 0, 0, 1, 0, sizes, places or {})


def credit(consumed: int) -> bytes:
    return messages.encode(Credit(SESSION, 0, 0, 1, consumed, False))


# What is packed is read.


def contents(arrivals: Sequence[Arrival]) -> list[tuple[Any, ...]]:
    """Kind, number, body and batches."""
    found: list[tuple[Any, ...]] = []
    for each in arrivals:
        assert each.error is None
        assert each.header is not None
        entries = [(bytes(entry.header), *map(bytes, entry.buffers)) for entry in each.entries]
        if entries or not isinstance(each.header, Batches):
            found.append((type(each.header), each.header.seq, each.body, entries))
    return found


sizes_of_buffers = st.lists(st.one_of(st.integers(0, 300), st.integers(0, 70_000), st.just(3_000_000)), max_size=4)
kinds = st.sampled_from([Batches, Batches, Batches, EndOfShard, ShardError])
pieces_sent = st.one_of(st.integers(1, 200), st.integers(200, 100_000), st.just(1 << 30))


@st.composite
def streams(draw: Any) -> list[Parcel]:
    stream = []
    for seq in range(draw(st.integers(1, 6))):
        kind, sizes = draw(kinds), draw(sizes_of_buffers)
        header = bytes([seq]) * draw(st.integers(1, 6000))
        buffers = [memoryview(bytes([seq + n]) * size) for n, size in enumerate(sizes)] if kind is Batches else ()
        stream.append(Parcel(1, seq, kind, header, buffers))
    return stream


def unpacked(parcels: Sequence[Parcel]) -> list[tuple[Any, ...]]:
    """Each batch, mark and error by itself."""
    return [
        (Batches, b"", (each.header, *map(bytes, each.travelling)))
        if each.kind is Batches
        else (each.kind, each.header, ())
        for each in parcels
    ]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stream=streams(), pieces=st.lists(pieces_sent, min_size=1, max_size=5))
def test_what_is_packed_is_read_however_it_is_cut(stream: list[Parcel], pieces: list[int], fake: Fake) -> None:
    data, position, turn = memoryview(wire(*stream)), 0, 0
    assert fake.server.fileno() >= 0
    with closing(Client(fake.port)) as client:
        fake.accept(client)
        assert fake.connection is not None
        fake.connection.setblocking(False)
        few = len(data) < 3000
        while position < len(data):
            size = pieces[turn % len(pieces)] if few else max(pieces[turn % len(pieces)], len(data) // 300)
            turn += 1
            position += sent(fake.connection, data[position : position + size])
            client.turn()
        until(lambda: count(client) >= len(stream), client)
        found = [
            (kind, body, entry) for kind, _, body, entries in contents(client.arrived) for entry in (entries or [()])
        ]
        assert found == unpacked(stream)
        assert client.is_quiet


def sent(connection: socket.socket, data: memoryview) -> int:
    try:
        return connection.send(data)
    except BlockingIOError:
        return 0


def count(client: Client) -> int:
    return sum(max(1, len(each.entries)) for each in client.whole)


def test_one_byte_at_a_time(fake: Fake, told: Client) -> None:
    stream = [batch(0, b"x" * 40), Parcel(1, 1, ShardError, b"traceback"), Parcel(1, 2, EndOfShard)]
    for byte in wire(*stream):
        fake.send(bytes([byte]))
        told.turn()
    until(lambda: count(told) == 3, told)
    kinds = [kind for kind, *_ in contents(told.arrived)]
    assert kinds == [Batches, ShardError, EndOfShard]


def test_the_first_message_opens_the_stream(ends: tuple[Worker, Client]) -> None:
    worker, client = ends
    assert worker.send(LanePacker(SESSION, 0, 0).opened().frames)
    until(lambda: client.arrived != [], client, worker)
    assert client.arrived == [Arrival(Opened(SESSION, 0, 0, 0, 0))]


def test_small_batches_travel_together_and_a_large_one_whole() -> None:
    small = [batch(seq, b"x") for seq in range(3)]
    assert len(packed(*small)) == 1
    assert len(packed(batch(0, b"x" * 3 * MB))) == 1


def test_small_pieces_leave_as_one_and_large_ones_from_where_they_are() -> None:
    buffer = memoryview(bytearray(MB))
    body = b"h" * lanes_module.TOGETHER_BYTES
    ((first, *rest),) = packed(batch(0, buffer))
    assert rest == [buffer]
    ((first, *rest),) = packed(batch(0, buffer, header=body))
    assert len(first) < 200
    assert rest[0] is body


# An error's body that comes in parts is no error without a body.


@pytest.mark.parametrize("kind", [ShardError, EndOfShard])
def test_only_of_a_batch_it_is_told_that_it_is_on_its_way(kind: type[Data], fake: Fake, told: Client) -> None:
    data = wire(Parcel(1, 3, kind, b"t" * 100_000))
    fake.send(data[:1000])
    until(lambda: 0 < told.lanes._lanes[0, 0].wanted < 100_000, told)
    assert told.arrived == []
    fake.send(data[1000:])
    until(lambda: told.arrived != [], told)
    assert told.arrived == [Arrival(kind(SESSION, 0, 0, 1, 3), body=b"t" * 100_000)]


def test_a_slow_batch_tells_that_it_is_on_its_way_once_a_while(
    fake: Fake, told: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, clock = wire(batch(7, b"x" * 3 * MB)), [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    lane = told.lanes._lanes[0, 0]
    fake.send(data[:200])
    until_turned(told, lambda: len(told.arrived) == 1)
    for part in range(1, 4):
        clock[0] += 0.4
        before = lane.wanted
        fake.send(data[part * 20_000 : (part + 1) * 20_000] if part > 1 else data[200:40_000])
        until_turned(told, lambda before=before: lane.wanted < before)  # type: ignore[misc]
    assert [each.entries for each in told.arrived] == [(), ()]
    assert [each.header.seq for each in told.arrived if each.header] == [7, 7]


def test_what_comes_too_slowly_to_wake_anybody_is_read_now_and_then(
    fake: Fake, told: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = wire(batch(7, b"x" * 3 * MB))
    fake.send(data[:20_000])
    lane = told.lanes._lanes[0, 0]
    until_turned(told, lambda: lane.wanted == len(data) - 20_000)
    before = lane.wanted
    fake.send(data[20_000:20_100])
    deadline = transport.Deadline(LONG_S)
    while lane.wanted == before:
        assert not deadline.expired
        told.lanes.tend(math.inf)
        assert not told.lanes.drained
        told.turn()


def test_of_a_batch_of_which_nothing_more_comes_nothing_is_told(fake: Fake, told: Client) -> None:
    data = wire(batch(7, b"x" * 3 * MB))
    fake.send(data[:20_000])
    lane = told.lanes._lanes[0, 0]
    until_turned(told, lambda: lane.wanted == len(data) - 20_000)
    lane._told_at = -math.inf
    lane._has_come = False
    told.arrived.clear()
    told.turn(math.inf)
    assert told.arrived == []
    assert told.is_quiet


def until_turned(client: Client, done: Callable[[], bool]) -> None:
    """With a clock that stands still; what came may be less than would wake the client."""
    expires = time.perf_counter() + LONG_S
    while time.perf_counter() < expires:
        client.turn()
        for lane in client.lanes._open.values():
            if not done():
                lane.is_drained = False
                client.arrived += [each for each in [client.lanes._receive(lane)] if each is not None]
        if done():
            return
    raise AssertionError


def test_a_message_of_no_batches_is_no_sign_that_any_come(fake: Fake) -> None:
    """A connection that breaks again and again is tried ever less often, and keeps no wait from its ``timeout``."""
    asked = []
    with closing(Client(fake.port, accepts=lambda header: asked.append(header.seq) or header.seq < 4)) as client:
        for seq in (3, 4):
            fake.accept(client)
            patience = client.lanes._lanes[0, 0]._patience
            fake.send(nothing_before(seq))
            until(lambda seq=seq: asked[-1:] == [seq], client)  # type: ignore[misc]
            lose(fake, client)
            assert client.lanes._lanes[0, 0]._patience == 2 * patience
            client.lanes.tend(when_due(client))
        assert client.arrived == []


def test_a_message_of_no_batches_tells_of_those_that_are_missing(fake: Fake) -> None:
    def accepts(header: Any) -> bool:
        raise StreamError("worker 0: 3 batches are missing, numbers 0 to 2")

    with closing(Client(fake.port, accepts=accepts)) as client:
        fake.accept(client)
        fake.send(nothing_before(3))
        until(lambda: client.arrived != [], client)
        (arrival,) = client.arrived
        assert str(arrival.error) == "worker 0: 3 batches are missing, numbers 0 to 2"


def nothing_before(seq: int) -> bytes:
    return b"".join(LanePacker(SESSION, 0, 0).nothing_before(1, seq).frames)


# What is not wanted.


def test_what_is_not_wanted_is_skipped_whatever_its_size(fake: Fake) -> None:
    with closing(Client(fake.port, accepts=lambda header: header.seq >= 10)) as client:
        fake.accept(client)
        tracemalloc.start()
        for seq, size in enumerate((0, 10, 4000, 70_000, 20 * MB)):
            data = wire(batch(seq, bytes(size)))
            before = tracemalloc.take_snapshot()
            sender = memoryview(data)
            assert fake.connection is not None
            fake.connection.setblocking(False)
            while sender:
                sender = sender[sent(fake.connection, sender) :]
                client.turn()
            assert peak_since(before) < MB
        tracemalloc.stop()
        fake.connection.setblocking(True)
        fake.send(wire(batch(10, b"wanted")))
        until(lambda: client.arrived != [], client)
        assert contents(client.arrived) == [(Batches, 10, b"", [(b"header", b"wanted")])]


def test_what_is_not_wanted_takes_few_calls_whatever_came_before(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a large batch only little is received together with what follows; here nothing follows."""
    room, offered = lanes_module._Lane._room, []

    def noted(lane: Any) -> memoryview:
        view = room(lane)
        if lane._waste:
            offered.append(len(view))
        return view

    monkeypatch.setattr(lanes_module._Lane, "_room", noted)
    with closing(Client(fake.port, accepts=lambda header: header.seq != 1)) as client:
        fake.accept(client)
        fake.send_to(client, wire(batch(0, b"x" * MB), batch(1, b"x" * MB), batch(2)))
        until(lambda: client.seqs == [0, 2], client)
        assert set(offered) == {lanes_module.SCRATCH_BYTES}


def peak_since(before: tracemalloc.Snapshot) -> int:
    return sum(max(0, each.size_diff) for each in tracemalloc.take_snapshot().compare_to(before, "filename"))


def test_shared_memory_of_what_is_not_wanted_is_given_back(fake: Fake) -> None:
    memory = segments.Segments(8 * MB)
    attachment = segments.attach(os.getpid(), memory.offer)
    assert attachment is not None
    with closing(memory), closing(Client(fake.port, accepts=lambda header: header.seq >= 10)) as client:
        client.lanes.attach(0, 0, attachment)
        fake.accept(client)
        (lent,) = memory.place([memoryview(bytearray(MB))])
        fake.send(wire(Parcel(1, 0, Batches, b"header", [lent])) + wire(batch(10)))
        until(lambda: client.arrived != [], client)
        assert memory.board.returned(lent.segment.slot) == lent.use


@pytest.mark.parametrize("count", [999, 1000, 1001, 40_000])
def test_any_number_of_buffers_comes_as_it_was_sent(count: int, fake: Fake, told: Client) -> None:
    """More than one call of the system fills; of the most even the header is larger than what is received at once."""
    buffers = [index.to_bytes(3, "little") for index in range(count)]
    data = memoryview(wire(Parcel(1, 0, Batches, b"many", list(map(memoryview, buffers)))) + wire(batch(1, b"next")))
    step = max(1, len(data) // 7)
    for start in range(0, len(data), step):
        fake.send(data[start : start + step])
        told.turn()
    until(lambda: told.seqs == [0, 1], told)
    first, second = [entry for arrival in told.whole for entry in arrival.entries]
    assert [bytes(each) for each in first.buffers] == buffers
    assert [bytes(each) for each in second.buffers] == [b"next"]
    assert told.is_quiet


def test_skipping_leaves_the_other_connections_their_turn(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast small messages come that nobody wants."""
    monkeypatch.setattr(lanes_module, "SCRATCH_BYTES", lanes_module.LITTLE_BYTES)
    monkeypatch.setattr(lanes_module, "READ_BYTES", 10_000)
    with closing(Client(fake.port, accepts=lambda header: header.seq > 0)) as client:
        fake.accept(client)
        data = wire(batch(0, b"x" * 100)) * 200 + wire(batch(1))
        fake.send(data)
        until(lambda: waiting(client) == len(data))
        client.turn()
        assert waiting(client) >= len(data) - 10_000 - lanes_module.SCRATCH_BYTES
        assert is_readable(client.raw, 0.0)
        until(lambda: client.seqs == [1], client)


def waiting(client: Client, worker: int = 0) -> int:
    """Bytes that have come and have not been read."""
    try:
        return len(client.lanes._lanes[worker, 0]._socket.recv(16 * MB, socket.MSG_PEEK))
    except BlockingIOError:
        return 0


# Bytes that no worker of ours would send.


HOSTILE_HEADERS = {
    "no msgpack": message(b"\xc1\xc1\xc1", b"rest"),
    "text that is no text": message(messages.encode(Opened(SESSION, 0, 0, 0, 0)).replace(b"0123", b"\xff\xfe\xff\xfe")),
    "sizes that are too small": message(batches([[3, 5]]), b"xxx", b"yyyy"),
    "sizes that are too large": message(batches([[3, 4]]), b"xxx", b"yyyyy"),
    "a batch without a header": message(batches([[3], []]), b"xxx"),
    "a body of no batch": message(batches([]), b"xxx"),
    "a piece of a large one": message(Chunk(SESSION, 0, 0, 1, 0, 0, 0), b"xxx"),
    "the beginning of a large one": message(Large(SESSION, 0, 0, 1, 0, [3, 4])),
    "no such memory": message(batches([[3, 4]], {0: Place(0, 0, 0, 64, 1, 0)}), b"xxx"),
}


@pytest.mark.parametrize("data", HOSTILE_HEADERS.values(), ids=HOSTILE_HEADERS)
def test_a_message_that_breaks_the_rules_is_told_and_the_next_is_read(data: bytes, fake: Fake, told: Client) -> None:
    fake.send(data + wire(batch(1, b"x")))
    until(lambda: told.seqs == [1], told)
    error, _ = told.whole
    assert error.error is not None
    assert error.header is None or str(error.error).startswith("worker 0: ")
    assert error.header is not None or str(error.error).startswith("a data message cannot be read: ")
    assert told.is_quiet


def test_an_empty_buffer_in_shared_memory_is_none_that_travels(fake: Fake, told: Client) -> None:
    memory = segments.Segments(8 * MB)
    attachment = segments.attach(os.getpid(), memory.offer)
    assert attachment is not None
    with closing(memory):
        told.lanes.attach(0, 0, attachment)
        lent = memory.place([memoryview(bytearray(MB)), memoryview(b"")])
        fake.send(wire(Parcel(1, 0, Batches, b"header", lent)))
        until(lambda: told.whole != [], told)
        ((entry,),) = [each.entries for each in told.whole]
        assert [part.nbytes for part in entry.buffers] == [MB, 0]
        del entry
        told.arrived.clear()


HOSTILE_PREFIXES = {
    "nothing for a header": PREFIX.pack(0, 10) + bytes(10),
    "a header that is too large": PREFIX.pack(DATA_BYTES + 1, 0),
    "http": b"HTTP/1.1 400 Bad Request\r\n\r\n",
}


@pytest.mark.parametrize("data", HOSTILE_PREFIXES.values(), ids=HOSTILE_PREFIXES)
def test_what_cannot_be_followed_ends_the_connection(data: bytes, fake: Fake, told: Client) -> None:
    fake.send(data)
    until(lambda: told.arrived != [], told)
    (arrival,) = told.arrived
    assert str(arrival.error) == f"tcp://127.0.0.1:{fake.port} sent something that is no message of ours"
    assert not told.is_open()
    assert told.is_quiet
    told.lanes.tend(when_due(told))
    fake.accept(told)
    fake.send(wire(batch(1)))
    until(lambda: told.seqs == [1], told)


HUGE = 1 << 62
ENORMOUS = {
    "buffers": message(batches([[3, HUGE]]), nbytes=HUGE + 3),
    "codec headers": message(batches([[HUGE, 3]]), nbytes=HUGE + 3),
    "many buffers": message(batches([[3, *[1 << 55] * 100]]), nbytes=(100 << 55) + 3),
    "an error": message(ShardError(SESSION, 0, 0, 1, 0), nbytes=HUGE),
    "an end": message(EndOfShard(SESSION, 0, 0, 1, 0), nbytes=DATA_BYTES + 1),
}


@pytest.mark.parametrize("data", ENORMOUS.values(), ids=ENORMOUS)
def test_what_cannot_be_held_is_told_with_its_worker(data: bytes, fake: Fake, told: Client) -> None:
    fake.send(data)
    until(lambda: told.arrived != [], told)
    (arrival,) = told.arrived
    assert arrival.header is not None
    assert "worker 0: " in str(arrival.error)
    assert told.is_quiet


def test_nothing_is_held_ready_for_what_is_not_wanted(fake: Fake) -> None:
    asked = []
    with closing(Client(fake.port, accepts=lambda header: bool(asked.append(header)))) as client:
        fake.accept(client)
        fake.send(ENORMOUS["buffers"] + bytes(1000))
        until(lambda: asked != [], client)
        assert client.is_quiet
        assert client.arrived == []


def test_announced_codec_headers_take_no_memory_before_they_come(fake: Fake, told: Client) -> None:
    """As much as is announced may be there, but is not touched before it is filled."""
    announced = 1 << 30
    resident = memory_in_use()
    fake.send(message(batches([[announced]]), nbytes=announced))
    until(lambda: told.lanes._lanes[0, 0]._incoming is not None, told)
    assert memory_in_use() - resident < announced // 4


def memory_in_use() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.one_of(
        st.binary(min_size=1, max_size=300),
        st.builds(message, st.binary(min_size=1, max_size=100), st.binary(max_size=100)),
        st.builds(
            lambda sizes, rest, nbytes: message(batches(sizes), rest, nbytes=nbytes),
            st.lists(st.lists(st.integers(0, 1 << 62), max_size=3), max_size=3),
            st.binary(max_size=100),
            st.integers(0, (1 << 64) - 1),
        ),
    )
)
def test_random_bytes_raise_nothing_and_keep_nobody_busy(data: bytes, fake: Fake, worker: Worker) -> None:
    with closing(Client(fake.port, worker.port)) as client:
        until(lambda: worker._client is not None, client, worker)
        fake.accept(client)
        fake.send(data)
        assert fake.connection is not None
        fake.hang_up()
        until(lambda: not client.is_open(), client)
        assert client.is_quiet
        worker.send(packed(batch(0, b"x"))[0])
        until(lambda: 0 in client.seqs, client, worker)
        worker._lose_client("the test is over")


def test_a_connection_that_is_cut_anywhere_raises_nothing(fake: Fake) -> None:
    data = wire(batch(0, b"x" * 5000), Parcel(1, 1, ShardError, b"traceback"))
    stages = [0, 1, 11, 12, 13, 30, 100, 4000, 5050, len(data) - 1, len(data)]
    with closing(Client(fake.port)) as client:
        for now, stage in enumerate(stages):
            fake.accept(client)
            fake.send(data[:stage])
            fake.hang_up()
            until(lambda: not client.is_open(), client)
            assert client.is_quiet
            client.lanes.tend(1e9 + now)
        assert client.whole[-1].body == b"traceback"
        fake.accept(client)


# Connections that break are made again.


def when_due(client: Client, worker: int = 0) -> float:
    return client.lanes._lanes[worker, 0].retry_at


def lose(fake: Fake, client: Client) -> None:
    fake.hang_up()
    until(lambda: not client.is_open(), client)


@pytest.mark.parametrize("cut", [0, 5, 60, 3000, 2 * MB])
def test_a_connection_is_made_again_and_the_rest_of_a_message_is_forgotten(cut: int, fake: Fake, told: Client) -> None:
    told.lanes.send(0, 0, credit(3))
    told.lanes.send(0, 0, credit(4))
    fake.send_to(told, wire(batch(0, b"x" * 5000), batch(1, b"y" * 3 * MB))[:cut])
    lose(fake, told)
    due = when_due(told)
    told.lanes.tend(due - 0.001)
    assert not told.is_open()
    told.lanes.tend(due)
    assert told.is_open()
    assert fake.accept(told) == HELLO + PREFIX.pack(len(credit(4)), 0) + credit(4)
    fake.send(wire(batch(2, b"z" * 5000)))
    until(lambda: 2 in told.seqs, told)
    assert told.seqs == ([0, 2] if cut > MB else [2])
    assert told.is_quiet


def test_the_longer_nobody_is_there_the_rarer_it_is_tried_until_something_comes(
    free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, waits = 1000.0, []
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with closing(Client(free_port)) as client:
        for _ in range(7):
            until_closed(client)
            waits.append(when_due(client) - now)
            now = when_due(client)
            client.lanes.tend(now)
        until_closed(client)
        with socket.create_server(("127.0.0.1", free_port)) as server:
            client.lanes.tend(when_due(client))
            connection, _ = server.accept()
            connection.send(wire(Parcel(1, 0, EndOfShard)))
            connection.close()
            until_closed(client)
        assert len(client.arrived) == 1
        assert when_due(client) - now == pytest.approx(0.1)
    assert waits == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0])


def until_closed(client: Client) -> None:
    """With a clock that stands still."""
    while client.is_open():
        assert is_readable(client.raw, LONG_S)
        client.turn()


def test_a_worker_may_come_later(free_port: int) -> None:
    with closing(Client(free_port)) as client:
        client.lanes.send(0, 0, credit(1))
        client.lanes.send(0, 0, credit(2))
        until(lambda: not client.is_open(), client)
        client.lanes.send(0, 0, credit(3))
        with closing(Worker(port=free_port)) as worker:
            client.lanes.tend(when_due(client))
            until(lambda: worker.heard != [], client, worker)
            assert worker.heard == [credit(3)]


@pytest.mark.parametrize("host", ["255.255.255.255", "192.0.2.1"])
def test_an_address_that_cannot_be_reached_keeps_nobody_waiting(host: str, worker: Worker) -> None:
    """To the first, the system refuses to connect at once; the second is a black hole, or there is no way to it."""
    with closing(Client(worker.port)) as client:
        client.lanes.connect(1, 0, f"tcp://{host}:9")
        client.lanes.send(1, 0, credit(1))
        meet(worker, client)
        assert worker.send(packed(batch(0))[0])
        until(lambda: client.seqs == [0], client, worker)
        client.lanes.tend(1e9)
        client.lanes.disconnect(1, 0)
        assert list(client.lanes._lanes) == [(0, 0)]


@pytest.mark.parametrize("port", [0, 65_536])
def test_an_endpoint_that_is_none_is_told_once(port: int) -> None:
    with closing(Client()) as client:
        with pytest.raises(AddressError, match=rf"the port must be a number from 1 to 65535, not '{port}'"):
            client.lanes.connect(0, 0, f"tcp://127.0.0.1:{port}")
        client.lanes.tend(1e9)


def test_a_worker_can_be_left_in_any_state(fake: Fake, free_port: int) -> None:
    with closing(Client(fake.port, fake.port, free_port, fake.port)) as client:
        fake.server.accept()[0].close()
        until(lambda: not client.is_open(0) and not client.is_open(2), client)
        for attempt in range(4):
            client.lanes.disconnect(attempt, 0)
            client.lanes.disconnect(attempt, 0)
            client.lanes.send(attempt, 0, credit(1))
        client.lanes.tend(1e9)
        assert client.lanes._open == {}
        assert client.is_quiet


def test_a_worker_left_in_the_middle_of_a_message_says_no_more(fake: Fake, told: Client) -> None:
    fake.send(wire(batch(0, b"x" * 5000), batch(1, b"y" * 5000)) + wire(batch(2))[:10])
    lane = told.lanes._lanes[0, 0]
    until(lambda: lane._high - lane._low == 10, told)
    told.arrived.clear()
    told.lanes.disconnect(0, 0)
    told.turn()
    assert told.arrived == []
    assert told.is_quiet


def test_a_worker_that_reads_nothing_loses_its_connection(told: Client) -> None:
    """Beyond what the system holds of it, and ``UNSENT_BYTES``."""
    for _ in range(20_000):
        told.lanes.send(0, 0, bytes(4000))
    assert not told.is_open()


# Whom a worker lets in.


def dial(worker: Worker, host: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection((host, worker.port), timeout=LONG_S)


def is_hung_up(connection: socket.socket) -> bool:
    try:
        return is_readable(connection, 0.0) and connection.recv(1) == b""
    except ConnectionError:
        return True


def test_strangers_are_turned_away_and_told_nothing(ends: tuple[Worker, Client]) -> None:
    worker, client = ends
    wrong = HELLO[:-1] + b"!"
    shown = [wrong, b"!" * len(HELLO), HELLO[:16] + b"!" * 64, wrong + b"more", b"\0" * 1000]
    strangers = [dial(worker) for _ in shown]
    for stranger, what in zip(strangers, shown, strict=True):
        stranger.sendall(what)
    assert worker.send(packed(batch(0))[0])
    until(lambda: all(map(is_hung_up, strangers)), worker, client)
    until(lambda: client.seqs == [0], worker, client)
    assert client.is_open()
    for stranger in strangers:
        stranger.close()


def test_no_stranger_learns_how_much_of_what_it_shows_is_right(worker: Worker) -> None:
    """Or it could find the rest out byte by byte."""
    shown = [HELLO[:5], HELLO[:20], HELLO[:16] + b"!" * 4, HELLO[:-1], HELLO[:16] + b"!" * 63]
    strangers = [dial(worker) for _ in shown]
    for stranger, what in zip(strangers, shown, strict=True):
        stranger.sendall(what)
    until(lambda: sum(len(each.shown) for each in worker._strangers.values()) == sum(map(len, shown)), worker)
    assert not any(map(is_hung_up, strangers))
    for stranger in strangers:
        stranger.close()
    until(lambda: not worker._strangers, worker)


def test_who_shows_nothing_is_turned_away_after_a_while(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with dial(worker) as stranger:
        assert is_readable(worker.raw, LONG_S)
        worker.turn()
        stranger.send(HELLO[:-1])
        assert is_readable(worker.raw, LONG_S)
        now += lanes_module.STRANGER_S
        worker.turn()
        assert len(worker._strangers) == 1
        now += 0.1
        worker.turn()
        assert worker._strangers == {}
        assert is_readable(stranger, LONG_S)
        assert stranger.recv(1) == b""


def test_of_too_many_strangers_the_oldest_are_turned_away(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_module, "STRANGERS", 3)
    with ExitStack() as stack:
        strangers = [stack.enter_context(dial(worker)) for _ in range(5)]
        until(lambda: all(is_hung_up(each) for each in strangers[:2]), worker)
        assert not any(is_hung_up(each) for each in strangers[2:])
        assert len(worker._strangers) == 3
        strangers[2].sendall(HELLO)
        until(lambda: worker._client is not None, worker)


def test_the_client_is_let_in_however_its_password_is_cut(worker: Worker) -> None:
    with dial(worker) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for n, byte in enumerate(HELLO + PREFIX.pack(len(credit(1)), 0) + credit(1)):
            connection.send(bytes([byte]))
            worker.turn()
            assert n + 1 >= len(HELLO) or not worker.send([b"x"])
        until(lambda: worker.heard == [credit(1)], worker)


def test_a_client_that_connects_again_takes_the_place_of_the_old_connection(ends: tuple[Worker, Client]) -> None:
    worker, client = ends
    with closing(Client(worker.port)) as again:
        until(lambda: not client.is_open(), worker, client, again)
        assert worker.send(packed(batch(0))[0])
        until(lambda: again.seqs == [0], worker, again)
        assert client.arrived == []


def test_credit_is_heard_however_it_is_cut(worker: Worker) -> None:
    frames = [credit(n) for n in range(300)]
    data = HELLO + b"".join(PREFIX.pack(len(frame), 0) + frame for frame in frames)
    with dial(worker) as connection:
        for start in range(0, len(data), 777):
            connection.sendall(data[start : start + 777])
            worker.turn()
        until(lambda: len(worker.heard) == 300, worker)
        assert worker.heard == frames


def test_credit_that_broke_off_is_not_continued_by_the_next_connection(worker: Worker) -> None:
    frame = PREFIX.pack(len(credit(1)), 0) + credit(1)
    with dial(worker) as first, dial(worker) as second:
        first.sendall(HELLO + frame[:-1])
        until(lambda: bool(worker._told), worker)
        second.sendall(HELLO + frame)
        until(lambda: worker.heard != [], worker)
        assert worker.heard == [credit(1)]


@pytest.mark.parametrize("prefix", [PREFIX.pack(5000, 0), PREFIX.pack(5, 1)], ids=["too long", "with a rest"])
def test_a_client_that_says_something_else_is_hung_up(prefix: bytes, worker: Worker) -> None:
    with dial(worker) as connection:
        connection.sendall(HELLO + PREFIX.pack(2, 0) + b"ok" + prefix + bytes(100))
        until(lambda: is_hung_up(connection), worker)
        assert worker.heard == [b"ok"]
        assert not worker.send([b"x"])


# Where a worker listens.


@pytest.mark.parametrize(
    ("host", "reached"),
    [
        ("127.0.0.1", ["127.0.0.1"]),
        ("localhost", ["localhost"]),
        ("::1", ["::1"]),
        ("::", ["127.0.0.1", "::1"]),
        ("*", ["127.0.0.1", "::1"]),
        ("0.0.0.0", ["127.0.0.1"]),
        ("lo", ["::1"]),
    ],
)
def test_a_worker_is_reached_where_its_daemon_is(host: str, reached: list[str]) -> None:
    with closing(Worker(host)) as worker:
        for address in reached:
            ((*_, where), *_) = socket.getaddrinfo(address, worker.port, type=socket.SOCK_STREAM)
            with closing(Client(worker.port, host=str(where[0]))) as client:
                meet(worker, client)
                worker._lose_client("the next one comes")


def test_at_an_interface_a_worker_is_where_zeromq_is() -> None:
    context = transport.Context()
    with closing(Worker("lo")) as worker:
        push = context.push(SESSION, None, "lo", [0])
        endpoint = push._socket.last_endpoint.decode()
        push.close()
        context.close()
        assert transport.split_address(endpoint.rstrip("\0"))[0] == worker._socket.getsockname()[0]


def test_the_next_port_is_taken_where_one_is_in_use(free_port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        with closing(Listener(SESSION, "127.0.0.1", [taken, free_port])) as worker:
            assert worker.port == free_port
        with pytest.raises(OSError, match=rf"cannot bind 127\.0\.0\.1:{taken}: Address already in use"):
            Listener(SESSION, "127.0.0.1", [taken])


@pytest.mark.parametrize(
    ("host", "text"),
    [
        ("192.0.2.77", r"cannot bind 192\.0\.2\.77:0: Cannot assign requested address"),
        ("2001:db8::1", r"cannot bind \[2001:db8::1\]:0: Cannot assign requested address"),
        ("nowhere.invalid", r"cannot bind nowhere\.invalid:0: .*(not known|resolution|associated)"),
    ],
)
def test_a_host_that_is_not_ours_is_told(host: str, text: str) -> None:
    with pytest.raises(OSError, match=text):
        Listener(SESSION, host, [0])


def test_without_ports_there_is_nowhere_to_listen() -> None:
    with pytest.raises(OSError, match=r"no port to bind on 127\.0\.0\.1"):
        Listener(SESSION, "127.0.0.1", [])


# What a worker sends.


def test_nothing_is_sent_to_nobody(worker: Worker) -> None:
    assert not worker.send(packed(batch(0))[0])
    with closing(Client(worker.port)) as client:
        meet(worker, client)
        assert worker.send(packed(batch(1))[0])
        until(lambda: client.seqs == [1], client, worker)


@pytest.mark.parametrize("nbytes", [4096, 2 * MB])
def test_what_was_borrowed_may_change_once_it_was_sent(nbytes: int, ends: tuple[Worker, Client]) -> None:
    """To a client that does not read meanwhile, so that most of it has to wait."""
    worker, client = ends
    memory = bytearray(nbytes)
    count = 12
    for seq in range(count):
        memory[:] = bytes([seq]) * nbytes
        ((first, *_),) = packed(batch(seq, b""))
        ((first, *_),) = packed(Parcel(1, seq, Batches, b"header", [Borrowed(memoryview(memory))]))
        assert worker.send([first, Borrowed(memoryview(memory))])
    memory[:] = b"!" * nbytes
    assert bool(worker._unsent) == (nbytes > MB)
    until(lambda: len(client.seqs) == count, client, worker)
    assert client.seqs == list(range(count))
    for seq, arrival in enumerate(each for each in client.arrived if each.entries):
        assert bytes(arrival.entries[0].buffers[0]) == bytes([seq]) * nbytes
    assert not worker._unsent
    assert not is_readable(worker.raw, 0.0)


def test_what_was_borrowed_and_cannot_be_copied_is_not_sent_later(
    ends: tuple[Worker, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(nbytes: int) -> memoryview:
        raise MemoryError(f"no room for {nbytes}")

    worker, client = ends
    ((first, *_),) = packed(batch(0, bytes(20 * MB)))
    monkeypatch.setattr(buffers, "allocate", no_room)
    with pytest.raises(MemoryError, match="no room to send"):
        worker.send([first, Borrowed(memoryview(bytearray(20 * MB)))])
    assert not worker._unsent
    until(lambda: not client.is_open(), client, worker)
    assert client.seqs == []


def test_what_is_sent_from_where_it_is(ends: tuple[Worker, Client]) -> None:
    worker, client = ends
    least, most = lanes_module.TOGETHER_BYTES, lanes_module.AT_ONCE_BYTES
    kinds = [type(worker.borrow(memoryview(bytearray(nbytes)))) for nbytes in (least - 1, least, most, most + 1)]
    assert kinds == [memoryview, Borrowed, Borrowed, memoryview]
    source = bytearray(b"x")
    copy = worker.borrow(memoryview(source))
    source[:] = b"y"
    assert bytes(copy) == b"x"
    worker.send(packed(batch(0, bytes(20 * MB)))[0])
    assert isinstance(worker.borrow(memoryview(bytearray(least))), memoryview)
    until(lambda: client.seqs == [0], client, worker)


@pytest.mark.parametrize("count", [999, 1000, 1001, 3500])
@pytest.mark.parametrize("nbytes", [0, 7])
def test_a_batch_of_more_buffers_than_are_sent_at_once(count: int, nbytes: int, ends: tuple[Worker, Client]) -> None:
    worker, client = ends
    parts = [bytes([n % 256]) * nbytes for n in range(count)]
    assert worker.send(packed(batch(0, *parts))[0])
    assert worker.send(packed(batch(1))[0])
    until(lambda: client.seqs == [0, 1], client, worker)
    assert [bytes(part) for part in client.whole[0].entries[0].buffers] == parts


def test_a_client_that_reads_a_byte_now_and_then_gets_everything_in_order(worker: Worker) -> None:
    stream = [batch(seq, bytes([seq]) * 600_000) for seq in range(10)]
    with dial(worker) as connection:
        connection.sendall(HELLO)
        until(lambda: worker._client is not None, worker)
        for frames in map(packed, stream):
            assert worker.send(frames[0])
        got = bytearray()
        for _ in range(2000):
            got += connection.recv(1)
            worker.turn()
        connection.setblocking(False)
        wanted = wire(stream[0]) + b"".join(map(wire, stream[1:]))
        until(lambda: len(drained(connection, got)) == len(wanted), worker)
        assert got == wanted


def drained(connection: socket.socket, got: bytearray) -> bytearray:
    try:
        while more := connection.recv(1 << 20):
            got += more
    except BlockingIOError:
        pass
    return got


def test_a_client_that_goes_away_while_much_waits_takes_it_along(ends: tuple[Worker, Client]) -> None:
    worker, client = ends
    assert worker.send(packed(batch(0, bytes(20 * MB)))[0])
    client.lanes.disconnect(0, 0)
    until(lambda: worker._client is None, worker)
    assert not worker._unsent
    assert not worker.send([b"x"])
    client.lanes.connect(0, 0, f"tcp://127.0.0.1:{worker.port}")
    meet(worker, client)
    assert worker.send(packed(batch(1))[0])
    until(lambda: client.seqs == [1], worker, client)


# Who is woken, and when.


def test_a_small_batch_behind_a_large_one_is_read_though_reading_stopped_in_between(
    ends: tuple[Worker, Client],
) -> None:
    worker, client = ends
    for seq in range(0, 8, 2):
        worker.send(packed(batch(seq, bytes(3 * MB)))[0])
        worker.send(packed(batch(seq + 1, b"x"))[0])

    def one() -> None:
        for arrival in client.lanes.read(256):
            client.arrived.append(arrival)
            if arrival.entries:
                client.lanes.taken()
                break

    poller = select.poll()
    poller.register(client.raw, select.POLLIN)
    deadline = transport.Deadline(LONG_S)
    while len(client.seqs) < 8:
        assert not deadline.expired
        worker.turn()
        if not client.lanes.drained or poller.poll(20):
            one()
    assert client.seqs == list(range(8))


def test_what_comes_after_a_large_batch_wakes_whoever_stopped_at_that(fake: Fake, told: Client) -> None:
    """To complete the large one, he was not to be woken for less than its rest."""
    data, rest = wire(batch(0, bytes(70_000))), lanes_module.TOGETHER_BYTES
    fake.send(data[:-rest])
    until(lambda: told.lanes._lanes[0, 0]._least == rest, told)
    fake.send(data[-rest:])
    while not told.seqs:  # the system may wake him sooner, too
        assert not told.lanes.drained or is_readable(told.raw, LONG_S)
        for arrival in told.lanes.read(256):
            told.arrived.append(arrival)
            if arrival.entries:
                told.lanes.taken()
                break
    fake.send(wire(batch(1)))
    assert is_readable(told.raw, LONG_S)
    until(lambda: told.seqs == [0, 1], told)


def test_what_comes_last_wakes_the_reader_wherever_it_stopped(
    fake: Fake, told: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``raw`` alone tells: nobody looks by himself as long as it is drained."""
    monkeypatch.setattr(lanes_module, "READ_BYTES", 100_000)
    data = b"".join(map(wire, [batch(0, bytes(3 * MB)), batch(1, b"x"), batch(2, bytes(70_000)), batch(3, b"y")]))
    assert fake.connection is not None
    fake.connection.setblocking(False)
    left = memoryview(data)
    while len(told.seqs) < 4:
        left = left[sent(fake.connection, left[:50_001]) :]
        if left:
            if not told.lanes.drained or is_readable(told.raw, 0.0):
                told.turn()
        else:
            assert not told.lanes.drained or is_readable(told.raw, LONG_S)
            told.turn()
    assert told.is_quiet


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("size", [100, 40_000])
def test_a_message_that_ctrl_c_left_in_the_middle_costs_the_connection(
    whole: bool, size: int, fake: Fake, told: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if no byte more comes by it, nobody waits for the rest."""
    fill, calls = lanes_module._Lane._fill, []

    def interrupted(lane: Any) -> int:
        nbytes = fill(lane) if whole else 0
        calls.append(nbytes)
        if len(calls) == 2 or size == 100:
            raise KeyboardInterrupt
        return nbytes or fill(lane)

    fake.send(wire(batch(0, b"x" * size)))
    until(lambda: waiting(told) > size)
    monkeypatch.setattr(lanes_module._Lane, "_fill", interrupted)
    with pytest.raises(KeyboardInterrupt):
        told.turn()
    monkeypatch.undo()
    assert_connects_again(told, fake)
    fake.send(wire(batch(1, b"y" * size)))
    until(lambda: told.seqs == [1], told)


def assert_connects_again(client: Client, fake: Fake) -> None:
    """With the next look, which is due, and without having taken anything in."""
    assert not client.lanes.drained
    client.turn()
    assert not client.is_open()
    assert client.whole == []
    assert client.is_quiet
    client.lanes.tend(when_due(client))
    assert fake.accept(client) == HELLO


def test_a_message_that_is_not_taken_in_costs_the_connection(fake: Fake, told: Client) -> None:
    """An exception comes after it has been read, and nothing more comes that would tell of it."""
    fake.send(wire(batch(0)))
    until(lambda: waiting(told) > 0)
    for _arrival in told.lanes.read(256):
        break
    assert_connects_again(told, fake)


def test_a_message_that_was_not_taken_in_from_a_worker_that_is_gone_costs_nothing(fake: Fake, told: Client) -> None:
    fake.send(wire(batch(0)))
    until(lambda: waiting(told) > 0)
    for _arrival in told.lanes.read(256):
        break
    told.lanes.disconnect(0, 0)
    told.turn()
    assert told.is_quiet


# Forks.


class Child:
    """A fork of this process, which keeps open what that had open."""

    def __enter__(self) -> "Child":
        self.pid = os.fork()
        if not self.pid:
            signal.pause()
            os._exit(0)
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def test_a_fork_keeps_no_connection_of_a_client_open(worker: Worker) -> None:
    client = Client(worker.port)
    meet(worker, client)
    with Child():
        client.close()
        until(lambda: worker._client is None, worker)


def test_a_fork_keeps_neither_port_nor_connection_of_a_worker_open() -> None:
    worker = Worker()
    with closing(Client(worker.port)) as client:
        meet(worker, client)
        with Child():
            worker.close()
            until(lambda: not client.is_open(), client)
            client.lanes.tend(when_due(client))
            until(lambda: not client.is_open(), client)


def test_both_ends_can_be_closed_twice(ends: tuple[Worker, Client]) -> None:
    worker, client = ends
    for _ in range(2):
        worker.close()
        client.close()


class Full:
    """A listening socket of a process that has no descriptors left."""

    def __init__(self, listener: socket.socket) -> None:
        self.fileno = listener.fileno

    def accept(self) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")


def test_a_worker_without_descriptors_is_not_kept_busy_by_who_wants_in(worker: Worker) -> None:
    listener, worker._socket = worker._socket, Full(worker._socket)
    with closing(Client(worker.port)) as client:
        worker.turn()
        assert not is_readable(worker.raw, 0.0)
        worker._socket = listener
        worker._deaf_until = -1.0
        worker.turn()
        meet(worker, client)


def test_everywhere_is_ipv4_alone_where_there_is_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lanes_module._everywhere() == "::"

    def unknown(*_: Any) -> Any:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr(lanes_module.socket, "socket", unknown)
    assert lanes_module._everywhere() == "0.0.0.0"


def test_who_sends_only_what_cannot_be_read_is_not_tried_again_sooner_for_that() -> None:
    fake = Fake()
    with closing(Client(fake.port)) as client:
        lane = client.lanes._lanes[0, 0]
        waits = []
        for _ in range(3):
            fake.accept(client)
            fake.send(b"220 mail.example ESMTP ready\r\n")
            until(lambda: not client.is_open(), client)
            waits.append(lane._patience)
            client.lanes.tend(math.inf)
        assert waits == sorted(set(waits))
    fake.close()
