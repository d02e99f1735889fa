"""The benchmark of startup times finds the phases of a run in today's code."""

import pytest

from scripts.bench.start import FIRST_STEP, PREPARE, time_process


@pytest.mark.slow
def test_a_run_is_timed_up_to_its_first_step(tmp_path):
    time_process(["-m", "unet3d.cli.main", *PREPARE], tmp_path)
    timing = time_process(["-c", FIRST_STEP], tmp_path)
    phases = [name for name, _ in timing.phases]
    assert phases == [
        "python",
        "imports",
        "build, with the memory estimate",
        "first validation volume",
        "first step",
    ]
    assert 0 < sum(seconds for _, seconds in timing.phases) <= timing.wall
