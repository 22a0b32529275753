"""Hostile bytes: at the control port, at the data ports, and in the stream that a client reads.

A daemon and its workers talk over pipes, which have no name that anybody could connect to; see ``transport.Channel``.
"""

import contextlib
import itertools
import random
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq
from daemons import Daemon, running, until, workers_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torchdata.dataloader2 import DataLoader2
from torchdata.datapipes.iter import IterableWrapper

from rpc_reading_service import RPCReadingService, codec, messages
from rpc_reading_service.daemon import versions
from rpc_reading_service.merge import Merge, Signal
from rpc_reading_service.messages import Batches, EndOfShard
from rpc_reading_service.stream import Packer, Parcel, StreamReader

pytestmark = pytest.mark.slow

SEED = 20_240_506
CONTROL_MESSAGES = 60_000
MESSAGES_AHEAD = 5_000
"""What waits for a daemon is bounded by how fast it reads: so many are sent before it has to have read them."""
STREAM_MESSAGES = 140_000
CONNECTIONS = 2_000
GROWTH_BYTES = 64 << 20
"""What a daemon may need more while it is shouted at."""

PATIENCE_S = 60.0
SESSION, OTHER = "a" * 32, "b" * 32


# Sessions that are running keep their exact stream.


@pytest.fixture(scope="module", params=["open", "with keys"])
def target(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[Daemon, Path | None]]:
    """A daemon, and the keys that it wants."""
    keys = folder if request.param == "with keys" else None
    with running("--port", "0", "--slots", "2", *(["--keys", str(keys)] if keys else [])) as started:
        assert started.line
        with load(started, keys) as loader:  # whatever is allocated once is there afterwards
            assert list(loader) == list(range(3000))
        yield started, keys


def load(daemon: Daemon, keys: Path | None) -> "DataLoader2[Any]":
    pipe = IterableWrapper(range(3000)).sharding_filter()
    service = RPCReadingService([daemon.address], keys=keys, on_worker_loss="raise", timeout=PATIENCE_S)
    return DataLoader2(pipe, reading_service=service)


@contextlib.contextmanager
def undisturbed(target: tuple[Daemon, Path | None], lines: int) -> Iterator[list[int]]:
    """A session whose stream has to be exact, whatever is done meanwhile to the ports: control first, then data.

    Args:
        lines: how many the daemon may log meanwhile
    """
    daemon, keys = target
    process = psutil.Process(daemon.process.pid)
    memory, descriptors, logged = process.memory_info().rss, process.num_fds(), len(daemon.errors.splitlines())
    with load(daemon, keys) as loader:
        iterator = iter(loader)
        elements = [next(iterator) for _ in range(5)]
        workers = loader.reading_service._client._session.workers
        yield [daemon.port, *(worker.port for worker in workers)]
        elements += iterator
        assert elements == list(range(3000))
    assert process.memory_info().rss - memory < GROWTH_BYTES
    until(lambda: process.num_fds() <= descriptors + 2, PATIENCE_S)
    new = daemon.errors.splitlines()[logged:]
    assert len(new) <= lines, new
    assert "Traceback" not in daemon.errors


def template(rng: random.Random) -> list[bytes]:
    """Something that a client might send."""
    kind = rng.choice([kind for kind in messages.FromClient.__args__ if kind is not messages.Hello])
    fields: list[Any] = [rng.randbytes(16).hex()]
    for _field in msgspec.structs.fields(kind)[1:]:
        fields.append(rng.choice([0, 1, 5, 2**62, -1, "x" * rng.randrange(70), None, 0.5, [], "0" * 64]))
    return [msgspec.msgpack.encode([kind.__name__, *fields]), rng.randbytes(rng.randrange(40))]


