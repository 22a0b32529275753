"""Every message on the wire: one frozen typed struct each, in MessagePack, nothing pickled.

Control channel, client DEALER <-> daemon ROUTER: ``[message]`` or ``[message, payload]``. The daemon relays what is
addressed to a worker, and what a worker answers, without a look at the payload.

    client                                  daemon                                worker
      | -- Hello ------------------------->   |                                     |
      |  <------------- Welcome | Refused --  |                                     |
      | -- OpenSession ------------------->   |                                     |
      |  <------- SessionOpened | Refused --  |                                     |
      | -- GraphChunk + payload, ... ----->   |                                     |
      |  <---------- GraphArriving, ... ----  |                                     |
      | -- StartWorker ------------------->   | == forked from the forkserver ==>   |
      |  <-------------------------------------- WorkerReady | WorkerFailed ------  |
      | -- StartEpoch + seeds ------------------------------------------------->    |
      |  <======================== data channel ================================    |
      | ========================= Credit ====================================>    |
      |  <-- WorkerExited (what a dead process cannot say itself) --                |
      | -- CloseSession ------------------>   |                                     |
      |  <------------------ SessionClosed -- |                                     |

    whoever may open a session
      | -- AskStatus --------------------->   |
      |  <----------------- Status | Refused --

Data channel, from a worker to the client, by a lane, or with keys from ROUTER to ROUTER: ``[header]`` or ``[header,
body, ...]``, in the order of production, so that the end of a shard and an exception cannot overtake the batches before
them. Small batches travel together. With keys, a large one is cut into ``Chunk`` messages, each of which is received
straight into its place while the next is under way, and each of which is a sign of life on a slow link. ``Credit``
goes the other way by the same connection.
"""

import enum
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

PROTOCOL_VERSION = 9
"""Changes with every change of a message: both ends must have the same."""

CHUNK_BYTES = 1 << 20
"""Largest body on the data channel: one 77 MB frame moved 1.24 GB/s, 0.5-1 MiB frames 2.4 GB/s."""

NONCE_BYTES = 32
"""Of what proves that both ends see the same memory."""

CONTROL_BYTES = CHUNK_BYTES + (64 << 10)
"""Largest frame that a control socket accepts: a graph chunk and some room."""

Count: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Identifier: TypeAlias = Annotated[str, Meta(min_length=32, max_length=32, pattern=r"^[0-9a-f]+\Z")]
Text: TypeAlias = Annotated[str, Meta(max_length=16_384)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0)]
Short: TypeAlias = Annotated[str, Meta(max_length=100)]


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages: compact arrays, told apart by their class's name."""


# Greeting.


class Hello(Message, frozen=True):
    """Client to daemon, first of all; repeated until answered."""

    protocol: int
    """``PROTOCOL_VERSION`` of the sender; must come first in every version, so that a mismatch can be told."""
    versions: dict[str, str]
    """Of python, torch, torchdata and this package."""
    client: Text
    """Who is asking, for logs and refusals: host name and process id."""


class Welcome(Message, frozen=True):
    """The daemon's answer to a Hello it can serve."""

    protocol: int
    """``PROTOCOL_VERSION`` of the daemon."""
    versions: dict[str, str]
    """Of python, torch, torchdata and this package."""
    boot: Identifier
    """Changes each time the daemon starts: tells a restarted daemon from one that was only slow."""
    host: Text
    """The daemon's host name."""
    slots: Count
    """Slots in all."""
    free: Count
    """Slots that no session holds."""
    sessions: Count
    """Sessions that hold the others."""
    ticket: Text
    """To be shown when a session is opened: this connection was looked at, and may open one."""


class Refused(Message, frozen=True):
    """The daemon will not do what was asked; the text is for the user."""

    kind: Text
    """Which error it becomes: ``version``, ``keys``, ``slots``, ``session``, ``graph``, ``size`` or ``draining``."""
    reason: Text
    """One sentence: who, what, which limit, what to do."""


# Sessions.


