"""What takes long says so, and only that: in the log, and as bars on a terminal."""

import io
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from daemons import until
from torchdata.dataloader2 import DataLoader2
from torchdata.datapipes.iter import IterableWrapper

from rpc_reading_service import RPCReadingService, graph, preparation, reading_service
from rpc_reading_service.display import Display
from rpc_reading_service.progress import AGAIN_S, SHORT_S, Progress, Stage

NOW = 100.0


def stage(done: float = 1.0, name: str = "sending the graph") -> Stage:
    return Stage(name, done, 2000.0, "MB")


# ---------------------------------------------------------------------------------------------------- the log's lines


def test_what_is_short_is_not_mentioned() -> None:
    progress = Progress()
    assert progress.look([stage()], NOW) == []
    assert progress.look([stage()], NOW + 0.9 * SHORT_S) == []
    assert progress.lasting == []
    assert progress.look([], NOW + SHORT_S) == []


def test_what_lasts_is_mentioned_now_and_then_and_when_it_is_over() -> None:
    progress = Progress()
    progress.look([stage()], NOW)
    assert progress.look([stage(500)], NOW + SHORT_S) == ["sending the graph: 500 of 2,000 MB, after 2 s"]
    assert progress.lasting == [stage(500)]
    assert progress.look([stage(600)], NOW + SHORT_S + 0.9 * AGAIN_S) == []
    assert progress.lasting == [stage(600)]
    again = NOW + SHORT_S + AGAIN_S
    assert progress.look([stage(900)], again) == ["sending the graph: 900 of 2,000 MB, after 12 s"]
    assert progress.look([], again + 0.5) == ["sending the graph took 12.5 s"]
    assert progress.lasting == []


def test_each_stage_has_its_own_time() -> None:
    progress = Progress()
    progress.look([stage()], NOW)
    progress.look([stage(), stage(name="replaying")], NOW + SHORT_S)
    assert progress.lasting == [stage()]
    assert progress.look([stage(name="replaying")], NOW + SHORT_S + 1.0) == ["sending the graph took 3.0 s"]
    progress.look([stage(name="replaying")], NOW + 2 * SHORT_S)
    assert [each.name for each in progress.lasting] == ["replaying"]


def test_what_cannot_be_foreseen_is_told_without_a_total_and_what_cannot_be_counted_without_a_number() -> None:
    assert str(Stage("pickling the graph", 1200.4, None, "MB")) == "pickling the graph: 1,200 MB"
    assert str(Stage("starting the local daemon", 0.0, None, "")) == "starting the local daemon"


# ---------------------------------------------------------------------------------------------------- the bars


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bars_are_shown_as_long_as_something_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal, lasting = Terminal(), [stage(500)]
    display = Display(lambda: lasting, terminal)
    until(lambda: "500 of 2,000 MB" in terminal.getvalue())
    lasting = [stage(700), stage(3, "replaying")]
    until(lambda: "700 of 2,000 MB" in terminal.getvalue() and "replaying" in terminal.getvalue())
    lasting = []
    shown = "\x1b[?25h"  # the cursor, when the bars are gone
    until(lambda: shown in terminal.getvalue())
    lasting = [stage(900)]
    until(lambda: "900 of 2,000 MB" in terminal.getvalue())
    display.close()
    assert terminal.getvalue().count(shown) == 2
    display.close()


def test_nothing_is_drawn_if_nothing_lasts() -> None:
    terminal, looked = Terminal(), threading.Event()

    def lasting() -> list[Stage]:
        looked.set()
        return []

    display = Display(lasting, terminal)
    assert looked.wait(10.0)
    display.close()
    assert terminal.getvalue() == ""


