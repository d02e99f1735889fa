"""Checkpoints of a run: last.ckpt, previous.ckpt and best.ckpt, and what a run starts from."""

import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_only
from torch import nn

from unet3d.checkpoint_file import (
    FALLBACKS,
    PREVIOUS,
    CorruptedCheckpointError,
    download,
    extract_weights,
    has_checkpoint,
    is_on_hub,
    load_checkpoint,
    save_checkpoint,
)
from unet3d.errors import UsageError, describe_os_error
from unet3d.files import find_run_checkpoint, make_temporary_path, remove_temporary_files
from unet3d.model.foreign_weights import (
    adapt_input_channels,
    get_nnunet_axes,
    is_first_convolution,
    rename_nnssl_encoder,
    rename_weights,
)
from unet3d.training.callbacks.resume_state import (
    find_leak,
    get_logged_steps,
    list_training_cases,
)
from unet3d.training.callbacks.stopping import StoppingLimits
from unet3d.training.lightning_internals import is_optimizer_step
from unet3d.training.loggers import purge_logs, warn

if TYPE_CHECKING:
    from unet3d.training.run import TrainingRun

LAST, BEST, CORRUPTED = "last.ckpt", "best.ckpt", "corrupted.ckpt"

PRETRAINED = "checkpoint_final.pth"
"""The file of a repository on the hub that nnssl or nnU-Net has trained."""

MAX_TIME_FRACTION = 0.01  # largest fraction of a run's time that may go into saving `last.ckpt`


class AtomicCheckpointIO(TorchCheckpointIO):
    """Save checkpoints atomically, keep the one before last.ckpt, and survive a full disk.

    Lightning's own plugin goes through $TMPDIR without fsync: with $TMPDIR on another file system,
    a kill left an empty last.ckpt and no other. A checkpoint that cannot be written costs a
    warning: the next save tries again, and the previous checkpoint stays intact.
    """

    def __init__(self) -> None:
        self.failed_saves: dict[str, str] = {}  # checkpoint name: why its last save failed

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        path = Path(path)
        try:
            if path.name == LAST and path.exists():
                replace_with_copy(path, path.with_name(PREVIOUS))
            save_checkpoint(checkpoint, path)
        except OSError as error:
            kept = "keeping the previous checkpoint" if path.exists() else "no previous checkpoint"
            message = f"{describe_os_error(error, path)}; {kept}"
            if path.name not in self.failed_saves:
                warn(f"{message}; training continues")
            self.failed_saves[path.name] = message
        else:
            self.failed_saves.pop(path.name, None)

    def load_checkpoint(self, path: Any, *_: Any, **__: Any) -> dict[str, Any]:
        return load_checkpoint(Path(path), mmap=False)


class LastCheckpoint(Checkpoint):
    """Save last.ckpt between two optimizer steps, `every_seconds` apart, and when the run ends.

    Lightning's callback saves before a step is logged, also between micro-batches, whose gradients
    are not in a checkpoint, and not at the end of the run. The interval grows where saving takes
    long.
    """

    def __init__(self, folder: Path, limits: StoppingLimits, every_seconds: float):
        self.path, self.limits, self.every_seconds = folder / LAST, limits, every_seconds
        limits.is_save_due = self._is_due
        self.saved_step = 0  # optimizer step of the last save in this process
        self.due = 0.0  # time of the next save

    def save(self, trainer: Trainer) -> None:
        """Save the current state of the run, after the metrics before it."""
        start = time.monotonic()
        save_logs(trainer)
        trainer.save_checkpoint(self.path)
        self.saved_step, interval = trainer.global_step, self.every_seconds
        if interval:
            interval = max(interval, (time.monotonic() - start) / MAX_TIME_FRACTION)
        self.due = start + interval

    def on_train_start(self, *_: Any) -> None:
        self.due = time.monotonic() + self.every_seconds

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % trainer.accumulate_grad_batches or trainer.global_step == self.saved_step:
            return
        if self._is_due() if trainer.world_size == 1 else self.limits.agreed_to_save:
            self.save(trainer)

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        self.save(trainer)

    def _is_due(self) -> bool:
        return time.monotonic() >= self.due

    def on_exception(self, trainer: Trainer, *_: Any) -> None:
        """Save if a run can be resumed here: a rank cannot save alone, nor within a step."""
        batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        is_logged = trainer.training and batches.processed == batches.completed
        is_between_steps = is_logged and is_optimizer_step(trainer)
        if is_between_steps and trainer.world_size == 1 and trainer.global_step != self.saved_step:
            self.save(trainer)