class SessionMessage(Message, frozen=True):
    """Base of all that concerns one session."""

    session: Identifier
    """Drawn at random by the client: who knows it may use the session."""

    def __str__(self) -> str:
        """For the log, which strangers may see."""
        return repr(self).replace(self.session, f"{self.session[:8]}...")


class CountedMessage(SessionMessage, frozen=True):
    """Base of those that tell how many others there were: a connection that breaks and heals may lose some."""

    sent: Count
    """Messages of this session sent before this one, by whoever sends it, to whom it is sent."""


class OpenSession(CountedMessage, frozen=True):
    """Client to daemon: hold slots for this session; repeated until answered, and to change their number."""

    client: Text
    """As in Hello."""
    slots: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
    """How many slots the session wants to hold here in all."""
    graph: Annotated[str, Meta(min_length=64, max_length=64)]
    """SHA-256 of the pickled graph, in hexadecimal: a daemon keeps graphs by it."""
    graph_bytes: Count
    """Size of the pickled graph."""
    graph_name: Short
    """What those who run the daemon see of it: the classes of its DataPipes."""
    ticket: Text
    """As in Welcome."""


class SessionOpened(CountedMessage, frozen=True):
    """The daemon holds these slots."""

    slots: Count
    """Slots that the session now holds here."""
    has_graph: bool
    """Whether the graph is here already and need not be sent."""


class GraphChunk(SessionMessage, frozen=True):
    """Client to daemon, with a payload of at most ``CHUNK_BYTES``: a piece of the pickled graph."""

    offset: Count
    """Where the payload belongs; chunks come in order."""


class GraphArriving(CountedMessage, frozen=True):
    """Daemon to client, each second and at the end: how much of the graph is here; on a slow link, a sign of life."""

    received: Count
    """Bytes of the pickled graph."""


class CloseSession(SessionMessage, frozen=True):
    """Client to daemon: end the session's workers and free its slots."""


class SessionClosed(SessionMessage, frozen=True):
    """The session is over here: asked for, or because the daemon ends; its slots are free."""

    reason: Text
    """Empty if the client asked for it."""


class Heartbeat(CountedMessage, frozen=True):
    """Client to daemon, every ``session.HEARTBEAT_S`` from the client's I/O thread: the session is alive."""


class Draining(SessionMessage, frozen=True):
    """Daemon to client: it will end; run the session's shards elsewhere from the next epoch on, or sooner."""

    reason: Text
    """Why."""
    grace: float
    """Seconds until it ends whatever is still running."""


class Phase(enum.IntEnum):
    """What a worker's main thread does, or waits for; not a message of its own."""

    IDLE = 0
    """It waits to be told what to do."""
    GRAPH = 1
    """The user's graph makes a batch, or is reset; that includes what it waits for, such as a dispatching worker."""
    REPLAY = 2
    """The same, for a batch that is suppressed."""
    ENCODING = 3
    """A batch is encoded, copied and sent."""
    CREDIT = 4
    """The window is full, and the training has batches of this shard that it has not consumed."""
    WIRE = 5
    """The window is full, and the training has consumed all that has arrived: the rest is under way."""


class WorkerReport(msgspec.Struct, frozen=True, array_like=True):
    """What a worker has done since its process was started; not a message of its own.

    Its seconds, of all phases together, are those since it was ready.
    """

    worker: Count
    """As in WorkerMessage."""
    attempt: Count
    """As in WorkerMessage."""
    phase: Phase
    """What it is at now."""
    batches: Count
    """Batches produced, not counting those that a replay suppressed."""
    nbytes: Count
    """Their size, encoded."""
    replayed: Count
    """Batches that a replay suppressed."""
    idle_s: Seconds
    """Seconds in ``Phase.IDLE``."""
    graph_s: Seconds
    """Seconds in ``Phase.GRAPH``."""
    replay_s: Seconds
    """Seconds in ``Phase.REPLAY``."""
    encoding_s: Seconds
    """Seconds in ``Phase.ENCODING``."""
    credit_s: Seconds
    """Seconds in ``Phase.CREDIT``."""
    wire_s: Seconds
    """Seconds in ``Phase.WIRE``."""


