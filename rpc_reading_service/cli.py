"""The command line of ``rpc-reading-worker``: parses, calls, maps errors to exit codes."""

import logging
import os
import re
import socket
import sys

import click

from rpc_reading_service import __version__, security, transport
from rpc_reading_service.daemon import MAX_GRAPH_BYTES, MAX_SESSIONS, Daemon, DaemonOptions
from rpc_reading_service.errors import KeysError
from rpc_reading_service.security import ServerKeys

EXIT_CANNOT_START = 2
"""The port is taken, the host is not this machine's, or no worker process can be started."""

LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"


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
    help="What to log on stderr.",
)
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
    lifeline: int | None,
) -> None:
    """Run DataPipe graphs of training processes that connect here.

    Prints one line when it is ready, and serves until SIGTERM or Ctrl-C.
    """
    if context.invoked_subcommand is not None:
        return
    logging.basicConfig(format=LOG_FORMAT, level=log_level.upper(), stream=sys.stderr)
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
        click.echo(f"rpc-reading-worker: {error}", err=True)
        sys.exit(EXIT_CANNOT_START)
    sys.exit(serve(options, socket.socket(fileno=lifeline) if lifeline is not None else None))


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
        click.echo(f"rpc-reading-worker: {error}", err=True)
        sys.exit(EXIT_CANNOT_START)
    click.echo(
        f"rpc-reading-worker --host 0.0.0.0 --keys {folder}  # needs {folder}/server.key and {folder}/allowed\n"
        f"export RPC_READING_KEYS={os.path.abspath(folder)}  # needs client.key and server.pub"
    )


def serve(options: DaemonOptions, lifeline: socket.socket | None) -> int:
    """Run a daemon; returns the exit code."""
    transport.allow_connections()
    try:
        daemon = Daemon(options, lifeline)
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
