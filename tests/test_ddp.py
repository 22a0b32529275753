"""``SequentialReadingService(DistributedReadingService(), RPCReadingService(...))`` on real gloo ranks.

This file is also the script that the ranks run: ``python test_ddp.py FD`` serves the functions under "What a rank runs"
over a pipe, so that a rank imports torch once for all tests; ``torchrun test_ddp.py ADDRESSES FOLDER`` trains and ends.
"""

import functools
import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain, islice
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torchdata.dataloader2 import DataLoader2, DistributedReadingService, SequentialReadingService
from torchdata.dataloader2.graph import find_dps, traverse_dps
from torchdata.datapipes.iter import FullSync, IterableWrapper

from rpc_reading_service import RPCReadingService, SlotsError
from rpc_reading_service.testing import local_workers

SLOTS = 3
N = 108  # for each number of workers here, all ranks get as many
SEED = 7
SOON_S = 10.0
LEAVING_S = 0.5
TIMEOUT_S = 60.0

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore::UserWarning",
    # Without it a rank that is refused at once tears its group down while another one is still connecting to it.
    "TORCH_DIST_INIT_BARRIER": "1",
}

Loader: TypeAlias = "DataLoader2[Any]"
Order: TypeAlias = Sequence[int] | None


Made: TypeAlias = tuple[int, float, float, float, str, int]
"""An element, the random numbers that were drawn for it, and who made it: the address of the daemon, and the pid."""


# What the workers run


def make(x: int) -> Made:
    return x, random.random(), float(np.random.rand()), float(torch.rand(())), my_daemon(), os.getpid()


def my_daemon() -> str:
    """The address at which an ancestor of this process listens."""
    if not known:
        connections = chain.from_iterable(each.net_connections("tcp") for each in psutil.Process().parents())
        listening = next(each.laddr for each in connections if each.status == psutil.CONN_LISTEN)
        known.append(f"{listening.ip.removeprefix('::ffff:')}:{listening.port}")
    return known[0]


known: list[str] = []


def keep_few_of_rank_0(world_size: int, x: int) -> bool:
    return x % world_size != 0 or x < 5 * world_size


def fail_at(at: int, x: int) -> int:
    if x == at:
        raise LookupError(f"no {x} in the archive")
    return x


# What a rank runs


class InTurn(RPCReadingService):
    """The ranks connect one after the other, in a given order."""

    order: Order = None

    def initialize(self, datapipe: Any) -> Any:
        for rank in self.order or ():
            if rank == dist.get_rank():
                datapipe = super().initialize(datapipe)
            dist.barrier()
        return datapipe if self.order else super().initialize(datapipe)