class HeartbeatReply(CountedMessage, frozen=True):
    """The daemon's answer to a Heartbeat."""

    boot: Identifier
    """As in Welcome."""
    reports: list[WorkerReport]
    """Of the session's workers on this daemon."""


# Workers.


class WorkerMessage(SessionMessage, frozen=True):
    """Base of all that concerns one worker process."""

    worker: Count
    """The shard: ``WorkerInfo.worker_id``; the dispatching worker, if there is one, comes after the last."""
    attempt: Count
    """0 for the first process of this shard, then one more each time it is run elsewhere or again."""


class StartWorker(WorkerMessage, frozen=True):
    """Client to daemon: run a shard in one of the session's slots; with keys, its payload is the session's secret."""

    sent: Count
    """As in CountedMessage: the graph must be here whole, and who had the slot must have been told to leave it."""
    num_workers: Count
    """``WorkerInfo.num_workers``."""
    prefetch_count: Annotated[int, Meta(ge=1)]
    """``worker_prefetch_cnt``: batches in flight that the window always allows."""
    prefetch_bytes: Annotated[int, Meta(ge=1)]
    """This worker's share of ``prefetch_bytes``."""

    @property
    def is_dispatching(self) -> bool:
        """Whether it is the one that feeds the others."""
        return self.worker == self.num_workers


class StopWorker(WorkerMessage, frozen=True):
    """Client to daemon, and on to the worker: end; the slot stays with the session."""


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """A worker's shared memory, for a client that sees it; not a message of its own."""

    fd: Count
    """Number of the board's descriptor in the worker."""
    nonce: Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
    """What stands on the board: proves that it is this worker's, and not one that merely looks alike."""


class WorkerReady(WorkerMessage, frozen=True):
    """Worker to client: the graph is built and sharded; the data channel is bound."""

    pid: Count
    """Process id on the daemon's machine."""
    port: Annotated[int, Meta(ge=1, le=65535)]
    """TCP port of the data channel, on the daemon's address."""
    offer: Offer | None
    """Its shared memory, unless it is the dispatching worker."""


class WorkerFailed(WorkerMessage, frozen=True):
    """Worker to client, with an encoded exception as payload: the graph could not be built or sharded."""

    missing: Text
    """Name of the module that the graph needs and the worker lacks; empty for any other failure."""


class WorkerExited(WorkerMessage, frozen=True):
    """Daemon to client: the process is gone, or had to be ended."""

    reason: Text
    """What happened, in words: ``was killed by SIGKILL``, ``exited with code 3``."""
    batch: Count | None
    """The batch that it was in the middle of; None if it was waiting, or replaying."""


class StartEpoch(WorkerMessage, frozen=True):
    """Client to worker, with the pickled seeds as payload: abandon whatever runs and begin this epoch."""

    epoch: Count
    """Grows by one each time within a session."""
    skip: Count
    """How many batches to suppress first: replay."""
    credit: Count
    """Batches of this shard consumed so far, as in Credit."""


class Credit(WorkerMessage, frozen=True):
    """Client to worker: how far the training loop has consumed; later ones replace earlier ones."""

    epoch: Count
    """Credit for any other epoch than the current one means nothing."""
    consumed: Count
    """Batches of this shard that were handed to the training loop in this epoch."""
    hungry: bool
    """Whether that is all that has arrived: what else the worker has sent is under way."""


class ConnectFeed(WorkerMessage, frozen=True):
    """Client to worker: where the dispatching worker is."""

    address: Text
    """Of its daemon."""
    port: Annotated[int, Meta(ge=1, le=65535)]
    """On which it feeds the others."""


class Pause(WorkerMessage, frozen=True):
    """Client to worker, with an optional pickled function as payload: stop producing and answer Paused."""

    request: Count
    """Comes back in the answer."""


class Resume(WorkerMessage, frozen=True):
    """Client to worker, with an optional pickled function as payload: go on and answer Done."""

    request: Count
    """Comes back in the answer."""


