"""How many batches a second does each contender deliver from a few workers on this machine, and what does it cost?

    python benchmarks/throughput.py                                   # five sizes, five rounds: half an hour
    python benchmarks/throughput.py --sizes 38.5MB --rounds 3 --contenders mprs,ours --json result.json
    python benchmarks/throughput.py --contenders mprs,mprs            # the noise of this machine
    python benchmarks/throughput.py --sizes 4KB --workers 32 --wait 0.02 --contenders ours,loader   # scaling

Rounds are interleaved (A B A B ...) and medians compared, so that a machine that slows down does so for all. Each
measurement is a fresh Python process: nobody inherits another's memory tuning, threads or hang, and what hangs is
killed and reported. Within it an endless epoch runs: a warm-up first checks every batch's values and shape, then drains
what was prefetched meanwhile, so that the seconds that count are a steady state. Who is measured: ``contenders.py``.
"""

import faulthandler
import itertools
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import psutil
import torch
from contenders import CONTENDERS, Case
from rich import box
from rich.console import Console
from rich.table import Table

SIZES: dict[str, tuple[int, ...]] = {
    "32B": (8,),
    "4KB": (1024,),
    "344KB": (3, 128, 224),
    "38.5MB": (64, 3, 224, 224),
    "154MB": (256, 3, 224, 224),
}
"""The shapes of float32 batches: a token or two, a row, an image, a batch of 64 images and one of 256."""
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
STDLIB = sysconfig.get_path("stdlib")
SHUTDOWN_BOUND = 5.0
"""Seconds. MultiProcessingReadingService hangs now and then when an epoch is broken off."""
ITEM = torch.float32.itemsize
MARK = "THROUGHPUT_BENCHMARK"
"""An environment variable that a measurement's processes inherit, so that all of them can be found and ended."""


# Measuring, in a process of its own


def measure(case: Case, result: Path) -> None:
    """Write the figures to the file before the shutdown begins: a hang in the shutdown does not make them void."""
    faulthandler.dump_traceback_later(case.bound, exit=True)
    started = time.perf_counter()
    with CONTENDERS[case.contender].stream(case) as batches:
        check(case, next(batches), 0)
        first = time.perf_counter() - started
        checked = consume(checked_batches(case, batches, 1), case.warm_up / 2)
        drained = consume(batches, case.warm_up / 2)
        before = CpuTimes.now()
        counted = consume(batches, case.seconds)
        here, there = CpuTimes.now().since(before)
        check(case, next(batches), 1 + checked.count + drained.count + counted.count)
        figures = Figures(counted.rate, here / counted.count, there / counted.count, memory_in_use(), first)
        result.write_text(json.dumps(asdict(figures)))
        faulthandler.dump_traceback_later(SHUTDOWN_BOUND, exit=True)


@dataclass(frozen=True)
class Count:
    count: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.count / self.seconds


def consume(batches: Iterator[torch.Tensor], seconds: float) -> Count:
    """Take batches as a training loop does, which keeps each until it has the next."""
    start = time.perf_counter()
    for count, _batch in enumerate(batches, 1):
        passed = time.perf_counter() - start
        if passed >= seconds:
            return Count(count, passed)
    raise RuntimeError("the endless stream came to an end")


@dataclass(frozen=True)
class Figures:
    """What one measurement found."""

    rate: float
    """Batches a second."""
    cpu_here: float
    """Seconds of CPU for each batch, in the training process."""
    cpu_there: float
    """The same in all its descendants."""
    memory: float
    """Bytes in use by all of them together at the end, what is shared counted once."""
    first: float
    """Seconds to the first batch, from nothing."""


@dataclass(frozen=True)
class CpuTimes:
    """Of this process, and of each of its descendants."""

    here: float
    there: dict[int, float]

    @classmethod
    def now(cls) -> "CpuTimes":
        own = psutil.Process()
        return cls(sum(own.cpu_times()[:2]), {each.pid: sum(each.cpu_times()[:2]) for each in own.children(True)})

    def since(self, before: "CpuTimes") -> tuple[float, float]:
        there = sum(seconds - before.there.get(pid, 0.0) for pid, seconds in self.there.items())
        return self.here - before.here, there


