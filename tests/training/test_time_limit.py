"""A run that time ended early says so."""

import json

import pytest


@pytest.mark.parametrize(("planned", "is_early"), [(3000, True), (20, False)])
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
