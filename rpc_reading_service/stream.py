"""Batches become data messages, and data messages from a socket become batches again.

The two ends of a stream: ``Packer`` in a worker; ``StreamReader`` in a client with keys, and in a worker that a
dispatching worker feeds. ``lanes`` has others, for clients without. What arrives is received straight into memory of
its own.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import msgspec

from rpc_reading_service import buffers, messages, protocol, segments
from rpc_reading_service.buffers import Borrowed
from rpc_reading_service.errors import StreamError
from rpc_reading_service.merge import Entry
from rpc_reading_service.messages import (
    CHUNK_BYTES,
    Batches,
    Chunk,
    Data,
    FromWorkerData,
    Large,
    Message,
    Opened,
)
from rpc_reading_service.transport import Copied, Piece

BATCHES_PER_MESSAGE = 1024


# The sending end.


class Parcel(msgspec.Struct):
    """Something for the client, in the order of production."""

    epoch: int
    seq: int
    kind: type[Data]
    """Batches for a batch, EndOfShard or ShardError for what ends the shard."""
    header: bytes = b""
    buffers: "Sequence[memoryview | Borrowed | Copied | segments.Lent]" = ()
    sizes: list[int] = []
    """Bytes of the header, and of each buffer; set here, whatever was given, since they are asked for several times."""

    def __post_init__(self) -> None:
        self.sizes = [len(self.header), *[buffer.nbytes for buffer in self.buffers]]

    @property
    def travelling(self) -> list[memoryview | Borrowed | Copied]:
        """The buffers that do not lie in shared memory."""
        return [buffer for buffer in self.buffers if not isinstance(buffer, segments.Lent)]

    @property
    def is_borrowed(self) -> bool:
        """Whether it cannot wait."""
        return Borrowed in map(type, self.buffers)


class Packed(msgspec.Struct):
    """A message, ready to be sent."""

    frames: list[Piece]
    parcels: Sequence[Parcel] = ()
    """What is in it."""


class Packer:
    """Turns the parcels of one stream into messages: small batches together, a large one in chunks.

    Args:
        session, worker, attempt: which stream, for the headers
    """

    def __init__(self, session: str, worker: int, attempt: int) -> None:
        self._stream = (session, worker, attempt)

    def opened(self) -> Packed:
        """The first message of all."""
        return Packed(self._message(Opened(*self._stream, 0, 0)))

    def nothing_before(self, epoch: int, seq: int) -> Packed:
        """No batch: says that all before this number have been sent, so that a gap shows though nothing else comes."""
        return Packed(self._message(Batches(*self._stream, epoch, seq, [], {}), b""))

    def pack(self, parcels: Sequence[Parcel]) -> Iterator[Packed]:
        """The messages for these parcels, in order."""
        together: list[Parcel] = []
        room = CHUNK_BYTES
        for parcel in parcels:
            nbytes = len(parcel.header)
            if parcel.buffers:
                nbytes += sum([buffer.nbytes for buffer in parcel.travelling])
            small = parcel.kind is Batches and nbytes <= CHUNK_BYTES
            if together and (not small or nbytes > room or len(together) == BATCHES_PER_MESSAGE):
                yield self._batches(together)
                together, room = [], CHUNK_BYTES
            if small:
                together.append(parcel)
                room -= nbytes
            elif parcel.kind is Batches:
                yield from self._large(parcel)
            else:
                yield Packed(self._message(self._header(parcel, parcel.kind), parcel.header), [parcel])
        if together:
            yield self._batches(together)

    def _header(self, parcel: Parcel, kind: Any, *fields: Any) -> Message:
        header: Message = kind(*self._stream, parcel.epoch, parcel.seq, *fields)
        return header

    def _batches(self, parcels: Sequence[Parcel]) -> Packed:
        all_buffers = [buffer for parcel in parcels for buffer in parcel.buffers]
        places = {n: buffer.place for n, buffer in enumerate(all_buffers) if isinstance(buffer, segments.Lent)}
        header = self._header(parcels[0], Batches, [parcel.sizes for parcel in parcels], places)
        body = parcels[0].header if len(parcels) == 1 else b"".join([parcel.header for parcel in parcels])
        frames = [buffer for number, buffer in enumerate(all_buffers) if number not in places]
        return Packed(self._message(header, body, frames), parcels)

    def _message(self, header: Message, body: bytes | None = None, frames: Sequence[Any] = ()) -> list[Piece]:
        """The frames of one message."""
        pieces = [frame.frames[0] if isinstance(frame, Copied) else frame for frame in frames]
        return [messages.encode(header), *([] if body is None else [body]), *pieces]

    def _large(self, parcel: Parcel) -> Iterator[Packed]:
        yield Packed([messages.encode(self._header(parcel, Large, parcel.sizes))], [parcel])
        for part, data in enumerate([memoryview(parcel.header), *parcel.travelling]):
            for number, piece in enumerate(_pieces(data)):
                header = self._header(parcel, Chunk, part, number * CHUNK_BYTES)
                yield Packed([messages.encode(header), piece], [parcel])


def _pieces(data: Any) -> Sequence[Piece]:
    """Each of ``CHUNK_BYTES``, but for the last; none of nothing."""
    if isinstance(data, Copied):
        return data.frames if data.nbytes else []
    return [data[offset : offset + CHUNK_BYTES] for offset in range(0, data.nbytes, CHUNK_BYTES)]


# The receiving end.


class Receiver(Protocol):
    """What a ``transport`` socket must offer to be read from."""

    def receive(self) -> bytes | None: ...

    @property
    def more(self) -> bool: ...

    def receive_frame(self) -> bytes: ...

    def receive_into(self, place: Any) -> int: ...

    def skip(self) -> None: ...


class Arrival(msgspec.Struct, frozen=True):
    """One data message, taken in."""

    header: Data | None
    """None if it could not be read."""
    entries: Sequence[Entry] = ()
    """Batches that are complete with it; none for a piece of a larger one."""
    body: bytes = b""
    """Of a ShardError."""
    error: StreamError | None = None
    """The message breaks the stream's rules."""

    @property
    def is_large(self) -> bool:
        """Whether it took long to read: a batch of more than ``CHUNK_BYTES`` that does not lie in shared memory."""
        if not self.entries or self.entries[0].nbytes <= CHUNK_BYTES:
            return False
        return not (isinstance(self.header, Batches) and self.header.places)


