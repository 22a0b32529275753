"""How many batches a second does each reading service deliver from a few workers on this machine?

    python benchmarks/throughput.py                                   # three sizes, five rounds: about four minutes
    python benchmarks/throughput.py --sizes 38.5MB --rounds 3 --transport tcp --json result.json
    python benchmarks/throughput.py --contenders mprs,mprs            # the noise of this machine

Rounds are interleaved (A B A B ...) and medians compared, so that a machine that slows down does so for all. Each
measurement is a fresh Python process: nobody inherits another's memory tuning, threads or hang, and what hangs is
killed and reported. Within it an endless epoch runs: a warm-up first checks every batch's values and shape, then drains
what was prefetched meanwhile, so that the seconds that count are a steady state. To add a contender, add a line to
``CONTENDERS``.
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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import psutil
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch.utils.data import IterDataPipe

SIZES: dict[str, tuple[int, ...]] = {"32B": (8,), "344KB": (3, 128, 224), "38.5MB": (64, 3, 224, 224)}
"""The shapes of float32 batches: a token or two, an image, a batch of 64 images."""
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
STDLIB = sysconfig.get_path("stdlib")
SHUTDOWN_BOUND = 5.0
"""Seconds. MultiProcessingReadingService hangs now and then when an epoch is broken off."""
ITEM = torch.float32.itemsize
MARK = "THROUGHPUT_BENCHMARK"
"""An environment variable that a measurement's processes inherit, so that all of them can be found and ended."""


# What is measured


@dataclass(frozen=True)
class Case:
    """One measurement: which contender, on what, for how long."""

    contender: str
    shape: tuple[int, ...]
    workers: int
    transport: str
    """Of RPCReadingService: ``auto``, ``tcp`` or ``shm``."""
    seconds: float
    warm_up: float
    bound: float
    """Seconds from the start of the process to the figure: longer is a hang."""

    @classmethod
    def from_json(cls, text: str) -> "Case":
        values = json.loads(text)
        return cls(**{**values, "shape": tuple(values["shape"])})


class FreshTensors(IterDataPipe[torch.Tensor]):
    """Makes a new tensor for each element, as users do, for ever; element i of the whole stream is filled with i."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.shards, self.shard = 1, 0

    def apply_sharding(self, num_of_instances: int, instance_id: int, sharding_group: Any = None) -> None:
        """What ``sharding_filter`` does, but without making the other shards' elements."""
        self.shards, self.shard = num_of_instances, instance_id

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in itertools.count(self.shard, self.shards):
            yield torch.full(self.shape, float(index))


# Who is measured


@dataclass(frozen=True)
class Contender:
    """Somebody who delivers the elements of ``FreshTensors`` in order, and shuts down at the end of the context."""

    name: str
    stream: Callable[[Case], AbstractContextManager[Iterator[torch.Tensor]]]


def reading_service(name: str, make: Callable[[Case], Any]) -> Contender:
    """A contender that is a torchdata reading service, made afresh for a case."""

    @contextmanager
    def stream(case: Case) -> Iterator[Iterator[torch.Tensor]]:
        from torchdata.dataloader2 import DataLoader2

        loader = DataLoader2(FreshTensors(case.shape), reading_service=make(case))
        try:
            yield iter(loader)
        finally:
            loader.shutdown()

    return Contender(name, stream)


def multiprocessing_service(case: Case) -> Any:
    from torchdata.dataloader2 import MultiProcessingReadingService

    return MultiProcessingReadingService(num_workers=case.workers)


def rpc_service(case: Case) -> Any:
    from rpc_reading_service import RPCReadingService

    options: dict[str, Any] = {} if case.transport == "auto" else {"transport": case.transport}
    return RPCReadingService(workers=case.workers, **options)


CONTENDERS = {
    "mprs": reading_service("MultiProcessingReadingService", multiprocessing_service),
    "ours": reading_service("RPCReadingService", rpc_service),
}


# Measuring, in a process of its own


