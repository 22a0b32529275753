"""Every element exactly once and in order, while workers and daemons are killed, stopped and restarted.

``make chaos SEED= MINUTES=`` goes on for longer.
"""

import chaos
import pytest

SEEDS = 4
BURSTS = 2
ELEMENTS = 50_000


@pytest.mark.timeout(180)
@pytest.mark.slow
def test_a_disturbed_epoch_is_the_undisturbed_one() -> None:
    faults = 0
    with chaos.four_daemons() as daemons:
        for seed in range(SEEDS):
            report = chaos.run(seed, ELEMENTS, daemons, bursts=BURSTS)
            assert report.elements == ELEMENTS
            faults += sum(report.faults.values())
    assert faults >= SEEDS, "nothing was disturbed"
