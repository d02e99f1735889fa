"""A run that time ended early says so."""

import json
from types import SimpleNamespace

import pytest

from unet3d.training.limits import StoppingLimits


@pytest.mark.parametrize(("planned", "is_early"), [(3000, True), (60, False)])
def test_a_run_says_if_time_ended_it_early(unet3d, tmp_path, capsys, planned, is_early):
    assert unet3d("trainer.max_steps=3", "logger=none") == 0
    more = (f"trainer.max_steps={planned}", "trainer.max_time=00:00:00:01", "resume=auto")
    assert unet3d(*more, "logger=none") == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert not [line for line in report["warnings"] if "max_steps=" in line or "width=16" in line]
    early = [line for line in report["warnings"] if "trainer.max_time ended the run" in line]
    assert len(early) == is_early
    if is_early:
        (line,) = early
        assert f"after {report['steps']} of 3,000 steps: resume it with more time" in line
        assert "try data.batch_size=1, model.width=4 or a smaller data.patch_size" in line
        assert line in capsys.readouterr().out


def test_a_run_that_only_time_limits_ended_early_if_it_has_few_steps():
    limits = StoppingLimits(max_seconds=1)
    limits.note_planned_steps(SimpleNamespace(global_step=19, max_epochs=None))
    assert limits.out_of_time
    assert limits.ended_early(19)
    assert not limits.ended_early(20)
