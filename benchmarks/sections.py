"""What is measured: each section says which contenders are asked what, and how its tables read.

To add one, add a ``Section`` to ``SECTIONS`` and its paragraph to ``docs/benchmarks.md``.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from apart import Task
from contenders import CONTENDERS, Load
from report import Columns, Row, Table, bars, cells, curves, number

SIZES: dict[str, tuple[int, ...]] = {
    "32B": (8,),
    "4KB": (1024,),
    "344KB": (3, 128, 224),
    "38.5MB": (64, 3, 224, 224),
    "154MB": (256, 3, 224, 224),
}
"""The shapes of float32 batches: a token or two, a row, an image, a batch of 64 images and one of 256."""
AIMED_AT = tuple(SIZES[size] for size in ("32B", "344KB", "38.5MB"))
"""Those for which the project has set itself a target."""
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
WORKERS = 2
"""Of each contender, where their number is not what is varied."""
STARTED = 8
"""Workers that are started, or get a large graph."""
WAIT_S = 0.02
IDLE_TIMES = 6
"""How much longer than a rate the CPU time of doing nothing is measured."""

Item = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """Of a whole run."""

    seconds: float
    """Measured time of each measurement in a steady state; longer if that is less than a few turns of the workers."""
    warm_up: float
    """Seconds before that."""
    workers: int
    """Of each contender in the section ``throughput``."""
    shapes: tuple[tuple[int, ...], ...]
    contenders: tuple[str, ...]
    """Those that are to be measured, in the sections that have them."""

    def narrowed(self) -> "Settings":
        """To what most depends on: the sizes with targets, and without the contenders that take long to start."""
        shapes = tuple(shape for shape in self.shapes if shape in AIMED_AT)
        contenders = tuple(name for name in self.contenders if not CONTENDERS[name].is_slow)
        return replace(self, shapes=shapes, contenders=contenders)


@dataclass(frozen=True)
class Section:
    """One question."""

    contenders: Sequence[str]
    """The first that is measured is what ratios are to."""
    task: Callable[[str, Settings], Task]
    tables: Callable[[list[Row]], list[Table]]
    has_targets: bool = False
    """So that it is measured in every round."""

    def tasks(self, settings: Settings) -> list[Task]:
        """Of one round; none if there is nothing to ask."""
        asked = [self.task(name, settings) for name in self.contenders if name in settings.contenders]
        return [task for task in asked if task.items]


# Throughput


def throughput(contender: str, settings: Settings) -> Task:
    return steady(contender, settings, [{"workers": settings.workers, "shape": shape} for shape in settings.shapes])


def steady(contender: str, settings: Settings, items: Sequence[Item]) -> Task:
    options = {"seconds": settings.seconds, "warm_up": settings.warm_up}
    return Task("steady:measure", contender, tuple(items), options)


def throughput_tables(rows: list[Row]) -> list[Table]:
    found = []
    for size, of_size in by_size(rows).items():
        columns = {**NAME, **rates(rows), "GB/s": gigabytes, **COSTS}
        plot = bars([(row.contender, ratio(row, rows)) for row in of_size])
        title = f"{size}, {of_size[0].item['workers']} workers"
        found.append(table(f"size-{size}", title, of_size, columns, plot))
    return found


def table(name: str, title: str, rows: list[Row], columns: Columns, plot: str = "") -> Table:
    """With what has to be known of its contenders."""
    names = {row.contender for row in rows}
    notes = [each.note for each in CONTENDERS.values() if each.name in names and each.note]
    return Table(f"benchmarks-{name}", title, list(columns), cells(rows, columns), plot, notes)


def by_size(rows: list[Row]) -> dict[str, list[Row]]:
    names = dict.fromkeys(size_of(row.item["shape"]) for row in rows)
    return {name: [row for row in rows if size_of(row.item["shape"]) == name] for name in names}


def size_of(shape: tuple[int, ...]) -> str:
    """The name of a shape."""
    known = {shape: size for size, shape in SIZES.items()}
    return known.get(shape) or f"{Load(WORKERS, shape).batch_bytes:,} B"


def shape_of(size: str) -> tuple[int, ...]:
    """The shape that a size names, or a flat one of as many bytes; nothing if it is neither."""
    if size in SIZES:
        return SIZES[size]
    found = re.fullmatch(r"(\d+\.?\d*)([KMG]?B)", size)
    items = int(float(found[1]) * UNITS[found[2]]) // Load(WORKERS, (1,)).batch_bytes if found else 0
    return (items,) if items else ()


def rates(rows: list[Row], unit: str = "batches/s") -> Columns:
    return {
        "rounds": lambda row: str(len(row.rounds)),
        unit: lambda row: number(row.median("rate")),
        "spread": lambda row: row.spread("rate"),
        "ratio": lambda row: number(ratio(row, rows)),
    }


def ratio(row: Row, rows: list[Row]) -> float:
    """To the first contender's rate with the same item."""
    return row.median("rate") / next(each for each in rows if each.item == row.item).median("rate")


def gigabytes(row: Row) -> str:
    return number(row.median("rate") * Load(**row.item).batch_bytes / 1e9)


def per_gigabyte(figure: str) -> Callable[[Row], str]:
    return lambda row: number(row.median(figure) / Load(**row.item).batch_bytes * 1e9)


