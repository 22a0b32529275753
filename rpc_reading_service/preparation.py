"""What the training process does before there is a session, and how far it is: in the log, and as a bar."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rpc_reading_service.display import Display
from rpc_reading_service.progress import Progress, Stage

logger = logging.getLogger(__name__)

TICK_S = 0.5


class Preparation:
    """Tells of a stage that lasts, by a thread of its own: the training loop's is busy with it.

    Args:
        terminal: where bars are shown; None for none
    """

    def __init__(self, terminal: TextIO | None) -> None:
        self._stages: list[Stage] = []
        self._progress = Progress()
        self._display = Display(lambda: self._progress.lasting, terminal) if terminal is not None else None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rpc-reading-preparation", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Preparation":
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._look()
        if self._display is not None:
            self._display.close()

    @contextmanager
    def stage(self, name: str, unit: str = "") -> Iterator[Callable[[float], None]]:
        """Something that may last; what it yields is told how many units of it are done."""

        def tell(done: float) -> None:
            self._stages = [Stage(name, done, None, unit)]

        tell(0.0)
        try:
            yield tell
        finally:
            self._stages = []

    def _run(self) -> None:
        while not self._over.wait(TICK_S):
            self._look()

    def _look(self) -> None:
        for line in self._progress.look(self._stages, time.monotonic()):
            logger.info("%s", line)