def graph(kind: str, n: int) -> Any:
    sharded = IterableWrapper(range(n)).shuffle().sharding_filter()
    if kind == "uneven":
        world_size = dist.get_world_size()
        return IterableWrapper(range(n)).sharding_filter().filter(functools.partial(keep_few_of_rank_0, world_size))
    if kind == "fails":
        return sharded.map(functools.partial(fail_at, n // 2))
    if kind == "dispatched":
        return sharded.sharding_round_robin_dispatch(SHARDING_PRIORITIES.MULTIPROCESSING).map(make)
    if kind == "batches":
        return sharded.map(make).batch(2)
    return sharded.map(make).fullsync().prefetch(3) if kind == "prefetched" else sharded.map(make)


def service(workers: Any, order: Order = None, **options: Any) -> SequentialReadingService:
    rpc = InTurn(workers, timeout=TIMEOUT_S, **options)
    rpc.order = order
    return SequentialReadingService(DistributedReadingService(), rpc)


def load(workers: Any, kind: str, n: int, seed: int | None, order: Order = None, **options: Any) -> Loader:
    loader = DataLoader2(graph(kind, n), reading_service=service(workers, order, **options))
    if seed is not None:
        loader.seed(seed)
    return loader


@contextmanager
def closing(loader: Loader) -> Iterator[Loader]:
    """Shut it down, and what torchdata leaves behind: the process group of each ``FullSync``."""
    try:
        with loader:
            yield loader
    finally:
        for fullsync in find_dps(traverse_dps(loader.datapipe), FullSync):
            fullsync.shutdown()
            if fullsync._process_group is not None:
                dist.destroy_process_group(fullsync._process_group)


def epochs(
    workers: Any,
    *,
    kind: str = "plain",
    n: int = N,
    seed: int | None = SEED,
    stops: Sequence[int | None] = (None, None),
    order: Order = None,
    **options: Any,
) -> list[list[Any]]:
    """What each epoch yields to this rank; each ends where ``stops`` says."""
    torch.manual_seed(dist.get_rank())
    with closing(load(workers, kind, n, seed, order, **options)) as loader:
        return [list(islice(loader, stop)) for stop in stops]


def left_before_a_collective(workers: Any, kind: str, stop: int) -> list[list[Any]]:
    """Two epochs; on rank 0 the thread of ``FullSync`` is busy elsewhere when the first one is left."""
    with closing(load(workers, kind, N, SEED)) as loader:
        iterator = iter(loader)
        taken = list(islice(iterator, stop - 1))
        if dist.get_rank() == 0:
            fullsync = find_dps(traverse_dps(loader.datapipe), FullSync)[-1]
            left = threading.Event()
            fullsync._executor._executor.submit(left.wait)
            threading.Timer(LEAVING_S, left.set).start()
        return [[*taken, next(iterator)], list(loader)]


def refusal(workers: Any, **options: Any) -> tuple[str, str, float]:
    """The type and the text of the error at the first ``iter``, and the seconds that it took."""
    began = time.monotonic()
    try:
        epochs(workers, **options)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    raise AssertionError("it was not refused")


kept: list[Any] = []
"""A loader that is at work when its process is killed."""


def save(workers: Any, kind: str, positions: Sequence[tuple[int, int]], **options: Any) -> list[dict[str, Any]]:
    """A state for each position (whole epochs before, elements in this one); the loader stays at work."""
    loader = load(workers, kind, N, SEED, **options)
    states = []
    for epoch in range(1 + max(epoch for epoch, _ in positions)):
        iterator = iter(loader)
        for taken, _ in enumerate(iterator, 1):
            if (epoch, taken) in positions:
                states.append(loader.state_dict())
                kept[:] = [loader, iterator]
                if len(states) == len(positions):
                    return states
    raise AssertionError(f"not all of {positions} were reached")


def resume(state: dict[str, Any], workers: Any, **options: Any) -> list[list[Any]]:
    """The rest of the epoch, and the next one."""
    with closing(DataLoader2.from_state(state, service(workers, **options))) as loader:
        return [list(loader) for _ in range(2)]


def thread_name(task: str) -> str:
    """Of a thread of this process; empty if it has ended meanwhile."""
    with suppress(OSError):
        return Path(f"/proc/self/task/{task}/comm").read_text().strip()
    return ""


def left_behind() -> list[str]:
    """Threads, children, and what else torchdata and this project start in a rank."""
    gc.collect()  # FullSync ends its thread with itself
    names = list(filter(None, map(thread_name, os.listdir("/proc/self/task"))))
    children = [each for each in psutil.Process().children() if "resource_tracker" not in " ".join(each.cmdline())]
    threads = [each for each in threading.enumerate() if each is not threading.main_thread()]
    return [*map(repr, threads), *map(repr, children), *(name for name in names if name.startswith("ZMQ"))]


def serve(pipe: Connection) -> None:
    """Call what the test names, until it hangs up."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    while True:
        try:
            name, args, kwargs = pipe.recv()
        except (EOFError, ConnectionResetError):
            break
        try:
            reply = True, globals()[name](*args, **kwargs), left_behind()
        except Exception:
            reply = False, traceback.format_exc(), []
        pipe.send(reply)
    dist.destroy_process_group()


def place(made: Made) -> list[Any]:
    return [made[0], made[4]]


def train(workers: list[str], folder: Path) -> None:
    """As a script under torchrun does, which leaves its last epoch early, and the interpreter to shut down."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    loader = load(workers, "plain", N, SEED)
    streams = [list(islice(loader, stop)) for stop in (None, 3)]
    kept.append(loader)
    text = json.dumps([[place(each) for each in stream] for stream in streams])
    (folder / f"{dist.get_rank()}.json").write_text(text)


# The ranks, as the tests see them


class Ranks:
    """The processes of one gloo group."""

    def __init__(self, world_size: int, port: int) -> None:
        self.world_size = world_size
        self._pipes: list[Connection] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        group = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **ENVIRONMENT}
        for rank in range(world_size):
            ours, theirs = Pipe()
            with theirs:
                command = [sys.executable, __file__, str(theirs.fileno())]
                environment = {**os.environ, **group, "RANK": str(rank)}
                self.processes.append(subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()]))
            self._pipes.append(ours)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call it on all ranks at once; what each returns. Nothing is left behind, unless the loader is kept."""
        return self.run_each(function, [{}] * self.world_size, *args, **kwargs)

    def run_each(
        self, function: Callable[..., Any], own: Sequence[dict[str, Any]], *args: Any, **kwargs: Any
    ) -> list[Any]:
        """As ``run``, with arguments of its own for each rank."""
        for pipe, each in zip(self._pipes, own, strict=True):
            pipe.send((function.__name__, args, {**each, **kwargs}))
        replies = [self._reply(pipe) for pipe in self._pipes]
        for rank, (succeeded, result, left) in enumerate(replies):
            assert succeeded, f"on rank {rank}:\n{result}"
            assert function is save or not left, f"on rank {rank}"
        return [result for _, result, _ in replies]

    def _reply(self, pipe: Connection) -> tuple[bool, Any, list[str]]:
        assert pipe.poll(TIMEOUT_S), f"no answer within {TIMEOUT_S:g} s"
        reply: tuple[bool, Any, list[str]] = pipe.recv()
        return reply

    def kill(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGKILL)

    def close(self) -> list[int]:
        """Their exit codes, once they have ended by themselves."""
        for pipe in self._pipes:
            pipe.close()
        try:
            return [process.wait(TIMEOUT_S) for process in self.processes]
        finally:
            self.kill()
            for process in self.processes:
                process.wait()


def elements(stream: Sequence[Any]) -> list[int]:
    return [each[0] if isinstance(each, tuple) else each for each in stream]


def values(stream: Sequence[Any]) -> list[Any]:
    """All but who made them."""
    return [values(each) if isinstance(each, list) else each[:4] for each in stream]


def daemons_of(streams: Sequence[Sequence[Made]]) -> list[str]:
    return sorted({each[4] for each in chain(*streams)})


def workers_of(streams: Sequence[Sequence[Made]]) -> int:
    return len({each[5] for each in chain(*streams)})


@pytest.fixture(scope="module")
def daemons() -> Iterator[list[str]]:
    with local_workers(4, SLOTS) as addresses:
        yield addresses


@pytest.fixture(scope="module")
def all_ranks(daemons: list[str]) -> Iterator[dict[int, Ranks]]:
    """Two ranks, and three, which start together, and end by themselves once the tests hang up."""
    groups = {world_size: Ranks(world_size, unused_port()) for world_size in (2, 3)}
    try:
        for ranks in groups.values():
            ranks.run(left_behind)  # once it is answered, they listen at the ports of their group
        yield groups
    finally:
        codes = {world_size: ranks.close() for world_size, ranks in groups.items()}
    assert codes == {2: [0, 0], 3: [0, 0, 0]}


@pytest.fixture(params=[2, 3])
def ranks(request: pytest.FixtureRequest, all_ranks: dict[int, Ranks]) -> Ranks:
    return all_ranks[request.param]


@pytest.fixture
def two_ranks(all_ranks: dict[int, Ranks]) -> Ranks:
    return all_ranks[2]


@pytest.fixture
def three_ranks(all_ranks: dict[int, Ranks]) -> Ranks:
    return all_ranks[3]


@dataclass(frozen=True)
class Runs:
    """What the ranks get from a pool: where the first rank connects first, and where the last one does."""

    pool: list[str]
    forwards: list[list[list[Made]]]
    backwards: list[list[list[Made]]]


@pytest.fixture(scope="module", params=[(size, count) for size in (2, 3) for count in (1, 2, 3, 4)], ids=str)
def runs(request: pytest.FixtureRequest, all_ranks: dict[int, Ranks], daemons: list[str]) -> Runs:
    world_size, count = request.param
    orders = range(world_size), range(world_size)[::-1]
    return Runs(daemons[:count], *(all_ranks[world_size].run(epochs, daemons[:count], order=order) for order in orders))


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


# What comes out


def test_the_ranks_see_each_element_once_an_epoch(runs: Runs) -> None:
    for streams in runs.forwards, runs.backwards:
        for epoch in zip(*streams, strict=True):
            assert sorted(chain(*map(elements, epoch))) == list(range(N))
        assert all(elements(first) != elements(second) for first, second in streams)


def test_without_a_seed_the_ranks_agree_on_one(ranks: Ranks, daemons: list[str]) -> None:
    for epoch in zip(*ranks.run(epochs, daemons, seed=None), strict=True):
        assert sorted(chain(*map(elements, epoch))) == list(range(N))


def test_with_uneven_data_every_rank_gets_as_much_as_the_poorest(ranks: Ranks, daemons: list[str]) -> None:
    for epoch in zip(*ranks.run(epochs, daemons, n=N + 1), strict=True):
        assert {len(stream) for stream in epoch} == {N // ranks.world_size}
        assert len(set(chain(*map(elements, epoch)))) == N
    for epoch in zip(*ranks.run(epochs, daemons, kind="uneven", num_workers=1), strict=True):
        assert [len(stream) for stream in epoch] == [5] * ranks.world_size


def test_the_same_seed_gives_the_same_stream_on_any_daemons(ranks: Ranks, daemons: list[str]) -> None:
    same = [ranks.run(epochs, pool, num_workers=1) for pool in (daemons, daemons[2:], daemons[:1])]
    others = ranks.run(epochs, daemons, num_workers=1, seed=SEED + 1)
    for once, again, elsewhere, other in zip(*same, others, strict=True):
        assert values(once) == values(again) == values(elsewhere)
        assert values(once)[0] != values(once)[1]
        assert values(other)[0] not in values(once)


@pytest.mark.parametrize("kind", ["plain", "prefetched", "batches"])
def test_an_epoch_that_all_ranks_leave_early_changes_nothing_in_the_next(
    two_ranks: Ranks, daemons: list[str], kind: str
) -> None:
    whole = two_ranks.run(epochs, daemons, kind=kind, stops=(None,) * 3)
    left = two_ranks.run(epochs, daemons, kind=kind, stops=(5, 1, None))
    for expected, found in zip(whole, left, strict=True):
        assert values(found[0]) == values(expected[0])[:5]
        assert values(found[-1]) == values(expected[-1])


@pytest.mark.parametrize("kind", ["plain", "prefetched"])
def test_a_rank_takes_part_in_every_collective_that_the_others_have_begun(
    two_ranks: Ranks, daemons: list[str], kind: str
) -> None:
    whole = two_ranks.run(epochs, daemons, kind=kind)
    left = two_ranks.run(left_before_a_collective, daemons, kind=kind, stop=5)
    for (first, second), (taken, rest) in zip(whole, left, strict=True):
        assert values(taken) == values(first)[:5]
        assert values(rest) == values(second)


def test_a_dispatching_worker_feeds_the_workers_of_its_rank(two_ranks: Ranks, daemons: list[str]) -> None:
    for epoch in zip(*two_ranks.run(epochs, daemons, kind="dispatched"), strict=True):
        assert sorted(chain(*map(elements, epoch))) == list(range(N))


def test_an_exception_in_the_worker_of_one_rank_ends_the_epoch_of_all(two_ranks: Ranks, daemons: list[str]) -> None:
    outcomes = two_ranks.run(outcome, daemons)
    errors = [error for error, _ in outcomes if error]
    assert len(errors) == 1
    assert f"no {N // 2} in the archive" in errors[0]
    assert all(length < N // 2 for error, length in outcomes if not error)


def outcome(workers: Any) -> tuple[str, int]:
    """The error of an epoch in which one element cannot be made, or how many there were."""
    try:
        return "", len(epochs(workers, kind="fails", stops=(None,))[0])
    except LookupError as error:
        return str(error), 0


# Who works for whom


def test_the_ranks_share_the_pool_the_same_way_whoever_connects_first(runs: Runs) -> None:
    size, count = len(runs.forwards), len(runs.pool)
    own = [runs.pool[rank::size] if count >= size else [runs.pool[rank % count]] for rank in range(size)]
    sharing = [1 if count >= size else len(range(rank % count, size, count)) for rank in range(size)]
    workers = min(len(own[rank]) * (SLOTS // sharing[rank]) for rank in range(size))  # torchdata wants as many on each
    for rank, (first, second) in enumerate(zip(runs.forwards, runs.backwards, strict=True)):
        assert daemons_of(first) == daemons_of(second) == sorted(own[rank])
        assert workers_of(first) == workers_of(second) == workers
        assert values(first) == values(second)


def test_without_sharing_a_rank_uses_all_the_daemons_that_it_is_given(two_ranks: Ranks, daemons: list[str]) -> None:
    same = two_ranks.run(epochs, daemons[:2], num_workers=2, share_workers=False)
    assert [daemons_of(streams) for streams in same] == [sorted(daemons[:2])] * 2
    pools = [{"workers": daemons[:1]}, {"workers": daemons[1:]}]
    own = two_ranks.run_each(epochs, pools, num_workers=3, share_workers=False)
    assert [daemons_of(streams) for streams in own] == [daemons[:1], sorted(daemons[1:])]
    for epoch in zip(*own, strict=True):
        assert sorted(chain(*map(elements, epoch))) == list(range(N))


def test_ranks_that_may_see_different_daemons_must_say_how_many_workers_they_have(
    two_ranks: Ranks, daemons: list[str]
) -> None:
    text = "in a distributed training every rank must have as many workers: give num_workers, the same on each"
    for workers, options in (["dns://workers.invalid:5555"], {}), (daemons[:1], {"share_workers": False}):
        told = two_ranks.run(refusal, workers, **options)
        assert [(error, words) for error, words, _ in told] == [(ValueError.__name__, text)] * 2


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"kind": "dispatched"}], ids=str)
def test_a_pool_that_is_too_small_is_refused_on_every_rank_at_once(
    three_ranks: Ranks, daemons: list[str], options: dict[str, Any]
) -> None:
    for error, text, seconds in three_ranks.run(refusal, daemons[:1], **options):
        assert error == SlotsError.__name__
        assert text.startswith(
            f"3 ranks share {SLOTS} slots ({daemons[0]} with {SLOTS}); rank 0 would get 1 of the 2 that each rank needs"
        )
        assert seconds < SOON_S
    assert [workers_of(streams) for streams in three_ranks.run(epochs, daemons[:1])] == [1, 1, 1]


# Checkpoints


def test_killed_ranks_go_on_from_their_own_states_on_other_daemons(
    two_ranks: Ranks, daemons: list[str], free_port: int
) -> None:
    kinds, positions = ("plain", "prefetched"), [(0, 1), (0, 8), (1, 25)]
    victims = Ranks(2, free_port)
    try:
        with local_workers(1, slots=8) as others:
            states = [victims.run(save, others, kind, positions, num_workers=2) for kind in kinds]
            victims.kill()
    finally:
        victims.close()
    for kind, saved in zip(kinds, states, strict=True):
        whole = two_ranks.run(epochs, daemons, kind=kind, stops=(None,) * 3, num_workers=2)
        for index, (epoch, taken) in enumerate(positions):
            own = [{"state": each[index]} for each in saved]
            resumed = two_ranks.run_each(resume, own, workers=daemons)
            for expected, (rest, following) in zip(whole, resumed, strict=True):
                assert values(rest) == values(expected[epoch])[taken:]
                assert values(following) == values(expected[epoch + 1])


# The end


def test_a_script_under_torchrun_ends_by_itself_and_frees_its_slots(
    two_ranks: Ranks, daemons: list[str], tmp_path: Path
) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, __file__, ",".join(daemons[:2]), str(tmp_path)]
    ended = subprocess.run(
        command, env={**os.environ, **ENVIRONMENT}, timeout=TIMEOUT_S, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    expected = two_ranks.run(epochs, daemons[:2], stops=(None, 3))  # needs all slots
    assert found == [[list(map(place, stream)) for stream in streams] for streams in expected]
    assert "rpc_reading_service" not in ended.stderr, ended.stderr  # torchdata's own __del__ may complain


if __name__ == "__main__":
    if len(sys.argv) == 2:
        serve(Connection(int(sys.argv[1])))
    else:
        train(sys.argv[1].split(","), Path(sys.argv[2]))