class BestCheckpoint(ModelCheckpoint):
    """Save best.ckpt after the validation with the best value of a metric.

    With `top_k` above 1, also keep the `top_k` best ones as best-step=STEP.ckpt. Lightning's
    callback forgets the best one when a folder is moved.
    """

    def __init__(
        self,
        folder: Path,
        *,
        monitor: str = "val/dice",
        mode: Literal["max", "min"] = "max",
        top_k: int = 1,
    ):
        super().__init__(
            folder,
            "best" if top_k == 1 else "best-step={step:06d}",
            monitor=monitor,
            mode=mode,
            save_top_k=top_k,
            auto_insert_metric_name=False,
            save_on_train_epoch_end=False,
            enable_version_counter=False,
        )
        self.folder = folder
        self.step: int | None = None  # of best.ckpt

    @property
    def state_key(self) -> str:
        """Return the name of its state in a checkpoint, which no option changes."""
        return "BestCheckpoint"

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        save_logs(trainer)
        if filepath == self.best_model_path:
            self.step = trainer.global_step
        super()._save_checkpoint(trainer, filepath)
        if filepath == self.best_model_path and Path(filepath).name != BEST:
            trainer.save_checkpoint(self.folder / BEST)

    def state_dict(self) -> dict[str, Any]:
        """Return the score of each file, by its name in the folder."""
        scores = {Path(path).name: float(v) for path, v in self.best_k_models.items()}
        return {"scores": scores, "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        scores = {
            str(path): torch.tensor(value)
            for name, value in state_dict["scores"].items()
            if (path := Path(self.dirpath or self.folder, name)).exists()
        }
        if not scores:
            return
        self.step = state_dict.get("step")
        best, worst = (max, min) if self.mode == "max" else (min, max)
        while len(scores) > self.save_top_k > 0:  # which a resumed run may change
            del scores[worst(scores, key=scores.__getitem__)]
        scores = {str(self._rename(Path(path))): score for path, score in scores.items()}
        self.best_k_models = scores
        self.best_model_path = best(scores, key=scores.__getitem__)
        self.best_model_score = scores[self.best_model_path]
        if len(scores) == self.save_top_k:
            self.kth_best_model_path = worst(scores, key=scores.__getitem__)
            self.kth_value = scores[self.kth_best_model_path]

    def _rename(self, path: Path) -> Path:
        """Return what this `top_k` calls a file, and create it beside best.ckpt of another one."""
        if self.save_top_k == 1:
            return path.with_name(BEST)
        if path.name != BEST:
            return path
        target = path.with_name(f"best-step={load_checkpoint(path)['global_step']:06d}.ckpt")
        rank_zero_only(replace_with_copy)(path, target)
        return target


def save_logs(trainer: Trainer) -> None:
    """Write metrics that precede a checkpoint: a run that is resumed does not log them again."""
    for logger in trainer.loggers:
        logger.save()


def replace_with_copy(path: Path, target: Path) -> None:
    """Replace `target` by a hard link to `path`, or a copy; `path` exists at any time."""
    link = make_temporary_path(target)
    try:
        try:
            os.link(path, link)
        except OSError:  # another file system, or one without hard links
            shutil.copyfile(path, link)
        link.replace(target)
    finally:
        link.unlink(missing_ok=True)  # replace() keeps it if both are already the same file


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """Where a run starts, and messages about resume= and init_from=."""

    checkpoint: Path | None = None  # to resume from
    steps: int = 0  # of the checkpoint
    is_finished: bool = False  # whether the checkpoint is at the end of this run already
    messages: list[str]


def resolve_start(run: "TrainingRun") -> RunStart:
    """Verify the checkpoint to resume from, if any, or load pretrained weights."""
    settings, folder, callbacks = run.settings, run.folder / "checkpoints", run.callbacks
    found, logged = load_resume(settings.resume, folder), 0
    if found is not None:
        path, content, problems = found
        logged = get_logged_steps(callbacks.resume_state, content, path, run.module.metadata)
    # All checks have passed: files change only from here on.
    if run.is_main:
        remove_temporary_files(folder / "*.ckpt")
    purge_logs(run.trainer, logged)
    if found is None:
        model, source = run.module.model, settings.init_from
        if source is None:
            return RunStart(messages=[])
        given = load_checkpoint(source)
        trained_on = list_training_cases(given)
        run.module.metadata["pretrained_on"] = trained_on
        messages = [
            load_pretrained(model, source, given),
            describe_other_meaning(given.get("unet3d", {}), run.module.metadata),
            find_leak(run.data, trained_on)[1],
        ]
        return RunStart(messages=[*filter(None, messages)])
    run.module.metadata["pretrained_on"] = content["unet3d"].get("pretrained_on", [])
    if run.is_main:
        restore_checkpoints(folder, path, content, is_fallback=bool(problems))
    finished = is_finished(run, content)
    if finished:  # what its report says; nothing else loads it
        run.module.on_load_checkpoint(content)
        for callback in (callbacks.curves, callbacks.training_warnings):
            callback.load_state_dict(content["callbacks"][callback.state_key])
    # Lightning loads the file itself: the content must not stay in memory while it trains.
    return RunStart(
        checkpoint=path,
        steps=content["global_step"],
        is_finished=finished,
        messages=[*problems, f"resuming from {path}"],
    )


