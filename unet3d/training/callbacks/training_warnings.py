"""Warnings about a run that does not learn: classes never predicted, a loss that stays flat."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback

from unet3d.config.fields import format_duration
from unet3d.report.training_warnings import (
    LEARNED_DICE,
    LOW_DICE,
    LOW_LR_FRACTION,
    MIN_VALIDATIONS,
    SILENT_FRACTION,
    LossHistory,
    SuggestedOverrides,
    detect_late_rise,
    format_divergence_warning,
    format_ended_early_warning,
    format_ended_rising_warning,
    format_loss_plateau_warning,
    format_low_dice_warning,
    format_never_predicted_warning,
)
from unet3d.training.callbacks.stopping import StoppingLimits
from unet3d.training.config import TrainConfig
from unet3d.training.module import SegmentationModule

HIGH_FOREGROUND_FRACTION = 0.9  # the foreground fraction that is suggested to a run with less


class TrainingWarnings(Callback):
    """Print a line when a problem appears; `warnings` lists those that remain.

    `suggest(out_of_time=...)` returns what to try; `absent` holds sentences about classes that no
    label contains. All ranks have the same confusion matrices but their own losses; rank 0 prints.
    """

    def __init__(
        self,
        limits: StoppingLimits,
        suggest: Callable[..., SuggestedOverrides],
        absent: Sequence[str] = (),
    ):
        self.limits, self.suggest, self.absent = limits, suggest, absent
        self.losses = LossHistory()
        self.dice: list[float] = []  # mean Dice of each validation
        self.unpredicted: dict[str, int] = {}  # class: validations in a row without a voxel of it
        self.low: dict[str, int] = {}  # class: validations in a row with a Dice below LOW_DICE
        self.active: list[str] = []  # problems that have been printed and still hold

    def on_train_batch_end(self, trainer: Trainer, pl_module: SegmentationModule, *_: Any) -> None:
        self.losses.add(trainer.global_step, pl_module.nonfinite_guard.loss)

    def on_validation_end(self, trainer: Trainer, pl_module: SegmentationModule) -> None:
        if trainer.sanity_checking:
            return
        scores, voxels = pl_module.metric.compute(), pl_module.metric.voxels()
        self.dice.append(scores["dice"])
        for name, (reference, predicted) in voxels.items():
            missing = reference > 0 and predicted == 0
            self.unpredicted[name] = self.unpredicted.get(name, 0) + 1 if missing else 0
            low = scores[f"dice/{name}"] < LOW_DICE  # False for NaN
            self.low[name] = self.low.get(name, 0) + 1 if low else 0
        steps, skipped = trainer.global_step, pl_module.nonfinite_guard.skipped
        done = self.limits.fraction_done(trainer)
        group = trainer.optimizers[0].param_groups[0]
        rate = float(group["lr"]) / float(group["initial_lr"] or 1)
        found = self._find_problems(steps, skipped)
        known = [problem for problem in self.active if problem in found]
        new = [p for p in found if p not in known and self._is_due(p, done, rate)]
        for message in self._format(new, steps, skipped):
            pl_module.print(f"step {steps}: {message}")
        self.active = known + new

    def _find_problems(self, steps: int, skipped: int) -> list[str]:
        """Return the names of all problems; a run that has diverged has no other."""
        if self._describe_divergence(steps, skipped) is not None:
            return ["divergence"]
        missing = [name for name, count in self.unpredicted.items() if count]
        low = [name for name, count in self.low.items() if count and name not in missing]
        flat = [] if self._find_flat_loss() is None else ["loss"]
        return [
            *(f"unpredicted {name}" for name in missing),
            *(f"low {name}" for name in low),
            *flat,
        ]

    def _is_due(self, problem: str, done: float, rate: float) -> bool:
        """Return whether a problem is worth a line at this fraction of the run and of the rate."""
        kind, _, name = problem.partition(" ")
        if kind == "unpredicted":
            return done >= SILENT_FRACTION and self.unpredicted[name] >= MIN_VALIDATIONS
        if kind == "low":  # a low rate in a warmup does not count
            is_late = done > 0.5 and rate <= LOW_LR_FRACTION
            return is_late and self.low[name] >= MIN_VALIDATIONS
        return kind == "divergence" or done >= SILENT_FRACTION

    def _format(self, problems: Sequence[str], steps: int, skipped: int) -> list[str]:
        """Return messages about these problems: one for all classes that have the same."""
        suggested = self.suggest(out_of_time=self.limits.out_of_time)
        missing = {k: n for k, n in self.unpredicted.items() if f"unpredicted {k}" in problems}
        low = [name for name in self.low if f"low {name}" in problems]
        medians = self._find_flat_loss() if "loss" in problems else None
        messages = [
            self._describe_divergence(steps, skipped) if "divergence" in problems else None,
            format_never_predicted_warning(missing, suggested) if missing else None,
            format_low_dice_warning(low, suggested) if low else None,
            format_loss_plateau_warning(*medians, suggested) if medians is not None else None,
        ]
        return [message for message in messages if message is not None]

    @property
    def has_learned(self) -> bool:
        """Return whether any validation reached a Dice that a network without training does not."""
        return any(value >= LEARNED_DICE for value in self.dice)

    def _find_flat_loss(self) -> tuple[float, float] | None:
        return None if self.has_learned else self.losses.detect_plateau()

    def _describe_divergence(self, steps: int, skipped: int) -> str | None:
        rise, suggested = self.losses.detect_divergence(), self.suggest()
        return format_divergence_warning(rise, steps, skipped, suggested)

    def find_failure(self, steps: int, skipped: int) -> str | None:
        """Return why nothing was learned in a finished run, if so."""
        return None if self.has_learned else self._describe_divergence(steps, skipped)

    def warnings(self, *, done: bool, steps: int = 0, skipped: int = 0) -> list[str]:
        """Return all current problems of a finished run; of another, those already printed."""
        found = self._find_problems(steps, skipped)
        warnings = list(self.absent)
        if done and found != ["divergence"]:  # then more steps would not help
            suggested = self.suggest(out_of_time=self.limits.out_of_time)
            if self.limits.ended_early(steps):
                planned = self.limits.planned_steps
                enough = format_duration(self.limits.time_elapsed() * planned / steps)
                warnings.append(format_ended_early_warning(steps, planned, enough, suggested))
            rise = detect_late_rise(self.dice)
            if rise is not None:
                warnings.append(format_ended_rising_warning(*rise, suggested))
        named = [p for p in found if done or p == "divergence" or p in self.active]
        return warnings + self._format(named, steps, skipped)

    def state_dict(self) -> dict[str, Any]:
        return {
            "losses": self.losses.state_dict(),
            "dice": list(self.dice),
            "unpredicted": dict(self.unpredicted),
            "low": dict(self.low),
            "active": list(self.active),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.losses.load_state_dict(state_dict["losses"])
        self.dice, self.active = list(state_dict["dice"]), list(state_dict["active"])
        self.unpredicted = dict(state_dict["unpredicted"])
        self.low = dict(state_dict["low"])


def suggest_overrides(settings: TrainConfig, *, out_of_time: bool = False) -> SuggestedOverrides:
    """Return overrides for each kind of warning; only keys that the network has.

    A run that was `out_of_time` is not asked for more steps, epochs or channels.
    """
    step, trainer = settings.step, settings.trainer
    arguments = step.network.model.arguments
    batches, volumes = step.micro_batches, step.data.batch_size
    width = None if arguments.get("channels") is not None else arguments.get("width")
    counts = {"max_steps": trainer.max_steps, "max_epochs": trainer.max_epochs}
    counts = {} if out_of_time else counts
    limits = [f"trainer.{key}={2 * n}" for key, n in counts.items() if n is not None]
    if trainer.max_seconds is not None:
        limits.append(f"trainer.max_time={format_duration(2 * trainer.max_seconds)}")
    for_class = [] if step.network.prior_bias else ["model.prior_bias=true"]
    for_class.append(" ".join(limits))
    if step.data.foreground_fraction < HIGH_FOREGROUND_FRACTION:
        for_class.append(f"data.foreground_fraction={HIGH_FOREGROUND_FRACTION}")
    if isinstance(width, int) and not out_of_time:
        for_class.append(f"model.width={2 * width}")
    cheaper = [f"trainer.accumulate_grad_batches={batches // 2}"] if batches > 1 else []
    cheaper += [f"data.batch_size={volumes // 2}"] if volumes > 1 else []
    cheaper += [f"model.width={width // 2}"] if isinstance(width, int) and width > 1 else []
    suggested = SuggestedOverrides(
        run_too_short=[" ".join(limits)],
        class_not_learned=for_class,
        cheaper_step=[*cheaper, "a smaller data.patch_size"],
    )
    lr = step.optimizer.arguments.get("lr")
    if not isinstance(lr, int | float) or lr <= 0:
        return suggested
    return replace(
        suggested,
        loss_not_falling=[f"optimizer.lr={lr * factor:g}" for factor in (0.1, 10)],
        lower_rate=f"lower optimizer.lr={lr:g} (unet3d lr suggests one)",
    )
