"""An epoch while a seeded schedule kills, stops, continues and restarts workers and daemons.

    python tests/chaos.py --seed 1 --minutes 10
    python tests/chaos.py --seed 1 --seeds 20

Every element must arrive exactly once and in the order of an undisturbed run. Also the engine of test_chaos.py.
"""

import contextlib
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import click
import psutil
from daemons import workers_of
from torchdata.dataloader2 import DataLoader2
from torchdata.datapipes.iter import IterableWrapper, IterDataPipe

from rpc_reading_service import RPCReadingService


@dataclass
class Report:
    """What happened in one run."""

    elements: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    recoveries: list[float] = field(default_factory=list)
    """Seconds from each fault to the next batch."""

    def __str__(self) -> str:
        waits = sorted(self.recoveries) or [0.0]
        faults = ", ".join(f"{count} times {fault}" for fault, count in sorted(self.faults.items()))
        return (
            f"{self.elements} elements, {faults or 'no fault'}, next batch after a fault: "
            f"median {statistics.median(waits):.2f} s, at most {waits[-1]:.2f} s"
        )

    def count(self, fault: str, times: int = 1) -> None:
        self.faults[fault] = self.faults.get(fault, 0) + times

    def add(self, other: "Report") -> None:
        """What happened in another run, too."""
        self.elements += other.elements
        self.recoveries += other.recoveries
        for fault, times in other.faults.items():
            self.count(fault, times)