def mutilated(rng: random.Random, frames: list[bytes]) -> list[bytes]:
    """Cut, lengthened, changed, doubled, in another order, or left as it is."""
    place = rng.randrange(len(frames))
    frame = bytearray(frames[place])
    match rng.randrange(8):
        case 0:
            del frame[rng.randrange(len(frame) + 1) :]
        case 1:
            frame += rng.randbytes(rng.randrange(1, 50))
        case 2 if frame:
            frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
        case 3:
            return frames * rng.randrange(2, 4)
        case 4:
            return frames[::-1]
        case 5:
            frame = bytearray(rng.randbytes(rng.randrange(200)))
        case 6:
            return frames[:place]
    return [*frames[:place], bytes(frame), *frames[place + 1 :]]


@contextlib.contextmanager
def dealer(port: int) -> Iterator["zmq.Socket[bytes]"]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.sndtimeo = 10_000
        stranger.sndhwm = 10_000
        stranger.connect(f"tcp://127.0.0.1:{port}")
        yield stranger


def wait_for_welcome(stranger: "zmq.Socket[bytes]") -> None:
    """The daemon has read all that was sent before: what it may take is measured, and not what waits for it."""
    stranger.send(messages.encode(messages.Hello(messages.PROTOCOL_VERSION, versions(), "a stranger")))
    while stranger.poll(1000 * PATIENCE_S):
        frame = stranger.recv_multipart()[0]
        if isinstance(messages.decode(frame, messages.FromDaemon), messages.Welcome):
            return
    raise AssertionError("the daemon does not answer")


def test_messages_without_sense_change_nothing(target: tuple[Daemon, Path | None]) -> None:
    rng, sent = random.Random(SEED), 0
    is_open = target[1] is None  # else nothing is taken from a stranger
    with undisturbed(target, lines=10) as ports, contextlib.ExitStack() as stack:
        control, *data = [stack.enter_context(dealer(port)) for port in ports]
        for number in range(CONTROL_MESSAGES):
            if is_open and number % MESSAGES_AHEAD == 0:
                wait_for_welcome(control)
            frames = mutilated(rng, template(rng)) or [b""]
            with contextlib.suppress(zmq.Again):  # full
                rng.choice(data).send_multipart(frames, zmq.NOBLOCK)
            with contextlib.suppress(zmq.Again):
                control.send_multipart(frames, 0 if is_open else zmq.NOBLOCK)
                sent += 1
        with contextlib.suppress(zmq.Again):
            control.send(bytes(messages.CONTROL_BYTES + 1), zmq.NOBLOCK)
    assert sent == CONTROL_MESSAGES or not is_open


HALVES = {
    "nothing": b"",
    "a byte": b"\xff",
    "half a signature": b"\xff\0\0\0",
    "a greeting": b"\xff" + bytes(8) + b"\x7f\x03\0NULL" + bytes(48),
    "a greeting with CURVE": b"\xff" + bytes(8) + b"\x7f\x03\0CURVE" + bytes(47),
    "CURVE and half a HELLO": b"\xff" + bytes(8) + b"\x7f\x03\0CURVE" + bytes(47) + b"\x04\xc8\x05HELLO\x01",
    "a large frame, announced": b"\xff" + bytes(8) + b"\x7f\x03\0NULL" + bytes(48) + b"\x02" + b"\x7f" * 8,
    "ZMTP/1.0": bytes.fromhex("01000600") + b"hello",
    "http": b"GET / HTTP/1.1\r\n\r\n",
}


def test_garbage_half_handshakes_and_slow_peers_change_nothing(target: tuple[Daemon, Path | None]) -> None:
    rng = random.Random(SEED)
    with undisturbed(target, lines=20) as ports, contextlib.ExitStack() as stack:
        for port, what in itertools.product(ports, [*HALVES.values(), *(rng.randbytes(4096) for _ in range(20))]):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), 5.0))
            with contextlib.suppress(OSError):
                connection.sendall(what)
        slow = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 5.0)) for port in ports]
        for byte in HALVES["a greeting"]:  # one at a time
            for connection in slow:
                with contextlib.suppress(OSError):
                    connection.send(bytes([byte]))


