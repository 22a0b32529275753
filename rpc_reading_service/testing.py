"""For tests, also those of your own project: daemons that live as long as a ``with`` block."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rpc_reading_service.launchers import LocalDaemons


@contextmanager
def local_workers(count: int, slots: int = 1, options: Sequence[str] = ()) -> Iterator[list[str]]:
    """Start daemons on free loopback ports and yield their addresses, ``["127.0.0.1:port", ...]``.

    Args:
        count: how many daemons
        slots: of each
        options: further command-line options for each
    """
    daemons = LocalDaemons([slots] * count, options)
    try:
        yield daemons.addresses
    finally:
        daemons.close()
