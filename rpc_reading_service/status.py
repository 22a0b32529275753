"""``rpc-reading-worker status`` and ``top``: ask daemons what they are doing, and show it.

Each daemon is asked by a thread of its own, so that neither a name server nor a daemon that is silent keeps the others
waiting; what has not come when the time is over is told as such. ``status`` waits for every answer until its timeout,
``top`` shows what has come. Nothing here needs torch: it is quick to start.
"""

import contextlib
import enum
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import msgspec
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rpc_reading_service import logs, messages, resolver, transport
from rpc_reading_service.errors import AddressError
from rpc_reading_service.messages import (
    PROTOCOL_VERSION,
    AskStatus,
    Phase,
    SessionStatus,
    Status,
    ToAsker,
    WorkerStatus,
)
from rpc_reading_service.security import CurveKeys
from rpc_reading_service.transport import Deadline

Answer: TypeAlias = Status | str
"""Of a daemon; the reason, if there is none."""

LOOK_S = 0.3
"""After so much silence it is looked whether anybody listens there at all."""

ASK_AGAIN_S = 1.0

DIAGNOSIS_S = 1.5
"""How much longer than the timeout the look may take that tells why there was no answer."""

PATIENCE_S = 1.0
"""How long ``top`` waits for those that it has just asked before it shows what it has; not longer than its interval."""

SILENT_S = 2.0
"""Figures are shown until their daemon has not answered for so long."""

PHASES = {
    Phase.IDLE: "awaits epoch",
    Phase.GRAPH: "in the graph",
    Phase.REPLAY: "replays",
    Phase.ENCODING: "encodes",
    Phase.CREDIT: "awaits training",
    Phase.WIRE: "awaits network",
}
"""What a worker does, as it is shown."""


# Ask.


def expand(addresses: Sequence[str], timeout: float) -> list[str]:
    """With all that a ``dns://`` name stands for now in its place; one that stands for nothing is shown as down.

    Args:
        timeout: how long the names are waited for, together, in seconds
    """
    answered, deadline = threading.Event(), transport.Deadline(timeout)
    questions = {name: resolver.Question(name, answered.set) for name in addresses if resolver.is_name(name)}
    while not all(question.is_over for question in questions.values()) and answered.wait(deadline.remaining()):
        answered.clear()
    found = {name: question.found or [name.removeprefix(resolver.SCHEME)] for name, question in questions.items()}
    return [each for address in addresses for each in found.get(address, [address])]


def ask(addresses: Sequence[str], keys: CurveKeys | None, timeout: float) -> dict[str, Answer]:
    """What each daemon says of itself, within ``timeout`` seconds and a little more."""
    return Watch(addresses, keys, timeout).look(timeout + DIAGNOSIS_S)


class Watch:
    """Daemons that are asked again and again; one that is silent keeps nobody from the figures of the others.

    Args:
        addresses: of the daemons
        keys: None for daemons without
        timeout: seconds after which a daemon that has not answered is asked anew
    """

    def __init__(self, addresses: Sequence[str], keys: CurveKeys | None, timeout: float) -> None:
        self._keys = keys
        self._timeout = timeout
        self._answers: dict[str, Answer | None] = dict.fromkeys(addresses)
        self._open: dict[str, float] = {}
        """Since when an answer is waited for."""
        self._changed = threading.Condition()
        transport.allow_connections()

    def look(self, patience: float) -> dict[str, Answer]:
        """Ask those that owe no answer; what is known once they have answered, or after ``patience`` seconds."""
        with self._changed:
            asked = self._answers.keys() - self._open.keys()
            for address in asked:
                self._open[address] = time.monotonic()
                threading.Thread(target=self._ask, args=(address,), name=f"asks {address}", daemon=True).start()
            self._changed.wait_for(lambda: not asked & self._open.keys(), patience)
            return {address: self._latest(address, answer) for address, answer in self._answers.items()}

    def _latest(self, address: str, answer: Answer | None) -> Answer:
        now = time.monotonic()
        silent_s = now - self._open.get(address, now)
        if answer is None or (isinstance(answer, Status) and silent_s > SILENT_S):
            return f"no answer so far, for {silent_s:.1f} s"
        return answer

    def _ask(self, address: str) -> None:
        answer = _answer(address, self._keys, Deadline(self._timeout))
        with self._changed:
            self._answers[address] = answer
            del self._open[address]
            self._changed.notify_all()