NAME: Columns = {"contender": lambda row: row.contender}
COUNT: Columns = {"workers": lambda row: str(row.item["workers"])}
COSTS: Columns = {
    "CPU s/GB here": per_gigabyte("cpu_here"),
    "there": per_gigabyte("cpu_there"),
    "MB": lambda row: number(row.median("memory") / 1e6),
}


# Numbers of workers


def workers(contender: str, settings: Settings) -> Task:
    shapes = [SIZES["344KB"], SIZES["32B"]]
    return steady(contender, settings, [{"workers": n, "shape": shape} for shape in shapes for n in (1, 2, 4, 16)])


def workers_tables(rows: list[Row]) -> list[Table]:
    found = []
    for size, of_size in by_size(rows).items():
        plot = curves([(row.contender, row.item["workers"], row.median("rate")) for row in of_size])
        columns = {**NAME, **COUNT, **rates(rows), **COSTS}
        found.append(table(f"workers-{size}", f"{size}, 1 to 16 workers", of_size, columns, plot))
    return found


# Scaling


def scaling(contender: str, settings: Settings) -> Task:
    items = [{"workers": count, "shape": SIZES["4KB"], "wait": WAIT_S} for count in (1, 2, 4, 8, 16, 32)]
    return steady(contender, settings, items)


def scaling_tables(rows: list[Row]) -> list[Table]:
    plot = curves([(row.contender, row.item["workers"], 100 * linear(row, rows)) for row in rows])
    of_linear: Columns = {"of linear": lambda row: f"{linear(row, rows):.1%}"}
    columns = {**NAME, **COUNT, **rates(rows), **of_linear, **COSTS}
    return [table("scaling", "Scaling, workers that wait 20 ms for each batch of 4 KB", rows, columns, plot)]


def linear(row: Row, rows: list[Row]) -> float:
    """As a share of what so many workers would do if each did what one alone does."""
    alone = next(each for each in rows if each.contender == row.contender)
    return row.median("rate") * alone.item["workers"] / (alone.median("rate") * row.item["workers"])


# The start


def start(contender: str, settings: Settings) -> Task:
    return Task("life:first_batch", contender, ({"workers": STARTED},), {})


def start_tables(rows: list[Row]) -> list[Table]:
    columns: Columns = {
        "s, from nothing": lambda row: number(row.median("cold")),
        "s, daemons running": lambda row: number(row.median("warm")),
    }
    plot = bars([(row.contender, row.median("warm")) for row in rows])
    return [table("start", f"First batch of {STARTED} workers", rows, {**NAME, **columns}, plot)]


def graph(contender: str, settings: Settings) -> Task:
    items = tuple({"workers": STARTED, "held": held} for held in ("", "bytes", "arrays"))
    return Task("life:large_graph", contender, items, {})


def graph_tables(rows: list[Row]) -> list[Table]:
    columns: Columns = {
        "the graph holds": lambda row: f"200 MB of {row.item['held']}" if row.item["held"] else "nothing",
        "s to the first batch": lambda row: number(row.median("seconds")),
        "MB more": lambda row: number((row.median("memory") - holding_nothing(row, rows).median("memory")) / 1e6),
    }
    return [table("graph", f"A large graph to {STARTED} workers", rows, {**NAME, **columns})]


def holding_nothing(row: Row, rows: list[Row]) -> Row:
    return next(each for each in rows if each.contender == row.contender and not each.item["held"])


# Doing nothing


def idle(contender: str, settings: Settings) -> Task:
    items = tuple({"workers": WORKERS, "paused": paused} for paused in (False, True))
    return Task("life:idle", contender, items, {"seconds": IDLE_TIMES * settings.seconds})


def idle_tables(rows: list[Row]) -> list[Table]:
    columns: Columns = {
        "what": lambda row: "batches that nobody takes" if row.item["paused"] else "a daemon without a session",
        "training process": lambda row: f"{row.median('here'):.2%}" if row.item["paused"] else "",
        f"daemon and {WORKERS} workers": lambda row: f"{row.median('there'):.2%}",
    }
    return [table("idle", "Doing nothing, CPU time as a share of a core", rows, columns)]


# The quickstart


def images(contender: str, settings: Settings) -> Task:
    return Task("life:images", contender, ({"workers": WORKERS},), {})


def images_tables(rows: list[Row]) -> list[Table]:
    plot = bars([(row.contender, ratio(row, rows)) for row in rows])
    title, columns = f"The quickstart's images, {WORKERS} workers", {**NAME, **rates(rows, "images/s")}
    return [table("images", title, rows, columns, plot)]


# All of them

FEW = ("mprs", "loader", "ours-tcp", "ours")
SECTIONS = {
    "throughput": Section(tuple(CONTENDERS), throughput, throughput_tables, has_targets=True),
    "workers": Section(("mprs", "ours-tcp", "ours"), workers, workers_tables),
    "scaling": Section(("mprs", "ours-tcp", "ours"), scaling, scaling_tables, has_targets=True),
    "start": Section(FEW, start, start_tables),
    "graph": Section(("mprs", "loader", "ours"), graph, graph_tables),
    "idle": Section(("ours",), idle, idle_tables),
    "images": Section(("mprs", "loader", "ours"), images, images_tables),
}
