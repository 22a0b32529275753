"""How does RPCReadingService compare with its peers on this machine, and what does it cost?

    python benchmarks/bench.py                              # everything, five rounds: a quarter of an hour
    python benchmarks/bench.py --only scaling               # one section: two or three minutes
    python benchmarks/bench.py --only throughput --sizes 38.5MB --contenders mprs,ours --rounds 3
    python benchmarks/bench.py --report FOLDER              # tables, plots and all records, as they come

Rounds are interleaved (A B A B ...) and medians compared, so that a machine that slows down does so for all. In each
round each contender gets a fresh process (``apart.py``). Who is measured: ``contenders.py``; what: ``sections.py``.
"""

import json
import os
import platform
import signal
import sys
from collections.abc import Collection, Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import psutil
from apart import Task, outcomes
from contenders import CONTENDERS
from report import Record, Table, rows_of, troubles
from rich import box
from rich.console import Console
from rich.table import Table as Printed
from sections import SECTIONS, SIZES, WORKERS, Settings, shape_of


def records(section: str, settings: Settings, rounds: int, full_rounds: int) -> Iterator[Record]:
    """The contenders take turns."""
    full, narrow = SECTIONS[section].tasks(settings), SECTIONS[section].tasks(settings.narrowed())
    for turn in range(rounds if SECTIONS[section].has_targets else min(rounds, full_rounds)):
        for task in full if turn < full_rounds else narrow:
            click.echo(f"{section}, round {turn + 1} of {rounds}, {CONTENDERS[task.contender].name}", err=True)
            yield from records_of(section, task)


def records_of(section: str, task: Task) -> Iterator[Record]:
    name = CONTENDERS[task.contender].name
    for item, outcome in zip(task.items, outcomes(task), strict=True):
        figures = {key: float(f"{value:.3g}") for key, value in (outcome.figures or {}).items()}
        click.echo(f"    {item}: {figures or 'nothing'} {outcome.trouble}", err=True)
        yield Record(section, name, item, outcome.figures, outcome.trouble)


# The report


class Report:
    """What has been measured so far, in a folder: an interrupted run is usable."""

    def __init__(self, folder: Path | None, head: str) -> None:
        self.folder = folder
        self.head = head
        self.records: list[Record] = []

    def add(self, record: Record) -> None:
        self.records.append(record)
        if self.folder:
            self.write(self.folder)

    def tables(self) -> list[Table]:
        found = []
        for name, section in SECTIONS.items():
            found += section.tables(rows_of([each for each in self.records if each.section == name]))
        return [each for each in found if each.lines]

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tables = self.tables()
        for each in tables:
            if each.plot:
                (folder / f"{each.name}.svg").write_text(each.plot)
        trouble = "\n".join(f"- {each}" for each in troubles(self.records))
        chapters = [self.head, *(each.markdown() for each in tables), trouble]
        (folder / "benchmarks.md").write_text("\n\n".join(filter(None, chapters)) + "\n")
        (folder / "records.json").write_text(json.dumps([asdict(each) for each in self.records], indent=1))

    def print(self) -> None:
        console = Console(width=160)
        for each in self.tables():
            console.print(printed(each))
        console.print(*troubles(self.records), sep="\n", highlight=False, markup=False, soft_wrap=True)


def printed(table: Table) -> Printed:
    shown = Printed(title=table.title, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in table.headings:
        shown.add_column(heading, justify="left" if heading == "contender" else "right", no_wrap=True)
    for line in table.lines:
        shown.add_row(*line)
    return shown


def machine() -> str:
    """The load tells whether others disturbed the measurement: about 0 before it on a machine to be believed."""
    packages = ("torch", "torchdata", "pyzmq", "rpcdataloader", "ray", "tensorflow-cpu")
    known = [f"{name} {version}" for name in packages if (version := version_of(name))]
    cores, memory = len(os.sched_getaffinity(0)), psutil.virtual_memory().total / 2**30
    python = f"Python {platform.python_version()}"
    return ", ".join([f"{cores} cores, {memory:.0f} GiB, load before it {os.getloadavg()[0]:.1f}", python, *known])


def version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


# The command


def sections_of(_context: click.Context, _option: click.Parameter, names: str) -> list[str]:
    return chosen(names, SECTIONS)


def contenders_of(_context: click.Context, _option: click.Parameter, names: str) -> list[str]:
    """Those that are installed."""
    found = chosen(names, CONTENDERS)
    for name in found:
        if not CONTENDERS[name].installed:
            click.echo(f"without {CONTENDERS[name].name}: {CONTENDERS[name].package} is not installed", err=True)
    return [name for name in found if CONTENDERS[name].installed]


def chosen(names: str, known: Collection[str]) -> list[str]:
    found = names.split(",")
    if unknown := set(found) - set(known):
        raise click.BadParameter(f"{', '.join(sorted(unknown))} not among {', '.join(known)}")
    return found


def shapes_of(_context: click.Context, _option: click.Parameter, sizes: str) -> list[tuple[int, ...]]:
    shapes = {size: shape_of(size) for size in sizes.split(",")}
    if wrong := [size for size, shape in shapes.items() if not shape]:
        raise click.BadParameter(f"{wrong[0]!r} is neither one of {', '.join(SIZES)} nor like 64B, 1.5KB, 2MB")
    return list(shapes.values())


def among(names: Collection[str], callback: Any, help: str) -> dict[str, Any]:
    return {"default": ",".join(names), "show_default": True, "callback": callback, "help": help}


@click.command(help=__doc__ and __doc__.partition("\n")[0])
@click.option("--only", "sections", **among(SECTIONS, sections_of, "Sections, comma-separated."))
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=1), help="Measurements of each.")
@click.option("--full-rounds", default=2, show_default=True, help="Those with all of it; targets have all rounds.")
@click.option("--seconds", default=0.4, show_default=True, help="Measured time of each, at least.")
@click.option("--warm-up", default=0.2, show_default=True, help="Seconds before that: half checking, half draining.")
@click.option("--workers", default=WORKERS, show_default=True, type=click.IntRange(min=1), help="For throughput.")
@click.option("--sizes", "shapes", **among(SIZES, shapes_of, "Batch sizes for throughput, comma-separated."))
@click.option("--contenders", **among(CONTENDERS, contenders_of, "The first of a section is its baseline."))
@click.option("--report", "folder", type=click.Path(file_okay=False, path_type=Path), help="Folder for the results.")
def main(sections: list[str], rounds: int, full_rounds: int, folder: Path | None, **settings: Any) -> None:
    report = Report(folder, machine())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # whatever runs is ended, and the report printed
    try:
        for section in sections:
            for record in records(section, Settings(**settings), rounds, full_rounds):
                report.add(record)
    finally:
        report.print()
    sys.exit(any(record.figures is None for record in report.records))


if __name__ == "__main__":
    main()
