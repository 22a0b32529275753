"""The command line of ``rpc-reading-worker``: parses, calls, maps errors to exit codes."""

import contextlib
import functools
import os
import re
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import click

from rpc_reading_service import __version__, logs, security, transport
from rpc_reading_service.daemon import MAX_GRAPH_BYTES, MAX_SESSIONS, Daemon, DaemonOptions
from rpc_reading_service.errors import KeysError
from rpc_reading_service.security import CurveKeys, ServerKeys

if TYPE_CHECKING:
    from rpc_reading_service.metrics import Exporter

EXIT_DOWN = 1
"""One of the daemons that were asked is down."""

EXIT_CANNOT_START = 2
"""The port is taken, the host is not this machine's, or no worker process can be started."""


def _port_range(_context: click.Context, _option: click.Parameter, value: str | None) -> range | None:
    """``LO-HI``, both included."""
    if value is None:
        return None
    low, dash, high = value.partition("-")
    if not (dash and low.isdigit() and high.isdigit() and 1 <= int(low) <= int(high) <= 65535):
        raise click.BadParameter(f"{value!r} is not a range of ports such as 6000-6015")
    return range(int(low), int(high) + 1)


_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def _size(_context: click.Context, _option: click.Parameter, value: str | None) -> int | None:
    """Bytes, with a unit."""
    if value is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?i?B)", value)
    nbytes = int(float(found[1]) * _UNITS[found[2]]) if found and found[2] in _UNITS else 0
    if nbytes == 0:
        raise click.BadParameter(f"{value!r} is not a size such as 500MB or 8GiB")
    return nbytes


@click.group(invoke_without_command=True, context_settings={"show_default": True})
@click.option("--host", default="127.0.0.1", help="Address to listen on; only this machine can reach the default.")
@click.option("--port", default=5555, type=click.IntRange(0, 65535), help="Port to listen on; 0 takes a free one.")
@click.option("--slots", type=click.IntRange(1, 4096), help="Workers that may run at once.  [default: one per core]")
@click.option(
    "--data-ports",
    callback=_port_range,
    metavar="LO-HI",
    help="Ports for the workers' batches.  [default: any free ones]",
)
@click.option(
    "--keys",
    type=click.Path(file_okay=False),
    metavar="DIR",
    help="Folder with the daemon's key and the clients that it lets in; see keygen.",
)
@click.option("--insecure", is_flag=True, help="Serve everybody who can reach the port, without keys.")
@click.option(
    "--max-sessions",
    default=MAX_SESSIONS,
    type=click.IntRange(min=1),
    help="Sessions that may be open at once.",
)
@click.option(
    "--max-graph-size",
    default=f"{MAX_GRAPH_BYTES >> 30}GiB",
    callback=_size,
    metavar="SIZE",
    help="Largest pickled graph, such as 500MB.",
)
@click.option(
    "--worker-memory",
    callback=_size,
    metavar="SIZE",
    help="Memory of its own that each worker may have, such as 8GiB.  [default: no limit]",
)
@click.option(
    "--grace",
    default=0.0,
    type=click.FloatRange(min=0),
    help="Seconds that sessions have after SIGTERM to finish their epoch or move on; a second one ends them.",
)
@click.option(
    "--log-level",
    default="warning",
    type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
    help="What to log on stderr; what workers write is logged in any case.",
)
@click.option("--log-json", is_flag=True, help="Log one JSON object a line.")
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    help="Port for Prometheus, needs prometheus-client; 0 takes a free one.  [default: no metrics]",
)
@click.option("--metrics-host", default="127.0.0.1", help="Address for it; whoever can reach it can read the metrics.")
@click.option("--lifeline", type=int, hidden=True, help="Descriptor of a socket to the process that started us.")
@click.version_option(__version__)
@click.pass_context
def main(
    context: click.Context,
    host: str,
    port: int,
    slots: int | None,
    data_ports: range | None,
    keys: str | None,
    insecure: bool,
    max_sessions: int,
    max_graph_size: int,
    worker_memory: int | None,
    grace: float,
    log_level: str,
    log_json: bool,
    metrics_port: int | None,
    metrics_host: str,
    lifeline: int | None,
) -> None:
    """Run DataPipe graphs of training processes that connect here.

    Prints one line when it is ready, and serves until SIGTERM or Ctrl-C.
    """
    if context.invoked_subcommand is not None:
        return
    slots = slots or len(os.sched_getaffinity(0))
    if data_ports is not None and len(data_ports) < slots:
        raise click.UsageError(f"--data-ports has {len(data_ports)} ports, but {slots} slots need one each")
    try:
        server_keys = ServerKeys.load(keys) if keys is not None else None
        options = DaemonOptions(
            host, port, slots, grace, data_ports or (0,), server_keys, insecure, max_sessions, max_graph_size,
            worker_memory,
        )  # fmt: skip
    except KeysError as error:
        _cannot_start(error)
    exporter = _exporter(metrics_host, metrics_port) if metrics_port is not None else None
    log = logs.start(log_level, log_json)
    try:
        code = serve(options, socket.socket(fileno=lifeline) if lifeline is not None else None, exporter)
    finally:
        if exporter is not None:
            exporter.close()
        logs.stop(log)
    sys.exit(code)


