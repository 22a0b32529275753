"""Where an epoch stands, as a few hundred bytes: what ``DataLoader2.state_dict`` keeps of the reading service.

The state counts what the training loop has consumed, never what was produced or prefetched. It is MessagePack behind a
checksum, and nothing in it is unpickled: bytes that are not a state, or are damaged, are refused in words.
"""

import zlib
from typing import Annotated

import msgspec
from msgspec import Meta

from rpc_reading_service.errors import CheckpointError

VERSION = 1
_MAGIC = b"rpc-reading-state"

Count = Annotated[int, Meta(ge=0)]


class State(msgspec.Struct, frozen=True, array_like=True):
    """A position in the stream."""

    num_workers: Annotated[int, Meta(ge=1)]
    """Shards; only as many can go on from here."""
    graph: str
    """Fingerprint of the graph's structure."""
    epoch: Count
    """Epochs begun so far; 0 before the first."""
    ended: bool
    """Whether the epoch is over: the next one follows."""
    consumed: list[Count]
    """Batches consumed, per shard."""
    turn: Count
    """The shard whose turn it is in round robin."""
    skip: Count
    """Elements to suppress at the end of the graph, where the part in the training process must run again."""
    received: str
    """Fingerprint of the seed generator that the epoch was begun with."""
    generator: list[list[int]]
    """State of the seed generator from which the epoch's seeds are drawn."""
    torch_before: str
    """Fingerprint of torch's global generator before the epoch drew its one number from it."""


def dump(state: State) -> bytes:
    body = msgspec.msgpack.encode(state)
    return _MAGIC + bytes([VERSION]) + zlib.crc32(body).to_bytes(4, "big") + body


def load(data: bytes) -> State:
    """The state in these bytes.

    Raises:
        CheckpointError: they are none, are of another version, or are damaged.
    """
    if not isinstance(data, bytes) or not data.startswith(_MAGIC):
        raise CheckpointError(
            "the reading service's state is not one of RPCReadingService: it was saved with another reading service; "
            "restore it with that one"
        )
    header = len(_MAGIC)
    version, checksum, body = data[header : header + 1], data[header + 1 : header + 5], data[header + 5 :]
    if version != bytes([VERSION]):
        found = version[0] if version else "none"
        raise CheckpointError(
            f"the reading service's state has version {found}, this package reads version {VERSION}: restore it with "
            "the version of rpc-reading-service that saved it"
        )
    try:
        if zlib.crc32(body).to_bytes(4, "big") != checksum:
            raise msgspec.DecodeError("checksum does not match")
        state = msgspec.msgpack.decode(body, type=State)
        if len(state.consumed) != state.num_workers or state.turn >= state.num_workers:
            raise msgspec.DecodeError("counts do not match num_workers")
    except msgspec.DecodeError as error:
        raise CheckpointError(f"the reading service's state is damaged ({error}): use an earlier checkpoint") from error
    return state


def check(state: State, num_workers: int | None, graph: str) -> None:
    """Whether a service with this ``num_workers`` and graph can go on from the state.

    Raises:
        CheckpointError: it cannot; the text says which number or graph would be right.
    """
    if num_workers is not None and num_workers != state.num_workers:
        raise CheckpointError(
            f"the checkpoint was saved with num_workers={state.num_workers}, but this service has "
            f"num_workers={num_workers}: shards cannot be recut in mid-stream; pass num_workers={state.num_workers}"
        )
    if graph != state.graph:
        raise CheckpointError(
            "the checkpoint was saved with another graph: its DataPipes are not those of this one; restore it with the "
            "graph that it was saved with"
        )
