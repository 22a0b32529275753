"""Measures what is not a steady state: the start, a large graph, doing nothing, and the quickstart's image pipeline."""

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from apart import CLOSED, Figures
from contenders import AHEAD, CONTENDERS, FreshTensors, Load, Open, held, loaded
from steady import CpuTimes, memory_in_use
from torch.utils.data import DataLoader
from torchdata.dataloader2 import DataLoader2, MultiProcessingReadingService
from torchdata.datapipes.iter import IterDataPipe

from rpc_reading_service import RPCReadingService
from rpc_reading_service.testing import local_workers

Items = Sequence[dict[str, Any]]
WARM_STARTS = 5
SETTLE_S = 1.0
"""After this the batches asked for in advance are there, and what went before has been tidied up."""


# The time to the first batch


def first_batch(name: str, items: Items) -> Iterator[Figures]:
    """``cold``: seconds from nothing but the imports; ``warm``: from opening a stream of what has been started."""
    for item in items:
        load, began = Load(**item), time.perf_counter()
        with CONTENDERS[name].start(load.workers) as open_stream:
            cold = until_first(open_stream, load, began)["seconds"]
            warm = [until_first(open_stream, load, time.perf_counter())["seconds"] for _ in range(WARM_STARTS)]
            yield {"cold": cold, "warm": statistics.median(warm)}
        yield CLOSED


def until_first(open_stream: Open, load: Load, began: float) -> Figures:
    """``seconds``, and ``memory``: what all processes together use then."""
    with open_stream(load) as batches:
        next(batches)
        return {"seconds": time.perf_counter() - began, "memory": memory_in_use()}


def large_graph(name: str, items: Items) -> Iterator[Figures]:
    """Each is new to what has been started, and made before the clock is."""
    loads = [Load(**item) for item in items]
    with CONTENDERS[name].start(max(load.workers for load in loads)) as open_stream:
        for load in loads:
            held(load.held)
            yield until_first(open_stream, load, time.perf_counter())
            yield CLOSED


# Doing nothing


def idle(_name: str, items: Items, seconds: float) -> Iterator[Figures]:
    """Shares of a core: of a daemon without a session, or of both ends of a session whose batches nobody takes."""
    for item in items:
        with local_workers(1, item["workers"]) as addresses:
            if item["paused"]:
                service = RPCReadingService(addresses)
                with loaded(FreshTensors(Load(workers=item["workers"])), service) as batches:
                    next(batches)
                    yield shares(seconds)
            else:
                yield shares(seconds)
        yield CLOSED


def shares(seconds: float) -> Figures:
    time.sleep(SETTLE_S)
    before, start = CpuTimes.now(), time.perf_counter()
    time.sleep(seconds)
    here, there = CpuTimes.now().since(before)
    passed = time.perf_counter() - start
    return {"here": here / passed, "there": there / passed}


# The quickstart


def images(name: str, items: Items) -> Iterator[Figures]:
    """Its pipeline without its training, two epochs."""
    sys.path.append(str(Path(__file__).parent.parent / "examples"))
    import quickstart

    for item in items:
        with tempfile.TemporaryDirectory() as folder:
            quickstart.write_shards(Path(folder))
            with image_loader(name, quickstart.training_pipeline(Path(folder)), item["workers"]) as loader:
                yield {"rate": quickstart.images_per_second(loader)}
        yield CLOSED


@contextmanager
def image_loader(name: str, pipe: IterDataPipe[Any], workers: int) -> Iterator[Any]:
    if name == "loader":
        yield DataLoader(pipe, batch_size=None, num_workers=workers, prefetch_factor=AHEAD)
        return
    services = {"ours": RPCReadingService(workers), "mprs": MultiProcessingReadingService(workers)}
    loader = DataLoader2(pipe, reading_service=services[name])
    try:
        yield loader
    finally:
        loader.shutdown()