class Limit(WorkerMessage, frozen=True):
    """Client to worker, with a pickled function as payload: apply it to the graph and answer Done."""

    request: Count
    """Comes back in the answer."""
    num_batches: Count | None
    """The function's second argument."""


class Done(WorkerMessage, frozen=True):
    """Worker to client: a Pause, Resume or Limit was carried out; an encoded exception as payload if it failed."""

    request: Count
    """As in the request."""


class AskStack(WorkerMessage, frozen=True):
    """Client to worker: where is your main thread?"""


class Stack(WorkerMessage, frozen=True):
    """Worker to client, from its I/O thread: what the main thread is doing."""

    epoch: Count
    """The epoch that it is at."""
    produced: Count
    """Batches of that epoch that it has sent, or is replaying up to, and the end of its shard: more than have arrived
    are under way, or lost."""
    busy_s: float
    """Seconds spent so far in the graph's current ``next``; 0 if it is not in one."""
    where: Text
    """Function, file and line, or what the worker is waiting for."""


# What a daemon is doing, for those who run it.


class WorkerStatus(msgspec.Struct, frozen=True, array_like=True):
    """One worker process; rates are those of the last second; not a message of its own."""

    report: WorkerReport
    """What it has done."""
    pid: Count
    """Process id on the daemon's machine."""
    state: Short
    """``starting``, ``on standby``, ``running``, ``paused`` or ``ending``."""
    seconds: Seconds
    """Since its process was started."""
    cpu: Seconds
    """Percent of one core."""
    memory: Count
    """Bytes of it that are resident."""
    batches_per_s: Seconds
    """Batches produced in a second."""
    bytes_per_s: Seconds
    """Their size, encoded."""


class SessionStatus(msgspec.Struct, frozen=True, array_like=True):
    """One session; not a message of its own."""

    session: Short
    """The beginning of its identifier, as in the daemon's log: who knows all of it may use the session."""
    client: Short
    """As in OpenSession."""
    graph: Short
    """The beginning of the pickled graph's SHA-256."""
    graph_name: Short
    """As in OpenSession, and printable."""
    graph_bytes: Count
    """Size of the pickled graph."""
    state: Short
    """``open``, ``waits for its graph``, ``client silent`` or ``ending``."""
    seconds: Seconds
    """Since it was opened."""
    slots: Count
    """That it holds here."""
    workers: list[WorkerStatus]
    """Its processes here."""


class Totals(msgspec.Struct, frozen=True, array_like=True):
    """Since the daemon was started, with those that have ended; not a message of its own."""

    sessions: Count = 0
    """Sessions opened."""
    workers: Count = 0
    """Workers started."""
    lost: Count = 0
    """Workers that ended without having been told to."""
    strangers: Count = 0
    """Times that somebody could not connect, was not let in, or sent what is no message."""
    batches: Count = 0
    """As in WorkerReport, of all workers."""
    nbytes: Count = 0
    """As in WorkerReport, of all workers."""
    replayed: Count = 0
    """As in WorkerReport, of all workers."""
    idle_s: Seconds = 0.0
    """As in WorkerReport, of all workers."""
    graph_s: Seconds = 0.0
    """As in WorkerReport, of all workers."""
    replay_s: Seconds = 0.0
    """As in WorkerReport, of all workers."""
    encoding_s: Seconds = 0.0
    """As in WorkerReport, of all workers."""
    credit_s: Seconds = 0.0
    """As in WorkerReport, of all workers."""
    wire_s: Seconds = 0.0
    """As in WorkerReport, of all workers."""
    cpu_s: Seconds = 0.0
    """CPU time of all workers, in seconds."""


class AskStatus(Message, frozen=True):
    """Anybody who may open a session, to a daemon, without a greeting: what are you doing?"""

    protocol: int
    """As in Hello."""


