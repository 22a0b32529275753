"""The benchmark measures what it says: each contender the right batches, each section some figures, and hangs end.

How fast anything is is for ``make bench`` to say.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
from daemons import until

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def keys_of(module: str, name: str) -> list[str]:
    """Those of a dict at the top of a module, without importing what it imports."""
    for node in ast.parse((BENCHMARKS / module).read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and node.targets[0].id == name:  # type: ignore[attr-defined]
            return [ast.literal_eval(key) for key in node.value.keys if key is not None]
    raise AssertionError(f"there is no {name} in {module}")


def measured(folder: Path, *options: str) -> list[dict[str, Any]]:
    """The records of one short round."""
    command = [sys.executable, str(BENCHMARKS / "bench.py"), "--rounds", "1", "--seconds", "0.1", "--warm-up", "0.2"]
    quiet = {**os.environ, "PYTHONWARNINGS": "ignore"}
    process = subprocess.run(
        [*command, *options, "--report", str(folder)], capture_output=True, text=True, timeout=110, env=quiet
    )
    if "is not installed" in process.stderr:
        pytest.skip(process.stderr.splitlines()[0])
    assert process.returncode == 0, process.stderr
    return json.loads((folder / "records.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", keys_of("contenders.py", "CONTENDERS"))
def test_a_contender_yields_the_right_batches(name: str, tmp_path: Path) -> None:
    (record,) = measured(tmp_path, "--only", "throughput", "--sizes", "4KB", "--contenders", name)
    assert record["figures"]["rate"] > 0


@pytest.mark.parametrize("section", [name for name in keys_of("sections.py", "SECTIONS") if name != "throughput"])
def test_a_section_has_figures_for_all_that_it_asks(section: str, tmp_path: Path) -> None:
    records = measured(tmp_path, "--only", section, "--contenders", "ours")
    assert len({str(each["item"]) for each in records}) == len(records) > 0
    assert all(value >= 0 for each in records for value in each["figures"].values())
    assert "RPCReadingService" in (tmp_path / "benchmarks.md").read_text() or section == "idle"


def test_a_terminated_run_ends_what_it_started(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "bench.py"), "--only", "idle", "--report", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        bench = psutil.Process(process.pid)
        until(lambda: bool(bench.children()), seconds=60)
        started = bench.children(recursive=True)
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert "terminated" in errors
    assert not psutil.wait_procs(started, timeout=10)[1]


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark's modules can be imported, as its programs do."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def scripted(modules: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """``apart``, whose processes find a function that does what its items say."""
    import apart

    (tmp_path / "scripted.py").write_text(
        "import pathlib, subprocess, time\n"
        "def run(contender, items):\n"
        "    for item in items:\n"
        "        if item == 'hangs':\n"
        "            sleep = subprocess.Popen(['/bin/sleep', '1000'], env={})\n"
        "            pathlib.Path(__file__).with_name('pid').write_text(str(sleep.pid))\n"
        "            time.sleep(1000)\n"
        "        assert item != 'fails', 'as asked'\n"
        "        yield {'rate': 1.0}\n"
        "        assert item != 'fails in the shutdown', 'as asked'\n"
        "        yield {}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return apart


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        (("fine", "fine"), [(True, ""), (True, "")]),
        (("fine", "fails", "fine"), [(True, ""), (False, "exit code 1: AssertionError: as asked"), (True, "")]),
        (
            ("fails in the shutdown", "fine"),
            [(True, "shutdown: exit code 1: AssertionError: as asked"), (True, "")],
        ),
        (("hangs", "fine"), [(False, "hung in run, scripted.py:7"), (True, "")]),
        (("fails", "fails", "fine"), [(False, "exit code 1: AssertionError: as asked")] * 3),
    ],
)
def test_an_item_that_fails_or_hangs_costs_only_itself(
    scripted: ModuleType, items: tuple[str, ...], expected: list[tuple[bool, str]]
) -> None:
    task = scripted.Task("scripted:run", "nobody", items, {}, bound=1.0)
    outcomes = list(scripted.outcomes(task))
    assert [(each.figures is not None, each.trouble) for each in outcomes] == expected


def test_what_a_hanging_item_has_started_is_ended(scripted: ModuleType, tmp_path: Path) -> None:
    list(scripted.outcomes(scripted.Task("scripted:run", "nobody", ("hangs",), {}, bound=1.0)))
    until(lambda: not psutil.pid_exists(int((tmp_path / "pid").read_text())))


@pytest.mark.usefixtures("modules")
def test_wrong_batches_are_noticed() -> None:
    import torch
    from contenders import CONTENDERS, Load
    from steady import Check

    load = Load(workers=1, shape=(2,))
    ordered, any_order = Check(CONTENDERS["ours"], load), Check(CONTENDERS["tfdata"], load)
    ordered(torch.tensor([0.0, 0.0]))
    any_order(torch.tensor([7.0, 7.0]))
    for check, values in [(ordered, [2.0, 2.0]), (ordered, [1.0, 0.0]), (ordered, [1.0]), (any_order, [7.0, 7.0])]:
        with pytest.raises(RuntimeError, match="batch 1 "):
            check(torch.tensor(values))


@pytest.mark.usefixtures("modules")
def test_tables_have_medians_over_the_rounds_and_say_how_far_from_linear() -> None:
    from report import Record, rows_of
    from sections import SECTIONS

    found = [(workers, rate) for workers, rates in {1: (40, 50, 60), 32: (1520, 1600, 800)}.items() for rate in rates]
    records = [
        Record("scaling", "ours", {"workers": workers, "shape": (8,), "wait": 0.02}, costs_at(rate))
        for workers, rate in found
    ]
    (table,) = SECTIONS["scaling"].tables(rows_of(records))
    lines = [dict(zip(table.headings, line, strict=True)) for line in table.lines]
    assert [line["batches/s"] for line in lines] == ["50.0", "1,520"]
    assert [line["of linear"] for line in lines] == ["100.0%", "95.0%"]
    assert [line["rounds"] for line in lines] == ["3", "3"]
    assert "<polyline" in table.plot


def costs_at(rate: float) -> dict[str, float]:
    return {"rate": rate, "cpu_here": 0.0, "cpu_there": 0.0, "memory": 1e6, "first": 0.1}