def load_resume(
    resume: str | None, checkpoints: Path
) -> tuple[Path, dict[str, Any], list[str]] | None:
    """Return path and content of the checkpoint that `resume=` selects, if any.

    Where last.ckpt is missing or corrupted, it is the next older one, and a line says so.
    """
    if resume is None or (resume == "auto" and not has_checkpoint(checkpoints)):
        return None
    if resume != "auto":
        path = Path(resume)
        if not path.is_dir() or not has_checkpoint(path / "checkpoints"):
            return path, load_checkpoint(path), []
        checkpoints = path / "checkpoints"
    problems: list[str] = []
    for path in (checkpoints / name for name in (LAST, *FALLBACKS)):
        try:
            if path.exists():
                return path, load_checkpoint(path), problems
            problems = problems or [f"{path} is missing"]
        except CorruptedCheckpointError as error:
            problems = problems or [str(error)]
    raise UsageError(
        f"{problems[0]}; there is no intact previous checkpoint. Remove resume= to start over"
    )


def restore_checkpoints(
    folder: Path, path: Path, content: Mapping[str, Any], *, is_fallback: bool
) -> None:
    """Make a fallback the last checkpoint again, or copy the best ones of a run elsewhere."""
    last = folder / LAST
    if is_fallback and path.parent.resolve() == folder.resolve():
        if last.exists():
            last.replace(folder / CORRUPTED)
        replace_with_copy(path, last)
    scores = content["callbacks"].get("BestCheckpoint", {}).get("scores", {})
    for name in {*scores, BEST} if scores else ():
        source, target = path.with_name(name), folder / name
        if source.exists() and not target.exists():
            folder.mkdir(parents=True, exist_ok=True)
            replace_with_copy(source, target)


def is_finished(run: "TrainingRun", content: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint's run has reached a limit and no validation is pending."""
    states, limits = content["callbacks"], run.callbacks.limits
    limits.load_state_dict(states[limits.state_key])
    state = states[run.callbacks.resume_state.state_key]
    if state["pending"]:
        return False
    for stopping in run.trainer.early_stopping_callbacks:
        if states.get(stopping.state_key, {}).get("wait_count", 0) >= stopping.patience:
            return True
    epochs = state["position"]["epoch"] + (state["position"]["batch"] == len(run.data.train_loader))
    by_epochs = 0 < (run.trainer.max_epochs or -1) <= epochs
    return by_epochs or limits.is_reached(content["global_step"])


def find_pretrained(path: Path) -> Path:
    """Return the file of `init_from`, downloaded if it is on the hub, before hours of other work.

    A repository has the weights in checkpoint_final.pth, as nnssl and nnU-Net save it; of a run, it
    is the best checkpoint, if there is one.
    """
    if is_on_hub(path):
        return download(path, [PRETRAINED], is_a="pretrained network") / PRETRAINED
    found = path if path.is_file() else find_run_checkpoint(path)
    if found is None:
        raise UsageError(f"init_from: no checkpoint at {path.absolute()}")
    return found


def describe_other_meaning(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Warn if a network's outputs or inputs meant something else, by metadata of checkpoints."""
    pairs = {key: (list(before.get(key) or now[key]), now[key]) for key in ("classes", "channels")}
    different = [
        f"{key} were {', '.join(one)} and are {', '.join(other)}"
        for key, (one, other) in pairs.items()
        if one != other
    ]
    if not different:
        return None
    return f"init_from: {'; '.join(different)}: weights are matched by position, not by name"


def load_pretrained(model: nn.Module, path: Path, content: Mapping[str, Any]) -> str:
    """Load the weights that match by name and shape; return a line on what was loaded.

    `content` is that of the file. Weights of nnU-Net, nnssl and MONAI are renamed first.
    """
    initial = model.state_dict()
    given = {
        name.removeprefix("model."): value for name, value in extract_weights(path, content).items()
    }
    if "nnssl_adaptation_plan" in content:
        given = rename_nnssl_encoder(given, content["nnssl_adaptation_plan"])
    axes = get_nnunet_axes(content.get("init_args", {}).get("plans", {}))
    weights, project = rename_weights(given, initial, axes)
    changes = f", weights of {project}" if project else ""
    first = next(iter(initial), "")
    if first in weights and is_first_convolution(initial[first], weights[first]):
        channels, given = initial[first].shape[1], weights[first].shape[1]
        weights[first] = adapt_input_channels(weights[first], channels)
        changes += f"; adapted {first} from {given} to {channels} input channels"
    matching = {
        name: value
        for name, value in weights.items()
        if name in initial and value.shape == initial[name].shape
    }
    if not matching:
        raise UsageError(
            f"init_from={path}: none of its {len(weights)} tensors fits this network: set model= "
            "and model.* as in the run that saved it"
        )
    model.load_state_dict({**initial, **matching})
    others = sorted(set(initial) - set(matching))
    missing = f"; randomly initialized: {', '.join(others)}" if others else ""
    return (
        f"init_from: loaded {len(matching)} of {len(initial)} tensors from {path}{changes}{missing}"
    )
