"""Warnings about classes that are never predicted and a loss that stays flat."""

from types import SimpleNamespace

import torch

from unet3d.metric.dice import Dice
from unet3d.report.training_warnings import SuggestedOverrides
from unet3d.training.callbacks.stopping import StoppingLimits
from unet3d.training.callbacks.training_warnings import TrainingWarnings, suggest_overrides
from unet3d.types import IGNORE_LABEL

SUGGESTED = SuggestedOverrides(
    class_not_learned=["model.width=16"], loss_not_falling=["optimizer.lr=1"]
)
REFERENCE = torch.tensor([0, 1, 1, 2, 2, 2, 2, IGNORE_LABEL]).view(1, 1, 1, 8)
GOOD = REFERENCE.where(REFERENCE != IGNORE_LABEL, 0)
WITHOUT_2 = torch.tensor([0, 1, 1, 0, 0, 0, 0, 2]).view(1, 1, 1, 8)  # one, but it is ignored
ELSEWHERE = torch.tensor([2, 1, 1, 0, 0, 0, 0, 0]).view(1, 1, 1, 8)


class Validations:
    """A run of 20 steps with a validation after each."""

    def __init__(self, regions=None):
        self.warnings = TrainingWarnings(
            StoppingLimits(max_steps=20), lambda out_of_time=False: SUGGESTED
        )
        self.lines = []
        self.metric = Dice(["background", "a", "b"], regions)
        self.module = SimpleNamespace(
            metric=self.metric,
            print=self.lines.append,
            nonfinite_guard=SimpleNamespace(loss=1.0, skipped=0),
        )
        rates = {"lr": torch.tensor(1.0), "initial_lr": 1.0}
        optimizer = SimpleNamespace(param_groups=[rates])
        self.trainer = SimpleNamespace(
            sanity_checking=False, global_step=0, max_epochs=None, optimizers=[optimizer]
        )

    def after(self, *predictions):
        for prediction in predictions:
            self.trainer.global_step += 1
            rates = self.trainer.optimizers[0].param_groups[0]
            rates["lr"] = 1 - self.trainer.global_step / 20
            self.metric.reset()
            self.metric.update(prediction, REFERENCE)
            self.warnings.on_validation_end(self.trainer, self.module)
        return self.lines


MISSING = "not one voxel of the validation set is predicted as b (for {} validations); "


def test_a_class_without_predicted_voxels_is_reported_once_and_again_when_it_is_lost_again():
    run = Validations()
    assert run.after(*[WITHOUT_2] * 4) == []  # a fifth of the run: too early
    (line,) = run.after(WITHOUT_2)
    assert line == f"step 5: {MISSING.format(5)}try model.width=16"
    assert run.after(*[WITHOUT_2] * 5) == [line]
    assert run.after(GOOD, GOOD, WITHOUT_2, WITHOUT_2) == [line]
    (_, again) = run.after(WITHOUT_2)
    assert again.startswith(f"step 15: {MISSING.format(3)}")


def test_a_misplaced_class_is_reported_after_the_learning_rate_has_decayed():
    run = Validations()
    assert run.after(*[ELSEWHERE] * 14) == []
    assert run.after(ELSEWHERE) == ["step 15: Dice is below 0.05 for b; try model.width=16"]


def test_a_flat_loss_is_reported_once_unless_the_network_has_learned():
    lines = []
    for prediction in (torch.zeros_like(GOOD), GOOD):
        run = Validations()
        for _ in range(80):
            run.warnings.on_train_batch_end(run.trainer, run.module)
        printed = run.after(*[prediction] * 8)
        lines.append([line for line in printed if "loss" in line])
    (line,), nothing = lines
    assert line.startswith("step 5: the loss does not fall: its median was 1 in the first eighth")
    assert nothing == []


def test_warnings_list_the_problems_at_the_end_of_a_run():
    run = Validations()
    run.after(GOOD, ELSEWHERE)
    assert run.warnings.warnings(done=False) == []
    assert run.warnings.warnings(done=True) == ["Dice is below 0.05 for b; try model.width=16"]
    run.after(WITHOUT_2, WITHOUT_2)
    assert run.warnings.warnings(done=False) == []  # too early
    run.after(WITHOUT_2)
    for done in (False, True):
        (warning,) = run.warnings.warnings(done=done)
        assert warning.startswith("not one voxel of the validation set is predicted as b (for 3")


def test_it_resumes_from_its_state_without_a_difference():
    uninterrupted, stopped, resumed = Validations(), Validations(), Validations()
    predictions = [*[WITHOUT_2] * 6, GOOD, GOOD, *[ELSEWHERE] * 10]
    uninterrupted.after(*predictions)
    stopped.after(*predictions[:6])
    resumed.warnings.load_state_dict(stopped.warnings.state_dict())
    resumed.trainer.global_step = 6
    resumed.after(*predictions[6:])
    assert stopped.lines + resumed.lines == uninterrupted.lines
    assert resumed.warnings.state_dict() == uninterrupted.warnings.state_dict()


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


def test_a_run_that_only_time_limits_ended_early_if_it_has_few_steps():
    limits = StoppingLimits(max_seconds=1)
    limits.note_planned_steps(SimpleNamespace(global_step=19, max_epochs=None))
    assert limits.out_of_time
    assert limits.ended_early(19)
    assert not limits.ended_early(20)


def suggest(composed, *overrides):
    return suggest_overrides(composed(*overrides))


def test_a_run_gets_more_of_what_it_has_little_of(composed):
    suggested = suggest(composed, "trainer.max_steps=null")
    assert suggested.run_too_short == ["trainer.max_epochs=40"]
    assert suggested.class_not_learned == [
        "trainer.max_epochs=40",
        "data.foreground_fraction=0.9",
        "model.width=16",
    ]
    assert suggested.loss_not_falling == ["optimizer.lr=0.0003", "optimizer.lr=0.03"]


def test_nothing_is_suggested_that_is_set_already_or_that_the_network_does_not_have(composed):
    overrides = ["model=dynunet", "data.foreground_fraction=1", "trainer.max_steps=50"]
    assert suggest(composed, *overrides).class_not_learned == ["trainer.max_steps=100"]
    words = ["model.channels=[8,16]", "model.prior_bias=false"]
    first, *others = suggest(composed, *words).class_not_learned
    assert first == "model.prior_bias=true"
    assert not [override for override in others if "width" in override or "prior" in override]


def test_every_limit_is_doubled_and_of_a_run_that_time_ended_only_time(composed):
    limits = ("trainer.max_steps=9", "trainer.max_epochs=3", "trainer.max_time=00:00:10:00")
    time = "trainer.max_time=00:00:20:00"
    longer = f"trainer.max_steps=18 trainer.max_epochs=6 {time}"
    assert suggest(composed, *limits).run_too_short == [longer]
    suggested = suggest_overrides(composed(*limits), out_of_time=True)
    assert suggested.run_too_short == [time]
    assert suggested.class_not_learned == [time, "data.foreground_fraction=0.9"]
