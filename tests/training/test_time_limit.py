"""A time limit that is too short is refused, and a run that it ended early says so."""

import json

import pytest

SLOW = """
import time
from lightning.pytorch.callbacks import Callback

class Slow(Callback):
    def on_train_batch_start(self, *_):
        time.sleep(0.1)
"""


@pytest.fixture
def slow(unet3d, tmp_path, monkeypatch):
    """Train with steps of a tenth of a second or more."""
    (tmp_path / "slow_steps.py").write_text(SLOW)
    (tmp_path / "conf" / "callbacks").mkdir(parents=True)
    config = tmp_path / "conf" / "callbacks" / "slow.yaml"
    config.write_text("slow:\n  _target_: slow_steps.Slow\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["callbacks=[default,slow]", "validation.hd95=false"]

    def command(*overrides):
        status = unet3d(*words, "logger=none", *overrides)
        return status, json.loads((tmp_path / "run" / "report.json").read_text())

    return command


def test_a_time_in_which_fewer_than_20_steps_fit_is_refused_with_what_would_fit(slow, capsys):
    status, report = slow("trainer.max_steps=50000", "trainer.max_time=00:00:00:02")
    (line,) = capsys.readouterr().err.splitlines()
    assert status == 2
    assert "trainer.max_time=00:00:00:02 is too short for 20 steps, as a step takes 0." in line
    assert "set trainer.max_time=00:00:00:" in line
    assert "try data.batch_size=1, model.width=4 or a smaller data.patch_size" in line
    assert (report["finished"], report["steps"]) == (False, 3)
    assert report["error"] in line


def test_a_time_that_ends_before_steps_were_measured_is_refused_too(slow, capsys):
    batches = ("trainer.accumulate_grad_batches=4", "data.batch_size=1", "data.patches_per_case=9")
    status, report = slow("trainer.max_steps=50", "trainer.max_time=00:00:00:01", *batches)
    assert status == 2
    assert report["steps"] < 3
    assert "; try trainer.accumulate_grad_batches=2, model.width=4 or" in capsys.readouterr().err


def test_a_run_of_few_steps_may_have_little_time(slow):
    status, report = slow("trainer.max_steps=4", "trainer.max_time=00:00:00:02")
    assert (status, report["steps"]) == (0, 4)


@pytest.mark.parametrize(("planned", "is_early"), [(1000, True), (20, False)])
def test_a_resumed_run_with_little_time_left_is_not_refused_and_says_if_it_ended_early(
    slow, capsys, planned, is_early
):
    assert slow("trainer.max_steps=3")[0] == 0
    more = (f"trainer.max_steps={planned}", "trainer.max_time=00:00:00:01", "resume=auto")
    status, report = slow(*more)
    assert status == 0
    assert not [line for line in report["warnings"] if "max_steps=" in line or "width=16" in line]
    early = [line for line in report["warnings"] if "trainer.max_time ended the run" in line]
    assert len(early) == is_early
    if is_early:
        (line,) = early
        assert f"after {report['steps']} of 1,000 steps: resume it with more time" in line
        assert "try data.batch_size=1, model.width=4 or a smaller data.patch_size" in line
        assert line in capsys.readouterr().out