def _answer(address: str, keys: CurveKeys | None, deadline: Deadline) -> Answer:
    context = transport.Context()
    try:
        with contextlib.closing(_Question(context, address, keys, deadline)) as question:
            return question.answer()
    except AddressError as error:
        return str(error)
    except Exception as error:  # one that cannot be asked must not keep the others from being shown
        return f"cannot be asked: {type(error).__name__}: {error}"
    finally:
        context.close()


class _Question:
    """One daemon that is asked."""

    def __init__(self, context: transport.Context, address: str, keys: CurveKeys | None, deadline: Deadline) -> None:
        self._address = address
        self._keys = keys
        self._deadline = deadline
        self._dealer = context.dealer(address, keys)
        self._poller = transport.Poller()
        self._poller.watch(self._dealer.raw)
        self._poller.watch(self._dealer.raw_monitor)

    def answer(self) -> Answer:
        """Ask until there is an answer, or a reason for which there will be none."""
        looked = False
        while not self._deadline.expired:
            self._dealer.send([messages.encode(AskStatus(PROTOCOL_VERSION))])
            again = Deadline(ASK_AGAIN_S if looked else LOOK_S)
            while not again.expired and not self._deadline.expired:
                self._poller.wait(again.remaining(self._deadline.remaining()) or 0.0)
                if found := self._received() or self._keys_trouble():
                    return found
            if not looked and (trouble := transport.diagnose(self._address, otherwise="")):
                return trouble
            looked = True
        return f"no answer within {self._deadline.timeout:g} s: {transport.diagnose(self._address, SILENT)}"

    def close(self) -> None:
        self._dealer.close()

    def _received(self) -> Answer | None:
        for frames in self._dealer.receive_all():
            try:
                message = messages.decode(frames[0], ToAsker)
            except msgspec.DecodeError as error:
                return f"its answer cannot be read ({error}): install the same version on both sides"
            return message if isinstance(message, Status) else f"refused: {message.reason}"
        return None

    def _keys_trouble(self) -> str | None:
        _, failure = self._dealer.events()
        if failure is transport.Failure.BROKEN:
            failure = self._dealer.look_closer()
        return None if failure is None else transport.keys_trouble(failure, self._keys)


SILENT = "something answers TCP there, but it is starting, stopped, or no rpc-reading-worker of this version"


# Show.


def show(answers: dict[str, Answer], console: Console, as_json: bool = False) -> bool:
    """Print once; returns whether all are up."""
    if as_json:
        console.file.write(
            json.dumps([as_dict(address, answer) for address, answer in answers.items()], indent=2) + "\n"
        )
    else:
        console.print(table(answers))
    return all(isinstance(answer, Status) for answer in answers.values())


def as_dict(address: str, answer: Answer) -> dict[str, Any]:
    """One daemon's answer, for JSON."""
    up = isinstance(answer, Status)
    return {"address": address, "up": up, "reason": None if up else answer, "status": _plain(answer) if up else None}


def _plain(value: Any) -> Any:
    match value:
        case msgspec.Struct():
            return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
        case list():
            return [_plain(each) for each in value]
        case enum.Enum():
            return value.name.lower()
    return value


def table(answers: dict[str, Answer], summed: bool = False) -> RenderableType:
    """Every daemon with its sessions and workers, for 80 columns.

    Args:
        summed: one line for all workers of a session
    """
    parts: list[RenderableType] = []
    for address, answer in answers.items():
        parts.append(Text.assemble((address, "bold"), "  ", _headline(answer), overflow="fold"))
        for session in answer.sessions if isinstance(answer, Status) else ():
            parts.append(_session(session))
            if session.workers:
                parts.append(_sum(session.workers) if summed else _rows(session.workers))
    return Group(*parts)


def _headline(answer: Answer) -> tuple[str, str]:
    if isinstance(answer, str):
        return f"down: {logs.printable(answer)}", "red"
    version = answer.versions.get("rpc-reading-service", "unknown")
    held = f"{answer.slots - answer.free} of {answer.slots} slots held"
    draining = f", draining: {answer.draining}" if answer.draining else ""
    text = f"up {_duration(answer.uptime)}, {held}, version {version}, boot {answer.boot[:8]}{draining}"
    return logs.printable(text), "yellow" if draining else "green"


def _session(session: SessionStatus) -> RenderableType:
    text = f"  session {session.session} of {session.client}: {session.state} for {_duration(session.seconds)}"
    text += f", {session.slots} slot{'s' * (session.slots != 1)}, "
    text += f"graph {session.graph_name} ({session.graph}, {_size(session.graph_bytes)})"
    return Text(logs.printable(text), overflow="fold")


