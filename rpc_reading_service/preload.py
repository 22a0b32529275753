"""Imported once, by a daemon's forkserver: what every worker would otherwise do again before it can begin.

Besides torch and torchdata that is the daemon's own main module, which multiprocessing imports in each process that it
starts, and the first look through a graph, for which the caches of the abstract base classes are empty.
"""

# ruff: noqa: E402
import warnings

# Whoever imports torchdata for a training is told; who runs a daemon can do nothing about it, and its log is in lines.
warnings.filterwarnings("ignore", r"\s#+\sWARNING!\sThe 'datapipes', 'dataloader2' modules are deprecated", UserWarning)

import numpy.random  # at an epoch's first seed otherwise, which takes 17 ms
import torch
from torchdata.datapipes.iter import IterableWrapper

from rpc_reading_service import cli, graph, worker

__all__ = ["cli", "numpy", "worker"]


def _look_through_a_graph() -> None:
    pipe = IterableWrapper([]).sharding_filter()
    data = graph.dump(graph.split(pipe, IterableWrapper([])), None, None, ()).data
    graph.load(graph.unpickle(data), 1, 0, lambda: iter(()))


_look_through_a_graph()
torch.manual_seed(torch.initial_seed())  # imports what it needs at the first call, and changes nothing
