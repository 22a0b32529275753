"""A link: how far the client has got with one daemon, and what it knows of it. No I/O.

Every legal change of a link's state is a row of ``TRANSITIONS``.

              welcome           ask              opened
    GREETING ---------> GREETED -------> OPENING -------> OPEN
                           ^  <--denied--/   ^  <--kept---/ |      kept: refused more slots than it holds
                           |                 +---- ask -----+
    any ------ lose ---> GREETING (it is silent, was restarted, has forgotten the session, or is left to end)
"""

import logging
from dataclasses import dataclass
from enum import Enum

logger = logging.getLogger(__name__)


class LinkState(Enum):
    """How far the client has got with one daemon."""

    GREETING = "no answer yet"
    GREETED = "answered"
    OPENING = "asked for slots"
    OPEN = "open"


class LinkEvent(Enum):
    """What moves a link from one state to another."""

    WELCOME = "it answered the greeting"
    ASK = "it is asked for slots"
    OPENED = "it holds slots"
    DENIED = "it has no slots for us"
    KEPT = "it has no more slots than those that it holds for us"
    LOSE = "it is lost"


_S, _E = LinkState, LinkEvent

TRANSITIONS: dict[tuple[LinkState, LinkEvent], LinkState] = {
    (_S.GREETING, _E.WELCOME): _S.GREETED,
    (_S.GREETED, _E.ASK): _S.OPENING,
    (_S.OPEN, _E.ASK): _S.OPENING,
    (_S.OPENING, _E.OPENED): _S.OPEN,
    (_S.OPENING, _E.DENIED): _S.GREETED,
    (_S.OPENING, _E.KEPT): _S.OPEN,
    **{(state, _E.LOSE): _S.GREETING for state in LinkState},
}


@dataclass
class Link:
    """One daemon, as the client sees it; times are those of the client's clock, in seconds."""

    address: str
    by_name: bool = False
    """Whether a name has this address, or had it, and the user did not give it."""
    state: LinkState = LinkState.GREETING
    heard: float = 0.0
    """When anything came from it."""
    greeted: float = 0.0
    """When it was sent the last Hello."""
    fresh: float = 0.0
    """When its socket was made."""
    beat: float = 0.0
    """When it was sent the last Heartbeat, or was asked for slots."""
    boot: str = ""
    """As in HeartbeatReply; empty until one has come."""
    host: str = ""
    slots: int = 0
    free: int = 0
    sessions: int = 0
    """As in Welcome."""
    wanted: int = 0
    """Slots that it was asked to hold."""
    held: int = 0
    """Slots that it holds for this session."""
    has_graph: bool = False
    """Whether the graph is there, or was sent."""
    arriving: int | None = None
    """Bytes of the graph that have arrived there; None if it is not on its way."""
    trouble: str = ""
    """What it said, or what became of it, for an error's text."""
    rejected: bool = False
    """Whether keys are why no connection comes about."""
    ticket: str = ""
    refused_at: float = float("-inf")
    dropped: float | None = None
    """When its connection broke, unless it has been heard since."""
    draining: bool = False
    """Whether it has said that it will end."""
    was_open: bool = False
    """Whether it may know of the session."""
    sent: int = 0
    received: int = 0
    """Messages of this session to it and from it, as in CountedMessage."""

    def __str__(self) -> str:
        held = f"held by {self.sessions} session{'s' * (self.sessions != 1)}"
        return f"{self.free} of {self.slots} slots free on {self.address}" + (f": {held}" if self.sessions else "")

    @property
    def in_use(self) -> bool:
        """Whether the daemon has been asked for slots, and not been lost since."""
        return self.state in (LinkState.OPENING, LinkState.OPEN)

    def change(self, event: LinkEvent) -> None:
        """The one place where the state changes."""
        self.state = TRANSITIONS[self.state, event]
        logger.debug("= %s: %s", self.address, event.value)
        if event is LinkEvent.LOSE:
            self.held, self.has_graph, self.draining, self.dropped = 0, False, False, None
            self.arriving = None
