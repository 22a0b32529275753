"""Measurements in fresh Python processes: nobody inherits another's memory tuning, threads or hang.

    module:function(contender, items, **options)     is a generator that runs in such a process

It measures one item after the other and yields twice for each: its figures, and ``CLOSED`` when what it was measured on
has been shut down. Figures are written at once, so that a hang in the shutdown does not make them void. What hangs, and
whatever it started, is killed and reported, and the items that are left get a process of their own.
"""

import faulthandler
import importlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

Figures = dict[str, float]
CLOSED: Figures = {}
SHUTDOWN_BOUND = 5.0
"""Seconds. MultiProcessingReadingService hangs now and then when an epoch is broken off."""
MARK = "RPC_READING_BENCHMARK"
"""An environment variable that a measurement's processes inherit, so that all of them can be found and ended."""
STDLIB = sysconfig.get_path("stdlib")


@dataclass(frozen=True)
class Task:
    """What one contender is asked in one round."""

    function: str
    """``module:function``"""
    contender: str
    items: tuple[dict[str, Any], ...]
    options: dict[str, Any]
    bound: float = 60.0
    """Seconds for each item, twice as many for the first, before which the contender starts: longer is a hang."""


@dataclass(frozen=True)
class Outcome:
    """The figures of an item, or why there are none; trouble can also come after the figures, in the shutdown."""

    figures: Figures | None
    trouble: str = ""


# Inside


def bound(seconds: float) -> None:
    """From now on; beyond it the process writes where each thread is, and ends."""
    faulthandler.dump_traceback_later(seconds, exit=True)


def measure(task: Task, lines_file: Path) -> None:
    module, _, function = task.function.partition(":")
    with lines_file.open("a", buffering=1) as lines:
        bound(2 * task.bound)
        for figures in getattr(importlib.import_module(module), function)(task.contender, task.items, **task.options):
            lines.write(json.dumps(figures) + "\n")
            bound(task.bound if figures == CLOSED else SHUTDOWN_BOUND)


# Outside


def outcomes(task: Task) -> Iterator[Outcome]:
    """One for each item, in as many processes as it takes; after two in a row without any figures it takes no more."""
    left, in_vain = task.items, 0
    while left:
        lines, trouble = run_apart(task, left)
        in_vain = 0 if lines else in_vain + 1
        found = outcomes_of(lines, trouble, len(left)) if in_vain < 2 else [Outcome(None, trouble)] * len(left)
        yield from found
        left = left[len(found) :]


def outcomes_of(lines: list[Figures], trouble: str, expected: int) -> list[Outcome]:
    """Those of one process: the trouble is that of the last item whose figures or end it has not written."""
    found = [Outcome(figures) for figures in lines if figures != CLOSED]
    in_shutdown = bool(lines) and (lines[-1] != CLOSED or len(found) == expected)
    if in_shutdown and trouble:
        found[-1] = Outcome(found[-1].figures, f"shutdown: {trouble}")
    elif not in_shutdown:
        found.append(Outcome(None, trouble or "ended without figures"))
    return found


def run_apart(task: Task, items: Sequence[dict[str, Any]]) -> tuple[list[Figures], str]:
    """Run the task in a fresh process, and leave none of its descendants behind whatever happens."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as folder:
        lines_file, log = Path(folder, "lines.json"), Path(folder, "log.txt")
        child = start(task, items, mark, lines_file, log)
        try:
            with suppress(subprocess.TimeoutExpired):
                child.wait((task.bound + SHUTDOWN_BOUND) * (len(items) + 1))
        finally:
            left = end_all(child.pid, mark, grace=2.0 if child.returncode == 0 else 0.0)
        trouble = what_went_wrong(child.wait(), log.read_text(errors="replace"))
        lines = lines_file.read_text().splitlines() if lines_file.exists() else []
        return [json.loads(line) for line in lines], trouble or left


def start(
    task: Task, items: Sequence[dict[str, Any]], mark: str, lines_file: Path, log: Path
) -> "subprocess.Popen[bytes]":
    values = json.dumps({**vars(task), "items": items})
    command = [sys.executable, __file__, values, str(lines_file)]
    with log.open("wb") as output:
        environment = {**os.environ, MARK: mark}
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)


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


def end_all(session: int, mark: str, grace: float) -> str:
    """Kill what is left of a measurement, and say so if anything was."""
    psutil.wait_procs(alive_of(session, mark), timeout=grace)
    left = alive_of(session, mark)
    for each in left:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(left, timeout=2)
    return f"left {len(left)} processes behind" if left else ""


def alive_of(session: int, mark: str) -> list[psutil.Process]:
    """Those not dead yet, also if they are in sessions of their own, or have written a title over their environment."""
    return [each for each in psutil.process_iter() if is_of(each, session, mark)]


def is_of(process: psutil.Process, session: int, mark: str) -> bool:
    """A zombie, for whose burial init may take seconds, is nobody's."""
    with suppress(psutil.Error, OSError):
        alive = process.status() != psutil.STATUS_ZOMBIE
        return alive and (os.getsid(process.pid) == session or process.environ().get(MARK) == mark)
    return False


if __name__ == "__main__":
    values = json.loads(sys.argv[1])
    measure(Task(**{**values, "items": tuple(values["items"])}), Path(sys.argv[2]))
