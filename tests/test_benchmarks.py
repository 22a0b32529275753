"""Each contender of the benchmark yields the right batches; how fast is for ``make bench`` to say."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def contenders() -> list[str]:
    """Their short names, without importing any of them."""
    for node in ast.parse((BENCHMARKS / "contenders.py").read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and node.targets[0].id == "CONTENDERS":  # type: ignore[attr-defined]
            return [ast.literal_eval(key) for key in node.value.keys if key is not None]
    raise AssertionError("there are no contenders")


@pytest.mark.parametrize("name", contenders())
def test_a_contender_yields_the_right_batches(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "throughput.py"), "--contenders", name, "--sizes", "4KB"]
    short = ["--rounds", "1", "--seconds", "0.1", "--warm-up", "0.2", "--json", str(tmp_path / "figures.json")]
    quiet = {**os.environ, "PYTHONWARNINGS": "ignore"}
    process = subprocess.run([*command, *short], capture_output=True, text=True, timeout=100, env=quiet)
    if "is not installed" in process.stderr:
        pytest.skip(process.stderr)
    assert process.returncode == 0, process.stderr
    (figures,) = json.loads((tmp_path / "figures.json").read_text())["results"]
    assert figures["batches_per_s"] > 0