class Status(Message, frozen=True):
    """The daemon's answer to AskStatus."""

    protocol: int
    """As in Welcome."""
    versions: dict[str, str]
    """As in Welcome."""
    boot: Identifier
    """As in Welcome."""
    host: Short
    """The daemon's host name."""
    pid: Count
    """Of the daemon."""
    uptime: Seconds
    """Seconds since it was started."""
    slots: Count
    """Slots in all."""
    free: Count
    """Slots that no session holds."""
    draining: Text
    """Why it takes no more sessions; empty if it does."""
    totals: Totals
    """Since it was started."""
    sessions: list[SessionStatus]
    """Those that are open."""


FromClient: TypeAlias = (
    Hello
    | AskStatus
    | OpenSession
    | GraphChunk
    | CloseSession
    | Heartbeat
    | StartWorker
    | StopWorker
    | ConnectFeed
    | StartEpoch
    | Pause
    | Resume
    | Limit
    | AskStack
)
FromDaemon: TypeAlias = (
    Welcome
    | Refused
    | SessionOpened
    | GraphArriving
    | SessionClosed
    | HeartbeatReply
    | Draining
    | WorkerReady
    | WorkerFailed
    | WorkerExited
    | Done
    | Stack
)
ToAsker: TypeAlias = Status | Refused
ToWorker: TypeAlias = ConnectFeed | StartEpoch | Pause | Resume | Limit | AskStack | StopWorker
FromWorker: TypeAlias = WorkerReady | WorkerFailed | Done | Stack


# Data channel.


class Data(WorkerMessage, frozen=True):
    """Base of the data channel's headers: where in which stream the body belongs."""

    epoch: Count
    """As in StartEpoch."""
    seq: Count
    """Number of the batch within its shard's epoch, from 0; of the first one in ``Batches``."""


class Opened(Data, frozen=True):
    """First message of every worker, without a body: the data channel works. By each new lane, until others follow."""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where in shared memory a buffer is; not a message of its own."""

    number: Count
    """Of the segment: no other one of this worker ever had it."""
    slot: Count
    """Where on the board the segment's return is noted."""
    fd: Count
    """Number of its descriptor in the worker."""
    size: Count
    """Of the segment, in bytes."""
    use: Count
    """What is noted on the board when nobody looks at it any more."""
    offset: Count
    """Of the buffer."""


class Batches(Data, frozen=True):
    """Batches of at most ``CHUNK_BYTES`` in all, not counting what lies in shared memory, or one of any size by a lane.

    Their codec headers come in one frame, then a frame for each buffer that has no place.
    """

    sizes: list[list[Count]]
    """Per batch: bytes of its codec header, then bytes of each of its buffers. None by a lane that was made again: then
    all before ``seq`` have been sent, and whoever misses one has lost it with a lane before."""
    places: dict[Count, Place]
    """Of the buffers that lie in shared memory: by their number in this message."""


class Large(Data, frozen=True):
    """One batch of more than ``CHUNK_BYTES``; its parts follow as Chunks."""

    sizes: list[Count]
    """Bytes of its codec header, then bytes of each of its buffers."""


class Chunk(Data, frozen=True):
    """Bytes of one part of the Large batch before, straight into their place."""

    part: Count
    """Which part: 0 is the codec header."""
    offset: Count
    """Where in the part the body belongs; chunks come in order."""


class EndOfShard(Data, frozen=True):
    """The shard is exhausted; ``seq`` counts all its batches."""


class ShardError(Data, frozen=True):
    """User code raised; the body is the encoded exception; ``seq`` counts the batches before it."""


FromWorkerData: TypeAlias = Opened | Batches | Large | Chunk | EndOfShard | ShardError
ToWorkerData: TypeAlias = Credit

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind)
    for kind in (FromClient, FromDaemon, ToAsker, ToWorker, FromWorker, FromWorkerData, ToWorkerData)
}


def encode(message: Message) -> bytes:
    """The message's first frame."""
    return _encoder.encode(message)


def decode(frame: bytes | bytearray | memoryview, kind: Any) -> Any:
    """A message of one of the unions above, checked field by field.

    Raises:
        msgspec.DecodeError: the frame is not such a message.
    """
    try:
        return _decoders[kind].decode(frame)
    except RecursionError as error:
        raise msgspec.DecodeError("the message is nested too deeply") from error