def travelling_sizes(header: Batches) -> list[int]:
    """Of the buffers that do not lie in shared memory."""
    sizes = [size for sizes in header.sizes for size in sizes[1:]]
    return [size for number, size in enumerate(sizes) if number not in header.places]


class Reader:
    """Reads the streams of any number of workers.

    Args:
        accepts: whether a message with this header is wanted; asked before anything is allocated for it
        allocate: gives the memory for a buffer
    """

    def __init__(
        self, accepts: Callable[[Any], bool], allocate: Callable[[int], memoryview] = buffers.allocate
    ) -> None:
        self._accepts = accepts
        self._allocate = allocate
        self._attachments: dict[tuple[int, int], segments.Attachment] = {}

    def attach(self, worker: int, attempt: int, attachment: segments.Attachment) -> None:
        """The buffers of this worker may lie in shared memory."""
        self._attachments[worker, attempt] = attachment

    def detach(self, worker: int, attempt: int) -> None:
        """The worker is gone; whatever is still looked at stays mapped."""
        self._attachments.pop((worker, attempt), None)

    def _entries(self, header: Batches, body: Any, travelling: Iterator[Any]) -> list[Entry]:
        """The batches of one message.

        Args:
            body: their codec headers
            travelling: the buffers that do not lie in shared memory
        """
        entries, start = [], 0
        lent, numbers = self._look(header) if header.places else {}, itertools.count()
        for header_size, *sizes in header.sizes:
            end = start + header_size
            parts: Sequence[Any] = ()
            nbytes = protocol.BATCH_OVERHEAD_BYTES + header_size
            if sizes:
                nbytes += sum(sizes)
                parts = [lent[n] if (n := next(numbers)) in lent else next(travelling) for _ in sizes]
            entries.append(Entry(body[start:end], parts, nbytes))
            start = end
        return entries

    def _look(self, header: Batches) -> dict[int, memoryview]:
        attachment = self._attachments.get((header.worker, header.attempt))
        if attachment is None:
            raise StreamError(f"worker {header.worker}: a buffer lies in shared memory that was not agreed upon")
        return attachment.look(header.places, [size for sizes in header.sizes for size in sizes[1:]])

    def _refuse(self, header: Any) -> None:
        attachment = self._attachments.get((header.worker, header.attempt))
        if isinstance(header, Batches) and attachment is not None:
            for place in header.places.values():
                attachment.give_back(place)