def test_rich_is_loaded_by_the_first_bar_alone() -> None:
    script = (
        "import sys, io; from rpc_reading_service.display import Display; "
        "Display(lambda: [], io.StringIO()).close(); print('rich' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "False\n"


# ---------------------------------------------------------------------------------------------------- for real


class Large:
    """A graph of 24 MB: at the pace of the link below it is 12 s under way, longer than a daemon may be silent."""

    def __init__(self) -> None:
        self.data = os.urandom(24_000_000)

    def __call__(self, element: int) -> int:
        return element


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """In the place of stderr; pytest itself puts its own there between a fixture and its test."""
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    return terminal


@pytest.mark.slow
def test_a_graph_may_be_long_under_way_and_that_is_told(
    slow_link: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = on_a_terminal(monkeypatch)
    caplog.set_level(logging.INFO, "rpc_reading_service")
    pipe = IterableWrapper(range(10)).sharding_filter().map(Large())
    service = RPCReadingService([slow_link], progress=True, pickle_by_value=(__name__,))
    with DataLoader2(pipe, reading_service=service) as loader:
        assert list(loader) == list(range(10))
        until(lambda: any("sending the graph took " in line for line in caplog.messages))
    found = "\n".join(caplog.messages)
    assert re.search(r"sending the graph: \d of 24 MB, after 2 s", found)
    assert re.search(r"sending the graph took 1\d\.\d s", found)
    assert "of 24 MB" in terminal.getvalue()
    assert "silent" not in found


class Hesitant:
    """Is pickled before a session only once the log has said so."""

    is_told: Callable[[], bool]

    def __reduce__(self) -> Any:
        if not any(thread.name == "rpc-reading-preparation" for thread in threading.enumerate()):
            return Hesitant, ()  # DataLoader2 copies the graph
        until(Hesitant.is_told)
        return int, ()


STARTS_WHEN_TOLD = """
import pathlib
pathlib.Path({gate!r}).read_text()
"""


def open_gate_once_told(gate: Path, told: Callable[[], bool]) -> None:
    """Whoever waits goes on, and nobody waits any more."""
    until(told, 30.0)
    other = gate.with_name("other")
    os.link(gate, other)
    gate.with_name("open").touch()
    os.replace(gate.with_name("open"), gate)
    other.write_text("go on")


def test_pickling_and_local_daemons_that_take_long_are_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    (tmp_path / "sitecustomize.py").write_text(STARTS_WHEN_TOLD.format(gate=str(gate)))
    monkeypatch.syspath_prepend(tmp_path)
    terminal = on_a_terminal(monkeypatch)
    caplog.set_level(logging.INFO, "rpc_reading_service.preparation")
    starting = "starting the local daemon"
    told = threading.Thread(target=open_gate_once_told, args=(gate, lambda: f"{starting}, after " in caplog.text))
    told.start()
    pipe = IterableWrapper(range(4)).sharding_filter()
    monkeypatch.setattr(Hesitant, "is_told", lambda: "pickling the graph: " in caplog.text, raising=False)
    pipe.unused = Hesitant()
    with DataLoader2(pipe, reading_service=RPCReadingService(1, progress=True)) as loader:
        assert list(loader) == list(range(4))
    told.join()
    assert re.fullmatch(r"pickling the graph: 0 MB, after \d s", caplog.messages[0])
    assert re.fullmatch(r"pickling the graph took \d\.\d s", caplog.messages[1])
    assert re.fullmatch(rf"{starting} took \d\.\d s", caplog.messages[-1])
    assert "pickling the graph" in terminal.getvalue()
    assert starting in terminal.getvalue()


def test_how_much_is_pickled_is_told_meanwhile() -> None:
    told: list[int] = []
    pipe = IterableWrapper([bytes(1 << 20), *range(100_000)], deepcopy=False).sharding_filter()
    payload = graph.dump(graph.split(pipe, IterableWrapper([])), None, None, tell=told.append)
    assert told == sorted(told)
    assert told[0] < 1 << 20 < told[-2] < told[-1] == len(payload.data)


def step(element: int) -> int:
    time.sleep(float(os.environ.get("STEP_S", "0")))
    return element


def start_slowly(datapipe: Any, _info: Any) -> Any:
    os.environ["STEP_S"] = "0.05"
    time.sleep(2.8)
    return datapipe


@pytest.mark.slow
def test_workers_that_start_slowly_and_a_long_replay_are_told(
    two_daemons: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = IterableWrapper(range(100_000)).sharding_filter().map(step)
    with DataLoader2(pipe, reading_service=RPCReadingService(two_daemons, pickle_by_value=(__name__,))) as loader:
        batches = iter(loader)
        for _ in range(130):
            next(batches)
        state = loader.state_dict()
    terminal = on_a_terminal(monkeypatch)
    caplog.set_level(logging.INFO, "rpc_reading_service.client")
    service = RPCReadingService(two_daemons, worker_init_fn=start_slowly, progress=True, pickle_by_value=(__name__,))
    with DataLoader2.from_state(state, service) as loader:
        assert next(iter(loader)) == 130
        until(lambda: any("replaying took " in line for line in caplog.messages))
    found = "\n".join(caplog.messages)
    assert re.search(r"starting workers: [01] of 2 workers, after 2 s", found)
    assert "starting workers took " in found
    counts = re.search(r"replaying: (\d+) of 130 batches, after 2 s", found)
    assert counts is not None
    assert 40 < int(counts[1]) < 120
    assert "of 130 batches" in terminal.getvalue()


def test_without_a_terminal_there_are_no_bars(two_daemons: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(reading_service, "Display", None)  # calling it would fail
    monkeypatch.setattr(preparation, "Display", None)
    service = RPCReadingService(two_daemons, progress=True)
    with DataLoader2(IterableWrapper(range(4)).sharding_filter(), reading_service=service) as loader:
        assert list(loader) == list(range(4))


def test_progress_is_a_bool() -> None:
    with pytest.raises(TypeError, match="progress must be a bool, not 1"):
        RPCReadingService(2, progress=1)  # type: ignore[arg-type]
