"""What a daemon is doing, for Prometheus: needs prometheus-client, the extra ``[metrics]``.

The daemon's state belongs to its one thread, which publishes a ``Status`` once a second; the threads that serve HTTP
read the last one, which never changes.
"""

import io
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import msgspec
import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from rpc_reading_service.messages import SessionStatus, Status, Totals, WorkerStatus

logger = logging.getLogger(__name__)

JOIN_S = 2.0

CONNECTIONS = 16
"""So many are served at once: each takes a thread and a descriptor of the daemon."""

SILENCE_S = 10.0
"""Who sends nothing for so long, or does not read, is hung up on: who holds a connection keeps it from others."""

PHASES = {
    "idle": "idle_s",
    "graph": "graph_s",
    "replay": "replay_s",
    "encoding": "encoding_s",
    "credit": "credit_s",
    "wire": "wire_s",
}
"""Label of each phase of a worker, and its field in ``Totals``."""

WORKER = ["session", "worker", "attempt"]
"""Labels of what is told of each worker."""


class Exporter(Collector):
    """Serves ``/metrics`` from threads of its own until it is closed.

    Args:
        host: where to listen; whoever can reach it can read the metrics
        port: 0 takes a free one
        silence: see ``SILENCE_S``

    Raises:
        OSError: the port is taken, or the host is not one of this machine's.
    """

    def __init__(self, host: str, port: int, silence: float = SILENCE_S) -> None:
        self._published: tuple[Status, float] | None = None
        registry = CollectorRegistry()
        registry.register(self)
        self._server = _Server(host, port, prometheus_client.make_wsgi_app(registry), silence)
        self._thread = threading.Thread(target=self._server.serve_forever, name="rpc-reading-metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def publish(self, status: Status) -> None:
        """For the daemon's thread: this is what is served from now on.

        A wait may turn out to have been another than it was taken for. What has been counted stays counted, since
        Prometheus takes a counter that falls for one that began anew.
        """
        if self._published is not None:
            before = msgspec.structs.asdict(self._published[0].totals)
            totals = {name: max(count, before[name]) for name, count in msgspec.structs.asdict(status.totals).items()}
            status = msgspec.structs.replace(status, totals=Totals(**totals))
        self._published = status, time.time()

    def collect(self) -> Iterable[Metric]:
        published = self._published
        return [] if published is None else families(*published)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(JOIN_S)


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """A thread for each connection, as prometheus-client's own; but of those there are no more than ``CONNECTIONS``."""

    daemon_threads = True
    request_queue_size = CONNECTIONS

    def __init__(self, host: str, port: int, app: Callable[..., Any], silence: float) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, *_, address = found[0]
        self._silence = silence
        self._room = threading.Semaphore(CONNECTIONS)
        super().__init__((str(address[0]), port), _Handler)
        self.set_app(app)

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        connection.settimeout(self._silence)
        return connection, address

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            return self.shutdown_request(request)
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # the user has no more threads
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("! %s: its request for metrics came to nothing", client_address, exc_info=True)


class _Handler(WSGIRequestHandler):
    """Logs no requests, and writes of none that failed, which the log would not know of."""

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def get_stderr(self) -> Any:
        return io.StringIO()


def families(status: Status, taken: float) -> Iterator[Metric]:
    """Every metric of one moment.

    Args:
        status: of that moment
        taken: when it was, in seconds since 1970
    """
    yield from _of_daemon(status, taken)
    yield from _of_totals(status)
    yield _of_sessions(status.sessions)
    yield from _of_workers([(session, worker) for session in status.sessions for worker in session.workers])


def _of_daemon(status: Status, taken: float) -> Iterator[Metric]:
    versions = {name.replace("-", "_"): version for name, version in status.versions.items()}
    yield InfoMetricFamily("rpc_reading_daemon", "Versions, host and boot of the daemon", {
        "host": status.host, "boot": status.boot, **versions,
    })  # fmt: skip
    yield _gauge("rpc_reading_start_time_seconds", "When the daemon was started, since 1970", taken - status.uptime)
    yield _gauge("rpc_reading_status_time_seconds", "When these figures were taken, since 1970", taken)
    yield _gauge("rpc_reading_slots", "Workers that may run at once", status.slots)
    yield _gauge("rpc_reading_free_slots", "Slots that no session holds", status.free)
    yield _gauge("rpc_reading_draining", "1 if the daemon takes no more sessions", float(bool(status.draining)))
    yield _gauge("rpc_reading_sessions", "Sessions that are open", len(status.sessions))


def _of_totals(status: Status) -> Iterator[Metric]:
    totals = status.totals
    yield _counter("rpc_reading_opened_sessions_total", "Sessions that were opened", totals.sessions)
    yield _counter("rpc_reading_started_workers_total", "Workers that were started", totals.workers)
    yield _counter("rpc_reading_lost_workers_total", "Workers that ended without having been told to", totals.lost)
    yield _counter("rpc_reading_strangers_total", "Connections and messages that were refused", totals.strangers)
    yield _counter("rpc_reading_batches_total", "Batches that workers produced", totals.batches)
    yield _counter("rpc_reading_batch_bytes_total", "Their size, encoded", totals.nbytes)
    yield _counter("rpc_reading_replayed_batches_total", "Batches that replays suppressed", totals.replayed)
    yield _counter("rpc_reading_cpu_seconds_total", "CPU time of workers", totals.cpu_s)
    seconds = CounterMetricFamily(
        "rpc_reading_phase_seconds", "What workers spent their time on, or waited for", labels=["phase"]
    )
    for phase, name in PHASES.items():
        seconds.add_metric([phase], getattr(totals, name))
    yield seconds


def _of_sessions(sessions: list[SessionStatus]) -> Metric:
    """What the figures of their workers can be joined with."""
    names = InfoMetricFamily("rpc_reading_session", "Which graph a session runs", labels=["session"])
    for session in sessions:
        names.add_metric([session.session], {"graph": session.graph_name})
    return names


def _of_workers(workers: list[tuple[SessionStatus, WorkerStatus]]) -> Iterator[Metric]:
    """Of those that run; the states and phases of all of them are counted, too."""
    states = GaugeMetricFamily("rpc_reading_workers", "Workers that run, by state", labels=["state"])
    for state in sorted({worker.state for _, worker in workers}):
        states.add_metric([state], sum(worker.state == state for _, worker in workers))
    yield states
    memory = GaugeMetricFamily("rpc_reading_worker_memory_bytes", "Resident memory of a worker", labels=WORKER)
    cpu = GaugeMetricFamily("rpc_reading_worker_cpu_ratio", "Cores that a worker keeps busy", labels=WORKER)
    batches = CounterMetricFamily("rpc_reading_worker_batches", "Batches that a worker produced", labels=WORKER)
    nbytes = CounterMetricFamily("rpc_reading_worker_batch_bytes", "Their size, encoded", labels=WORKER)
    for session, worker in workers:
        labels = [session.session, str(worker.report.worker), str(worker.report.attempt)]
        memory.add_metric(labels, worker.memory)
        cpu.add_metric(labels, worker.cpu / 100)
        batches.add_metric(labels, worker.report.batches)
        nbytes.add_metric(labels, worker.report.nbytes)
    yield from (memory, cpu, batches, nbytes)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value)
