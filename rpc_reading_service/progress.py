"""What takes long before batches come: pickling, the graph on its way, workers starting, a replay; without I/O."""

from collections.abc import Sequence
from typing import NamedTuple

SHORT_S = 2.0
"""What takes no longer than this is nobody's concern."""

AGAIN_S = 10.0
"""How often the log says how far something is that lasts."""


class Stage(NamedTuple):
    """Something that takes its time, and how far it is."""

    name: str
    """As a heading: ``sending the graph``."""
    done: float
    total: float | None
    """None if nobody knows it before."""
    unit: str
    """Of ``done`` and ``total``; empty for what cannot be counted."""

    @property
    def amount(self) -> str:
        total = "" if self.total is None else f" of {self.total:,.0f}"
        return f"{self.done:,.0f}{total} {self.unit}" if self.unit else ""

    def __str__(self) -> str:
        return f"{self.name}: {self.amount}" if self.unit else self.name


class Progress:
    """Which stages last, and what there is to log of them."""

    def __init__(self) -> None:
        self.lasting: list[Stage] = []
        self._since: dict[str, float] = {}
        self._tell_at: dict[str, float] = {}

    def look(self, stages: Sequence[Stage], now: float) -> list[str]:
        """What is going on now; returns lines for the log."""
        lines = [self._over(name, now) for name in self._since.keys() - {stage.name for stage in stages}]
        lasting = []
        for stage in stages:
            since = self._since.setdefault(stage.name, now)
            if now - since < SHORT_S:
                continue
            lasting.append(stage)
            if now >= self._tell_at.get(stage.name, now):
                self._tell_at[stage.name] = now + AGAIN_S
                lines.append(f"{stage}, after {now - since:.0f} s")
        self.lasting = lasting
        return [line for line in lines if line]

    def _over(self, name: str, now: float) -> str:
        since = self._since.pop(name)
        told = self._tell_at.pop(name, None) is not None
        return f"{name} took {now - since:.1f} s" if told else ""