def _rows(workers: Sequence[WorkerStatus]) -> RenderableType:
    rows = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for heading in ("worker", "pid", "state", "doing"):
        rows.add_column(heading, overflow="fold")
    for heading in ("batches/s", "MB/s", "CPU %", "memory"):
        rows.add_column(heading, justify="right", no_wrap=True)
    for worker in sorted(workers, key=lambda each: (each.report.worker, each.report.attempt)):
        rows.add_row(
            _name(worker), str(worker.pid), Text(logs.printable(worker.state)), doing(worker), *_figures(worker)
        )
    return rows


def _sum(workers: Sequence[WorkerStatus]) -> RenderableType:
    counts = ", ".join(f"{count} {what}" for what, count in Counter(map(doing, workers)).most_common())
    batches, nbytes = sum(each.batches_per_s for each in workers), sum(each.bytes_per_s for each in workers)
    cpu, memory = sum(each.cpu for each in workers), sum(each.memory for each in workers)
    text = (
        f"  {len(workers)} workers ({counts}): {batches:,.1f} batches/s, {nbytes / 1e6:,.1f} MB/s, {cpu:,.0f} % CPU, "
    )
    return Text(text + _size(memory), overflow="fold")


def doing(worker: WorkerStatus) -> str:
    """What it does, or waits for."""
    if worker.state == "starting":
        return "builds graph"
    if worker.state == "paused" and worker.report.phase is Phase.IDLE:
        return "awaits resume"
    return PHASES[worker.report.phase]


def _name(worker: WorkerStatus) -> str:
    """The shard, and how often it was started again."""
    return f"{worker.report.worker}" + (f" (+{worker.report.attempt})" if worker.report.attempt else "")


def _figures(worker: WorkerStatus) -> tuple[str, str, str, str]:
    rates = f"{worker.batches_per_s:,.1f}", f"{worker.bytes_per_s / 1e6:,.1f}"
    return *rates, f"{worker.cpu:.0f}", _size(worker.memory)


def _size(nbytes: int) -> str:
    unit, factor = ("KB", 1e3) if nbytes < 1e6 else ("MB", 1e6) if nbytes < 1e10 else ("GB", 1e9)
    return f"{nbytes / factor:,.0f} {unit}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    days, hours = minutes // 1440, minutes // 60 % 24
    return f"{days} d {hours} h" if days else f"{hours} h {minutes % 60} min" if hours else f"{minutes} min"


# Watch.


def top(look: Callable[[float], dict[str, Answer]], console: Console, interval: float, count: int | None) -> None:
    """Look again and again, until Ctrl-C or ``count`` times: in place on a terminal, else in lines.

    Args:
        look: as ``Watch.look``
        interval: seconds between the beginnings of two looks
    """
    if not console.is_terminal:
        for answers in _looks(look, interval, count):
            for line in lines(answers):
                console.file.write(f"{time.strftime('%H:%M:%S')} {line}\n")
            console.file.flush()
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:
        for answers in _looks(look, interval, count):
            live.update(_fitting(answers, console), refresh=True)


def _fitting(answers: dict[str, Answer], console: Console) -> RenderableType:
    """With a line for each worker, if the terminal is high enough."""
    whole = table(answers)
    return whole if len(console.render_lines(whole)) <= console.height else table(answers, summed=True)


def _looks(
    look: Callable[[float], dict[str, Answer]], interval: float, count: int | None
) -> Iterator[dict[str, Answer]]:
    number = 0
    while count is None or number < count:
        deadline = Deadline(interval)
        yield look(min(interval, PATIENCE_S) if number else PATIENCE_S)
        number += 1
        if number != count:
            time.sleep(deadline.remaining() or 0.0)


def lines(answers: dict[str, Answer]) -> Iterator[str]:
    """One for each worker, and for each daemon that has none."""
    for address, answer in answers.items():
        if isinstance(answer, str):
            yield f"{address} down: {logs.printable(answer)}"
            continue
        for session in answer.sessions:
            whose = f"{address} {session.session} of {session.client}, graph {session.graph_name}"
            if not session.workers:
                yield logs.printable(f"{whose}: {session.state}")
            for worker in session.workers:
                rate, megabytes, cpu, memory = _figures(worker)
                yield logs.printable(
                    f"{whose}: worker {_name(worker)} {worker.state}, {doing(worker)}: {rate} batches/s, "
                    f"{megabytes} MB/s, {cpu} % CPU, {memory}"
                )
        if not answer.sessions:
            yield f"{address} {logs.printable(_headline(answer)[0])}"
