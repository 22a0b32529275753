"""Every error this package raises, drawn as a tree: one class per thing a user can do about it.

    RPCReadingError (RuntimeError)
    ├── AddressError (also ValueError)      a worker address is malformed, repeated or does not resolve: mend the list
    ├── ConnectError (also ConnectionError) no daemon answers at an address: start it, or open the port
    ├── VersionError                        the two ends do not fit together: install matching versions
    ├── KeysError                           keys are missing, unreadable, or not those of the other side: mend the keys
    ├── SlotsError                          too few free slots: add daemons, or ask for fewer workers
    ├── GraphError                          the graph cannot be split, sent or rebuilt: change the graph
    │   └── GraphPickleError                an attribute of a DataPipe cannot be pickled
    ├── CheckpointError (also ValueError)   a saved state is not ours, damaged, or of another graph: use the right one
    ├── BatchError                          a batch cannot be encoded: change what the graph yields
    ├── WorkerError                         user code failed in a worker, with an exception that cannot be rebuilt here
    ├── WorkerLostError                     a worker or its daemon died: look at that machine
    ├── WorkerTimeoutError (TimeoutError)   a worker is alive but silent for longer than ``timeout``
    ├── StreamError                         the data channel broke its own rules: a bug, or bytes from a stranger
    └── ClosedError                         the reading service was used after ``finalize``, or in a forked child

A user's own exception is not in the tree: it is raised as the type it had in the worker.
"""


class RPCReadingError(RuntimeError):
    """Base of every error raised by this package."""


class AddressError(RPCReadingError, ValueError):
    """A worker address is malformed, given twice, or does not resolve."""


class ConnectError(RPCReadingError, ConnectionError):
    """No daemon answered at one or more addresses within ``connect_timeout``."""


class KeysError(RPCReadingError):
    """Keys are missing, cannot be read, can be read by others, or are not those that the other side knows."""


class VersionError(RPCReadingError):
    """Client and daemon speak different protocols, or run Pythons that cannot exchange pickles."""


class SlotsError(RPCReadingError):
    """The daemons have fewer free slots than the session needs."""


class GraphError(RPCReadingError):
    """The DataPipe graph cannot be split, sent, or rebuilt on a worker."""


class GraphPickleError(GraphError):
    """An attribute of a DataPipe cannot be pickled."""


class CheckpointError(RPCReadingError, ValueError):
    """A saved state cannot be restored: not ours, damaged, or of another graph or ``num_workers``."""


class BatchError(RPCReadingError):
    """A batch cannot be encoded for the wire."""


class WorkerError(RPCReadingError):
    """User code failed in a worker with an exception that cannot be rebuilt in the training process."""


class WorkerLostError(RPCReadingError):
    """A worker, or the daemon that it belongs to, is gone."""


class WorkerTimeoutError(RPCReadingError, TimeoutError):
    """A worker is alive but has delivered nothing for longer than ``timeout`` seconds."""


class StreamError(RPCReadingError):
    """A data message breaks the stream's own rules, such as a gap in its sequence numbers."""


class ClosedError(RPCReadingError):
    """The reading service was used after ``finalize``, or in a forked child of the process that opened it."""