def test_two_thousand_connections_at_once_change_nothing(target: tuple[Daemon, Path | None]) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] < 2 * CONNECTIONS:
        pytest.skip("the system allows too few descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 2 * CONNECTIONS), before[1]))
    try:
        with undisturbed(target, lines=20) as ports, contextlib.ExitStack() as stack:
            halves = list(HALVES.values())
            for number in range(CONNECTIONS):
                connection = stack.enter_context(socket.create_connection(("127.0.0.1", ports[0]), PATIENCE_S))
                connection.setblocking(False)
                with contextlib.suppress(OSError):
                    connection.send(halves[number % len(halves)])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def wire_frame(body: bytes, more: bool) -> bytes:
    """A frame of ZMTP/3."""
    return struct.pack(">BQ" if len(body) > 255 else ">BB", more | 2 * (len(body) > 255), len(body)) + body


FLOODS = {
    "large messages": wire_frame(bytes(1 << 20), more=False),
    "messages of a byte": 20_000 * wire_frame(b"x", more=False),
    "a message of large frames without an end": 16 * wire_frame(bytes(60_000), more=True),
    "a message of frames of a byte without an end": 20_000 * wire_frame(b"x", more=True),
}
READY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
HANDSHAKE = HALVES["a greeting"] + bytes([4, len(READY)]) + READY
FLOODERS = 8
FLOOD_S = 2.0
NOTHING_BYTES = 32 << 20
"""What a second of a flood's messages would take, when they were kept, was ten times as much."""

FLOOD_GROWTH_BYTES = 200 << 20
"""Far more than the 10 to 80 MB that it takes. An endless message took 2.8 GB in 4 s when nothing bounded it."""

MANY_FLOODERS = 500
LITTLE_BYTES = 60_000
STORM_S = 4.0
UNANSWERED_BYTES = 50_000
"""What a connection takes that the daemon has not answered; after that, nothing."""


def shout(port: int, data: bytes, stop: threading.Event) -> None:
    """Send as fast as the other end takes it; whoever is shut out comes back at once."""
    while not stop.is_set():
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 2.0) as connection:
            connection.sendall(HANDSHAKE)
            # Messages before the end of its greeting are refused.
            if len(connection.makefile("rb").read(65)) == 65:
                while not stop.is_set():
                    connection.sendall(data)


def peak_memory(process: psutil.Process, seconds: float) -> int:
    peak, deadline = 0, time.monotonic() + seconds
    while time.monotonic() < deadline:
        peak = max(peak, process.memory_info().rss)
        threading.Event().wait(0.01)
    return peak