def memory_in_use() -> float:
    own = psutil.Process()
    return float(sum(each.memory_full_info().pss for each in [own, *own.children(True)]))


def checked_batches(case: Case, batches: Iterator[torch.Tensor], first: int) -> Iterator[torch.Tensor]:
    for index, batch in enumerate(batches, first):
        check(case, batch, index)
        yield batch


def check(case: Case, batch: torch.Tensor, index: int) -> None:
    if batch.dtype != torch.float32 or tuple(batch.shape) != case.shape:
        raise RuntimeError(f"batch {index} is a {batch.dtype} {tuple(batch.shape)}, not a float32 {case.shape}")
    if not CONTENDERS[case.contender].is_limit and not bool((batch == index).all()):
        raise RuntimeError(f"batch {index} holds {batch.flatten()[0].item()}, not only {index}")


# Measuring apart, from outside that process


@dataclass(frozen=True)
class Outcome:
    """The figures, or why there are none; trouble can also come after the figures, in the shutdown."""

    figures: Figures | None
    trouble: str = ""

    def __str__(self) -> str:
        rate = self.figures and self.figures.rate
        return ", ".join(filter(None, [f"{number(rate)} batches/s", self.trouble]))


def measure_apart(case: Case) -> Outcome:
    """Run ``measure`` in a fresh process, and leave none of its descendants behind whatever happens."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder, "rate.json"), Path(folder, "log.txt")
        command = [sys.executable, __file__, "--child", json.dumps(asdict(case)), str(result)]
        with log.open("wb") as output:
            child = subprocess.Popen(
                command, env={**os.environ, MARK: mark}, stdout=output, stderr=output, start_new_session=True
            )
        try:
            with suppress(subprocess.TimeoutExpired):
                child.wait(case.bound + SHUTDOWN_BOUND + 10)
        finally:
            left = end_all(mark, grace=2.0 if child.returncode == 0 else 0.0)
        trouble = what_went_wrong(child.wait(), log.read_text(errors="replace"))
        if not result.exists():
            return Outcome(None, trouble)
        figures = Figures(**json.loads(result.read_text()))
        return Outcome(figures, f"shutdown: {trouble}" if trouble else left)


def what_went_wrong(code: int, log: str) -> str:
    """Where it hung, the exception, or nothing."""
    if code and "Timeout (" in log:
        return f"hung in {place_of_hang(log)}"
    return f"exit code {code}: {last_exception(log)}" if code else ""


def last_exception(log: str) -> str:
    """Its first line; one with a remote traceback in its text ends with lines that say less."""
    lines = [line for line in log.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt|Exit)\b", line)]
    return (named or lines or ["no output"])[-1]


def place_of_hang(log: str) -> str:
    """The innermost frame outside the standard library of the main thread, which faulthandler writes last."""
    frames = re.findall(r'File "(.+)", line (\d+) in (\S+)', log.rpartition("(most recent call first):")[2])
    outside = [frame for frame in frames if "site-packages" in frame[0] or not frame[0].startswith(STDLIB)]
    file, line, function = [*outside, *frames, ("unknown", 0, "unknown")][0]
    return f"{function}, {Path(file).name}:{line}"


def end_all(mark: str, grace: float) -> str:
    """Kill what is left of a measurement, and say so if anything was."""
    psutil.wait_procs(alive_with(mark), timeout=grace)
    left = alive_with(mark)
    for each in left:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(left, timeout=2)
    return f"left {len(left)} processes behind" if left else ""


def alive_with(mark: str) -> list[psutil.Process]:
    """Those not dead yet: a zombie, for whose burial init may take seconds, has no environment."""
    return [each for each in psutil.process_iter() if has_mark(each, mark)]


def has_mark(process: psutil.Process, mark: str) -> bool:
    with suppress(psutil.Error):
        return bool(process.environ().get(MARK) == mark)
    return False


# The report


@dataclass(frozen=True)
class Row:
    """All rounds of one contender at one size."""

    size: str
    batch_bytes: int
    contender: str
    rounds: list[Figures]
    troubles: list[str]

    def median(self, name: str) -> float:
        return statistics.median(getattr(each, name) for each in self.rounds) if self.rounds else math.nan

    def figures(self, baseline: "Row") -> dict[str, Any]:
        """For the table and for JSON, which knows no NaN."""
        rate = self.median("rate")
        known = {
            "batches_per_s": rate,
            "gb_per_s": rate * self.batch_bytes / 1e9,
            "ratio": rate / baseline.median("rate"),
            "cpu_here_s_per_gb": self.median("cpu_here") / self.batch_bytes * 1e9,
            "cpu_there_s_per_gb": self.median("cpu_there") / self.batch_bytes * 1e9,
            "memory_mb": self.median("memory") / 1e6,
            "first_s": self.median("first"),
        }
        rates = [each.rate for each in self.rounds]
        known_rounds = {"size": self.size, "contender": self.contender, "rates": rates, "troubles": self.troubles}
        return known_rounds | {key: None if math.isnan(value) else value for key, value in known.items()}


def machine() -> dict[str, Any]:
    """The load tells whether others disturbed the measurement: about 0 before it on a machine to be believed."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("torch", "torchdata", "pyzmq")},
    }


