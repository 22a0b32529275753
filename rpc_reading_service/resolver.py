"""``dns://name:port``: every daemon whose address the name has, asked again while a session lasts.

The system's resolver may take as long as it likes and cannot be interrupted, so that each question has a thread of its
own: neither the training loop nor the client's I/O thread waits for one, and no name for another.
"""

import logging
import threading
from collections.abc import Callable, Sequence

from rpc_reading_service import transport
from rpc_reading_service.errors import AddressError

logger = logging.getLogger(__name__)

SCHEME = "dns://"


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


class Resolver:
    """The names of one session, each asked about by itself: one that does not resolve holds up no other.

    Args:
        names: ``dns://name:port`` each
        done: called, in another thread, when ``take`` has something
    """

    def __init__(self, names: Sequence[str], done: Callable[[], None]) -> None:
        self._names = names
        self._done = done
        self._asked: dict[str, Question] = {}
        self._known: dict[str, list[str]] = {}
        self._troubles: dict[str, str] = {}

    def ask(self) -> None:
        """Ask for the addresses of each name once more, unless that question is open."""
        for name in self._names:
            if name not in self._asked:
                self._asked[name] = Question(name, self._done)

    def take(self) -> tuple[list[str], dict[str, str]] | None:
        """What is known now, if any answer has come since the last call.

        Returns:
            The addresses of all names, sorted, since every rank of a distributed training must have one order; and
            those names that have none, each with the reason, which is empty as long as there is no answer.
        """
        over = [question for question in self._asked.values() if question.is_over]
        for question in over:
            del self._asked[question.address]
            self._note(question)
        if not over:
            return None
        addresses = {address for found in self._known.values() for address in found}
        unknown = [name for name in self._names if name not in self._known]
        return sorted(addresses), {name: self._troubles.get(name, "") for name in unknown}

    def _note(self, question: "Question") -> None:
        """A trouble is logged once, however often the question is repeated."""
        name, trouble = question.address, question.trouble
        if trouble and trouble != self._troubles.get(name):
            kept = "the addresses that it had are kept" if name in self._known else "it is asked again"
            logger.warning("%s; %s", trouble, kept)
        self._troubles[name] = trouble
        if question.found:
            self._known[name] = question.found


class Question(threading.Thread):
    """Asks the system for the addresses of a name, from now on."""

    def __init__(self, name: str, done: Callable[[], None]) -> None:
        super().__init__(name="rpc-reading-resolver", daemon=True)
        self.address = name
        self._done = done
        self.found: list[str] = []
        self.trouble = ""
        self.is_over = False
        self.start()

    def run(self) -> None:
        try:
            self.found = transport.resolve(self.address.removeprefix(SCHEME))
        except AddressError as error:
            self.trouble = str(error)
        finally:
            self.is_over = True
            self._done()