def measure(case: Case, result: Path) -> None:
    """Write the rate to the file before the shutdown begins, since a hang in the shutdown does not make it void."""
    faulthandler.dump_traceback_later(case.bound, exit=True)
    with CONTENDERS[case.contender].stream(case) as batches:
        checked = consume(checked_batches(case, batches), case.warm_up / 2)
        drained = consume(batches, case.warm_up / 2)
        counted = consume(batches, case.seconds)
        check(case, next(batches), checked.count + drained.count + counted.count)
        result.write_text(json.dumps(counted.rate))
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


def checked_batches(case: Case, batches: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    for index, batch in enumerate(batches):
        check(case, batch, index)
        yield batch


def check(case: Case, batch: torch.Tensor, index: int) -> None:
    if batch.dtype != torch.float32 or tuple(batch.shape) != case.shape:
        raise RuntimeError(f"batch {index} is a {batch.dtype} {tuple(batch.shape)}, not a float32 {case.shape}")
    if not bool((batch == index).all()):
        raise RuntimeError(f"batch {index} holds {batch.flatten()[0].item()}, not only {index}")


# Measuring apart, from outside that process


@dataclass(frozen=True)
class Outcome:
    """Batches a second, or why there is no figure; trouble can also come after the figure, in the shutdown."""

    rate: float | None
    trouble: str = ""

    def __str__(self) -> str:
        return ", ".join(filter(None, [f"{number(self.rate)} batches/s", self.trouble]))


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
        return Outcome(json.loads(result.read_text()), f"shutdown: {trouble}" if trouble else left)


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
    rates: list[float]
    troubles: list[str]

    @property
    def median(self) -> float:
        return statistics.median(self.rates) if self.rates else math.nan

    def figures(self, baseline: "Row") -> dict[str, Any]:
        """For the table and for JSON, which knows no NaN."""
        known = {
            "batches_per_s": self.median,
            "gb_per_s": self.median * self.batch_bytes / 1e9,
            "ratio": self.median / baseline.median,
        }
        return asdict(self) | {key: None if math.isnan(value) else value for key, value in known.items()}


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
    for heading in ("batch", "reading service", "batches/s", "spread", "GB/s", "ratio"):
        report.add_column(heading, justify="left" if heading == "reading service" else "right", no_wrap=True)
    for row in figures:
        spread = f"{(max(row['rates']) - min(row['rates'])) / row['batches_per_s']:.0%}" if row["rates"] else "none"
        rates = [number(row["batches_per_s"]), spread, number(row["gb_per_s"]), number(row["ratio"])]
        report.add_row(row["size"], row["contender"], *rates)
    return report


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
    return names


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
            rates=[each.rate for each in found if each.rate is not None],
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
@click.option("--transport", default="auto", show_default=True, type=click.Choice(["auto", "tcp", "shm"]))
@click.option("--contenders", default=",".join(CONTENDERS), show_default=True, help="The first is the baseline.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Also write all figures.")
@click.option("--child", type=(str, click.Path(path_type=Path)), hidden=True)
def main(
    sizes: str,
    workers: int,
    rounds: int,
    seconds: float,
    warm_up: float,
    bound: float,
    transport: str,
    contenders: str,
    json_file: Path | None,
    child: tuple[str, Path] | None,
) -> None:
    if child:
        return measure(Case.from_json(child[0]), child[1])
    names, shapes = names_of(contenders), {size: shape_of(size) for size in sizes.split(",")}
    host = machine()
    figures = []
    for size, shape in shapes.items():
        case = Case("", shape, workers, transport, seconds, warm_up, bound=bound + warm_up + seconds)
        rows = run_rounds(size, case, names, rounds)
        figures += [row.figures(baseline=rows[0]) for row in rows]
    settings = {"workers": workers, "rounds": rounds, "seconds": seconds, "warm_up": warm_up, "transport": transport}
    console = Console()
    console.print(table(figures, title=one_line(settings), caption=one_line(host)))
    console.print(*troubles(figures), sep="\n", highlight=False, markup=False, soft_wrap=True)
    if json_file:
        json_file.write_text(json.dumps({"machine": host, "settings": settings, "results": figures}, indent=2))
    sys.exit(any(not row["rates"] for row in figures))


def one_line(values: dict[str, Any]) -> str:
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in values.items())


if __name__ == "__main__":
    main()
