"""What a daemon serves to Prometheus, and the documents that are about it."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemons import Daemon, running, until
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from test_status import example
from torchdata.dataloader2 import DataLoader2
from torchdata.datapipes.iter import IterableWrapper

from rpc_reading_service import RPCReadingService, metrics

ROOT = Path(__file__).parents[1]
N = 60


@pytest.fixture(scope="module")
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(scope="module")
def daemon(port: int) -> Iterator[Daemon]:
    with running("--port", "0", "--slots", "2", "--metrics-port", str(port)) as started:
        assert started.line
        yield started


def scrape(port: int) -> dict[str, Metric]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return {each.name: each for each in text_string_to_metric_families(answer.read().decode())}


def value(families: dict[str, Metric], name: str, **labels: str) -> float:
    """The sum of the samples with these labels."""
    samples = [sample for family in families.values() for sample in family.samples if sample.name == name]
    assert samples or labels, name
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


def test_counters_add_up_to_what_the_training_got(daemon: Daemon, port: int) -> None:
    until(lambda: bool(scrape(port)))
    idle = scrape(port)
    assert (value(idle, "rpc_reading_slots"), value(idle, "rpc_reading_free_slots")) == (2, 2)
    pipe = IterableWrapper(range(N)).sharding_filter()
    with DataLoader2(pipe, reading_service=RPCReadingService([daemon.address], timeout=60.0)) as loader:
        assert len(list(loader)) == N
        until(lambda: value(scrape(port), "rpc_reading_workers", state="on standby") == 2)
        busy = scrape(port)
        assert (value(busy, "rpc_reading_sessions"), value(busy, "rpc_reading_free_slots")) == (1, 0)
        assert value(busy, "rpc_reading_worker_batches_total", worker="1") == N / 2
        assert value(busy, "rpc_reading_session_info", graph="IterableWrapper -> ShardingFilter") == 1
        assert value(busy, "rpc_reading_worker_memory_bytes") > 10**7
    until(lambda: value(scrape(port), "rpc_reading_sessions") == 0)
    after = scrape(port)
    counted = ("rpc_reading_opened_sessions_total", "rpc_reading_started_workers_total", "rpc_reading_batches_total")
    assert [value(after, name) for name in counted] == [1, 2, N]
    assert value(after, "rpc_reading_lost_workers_total") == 0
    assert value(after, "rpc_reading_batch_bytes_total") > N
    assert value(after, "rpc_reading_phase_seconds_total", phase="graph") > 0
    assert value(after, "rpc_reading_cpu_seconds_total") > 0
    assert not re.findall(r"session=\"[0-9a-f]{9}", str(after))


def test_a_metrics_port_in_use_is_one_line_and_exit_code_2(daemon: Daemon, port: int) -> None:
    until(lambda: bool(scrape(port)))
    with running("--port", "0", "--metrics-port", str(port)) as second:
        assert second.process.wait(30) == 2
        words = f"rpc-reading-worker: cannot serve metrics on 127.0.0.1:{port}: Address already in use; .*\n"
        assert re.fullmatch(words, second.errors)
        assert second.line == ""


WITHOUT = """
import sys
sys.modules["prometheus_client"] = None
from rpc_reading_service.cli import main
main(["--metrics-port", "0", "--port", "0"])
"""


def test_without_prometheus_client_it_says_what_to_install() -> None:
    ended = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        "rpc-reading-worker: --metrics-port needs prometheus-client: pip install 'rpc-reading-service[metrics]'\n"
    )


def test_a_daemon_with_metrics_ends_at_sigterm_and_the_port_is_free(daemon: Daemon, port: int) -> None:
    """The last test of this daemon."""
    until(lambda: bool(scrape(port)))
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(10) == 0
    assert "Traceback" not in daemon.errors
    exporter = metrics.Exporter("127.0.0.1", port)
    assert scrape(port) == {}  # nothing was published yet
    exporter.publish(example())
    assert value(scrape(port), "rpc_reading_draining") == 1
    exporter.close()
    exporter.close()
    with pytest.raises(OSError, match="refused"):
        scrape(port)


def is_open(connection: socket.socket) -> bool:
    """Whether nothing comes from the other end, not even its end, for a moment."""
    connection.settimeout(0.2)
    try:
        return connection.recv(1) != b""
    except TimeoutError:
        return True
    except ConnectionError:
        return False


def connect(stack: contextlib.ExitStack, port: int) -> socket.socket:
    return stack.enter_context(socket.create_connection(("127.0.0.1", port)))


def test_connections_are_bounded() -> None:
    exporter = metrics.Exporter("127.0.0.1", 0, silence=60.0)
    exporter.publish(example())
    before = threading.active_count()
    try:
        with contextlib.ExitStack() as stack:
            held = [connect(stack, exporter.port) for _ in range(metrics.CONNECTIONS)]
            until(lambda: threading.active_count() == before + metrics.CONNECTIONS)
            assert not any(is_open(connect(stack, exporter.port)) for _ in range(metrics.CONNECTIONS))
            assert threading.active_count() == before + metrics.CONNECTIONS
            assert is_open(held[0])
        until(lambda: threading.active_count() == before)
        assert value(scrape(exporter.port), "rpc_reading_draining") == 1
    finally:
        exporter.close()


def test_who_says_nothing_is_hung_up_on() -> None:
    exporter = metrics.Exporter("127.0.0.1", 0, silence=0.1)
    try:
        with contextlib.ExitStack() as stack:
            silent = connect(stack, exporter.port)
            until(lambda: not is_open(silent))
    finally:
        exporter.close()


def test_an_answer_that_cannot_be_sent_writes_nothing_past_the_log(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> Any:
        raise TimeoutError("whoever asked does not read")

    exporter = metrics.Exporter("127.0.0.1", 0)
    try:
        monkeypatch.setattr(exporter._server, "application", fail)
        with contextlib.ExitStack() as stack:
            asking = connect(stack, exporter.port)
            asking.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            until(lambda: not is_open(asking))
    finally:
        exporter.close()
    assert capfd.readouterr().err == ""


def test_connections_for_which_there_is_no_thread_take_nobodys_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    exporter = metrics.Exporter("127.0.0.1", 0)
    exporter.publish(example())
    try:
        with monkeypatch.context() as patch, contextlib.ExitStack() as stack:
            patch.setattr(threading.Thread, "start", refuse)
            assert not any(is_open(connect(stack, exporter.port)) for _ in range(metrics.CONNECTIONS))
        assert value(scrape(exporter.port), "rpc_reading_draining") == 1
    finally:
        exporter.close()


def test_metrics_are_served_on_ipv6() -> None:
    exporter = metrics.Exporter("::1", 0)
    try:
        assert urllib.request.urlopen(f"http://[::1]:{exporter.port}/metrics", timeout=10).status == 200
    finally:
        exporter.close()


# Names.

FAMILIES = list(metrics.families(example(), taken=1e9))
UNITS = ("seconds", "bytes", "ratio")


def test_names_are_those_of_the_conventions() -> None:
    """As of https://prometheus.io/docs/practices/naming/: base units at the end, ``_total`` for what only grows."""
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    for family in FAMILIES:
        assert re.fullmatch(r"rpc_reading_[a-z]+(_[a-z]+)*", family.name)
        assert family.documentation
        assert all(sample.name.endswith("_total") for sample in family.samples) == (family.type == "counter")
        for word in ("milli", "micro", "percent", "_mb", "_kb"):
            assert word not in family.name
        for unit in UNITS:
            assert unit not in family.name.removesuffix(unit), family.name