@contextlib.contextmanager
def during(act: Callable[..., None], *args: Any) -> Iterator[None]:
    """Several threads do it meanwhile."""
    stop = threading.Event()
    threads = [threading.Thread(target=act, args=(*args, stop)) for _ in range(FLOODERS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("what", FLOODS)
def test_a_flood_that_is_faster_than_it_can_be_read_is_cut_off(what: str) -> None:
    with running("--port", "0", "--slots", "1") as daemon, load(daemon, None) as loader:
        iterator, process = iter(loader), psutil.Process(daemon.process.pid)
        elements, before = [next(iterator)], process.memory_info().rss
        with during(shout, daemon.port, FLOODS[what]):
            peak = peak_memory(process, FLOOD_S)
            elements += iterator
        assert elements == list(range(3000))
        assert peak - before < FLOOD_GROWTH_BYTES
        daemon.wait_for_line("127.0.0.1 was cut off: it has no session, and sends more than can be read")


def come_and_go(port: int, gone: list[int], stop: threading.Event) -> None:
    while not stop.is_set():
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 2.0) as connection:
            connection.sendall(HANDSHAKE)
            connection.recv(64)
            gone.append(port)


def test_connections_that_come_and_go_as_fast_as_they_can_take_little() -> None:
    """They were half a gigabyte a second. How many come while the daemon waits for a core is the system's affair."""
    gone: list[int] = []
    with running("--port", "0", "--slots", "1") as daemon, load(daemon, None) as loader:
        iterator, process = iter(loader), psutil.Process(daemon.process.pid)
        elements, before = [next(iterator)], process.memory_info().rss
        with during(come_and_go, daemon.port, gone):
            peak, count = peak_memory(process, STORM_S), len(gone)
            elements += iterator
        assert elements == list(range(3000))
    assert peak - before < GROWTH_BYTES + count * UNANSWERED_BYTES / 10


def test_many_who_bring_little_each_are_bounded_together() -> None:
    """Each brings an endless message; 60 KB of it were 1.3 MB, for good."""
    with running("--port", "0", "--slots", "1") as daemon, contextlib.ExitStack() as stack:
        assert daemon.line
        before = psutil.Process(daemon.process.pid).memory_info().rss
        connections = [
            stack.enter_context(socket.create_connection(("127.0.0.1", daemon.port), PATIENCE_S))
            for _ in range(MANY_FLOODERS)
        ]
        for connection in connections:
            connection.sendall(HANDSHAKE)
        for connection in connections:
            with contextlib.suppress(OSError):  # cut off, for the others' messages
                assert len(connection.makefile("rb").read(65)) == 65
                connection.sendall(LITTLE_BYTES // 3 * wire_frame(b"x", more=True))
        daemon.wait_for_line("127.0.0.1 was cut off: it has no session, and sends more than can be read")
        assert psutil.Process(daemon.process.pid).memory_info().rss - before < GROWTH_BYTES


def test_of_a_flood_at_a_workers_data_port_nothing_is_kept() -> None:
    with running("--port", "0", "--slots", "1") as daemon, load(daemon, None) as loader:
        iterator, (process,) = iter(loader), workers_of(daemon.process.pid)
        elements = [next(iterator)]
        (worker,) = loader.reading_service._client._session.workers
        before = process.memory_info().rss
        for what in FLOODS:
            with during(shout, worker.port, FLOODS[what]):
                assert peak_memory(process, FLOOD_S / 2) - before < NOTHING_BYTES, what
        elements += iterator
        assert elements == list(range(3000))


# What a client reads: nothing is decoded but what is expected, and nothing wrong comes out.


class Wire:
    """A data socket that has received these messages."""

    def __init__(self) -> None:
        self.arrived: list[list[bytes]] = []
        self._rest: list[bytes] = []

    def receive(self) -> bytes | None:
        if not self.arrived:
            return None
        first, *self._rest = self.arrived.pop(0)
        return first

    @property
    def more(self) -> bool:
        return bool(self._rest)

    def receive_frame(self) -> bytes:
        return self._rest.pop(0)

    def receive_into(self, place: Any) -> int:
        frame = self._rest.pop(0)
        size = min(len(frame), memoryview(place).nbytes)
        memoryview(place)[:size] = frame[:size]
        return len(frame)

    def skip(self) -> None:
        self._rest = []


class Reading:
    """A client that reads one shard, from a wire on which anything may come."""

    def __init__(self) -> None:
        self.merge = Merge(1)
        self.merge.begin_epoch(1)
        self.wire = Wire()
        self.reader = StreamReader(self.wire, self._accepts)
        self.got: list[Any] = []
        self.broken = False

    def _accepts(self, header: Any) -> bool:
        return bool(header.session == SESSION and self.merge.accepts(header))

    def feed(self, frames: list[bytes]) -> None:
        """As the client does: a stream that breaks its rules is given up."""
        self.wire.arrived.append(frames)
        for arrival in self.reader.read(1):
            if arrival.header is None:
                continue
            if arrival.error is not None or isinstance(arrival.header, messages.ShardError):
                self.broken = True
            elif isinstance(arrival.header, EndOfShard):
                self.merge.end(0)
            elif arrival.entries:
                self.merge.add(0, arrival.entries)
        while not self.broken and not isinstance(item := self.merge.next(), Signal):
            self.got.append(codec.decode(item[1].header, item[1].buffers))


def stream_of(session: str, batches: Sequence[Any], epoch: int = 1) -> list[list[bytes]]:
    """The data messages of a shard."""
    encoder, parcels = codec.Encoder(), []
    for number, batch in enumerate(batches):
        encoded = encoder.encode(batch)
        parcels.append(Parcel(epoch, number, Batches, encoded.header, encoded.buffers))
    parcels.append(Parcel(epoch, len(batches), EndOfShard))
    packed = itertools.chain.from_iterable(Packer(session, 0, 0).pack([parcel]) for parcel in parcels)
    return [[bytes(frame) for frame in message.frames] for message in packed]


BATCHES = [list(range(number)) for number in range(12)]
STREAM = stream_of(SESSION, BATCHES)
STRAY = [
    *stream_of(OTHER, ["of another session"]),
    *stream_of(SESSION, ["of an old epoch"], epoch=0),
    *stream_of(SESSION, ["of an epoch to come"], epoch=7),
]


def headers_only(rng: random.Random, frames: list[bytes]) -> list[bytes]:
    """Mutilated so that what is decoded at the end is either as it was sent, or not there.

    TCP and CURVE see to it that the bytes of a body are those that were sent; what may come is any other message.
    """
    match rng.randrange(4):
        case 0:
            return frames[: rng.randrange(1, len(frames) + 1)]
        case 1:
            return [frames[0][: rng.randrange(len(frames[0]))], *frames[1:]]
        case 2:
            return [rng.randbytes(rng.randrange(100)), *frames[1:]]
    return [*frames, rng.randbytes(5)]


def assault(rng: random.Random, reading: Reading, count: int) -> int:
    """The stream in order, with other messages between; returns how many messages it took."""
    sent = 0
    for frames in STREAM:
        for _ in range(rng.randrange(count)):
            match rng.randrange(3):
                case 0:
                    reading.feed(rng.choice(STRAY))
                case 1:
                    reading.feed(rng.choice(STREAM[: STREAM.index(frames) or 1]))  # again
                case 2:
                    reading.feed([rng.randbytes(rng.randrange(60)), rng.randbytes(rng.randrange(60))])
            sent += 1
        reading.feed(frames)
        sent += 1
    return sent


def test_a_stream_among_repeated_stray_and_random_messages_comes_out_as_it_was_sent() -> None:
    rng, sent = random.Random(SEED), 0
    while sent < STREAM_MESSAGES // 2:
        reading = Reading()
        sent += assault(rng, reading, count=8)
        assert not reading.broken
        assert reading.got == BATCHES


def test_a_stream_that_is_cut_shuffled_or_mutilated_gives_a_prefix_and_no_more() -> None:
    rng, sent = random.Random(SEED), 0
    while sent < STREAM_MESSAGES // 2:
        reading, arriving = Reading(), list(STREAM)
        for _ in range(rng.randrange(1, 4)):
            place = rng.randrange(len(arriving))
            match rng.randrange(3):
                case 0:
                    arriving.pop(place)
                case 1:
                    arriving.insert(place, arriving.pop(rng.randrange(len(arriving))))
                case 2:
                    arriving[place] = headers_only(rng, arriving[place])
        for frames in arriving:
            reading.feed(frames)
        sent += len(arriving)
        assert reading.got == BATCHES[: len(reading.got)]


@given(st.lists(st.lists(st.binary(max_size=200), min_size=1, max_size=4), max_size=20))
@settings(max_examples=300, deadline=None)
def test_any_bytes_at_all_are_read_without_an_exception_and_give_nothing(arriving: list[list[bytes]]) -> None:
    reading = Reading()
    for frames in arriving:
        reading.feed(frames)
    assert reading.got == []


@given(
    st.integers(0, len(BATCHES) - 1),
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 7)), min_size=1, max_size=8),
)
@settings(max_examples=300, deadline=None)
def test_changed_headers_are_read_without_an_exception(number: int, changes: list[tuple[int, int]]) -> None:
    header, rest = bytearray(STREAM[number][0]), STREAM[number][1:]
    for place, bit in changes:
        header[place % len(header)] ^= 1 << bit
    reading = Reading()
    reading.feed([bytes(header), *rest])
    assert reading.got in ([], [BATCHES[number]])
