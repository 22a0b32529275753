"""Every element exactly once and in order, while workers and daemons are killed, stopped and restarted.

``make chaos SEED= MINUTES=`` goes on for longer.
"""

from collections.abc import Iterator

import chaos
import pytest

SEEDS = 4
ELEMENTS = 50_000


@pytest.fixture(scope="module")
def daemons() -> Iterator[list[chaos.Daemon]]:
    with chaos.four_daemons() as daemons:
        yield daemons


@pytest.mark.timeout(180)
def test_a_disturbed_epoch_is_the_undisturbed_one(daemons: list[chaos.Daemon]) -> None:
    faults = 0
    for seed in range(SEEDS):
        report = chaos.run(seed, ELEMENTS, daemons)
        assert report.elements == ELEMENTS
        faults += sum(report.faults.values())
    assert faults >= SEEDS, "nothing was disturbed"
