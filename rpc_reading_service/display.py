"""Progress bars for what takes long, on the terminal of the training process: rich is imported when one is shown."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from rpc_reading_service.progress import Stage

REFRESH_S = 0.25


class Display:
    """Shows the stages that last, as bars that vanish with them. A thread of its own: a terminal may be stopped.

    Args:
        lasting: the stages to show now
        terminal: where
    """

    def __init__(self, lasting: Callable[[], Sequence[Stage]], terminal: TextIO) -> None:
        self._lasting = lasting
        self._terminal = terminal
        self._bars: Any = None
        self._tasks: dict[str, Any] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rpc-reading-progress", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Remove the bars. The garbage collector may ask for it in the display's own thread."""
        self._over.set()
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _run(self) -> None:
        while not self._over.wait(REFRESH_S):
            self._show(self._lasting())
        self._show([])

    def _show(self, stages: Sequence[Stage]) -> None:
        if stages and self._bars is None:
            self._bars = _bars(self._terminal)
            self._bars.start()
        if self._bars is None:
            return
        for name in self._tasks.keys() - {stage.name for stage in stages}:
            self._bars.remove_task(self._tasks.pop(name))
        for stage in stages:
            self._update(stage)
        self._bars.refresh()
        if not stages:
            self._bars.stop()
            self._bars = None

    def _update(self, stage: Stage) -> None:
        if stage.name not in self._tasks:
            self._tasks[stage.name] = self._bars.add_task(stage.name, text="")
        self._bars.update(self._tasks[stage.name], completed=stage.done, total=stage.total, text=stage.amount)


def _bars(terminal: TextIO) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"), TimeElapsedColumn()
    return Progress(
        *columns,
        console=Console(file=terminal),
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
