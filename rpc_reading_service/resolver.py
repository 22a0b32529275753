"""``dns://name:port``: every daemon whose address the name has, asked again while a session lasts.

The system's resolver may take as long as it likes and cannot be interrupted, so that each question has a thread of its
own: neither the training loop nor the client's I/O thread waits for one longer than it wants to.
"""

import logging
import threading
from collections.abc import Callable, Sequence

from rpc_reading_service import transport
from rpc_reading_service.errors import AddressError
from rpc_reading_service.transport import Deadline

logger = logging.getLogger(__name__)

SCHEME = "dns://"

AGAIN_S = 1.0
"""How long after a question in vain the next one is asked: names of daemons that are being started come late."""


def is_name(address: str) -> bool:
    """Whether it stands for every address that a name has."""
    return address.startswith(SCHEME)


def normalize(address: str) -> str:
    """A worker address of either kind, checked, as it is written here.

    Raises:
        AddressError: it is malformed.
    """
    scheme = SCHEME if is_name(address) else ""
    return scheme + transport.join_address(*transport.split_address(address.removeprefix(scheme)))


def look_up(names: Sequence[str]) -> list[str]:
    """The addresses of all these names, sorted, since every rank of a distributed training must have one order.

    Raises:
        AddressError: a name does not resolve.
    """
    return sorted({address for name in names for address in transport.resolve(name.removeprefix(SCHEME))})


class Resolver:
    """The names of one session.

    Args:
        names: ``dns://name:port`` each
        done: called, in another thread, when ``take`` has something
    """

    def __init__(self, names: Sequence[str], done: Callable[[], None]) -> None:
        self._names = names
        self._done = done
        self._asked: _Question | None = None

    def first(self, deadline: Deadline) -> list[str]:
        """The addresses, once every name has one; empty without names.

        Raises:
            AddressError: a name does not resolve by the deadline.
        """
        while self._names:
            question = _Question(self._names, lambda: None)
            question.join(deadline.remaining())
            if question.found is not None:
                return question.found
            if deadline.expired:
                raise question.trouble or AddressError(self._unanswered(deadline))
            logger.warning("%s; it is asked again", question.trouble)
            threading.Event().wait(deadline.remaining(at_most=AGAIN_S))
        return []

    def _unanswered(self, deadline: Deadline) -> str:
        return f"{', '.join(self._names)}: no answer from this machine's DNS within {deadline.timeout:g} s"

    def ask(self) -> None:
        """Ask once more, unless a question is open."""
        if self._asked is None:
            self._asked = _Question(self._names, self._done)

    def take(self) -> list[str] | None:
        """The answer to ``ask``, once; None while there is none, and if a name does not resolve."""
        question = self._asked
        if question is None or not question.is_over:
            return None
        self._asked = None
        if question.trouble is not None:
            logger.warning("%s; the addresses that it had are kept", question.trouble)
        return question.found


class _Question(threading.Thread):
    """Asks the system for the addresses, from now on."""

    def __init__(self, names: Sequence[str], done: Callable[[], None]) -> None:
        super().__init__(name="rpc-reading-resolver", daemon=True)
        self._names = names
        self._done = done
        self.found: list[str] | None = None
        self.trouble: AddressError | None = None
        self.is_over = False
        self.start()

    def run(self) -> None:
        try:
            self.found = look_up(self._names)
        except AddressError as error:
            self.trouble = error
        finally:
            self.is_over = True
            self._done()
