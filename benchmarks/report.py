"""Records of measurements as tables and plots. Everything here takes values and returns values."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from apart import Figures

OURS, OTHERS = "#2a6f97", "#b0b0b0"


@dataclass(frozen=True)
class Record:
    """What one item of one contender came to in one round."""

    section: str
    contender: str
    """Its name in the table."""
    item: dict[str, Any]
    figures: Figures | None
    trouble: str = ""


@dataclass(frozen=True)
class Row:
    """All rounds of one item of one contender."""

    contender: str
    item: dict[str, Any]
    rounds: list[Figures]

    def median(self, figure: str) -> float:
        return statistics.median(each[figure] for each in self.rounds) if self.rounds else math.nan

    def spread(self, figure: str) -> str:
        """Highest less lowest, as a share of the median."""
        values = [each[figure] for each in self.rounds]
        return f"{(max(values) - min(values)) / self.median(figure):.0%}" if values else "none"


def rows_of(records: Sequence[Record]) -> list[Row]:
    """In the order in which they were first measured."""
    rows: dict[str, Row] = {}
    for each in records:
        row = rows.setdefault(f"{each.contender} {each.item}", Row(each.contender, each.item, []))
        row.rounds.extend([each.figures] if each.figures else [])
    return list(rows.values())


@dataclass(frozen=True)
class Table:
    """Ready to be written down."""

    name: str
    """Of the file of its plot."""
    title: str
    headings: Sequence[str]
    lines: list[list[str]]
    plot: str = ""
    """SVG, or nothing."""
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        rule = ["---"] * len(self.headings)
        rows = "\n".join(f"| {' | '.join(line)} |" for line in [self.headings, rule, *self.lines])
        plot = f"![{self.title}]({self.name}.svg)" if self.plot else ""
        return "\n\n".join(filter(None, [f"## {self.title}", rows, *self.notes, plot]))


Columns = dict[str, Callable[[Row], str]]
"""What a cell says of its row, by heading."""


def cells(rows: Sequence[Row], columns: Columns) -> list[list[str]]:
    return [[cell(row) for cell in columns.values()] for row in rows]


def number(value: float) -> str:
    """Three digits that count, or all before the point."""
    if math.isnan(value):
        return "none"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}" if value >= 0.001 else f"{value:.6f}"


def troubles(records: Sequence[Record]) -> Iterator[str]:
    counted = Counter((each.contender, str(each.item), each.trouble) for each in records if each.trouble)
    for (contender, item, trouble), count in counted.items():
        yield f"{contender}, {item}, {count} x: {trouble}"


# Plots


def bars(values: Sequence[tuple[str, float]]) -> str:
    """A bar for each value, on a scale of powers of ten."""
    known = [(name, value) for name, value in values if value > 0]
    if not known:
        return ""
    least, most = (f([math.log10(value) for _, value in known]) for f in (min, max))
    lines = []
    for place, (name, value) in enumerate(known):
        y, width = 20 * place + 15, 10 + 380 * (math.log10(value) - least) / max(most - least, 0.01)
        lines.append(text(0, y, name))
        lines.append(f'<rect x="300" y="{y - 11}" width="{width:.0f}" height="14" fill="{colour(name)}"/>')
        lines.append(text(305 + width, y, number(value)))
    return svg(760, 20 * len(known) + 10, lines)


def curves(points: Sequence[tuple[str, int, float]]) -> str:
    """A line for each name through its points; the steps of x are of the same width, y begins at 0."""
    series: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for name, x, y in points:
        series[name].append((x, y))
    steps, most = sorted({x for _, x, _ in points}), max((y for _, _, y in points), default=0.0)
    if not most > 0:
        return ""
    places = {x: 70 + 430 * place / max(1, len(steps) - 1) for place, x in enumerate(steps)}
    lines = [text(place - 5, 250, str(x)) for x, place in places.items()]
    lines += [text(0, 235 - 210 * part, number(most * part)) for part in (0.0, 0.5, 1.0)]
    for order, (name, pairs) in enumerate(series.items()):
        path = " ".join(f"{places[x]:.0f},{230 - 210 * y / most:.0f}" for x, y in sorted(pairs))
        style = f'fill="none" stroke="{colour(name)}" stroke-width="2" stroke-dasharray="{DASHES[order % len(DASHES)]}"'
        lines.append(f'<polyline points="{path}" {style}/>')
        lines.append(f'<line x1="530" x2="570" y1="{20 * order + 26}" y2="{20 * order + 26}" {style}/>')
        lines.append(text(580, 20 * order + 30, name))
    return svg(880, 260, lines)


DASHES = ("none", "8 3", "2 3", "8 3 2 3")
"""So that lines of one colour are told apart."""


def colour(name: str) -> str:
    return OURS if "RPCReadingService" in name else OTHERS


def text(x: float, y: float, words: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}">{words}</text>'


def svg(width: int, height: int, lines: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-size="12"'
    return "\n".join([f'{head} font-family="sans-serif">', *lines, "</svg>"])
