"""Run the DataPipe graph of a torchdata ``DataLoader2`` on remote workers and feed its batches back.

    from rpc_reading_service import RPCReadingService
    loader = DataLoader2(pipe, reading_service=RPCReadingService(workers=["cpu1:5555", "cpu2:5555"]))

Importing the package is cheap: torch and torchdata are loaded with the first use of a public name, so that the
daemon, which needs neither, stays small.
"""

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rpc_reading_service.errors import (
        AddressError,
        BatchError,
        CheckpointError,
        ClosedError,
        ConnectError,
        GraphError,
        GraphPickleError,
        KeysError,
        RPCReadingError,
        SlotsError,
        StreamError,
        VersionError,
        WorkerError,
        WorkerLostError,
        WorkerTimeoutError,
    )
    from rpc_reading_service.inplace import collate, empty
    from rpc_reading_service.reading_service import RPCReadingService
    from rpc_reading_service.security import CurveKeys
    from rpc_reading_service.statistics import Statistics

__version__ = "0.1.0"

__all__ = [
    "AddressError",
    "BatchError",
    "CheckpointError",
    "ClosedError",
    "ConnectError",
    "CurveKeys",
    "GraphError",
    "GraphPickleError",
    "KeysError",
    "RPCReadingError",
    "RPCReadingService",
    "SlotsError",
    "Statistics",
    "StreamError",
    "VersionError",
    "WorkerError",
    "WorkerLostError",
    "WorkerTimeoutError",
    "collate",
    "empty",
]

_MODULES = {
    "RPCReadingService": "reading_service",
    "CurveKeys": "security",
    "Statistics": "statistics",
    "collate": "inplace",
    "empty": "inplace",
}
"""Of the public names that are no errors."""


def _check_torchdata(version: str) -> None:
    """torchdata removed DataLoader2 and its DataPipes in 0.10: say so before anything fails deep inside."""
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < (0, 8) or (major, minor) >= (0, 10):
        raise ImportError(
            f"rpc_reading_service needs torchdata 0.8 or 0.9, which have DataLoader2, but torchdata {version} is "
            "installed: pip install 'torchdata>=0.8,<0.10'"
        )


_check_torchdata(metadata.version("torchdata"))


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