def table(figures: list[dict[str, Any]], title: str, caption: str) -> Table:
    """The spread is that of the rounds: highest less lowest rate, as a share of the median."""
    report = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in HEADINGS:
        report.add_column(heading, justify="left" if heading == "contender" else "right", no_wrap=True)
    for row in figures:
        report.add_row(*cells(row))
    return report


HEADINGS = ("batch", "contender", "batches/s", "spread", "GB/s", "ratio", "CPU s/GB here", "there", "MB", "first s")


def cells(row: dict[str, Any]) -> list[str]:
    """One line of the table."""
    spread = f"{(max(row['rates']) - min(row['rates'])) / row['batches_per_s']:.0%}" if row["rates"] else "none"
    names = ("gb_per_s", "ratio", "cpu_here_s_per_gb", "cpu_there_s_per_gb", "memory_mb", "first_s")
    return [row["size"], row["contender"], number(row["batches_per_s"]), spread, *(number(row[name]) for name in names)]


def markdown(figures: list[dict[str, Any]]) -> str:
    """The table for ``docs/benchmarks.md``."""
    lines = [HEADINGS, ["---"] * len(HEADINGS), *(cells(row) for row in figures)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plot(figures: list[dict[str, Any]]) -> str:
    """A bar for each row, as SVG: how many times the baseline, on a scale of powers of ten."""
    known = [row for row in figures if row["ratio"]]
    least, most = (f([math.log10(row["ratio"]) for row in known]) for f in (min, max))
    lines = []
    for place, row in enumerate(known):
        y, width = 20 * place + 15, 10 + 380 * (math.log10(row["ratio"]) - least) / max(most - least, 0.01)
        colour = "#2a6f97" if "RPCReadingService" in row["contender"] else "#b0b0b0"
        lines.append(f'<text x="0" y="{y}">{row["size"]}  {row["contender"]}</text>')
        lines.append(f'<rect x="340" y="{y - 11}" width="{width:.0f}" height="14" fill="{colour}"/>')
        lines.append(f'<text x="{345 + width:.0f}" y="{y}">{number(row["ratio"])}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="800" height="{20 * len(known) + 10}" font-size="12"'
    return "\n".join([f'{head} font-family="sans-serif">', *lines, "</svg>"])


def number(value: float | None) -> str:
    """Three digits that count, or all before the point."""
    if value is None:
        return "none"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}" if value >= 0.001 else f"{value:.6f}"


def troubles(figures: list[dict[str, Any]]) -> Iterator[str]:
    for row in figures:
        for trouble, count in Counter(row["troubles"]).items():
            yield f"{row['contender']} at {row['size']}, {count} x: {trouble}"


# The command


def shape_of(size: str) -> tuple[int, ...]:
    """The shape that a size names, or a flat one of as many bytes."""
    if size in SIZES:
        return SIZES[size]
    found = re.fullmatch(r"(\d+\.?\d*)([KMG]?B)", size)
    items = int(float(found[1]) * UNITS[found[2]]) // ITEM if found else 0
    if not items:
        raise click.BadParameter(f"{size!r} is neither one of {', '.join(SIZES)} nor like 64B, 1.5KB, 2MB")
    return (items,)


def names_of(contenders: str) -> list[str]:
    names = contenders.split(",")
    if unknown := set(names) - CONTENDERS.keys():
        raise click.BadParameter(f"{', '.join(sorted(unknown))} not among {', '.join(CONTENDERS)}")
    missing = [name for name in names if not CONTENDERS[name].installed]
    for name in missing:
        click.echo(f"without {CONTENDERS[name].name}: {CONTENDERS[name].package} is not installed", err=True)
    return [name for name in names if name not in missing]


def run_rounds(size: str, case: Case, contenders: list[str], rounds: int) -> list[Row]:
    """One row a contender; the contenders take turns."""
    outcomes: list[list[Outcome]] = [[] for _ in contenders]
    for turn, (place, name) in itertools.product(range(rounds), enumerate(contenders)):
        outcome = measure_apart(replace(case, contender=name))
        outcomes[place].append(outcome)
        click.echo(f"{size}, round {turn + 1} of {rounds}, {CONTENDERS[name].name}: {outcome}", err=True)
    return [
        Row(
            size=size,
            batch_bytes=ITEM * math.prod(case.shape),
            contender=CONTENDERS[name].name,
            rounds=[each.figures for each in found if each.figures is not None],
            troubles=[each.trouble for each in found if each.trouble],
        )
        for name, found in zip(contenders, outcomes, strict=True)
    ]


@click.command(help=__doc__ and __doc__.partition("\n")[0])
@click.option("--sizes", default=",".join(SIZES), show_default=True, help="Batch sizes, comma-separated.")
@click.option("--workers", default=2, show_default=True, type=click.IntRange(min=1), help="Workers of each contender.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=1), help="Measurements of each.")
@click.option("--seconds", default=2.0, show_default=True, help="Measured time of each measurement.")
@click.option("--warm-up", default=1.0, show_default=True, help="Seconds before that: half checking, half draining.")
@click.option("--bound", default=60.0, show_default=True, help="Seconds beyond those two after which it is a hang.")
@click.option("--wait", default=0.0, show_default=True, help="Seconds that a worker waits for each batch.")
@click.option("--contenders", default=",".join(CONTENDERS), show_default=True, help="The first is the baseline.")
@click.option("--report", type=click.Path(dir_okay=False, path_type=Path), help="Table and plot: FILE.md and FILE.svg.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Also write all figures.")
@click.option("--child", type=(str, click.Path(path_type=Path)), hidden=True)
def main(
    sizes: str,
    workers: int,
    rounds: int,
    seconds: float,
    warm_up: float,
    bound: float,
    wait: float,
    contenders: str,
    report: Path | None,
    json_file: Path | None,
    child: tuple[str, Path] | None,
) -> None:
    if child:
        values = json.loads(child[0])
        return measure(Case(**{**values, "shape": tuple(values["shape"])}), child[1])
    names, shapes = names_of(contenders), {size: shape_of(size) for size in sizes.split(",")}
    host = machine()
    figures = []
    for size, shape in shapes.items():
        case = Case("", shape, workers, seconds, warm_up, bound=bound + warm_up + seconds, wait=wait)
        rows = run_rounds(size, case, names, rounds)
        figures += [row.figures(baseline=rows[0]) for row in rows]
    settings = {"workers": workers, "rounds": rounds, "seconds": seconds, "warm_up": warm_up, "wait": wait}
    console = Console(width=160)
    console.print(table(figures, title=one_line(settings), caption=one_line(host)))
    console.print(*troubles(figures), sep="\n", highlight=False, markup=False, soft_wrap=True)
    if report:
        report.with_suffix(".md").write_text(f"{one_line(settings)}; {one_line(host)}\n\n{markdown(figures)}\n")
        report.with_suffix(".svg").write_text(plot(figures))
    if json_file:
        json_file.write_text(json.dumps({"machine": host, "settings": settings, "results": figures}, indent=2))
    sys.exit(any(not row["rates"] for row in figures))


def one_line(values: dict[str, Any]) -> str:
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in values.items())


if __name__ == "__main__":
    main()