def sample_names() -> set[str]:
    return {sample.name for family in FAMILIES for sample in family.samples}


# Documents.


def test_operations_md_lists_every_metric_and_no_other() -> None:
    text = (ROOT / "docs/operations.md").read_text()
    assert set(re.findall(r"\brpc_reading_(?!service\b)[a-z_]+\b", text)) == sample_names()
    rows = dict(re.findall(r"^\| `(rpc_reading_[a-z_]+)` \| (\w+) \|", text, re.MULTILINE))
    types = {sample.name: family.type for family in FAMILIES for sample in family.samples}
    assert rows == types


DASHBOARD = json.loads((ROOT / "docs/grafana.json").read_text())
PANELS = DASHBOARD["panels"]


def test_the_dashboard_has_what_grafana_wants_of_one() -> None:
    assert {"title", "uid", "schemaVersion", "time", "templating", "panels"} <= DASHBOARD.keys()
    assert DASHBOARD["schemaVersion"] >= 36
    assert DASHBOARD["id"] is None  # a new one, wherever it is imported
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    for panel in PANELS:
        assert {"title", "type", "gridPos", "targets", "datasource", "fieldConfig"} <= panel.keys(), panel["title"]
        place = panel["gridPos"]
        assert place.keys() == {"x", "y", "w", "h"}
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])
    names = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(PANELS))) - {"__rate_interval"} <= names


def test_no_two_panels_of_the_dashboard_lie_on_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        place = panel["gridPos"]
        columns, rows = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        cells = {(x, y) for x in columns for y in rows}
        assert not cells & taken, panel["title"]
        taken |= cells


def expressions() -> list[Any]:
    return [target["expr"] for panel in PANELS for target in panel["targets"]]


@pytest.mark.parametrize("expression", expressions())
def test_every_expression_of_the_dashboard_uses_metrics_and_labels_that_there_are(expression: str) -> None:
    names = set(re.findall(r"\brpc_reading_\w+", expression))
    assert names
    assert names <= sample_names()
    assert expression.count("(") == expression.count(")")
    labels = {label for family in FAMILIES for sample in family.samples for label in sample.labels} | {
        "instance",
        "job",
    }
    groups = ",".join(re.findall(r"by \(([^)]*)\)", expression))
    used = {*re.findall(r"(\w+)\s*(?:=~|=|!=)\s*\"", expression), *re.findall(r"\w+", groups)}
    assert used <= labels
    counters = {sample.name for family in FAMILIES if family.type == "counter" for sample in family.samples}
    for name in names & counters:
        assert re.search(rf"(rate|increase)\({name}\b", expression), f"{name} only grows"
