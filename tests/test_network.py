"""Hosts that are joined by a network which breaks: namespaces and veth pairs on this machine."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil
import pytest
import torch
from daemons import workers_of
from torchdata.dataloader2 import DataLoader2
from torchdata.datapipes.iter import IterableWrapper, IterDataPipe

from rpc_reading_service import RPCReadingService

ELEMENTS = 4000
LOSS = 0.005


def missing() -> str | None:
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc", "iptables"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    probe = subprocess.run(["ip", "netns", "add", "rpc-probe"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", "rpc-probe"], capture_output=True)
    return None if probe.returncode == 0 else f"no network namespaces here: {probe.stderr.strip()}"


REASON = missing()
pytestmark = [pytest.mark.network, pytest.mark.skipif(REASON is not None, reason=str(REASON)), pytest.mark.timeout(180)]


def sh(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True)


@dataclass
class Host:
    """A network namespace with a daemon in it, and our end of the cable to it."""

    number: int

    @property
    def name(self) -> str:
        return f"rpc-host{self.number}"

    @property
    def cable(self) -> str:
        return f"rpc-veth{self.number}"

    @property
    def address(self) -> str:
        return f"10.231.{self.number}.2:5555"

    def create(self) -> None:
        sh(f"ip netns add {self.name}")
        sh(f"ip link add {self.cable} type veth peer name eth0 netns {self.name}")
        sh(f"ip addr add 10.231.{self.number}.1/30 dev {self.cable}")
        sh(f"ip link set {self.cable} up")
        sh(f"ip -n {self.name} addr add 10.231.{self.number}.2/30 dev eth0")
        sh(f"ip -n {self.name} link set eth0 up")
        sh(f"ip -n {self.name} link set lo up")
        command = [
            sys.executable,
            "-m",
            "rpc_reading_service",
            "--host",
            f"10.231.{self.number}.2",
            "--insecure",
            "--slots",
            "4",
        ]
        self.daemon = subprocess.Popen(
            ["ip", "netns", "exec", self.name, *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def wait_ready(self) -> None:
        assert self.daemon.stdout is not None
        assert "ready on" in self.daemon.stdout.readline()

    def destroy(self) -> None:
        self.heal()
        self.daemon.send_signal(signal.SIGTERM)
        self.daemon.wait(15)
        assert self.daemon.stdout is not None
        self.daemon.stdout.close()
        sh(f"ip netns del {self.name}")

    # What can be done to the cable.

    def pull(self) -> None:
        sh(f"ip link set {self.cable} down")

    def plug(self) -> None:
        sh(f"ip link set {self.cable} up")

    def drop_incoming(self) -> None:
        sh(f"iptables -A INPUT -i {self.cable} -j DROP")

    def drop_outgoing(self) -> None:
        sh(f"iptables -A OUTPUT -o {self.cable} -j DROP")

    def throttle(self, rate: str) -> None:
        """Towards us; of netem, which could also delay, not every kernel knows."""
        sh(f"tc -n {self.name} qdisc add dev eth0 root tbf rate {rate} burst 64kb latency 50ms")

    def lose(self, share: float) -> None:
        sh(f"iptables -A INPUT -i {self.cable} -m statistic --mode random --probability {share} -j DROP")

    def heal(self) -> None:
        """Undo whatever was done."""
        for command in (
            f"iptables -D INPUT -i {self.cable} -j DROP",
            f"iptables -D OUTPUT -o {self.cable} -j DROP",
            f"iptables -D INPUT -i {self.cable} -m statistic --mode random --probability {LOSS} -j DROP",
            f"tc -n {self.name} qdisc del dev eth0 root",
            f"ip link set {self.cable} up",
        ):
            subprocess.run(command.split(), capture_output=True)


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    hosts = [Host(1), Host(2)]
    try:
        for host in hosts:
            host.create()
        for host in hosts:
            host.wait_ready()
        yield hosts
    finally:
        for host in hosts:
            host.destroy()


@pytest.fixture(autouse=True)
def healed(hosts: list[Host]) -> Iterator[None]:
    yield
    for host in hosts:
        host.heal()
    # A host that was cut off ends its workers once it has noticed that the client is gone, within 30 s.
    _, alive = psutil.wait_procs([worker for host in hosts for worker in workers_of(host.daemon.pid)], timeout=35)
    assert not alive


class Paced(IterDataPipe[int]):
    """Slow enough that a fault finds the epoch under way."""

    def __init__(self, source: IterDataPipe[int], seconds: float) -> None:
        self.source, self.seconds = source, seconds

    def __iter__(self) -> Iterator[int]:
        pause = threading.Event()
        for element in self.source:
            pause.wait(self.seconds)
            yield element


def large(element: int) -> torch.Tensor:
    return torch.full((500_000,), float(element))


def paced(seconds: float) -> IterDataPipe[int]:
    return Paced(IterableWrapper(range(ELEMENTS)).shuffle().sharding_filter(), seconds)


def service(hosts: list[Host]) -> RPCReadingService:
    return RPCReadingService([host.address for host in hosts], num_workers=4, timeout=90.0, pickle_by_value=(__name__,))


def longest_wait_while(hosts: list[Host], breaking: Callable[[], None]) -> float:
    """Read an epoch, break the network after a fifth of it, and check that every element comes once, in order."""
    with DataLoader2(paced(0.0), reading_service=service(hosts)) as loader:
        loader.seed(3)
        expected = list(loader)
    longest, last = 0.0, time.monotonic()
    with DataLoader2(paced(0.004), reading_service=service(hosts)) as loader:
        loader.seed(3)
        for number, element in enumerate(loader):
            assert element == expected[number]
            now = time.monotonic()
            longest, last = max(longest, now - last), now
            if number == ELEMENTS // 5:
                breaking()
        assert number == ELEMENTS - 1
    return longest


def test_a_host_that_vanishes_without_a_word_is_replaced_within_fifteen_seconds(hosts: list[Host]) -> None:
    assert longest_wait_while(hosts, hosts[0].pull) < 16


def test_batches_that_are_cut_off_one_way_are_noticed_within_fifteen_seconds(hosts: list[Host]) -> None:
    assert longest_wait_while(hosts, hosts[0].drop_incoming) < 16


def test_requests_that_are_cut_off_one_way_are_noticed_within_fifteen_seconds(hosts: list[Host]) -> None:
    assert longest_wait_while(hosts, hosts[0].drop_outgoing) < 16


def test_a_link_that_heals_delivers_nothing_twice(hosts: list[Host]) -> None:
    heal = threading.Timer(20.0, hosts[0].plug)

    def breaking() -> None:
        hosts[0].pull()
        heal.start()

    try:
        longest_wait_while(hosts, breaking)
    finally:
        heal.join()


def test_a_short_stall_loses_nobody(hosts: list[Host], caplog: pytest.LogCaptureFixture) -> None:
    heal = threading.Timer(4.0, hosts[0].heal)

    def breaking() -> None:
        hosts[0].drop_incoming()
        heal.start()

    try:
        assert longest_wait_while(hosts, breaking) < 12
    finally:
        heal.join()
    assert "is lost" not in caplog.text


def test_large_batches_over_a_slow_and_lossy_link_are_no_loss(
    hosts: list[Host], caplog: pytest.LogCaptureFixture
) -> None:
    for host in hosts:
        host.throttle("40mbit")
        host.lose(LOSS)
    graph = IterableWrapper(range(16)).sharding_filter().map(large)
    with DataLoader2(graph, reading_service=service(hosts)) as loader:
        assert [(float(batch[0]), batch.numel()) for batch in loader] == [(float(i), 500_000) for i in range(16)]
    assert "lost" not in caplog.text