class Daemon:
    """One daemon on a port of its own, which it gets again after a restart."""

    def __init__(self, slots: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.slots = slots
        self.process = self._start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _start(self) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "rpc_reading_service", "--port", str(self.port), "--slots", str(self.slots)]
        return subprocess.Popen(
            [*command, "--log-level", "error"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        assert "ready on" in self.process.stdout.readline()

    def workers(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return workers_of(self.process.pid)
        return []

    def restart(self) -> None:
        """Kill the daemon, and with it its workers; start it again at once."""
        self.process.kill()
        self._gone()
        self.process = self._start()

    def _gone(self) -> None:
        self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        self._gone()


class Chaos(threading.Thread):
    """Breaks things in bursts, each of which begins at a batch of the schedule, until told to stop.

    Args:
        daemons: at least one of them is always left alone in a burst
        rng: the schedule
        bursts: how many
        batches: of the epoch
    """

    def __init__(self, daemons: list[Daemon], rng: random.Random, report: Report, bursts: int, batches: int) -> None:
        super().__init__(name="chaos", daemon=True)
        self._daemons = daemons
        self._rng = rng
        self._report = report
        self._schedule = sorted(rng.sample(range(batches), bursts))
        self._begin = threading.Event()
        self._stop_now = threading.Event()
        self._stopped: list[psutil.Process] = []
        self.last_fault: float | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._run()
        except BaseException as error:  # raised again by ``stop``
            self._error = error

    def _run(self) -> None:
        while self._begin.wait() and not self._stop_now.is_set():
            self._begin.clear()
            for _ in range(self._rng.randint(1, 3)):
                self._break_something()
                self._stop_now.wait(self._rng.uniform(0.0, 0.2))
            if self._stopped:
                self._stop_now.wait(self._rng.uniform(0.0, 8.0))
                self._continue_all()

    def reached(self, batch: int) -> None:
        """Called for each batch that is read."""
        if self._schedule and batch >= self._schedule[0]:
            self._schedule.pop(0)
            self._begin.set()

    def stop(self) -> None:
        self._stop_now.set()
        self._begin.set()
        self.join()
        self._continue_all()
        if self._error is not None:
            raise self._error

    def _break_something(self) -> None:
        fault = self._rng.choices([self._kill_worker, self._stop_worker, self._restart_daemon], weights=[8, 2, 1])[0]
        fault()

    def _victim(self) -> psutil.Process | None:
        workers = [worker for daemon in self._daemons for worker in daemon.workers()]
        return self._rng.choice(workers) if workers else None

    def _note(self, fault: str) -> None:
        self._report.count(fault)
        self.last_fault = self.last_fault or time.monotonic()

    def _kill_worker(self) -> None:
        victim = self._victim()
        if victim is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
                self._note("worker killed")

    def _stop_worker(self) -> None:
        victim = self._victim()
        if victim is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.suspend()
                self._stopped.append(victim)
                self._note("worker stopped")

    def _continue_all(self) -> None:
        while self._stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._stopped.pop().resume()

    def _restart_daemon(self) -> None:
        self._rng.choice(self._daemons[1:]).restart()
        self._note("daemon restarted")


class Slowly(IterDataPipe[int]):
    """Holds a worker back a little, so that faults find it at work."""

    def __init__(self, source: IterDataPipe[int], seconds: float, every: int) -> None:
        self.source, self.seconds, self.every = source, seconds, every

    def __iter__(self) -> Iterator[int]:
        for i, element in enumerate(self.source):
            if i % self.every == 0:
                time.sleep(self.seconds)
            yield element


def graph(elements: int, seconds: float) -> IterDataPipe[list[int]]:
    source = IterableWrapper(range(elements), deepcopy=False).shuffle(buffer_size=1000).sharding_filter()
    return Slowly(source, seconds, every=100).batch(10)


def run(seed: int, elements: int, daemons: list[Daemon], workers: int = 4, bursts: int = 2) -> Report:
    """One disturbed epoch; raises AssertionError at the first element that is not the one of an undisturbed run."""
    rng = random.Random(seed)
    report = Report()
    expected = undisturbed(seed, elements, daemons, workers)
    loader = DataLoader2(
        graph(elements, 0.004),
        reading_service=RPCReadingService(
            [d.address for d in daemons], num_workers=workers, timeout=300.0, pickle_by_value=(__name__,)
        ),
    )
    loader.seed(seed)
    chaos = Chaos(daemons, rng, report, bursts, len(expected))
    chaos.start()
    try:
        for number, batch in enumerate(loader):
            chaos.reached(number)
            assert batch == expected[number], f"seed {seed}: batch {number} is {batch}, not {expected[number]}"
            report.elements += len(batch)
            if chaos.last_fault is not None:
                report.recoveries.append(time.monotonic() - chaos.last_fault)
                chaos.last_fault = None
    finally:
        chaos.stop()
        loader.shutdown()
    assert report.elements == elements, f"seed {seed}: {report.elements} of {elements} elements arrived"
    return report


def undisturbed(seed: int, elements: int, daemons: list[Daemon], workers: int) -> list[list[int]]:
    service = RPCReadingService([d.address for d in daemons], num_workers=workers, pickle_by_value=(__name__,))
    with DataLoader2(graph(elements, 0.0), reading_service=service) as loader:
        loader.seed(seed)
        return list(loader)


@contextlib.contextmanager
def four_daemons(slots: int = 4) -> Iterator[list[Daemon]]:
    daemons = [Daemon(slots) for _ in range(4)]
    try:
        for daemon in daemons:
            daemon.wait_ready()
        yield daemons
    finally:
        for daemon in daemons:
            daemon.close()


@click.command()
@click.option("--seed", default=0)
@click.option("--seeds", type=int, help="Runs so many seeds instead of --minutes.")
@click.option("--minutes", default=1.0)
@click.option("--elements", default=100_000)
def main(seed: int, seeds: int | None, minutes: float, elements: int) -> None:
    """Runs seed after seed until the time is over."""
    end = time.monotonic() + 60 * minutes
    last = seed + (seeds or 0)
    me = psutil.Process(os.getpid())
    total = Report()
    with four_daemons() as daemons:
        before = me.memory_info().rss
        while seed < last or (seeds is None and time.monotonic() < end):
            started = time.monotonic()
            report = run(seed, elements, daemons)
            click.echo(f"seed {seed}: {report} in {time.monotonic() - started:.1f} s")
            total.add(report)
            seed += 1
        growth = me.memory_info().rss - before
        assert total.faults, "nothing was disturbed"
        left = [worker for daemon in daemons for worker in daemon.workers()]
        assert psutil.wait_procs(left, 10)[1] == [], "workers were left behind"
    click.echo(f"in all: {total}; memory of the training process grew by {growth / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
