"""Warnings about a run that does not learn: classes never predicted, a loss that stays flat."""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback

from unet3d.config.fields import format_duration
from unet3d.report.charts import Points
from unet3d.report.curves import Curve
from unet3d.text import join_first, pluralize
from unet3d.training.callbacks.stopping import StoppingLimits
from unet3d.training.config import TrainConfig
from unet3d.training.module import SegmentationModule

MIN_VALIDATIONS = 3  # in a row, before a class counts as never predicted
SILENT_FRACTION = 0.25  # of a run, in which nothing is reported: small classes are learned late
MIN_FALL = 0.05  # fraction by which the loss must have fallen by the end
LEARNED_DICE = 0.5  # from here on, a loss that stays flat was low from the start (init_from=)
DIVERGED = 10.0  # a loss above this, and this many times as high as its lowest value, has diverged
MIN_POINTS = 64  # of the curve of the loss, with fewer it is not judged
HIGH_FOREGROUND_FRACTION = 0.9  # the foreground fraction that is suggested to a run with less

LOWER_RATE = "lower optimizer.lr (unet3d lr suggests a rate)"


class TrainingWarnings(Callback):
    """Print a line when a problem appears; `warnings` lists those that remain.

    `loss` is the curve of the loss, to which another callback adds each step. `suggest(kind,
    out_of_time=...)` returns overrides to try. All ranks have the same confusion matrices but their
    own losses; rank 0 prints.
    """

    def __init__(self, limits: StoppingLimits, loss: Curve, suggest: Callable[..., Sequence[str]]):
        self.limits, self.loss, self.suggest = limits, loss, suggest
        self.lowest_loss = math.inf  # of all batches
        self.dice: list[float] = []  # mean Dice of each validation
        self.unpredicted: dict[str, int] = {}  # class: validations in a row without a voxel of it
        self.active: list[str] = []  # problems that have been printed and still hold

    def on_train_batch_end(self, trainer: Trainer, pl_module: SegmentationModule, *_: Any) -> None:
        loss = pl_module.nonfinite_guard.loss
        if math.isfinite(loss):  # a step with any other is skipped
            self.lowest_loss = min(self.lowest_loss, loss)

    def on_validation_end(self, trainer: Trainer, pl_module: SegmentationModule) -> None:
        if trainer.sanity_checking:
            return
        self.dice.append(pl_module.metric.compute()["dice"])
        for name, (reference, predicted) in pl_module.metric.voxels().items():
            missing = reference > 0 and predicted == 0
            self.unpredicted[name] = self.unpredicted.get(name, 0) + 1 if missing else 0
        steps, skipped = trainer.global_step, pl_module.nonfinite_guard.skipped
        done = self.limits.fraction_done(trainer)
        found = self._find_problems(steps, skipped)
        known = [problem for problem in self.active if problem in found]
        new = {p: text for p, text in found.items() if p not in known and self._is_due(p, done)}
        for message in self._describe(new):
            pl_module.print(f"step {steps}: {message}")
        self.active = [*known, *new]

    def _find_problems(self, steps: int, skipped: int) -> dict[str, str]:
        """Return the texts of all problems by name; a run that has diverged has no other."""
        divergence = self._describe_divergence(steps, skipped)
        if divergence is not None:
            return {"divergence": divergence}
        problems = {
            f"unpredicted {name}": f"{name} (for {pluralize(count, 'validation')})"
            for name, count in self.unpredicted.items()
            if count
        }
        medians = None if self.has_learned else detect_plateau(self.loss.points)
        if medians is not None:
            problems["loss"] = (
                f"the loss does not fall: its median was {medians[0]:.4g} in the first eighth of "
                f"the steps and {medians[1]:.4g} in the last"
            )
        return problems

    def _is_due(self, problem: str, done: float) -> bool:
        """Return whether a problem is worth a line at this fraction of the run."""
        kind, _, name = problem.partition(" ")
        if kind == "unpredicted" and self.unpredicted[name] < MIN_VALIDATIONS:
            return False
        return kind == "divergence" or done >= SILENT_FRACTION

    def _describe(self, problems: Mapping[str, str]) -> list[str]:
        """Return a line for each problem, and one for all classes that are not predicted."""
        lines = [text for name, text in problems.items() if name == "divergence"]
        missing = [text for name, text in problems.items() if name.startswith("unpredicted")]
        if missing:
            line = f"no voxel of the validation set is predicted as {join_first(missing)}"
            lines.append(self._append_overrides(line, "class"))
        if "loss" in problems:
            lines.append(self._append_overrides(problems["loss"], "loss"))
        return lines

    def _append_overrides(self, message: str, kind: str) -> str:
        """Append what to try against a kind of problem."""
        overrides = self.suggest(kind, out_of_time=self.limits.out_of_time)
        return f"{message}; try {' or '.join(overrides)}" if overrides else message

    @property
    def has_learned(self) -> bool:
        """Return whether any validation reached a Dice that a network without training does not."""
        return any(value >= LEARNED_DICE for value in self.dice)

    def _describe_divergence(self, steps: int, skipped: int) -> str | None:
        rise = detect_divergence(self.loss.points, self.lowest_loss)
        if rise is not None:
            change = "from {:.4g} to {:.4g}".format(*rise)
            return f"the training diverged: its loss rose {change}; {LOWER_RATE}"
        if 2 * skipped <= steps:
            return None
        return (
            f"{skipped:,} of {steps:,} steps were skipped, since their loss or gradients were not "
            f"finite; {LOWER_RATE}, or check the cases that the log names"
        )

    def find_failure(self, steps: int, skipped: int) -> str | None:
        """Return why nothing was learned in a finished run, if so."""
        return None if self.has_learned else self._describe_divergence(steps, skipped)

    def warnings(self, *, done: bool, steps: int = 0, skipped: int = 0) -> list[str]:
        """Return all current problems of a finished run; of another, those already printed."""
        found = self._find_problems(steps, skipped)
        warnings = list[str]()
        # After a divergence more steps would not help.
        if done and "divergence" not in found and self.limits.ended_early(steps):
            planned = self.limits.planned_steps
            time = format_duration(self.limits.time_elapsed() * planned / steps)
            warnings.append(
                f"trainer.max_time ended the run after {steps:,} of {planned:,} steps: resume it "
                f"with more time (resume=auto trainer.max_time={time} for all steps), or start a "
                "run with a smaller model.width or data.patch_size"
            )
        named = {p: text for p, text in found.items() if done or p in ("divergence", *self.active)}
        return warnings + self._describe(named)

    def state_dict(self) -> dict[str, Any]:
        return {
            "lowest_loss": self.lowest_loss,
            "dice": list(self.dice),
            "unpredicted": dict(self.unpredicted),
            "active": list(self.active),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.lowest_loss = state_dict.get("lowest_loss", math.inf)
        self.dice, self.active = list(state_dict["dice"]), list(state_dict["active"])
        self.unpredicted = dict(state_dict["unpredicted"])


def detect_plateau(points: Points) -> tuple[float, float] | None:
    """Return the medians of the first and last eighth if the loss has not fallen, else None."""
    if len(points) < MIN_POINTS:
        return None
    eighth = len(points) // 8
    first, last = (median(loss for _, loss in part) for part in (points[:eighth], points[-eighth:]))
    return (first, last) if first - last < MIN_FALL * abs(first) else None


def detect_divergence(points: Points, lowest: float) -> tuple[float, float] | None:
    """Return the lowest loss and the median of the latest if it rose by magnitudes, else None.

    `lowest` is that of single batches: where the first step diverges, every mean has diverged.
    """
    if not points:
        return None
    last = median(loss for _, loss in points[-max(3, len(points) // 8) :])
    return (lowest, last) if last > DIVERGED * max(abs(lowest), 1) else None


def suggest_overrides(
    settings: TrainConfig, kind: Literal["class", "loss"], *, out_of_time: bool = False
) -> list[str]:
    """Return overrides to try against a kind of problem; only keys that the network has.

    A run that was `out_of_time` is not asked for more steps, epochs or channels.
    """
    step, trainer = settings.step, settings.trainer
    if kind == "loss":
        lr = step.optimizer.arguments.get("lr")
        is_known = isinstance(lr, int | float) and lr > 0
        return [f"optimizer.lr={lr * factor:g}" for factor in (0.1, 10)] if is_known else []
    arguments = step.network.model.arguments
    width = None if arguments.get("channels") is not None else arguments.get("width")
    counts = {"max_steps": trainer.max_steps, "max_epochs": trainer.max_epochs}
    limits = [
        f"trainer.{k}={2 * n}" for k, n in counts.items() if n is not None and not out_of_time
    ]
    if trainer.max_seconds is not None:
        limits.append(f"trainer.max_time={format_duration(2 * trainer.max_seconds)}")
    overrides = [] if step.network.prior_bias else ["model.prior_bias=true"]
    overrides.append(" ".join(limits))
    if step.data.foreground_fraction < HIGH_FOREGROUND_FRACTION:
        overrides.append(f"data.foreground_fraction={HIGH_FOREGROUND_FRACTION}")
    if isinstance(width, int) and not out_of_time:
        overrides.append(f"model.width={2 * width}")
    return overrides