def _cannot_start(reason: object) -> NoReturn:
    click.echo(f"rpc-reading-worker: {reason}", err=True)
    sys.exit(EXIT_CANNOT_START)


def _exporter(host: str, port: int) -> "Exporter":
    try:
        from rpc_reading_service.metrics import Exporter
    except ModuleNotFoundError:
        _cannot_start("--metrics-port needs prometheus-client: pip install 'rpc-reading-service[metrics]'")
    try:
        return Exporter(host, port)
    except OSError as error:
        where = transport.join_address(host, port)
        _cannot_start(
            f"cannot serve metrics on {where}: {error.strerror or error}; mend --metrics-port or --metrics-host"
        )


@main.command()
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False))
def keygen(folder: str) -> None:
    """Make keys for daemons and for one client.

    Daemons need server.key and allowed, clients client.key and server.pub. For one more client, make keys in another
    folder, copy its client.pub to allowed under another name, and give the client this folder's server.pub.
    """
    try:
        security.create(folder)
    except KeysError as error:
        _cannot_start(error)
    click.echo(
        f"rpc-reading-worker --host 0.0.0.0 --keys {folder}  # needs {folder}/server.key and {folder}/allowed\n"
        f"export RPC_READING_KEYS={os.path.abspath(folder)}  # needs client.key and server.pub"
    )


def _asking(command: Any) -> Any:
    """What ``status`` and ``top`` have in common."""
    options = [
        click.argument("addresses", metavar="ADDRESS...", nargs=-1, required=True),
        click.option(
            "--keys",
            envvar="RPC_READING_KEYS",
            type=click.Path(file_okay=False),
            metavar="DIR",
            help="Folder with client.key and server.pub, for daemons with keys.  [default: RPC_READING_KEYS]",
        ),
        click.option("--timeout", default=5.0, type=click.FloatRange(min=0.1), help="Seconds to wait for an answer."),
    ]
    return functools.reduce(lambda wrapped, option: option(wrapped), reversed(options), command)


@main.command("status")
@_asking
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show_status(addresses: Sequence[str], keys: str | None, timeout: float, as_json: bool) -> None:
    """Show what daemons, their sessions and workers are doing; exit code 1 if one is down."""
    from rich.console import Console

    from rpc_reading_service import status

    answers = status.ask(status.expand(addresses, timeout), _client_keys(keys), timeout)
    sys.exit(0 if status.show(answers, Console(), as_json) else EXIT_DOWN)


@main.command("top")
@_asking
@click.option("--interval", default=1.0, type=click.FloatRange(min=0.1), help="Seconds from one look to the next.")
@click.option("--count", type=click.IntRange(min=1), help="How often to look.  [default: until Ctrl-C]")
def watch(addresses: Sequence[str], keys: str | None, timeout: float, interval: float, count: int | None) -> None:
    """Watch what the workers of daemons are doing."""
    from rich.console import Console

    from rpc_reading_service import status

    daemons = status.Watch(status.expand(addresses, timeout), _client_keys(keys), timeout)
    with contextlib.suppress(KeyboardInterrupt):
        status.top(daemons.look, Console(), interval, count)


def _client_keys(folder: str | None) -> CurveKeys | None:
    try:
        return CurveKeys.load(folder) if folder else None
    except KeysError as error:
        _cannot_start(error)


def serve(options: DaemonOptions, lifeline: socket.socket | None, exporter: "Exporter | None" = None) -> int:
    """Run a daemon; returns the exit code."""
    transport.allow_connections()
    try:
        daemon = Daemon(options, lifeline, exporter.publish if exporter is not None else None)
    except OSError as error:
        click.echo(f"rpc-reading-worker: {error.strerror or error}", err=True)
        return EXIT_CANNOT_START
    try:
        daemon.warm_up()
        ready = f"rpc-reading-worker ready on {daemon.address}, {options.slots} slot{'s' * (options.slots != 1)}"
        click.echo(ready)
        sys.stdout.flush()
        if lifeline is not None:
            lifeline.sendall(ready.encode() + b"\n")
        return daemon.run()
    except KeyboardInterrupt:
        return 0
    except RuntimeError as error:
        click.echo(f"rpc-reading-worker: {error}", err=True)
        return EXIT_CANNOT_START
    finally:
        daemon.close()
