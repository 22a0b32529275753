"""What a session wants done, one named tuple each: ``session`` decides, the client's I/O thread carries out. No I/O."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from rpc_reading_service.messages import Message, Offer


class Send(NamedTuple):
    """Send a control message."""

    address: str
    message: Message
    payload: bytes | memoryview | None = None


class ConnectData(NamedTuple):
    """Connect to a worker's data channel."""

    worker: int
    attempt: int
    address: str
    port: int
    pid: int
    offer: Offer | None
    """Its shared memory."""


class SendData(NamedTuple):
    """Send a message to a worker by its data channel."""

    worker: int
    attempt: int
    message: Message


class DisconnectData(NamedTuple):
    """The worker behind this data channel is gone."""

    worker: int
    attempt: int


class Reconnect(NamedTuple):
    """The daemon is lost: start over with a fresh socket, so that nothing stale is delivered."""

    address: str


class Leave(NamedTuple):
    """The daemon is not needed any more: close its socket."""

    address: str


class Resolve(NamedTuple):
    """Ask which addresses the names have now; the answer is ``ClientSession.resolved``."""


class Drop(NamedTuple):
    """Go on without the rest of this shard in this epoch."""

    worker: int
    epoch: int
    reason: str


class Fail(NamedTuple):
    """The session cannot go on."""

    error: BaseException


class FailRemotely(NamedTuple):
    """User code failed while a worker was set up; the payload is its encoded exception."""

    payload: bytes
    where: str
    address: str
    missing: str


class FailToConnect(NamedTuple):
    """No answer from these daemons within ``connect_timeout``, and no address for these names."""

    addresses: list[str]
    unresolved: Sequence[str] = ()
    """One sentence for each name."""


Action: TypeAlias = (
    Send
    | ConnectData
    | SendData
    | DisconnectData
    | Reconnect
    | Leave
    | Resolve
    | Drop
    | Fail
    | FailRemotely
    | FailToConnect
)