class StreamReader(Reader):
    """Reads what any number of workers send to one socket of ZeroMQ's.

    Args:
        receiver: the socket
        accepts, allocate: see ``Reader``
    """

    def __init__(
        self,
        receiver: Receiver,
        accepts: Callable[[Any], bool],
        allocate: Callable[[int], memoryview] = buffers.allocate,
    ) -> None:
        super().__init__(accepts, allocate)
        self._receiver = receiver
        self.drained = True
        """Whether the last ``read`` ended since nothing more had arrived."""
        self._assemblies: dict[int, tuple[Large, buffers.Assembly]] = {}

    def read(self, at_most: int) -> Iterator[Arrival]:
        """What has arrived and is wanted."""
        self.drained = False
        for _ in range(at_most):
            self._receiver.skip()  # what the last message had too many, or Ctrl-C left of it
            frame = self._receiver.receive()
            if frame is None:
                self.drained = True
                return
            arrival = self._take_in(frame)
            if arrival is not None:
                yield arrival

    def forget(self, worker: int) -> None:
        """The rest of the worker's batch will not come."""
        self._assemblies.pop(worker, None)

    def _take_in(self, frame: bytes) -> Arrival | None:
        header: Any = None
        try:
            header = messages.decode(frame, FromWorkerData)
            if self._accepts(header):
                return self._receive(header)
            self._refuse(header)
            return None
        except msgspec.DecodeError as error:
            return Arrival(None, error=StreamError(f"a data message cannot be read: {error}"))
        except StreamError as error:
            self.forget(header.worker)
            return Arrival(header, error=error)

    def _receive(self, header: Any) -> Arrival:
        if isinstance(header, Chunk):
            return Arrival(header, self._chunk(header))
        self.forget(header.worker)  # what it had begun was of an epoch that is over
        match header:
            case Batches():
                return Arrival(header, self._batches(header))
            case Large():
                self._assemblies[header.worker] = (header, self._assembly(header))
                return Arrival(header)
            case _:
                return Arrival(header, body=self._receiver.receive_frame() if self._receiver.more else b"")

    def _batches(self, header: Batches) -> list[Entry]:
        if not self._receiver.more:
            raise StreamError(f"worker {header.worker}: a message with batches has no body")
        body = self._receiver.receive_frame()  # whose slices, unlike a view's, the garbage collector need not look at
        if not all(header.sizes) or sum(sizes[0] for sizes in header.sizes) != len(body):
            raise StreamError(f"worker {header.worker}: the body has not the size that was announced")
        return self._entries(header, body, (self._buffer(header, size) for size in travelling_sizes(header)))

    def _assembly(self, header: Large) -> buffers.Assembly:
        try:
            return buffers.Assembly(header.sizes, self._allocate)
        except (MemoryError, ValueError, OSError, OverflowError) as error:
            nbytes = sum(header.sizes)
            raise StreamError(f"worker {header.worker}: no memory for a batch of {nbytes} bytes") from error

    def _buffer(self, header: Batches, size: int) -> Any:
        if size > CHUNK_BYTES or not self._receiver.more:
            raise StreamError(f"worker {header.worker}: a buffer is missing, or larger than a message may be")
        buffer = self._allocate(size)
        if self._receiver.receive_into(buffer) != size:
            raise StreamError(f"worker {header.worker}: a buffer has not the size that was announced")
        return buffer

    def _chunk(self, chunk: Chunk) -> list[Entry]:
        large, assembly = self._assemblies.get(chunk.worker, (None, None))
        if large is None or assembly is None or _stream(large) != _stream(chunk):
            return []
        place = assembly.place(chunk.part, chunk.offset)
        size = self._receiver.receive_into(place[:CHUNK_BYTES]) if place is not None and self._receiver.more else 0
        if place is None or not 0 < size <= place.nbytes:
            raise StreamError(f"worker {chunk.worker}: a piece of a batch is missing, or has the wrong size")
        assembly.filled(chunk.part, size)
        if not assembly.complete:
            return []
        self.forget(chunk.worker)
        header, *parts = assembly.parts
        return [Entry(header, parts, protocol.weight(large.sizes))]


def _stream(header: Large | Chunk) -> tuple[int, int, int]:
    return header.attempt, header.epoch, header.seq
