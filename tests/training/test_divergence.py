"""A run that diverged says so, names the learning rate, and is no success."""

import json

from tests.training.callbacks.test_training_warnings import GOOD, Validations


def test_a_run_whose_steps_were_skipped_ends_with_4_and_names_the_learning_rate_alone(
    unet3d, tmp_path, capsys
):
    words = ("optimizer.lr=1e30", "trainer.max_steps=14", "max_skipped_steps=100", "logger=none")
    for attempt in ((), ("resume=auto",)):
        assert unet3d(*words, "validation.hd95=false", "evaluation.enabled=true", *attempt) == 4
        err = capsys.readouterr().err
        report = json.loads((tmp_path / "run" / "report.json").read_text())
        (warning,) = report["warnings"]
        assert warning.startswith("13 of 14 steps were skipped, since their loss or gradients were")
        assert "lower optimizer.lr=1e+30" in warning
        assert err == f"unet3d: {warning}\n"
        assert report["error"] == warning
        assert (report["finished"], report["steps"]) == (True, 14)
        assert "evaluation" not in report


LOWER = "lower the learning rate"


def test_divergence_is_printed_once_and_not_reported_when_it_is_over():
    run = Validations()
    for loss in (1.5, 70.0, 80.0, 90.0):
        run.module.nonfinite_guard.loss = loss
        run.warnings.on_train_batch_end(run.trainer, run.module)
    run.after(GOOD, GOOD)
    assert run.lines == ["step 1: the training diverged: its loss rose from 1.5 to 80; " + LOWER]
    run.module.nonfinite_guard.loss = 1.4
    for _ in range(3):
        run.warnings.on_train_batch_end(run.trainer, run.module)
    assert len(run.after(GOOD)) == 1
    assert run.warnings.warnings(done=True, steps=3) == []


def test_a_run_that_had_learned_before_it_diverged_is_warned_about_but_does_not_fail():
    run = Validations()
    run.after(GOOD)
    for loss in (0.1, 1e9, 1e9, 1e9):
        run.module.nonfinite_guard.loss = loss
        run.warnings.on_train_batch_end(run.trainer, run.module)
    assert run.warnings.find_failure(steps=4, skipped=0) is None
    (warning,) = run.warnings.warnings(done=True, steps=4)
    assert warning == f"the training diverged: its loss rose from 0.1 to 1e+09; {LOWER}"


def test_half_of_the_steps_may_be_skipped():
    run = Validations()
    assert run.warnings.find_failure(steps=10, skipped=5) is None
    assert run.warnings.find_failure(steps=10, skipped=6).startswith("6 of 10 steps were skipped")
