"""What a run starts from: a checkpoint to resume, or the weights of another run."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from unet3d.checkpoint_file import (
    FALLBACKS,
    CorruptedCheckpointError,
    extract_weights,
    find_mismatch,
    has_checkpoint,
    load_checkpoint,
)
from unet3d.errors import UsageError
from unet3d.model.pretrained import (
    adapt_input_channels,
    get_axes_of_nnunet,
    is_first_convolution,
    rename_weights,
)
from unet3d.training.callbacks.early_stopping import EarlyStopping
from unet3d.training.checkpoints import BEST, remove_leftovers, replace_with_copy
from unet3d.training.loggers import purge_logs
from unet3d.training.resume_state import get_logged_steps
from unet3d.training.run import TrainingRun

CORRUPTED = "corrupted.ckpt"


@dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """An intact checkpoint to resume from, and lines to print about it."""

    path: Path
    content: dict[str, Any]
    messages: list[str]
    lost: Path | None = None  # last.ckpt, missing or corrupted: `path` is older

    def restore(self, folder: Path) -> None:
        """Make this the last checkpoint again, or copy the best ones of a run in another folder."""
        if self.lost is not None and self.lost.parent.resolve() == folder.resolve():
            if self.lost.exists():
                self.lost.replace(self.lost.with_name(CORRUPTED))
            replace_with_copy(self.path, self.lost)
        scores = self.content["callbacks"].get("BestCheckpoint", {}).get("scores", {})
        for name in {*scores, BEST} if scores else ():
            source, target = self.path.with_name(name), folder / name
            if source.exists() and not target.exists():
                folder.mkdir(parents=True, exist_ok=True)
                replace_with_copy(source, target)


def load_resume(resume: str | None, checkpoints: Path) -> LoadedCheckpoint | None:
    """Load the checkpoint that `resume=` selects, if any; nothing is changed on disk."""
    if resume is None:
        return None
    if resume == "auto":
        return load_intact_checkpoint(checkpoints) if has_checkpoint(checkpoints) else None
    path = Path(resume)
    if path.is_dir() and has_checkpoint(path / "checkpoints"):
        return load_intact_checkpoint(path / "checkpoints")
    if not path.is_file():
        raise UsageError(f"resume={resume}: no checkpoint at {path.absolute()}")
    messages = [f"resuming from {path}"]
    return LoadedCheckpoint(path=path, content=load_checkpoint(path), messages=messages)


def load_intact_checkpoint(checkpoints: Path) -> LoadedCheckpoint:
    """Load the last checkpoint of a run; if it is missing or corrupted, the next older one."""
    last = checkpoints / "last.ckpt"
    reason = f"{last} is missing"
    if last.exists():
        try:
            content = load_checkpoint(last)
            return LoadedCheckpoint(path=last, content=content, messages=[f"resuming from {last}"])
        except CorruptedCheckpointError as error:
            reason = str(error)
    for path in (checkpoints / name for name in FALLBACKS):
        if path.exists():
            with suppress(CorruptedCheckpointError):
                content = load_checkpoint(path)
                messages = [reason, f"resuming from the previous checkpoint, {path}"]
                return LoadedCheckpoint(path=path, content=content, messages=messages, lost=last)
    raise UsageError(
        f"{reason}; there is no intact previous checkpoint. Remove resume= to start over"
    )


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run starts, and messages about resume= and init_from=."""

    checkpoint: Path | None = None  # to resume from
    steps: int = 0  # of the checkpoint
    is_finished: bool = False  # whether the checkpoint is at the end of this run already
    messages: list[str]


def resolve_start(run: TrainingRun) -> Start:
    """Verify the checkpoint to resume from, if any, or load pretrained weights."""
    settings, folder = run.settings, run.folder / "checkpoints"
    checkpoint = load_resume(settings.resume, folder)
    if checkpoint is None:
        if run.is_main:
            remove_leftovers(folder)
        purge_logs(run.trainer, 0)
        if settings.init_from is None:
            return Start(messages=[])
        return Start(messages=[load_pretrained(run.module.model, settings.init_from)])
    path, content, callbacks = checkpoint.path, checkpoint.content, run.callbacks
    logged = get_logged_steps(callbacks.resume_state, content, path, run.module.metadata)
    mismatch = find_mismatch(run.module.state_dict(), extract_weights(path, content))
    if mismatch is not None:
        raise UsageError(
            f"resume={path}: {mismatch}; use init_from= to start a new run from its weights"
        )
    if run.is_main:  # nothing was changed before, when it could still be refused
        remove_leftovers(folder)
        checkpoint.restore(folder)
    purge_logs(run.trainer, logged)
    finished = is_finished(run, content)
    warnings = callbacks.training_warnings
    if finished and warnings.state_key in content["callbacks"]:  # nothing else loads them
        warnings.load_state_dict(content["callbacks"][warnings.state_key])
        run.module.on_load_checkpoint(content)
    # Lightning loads the file itself: the content must not stay in memory while it trains.
    return Start(
        checkpoint=path,
        steps=content["global_step"],
        is_finished=finished,
        messages=checkpoint.messages,
    )


def is_finished(run: TrainingRun, content: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint's run has reached a limit and no validation is pending."""
    states, limits = content["callbacks"], run.callbacks.limits
    limits.load_state_dict(states[limits.state_key])
    state = states[run.callbacks.resume_state.state_key]
    if state["pending"]:
        return False
    for callback in run.callbacks.ordered:
        if isinstance(callback, EarlyStopping):
            waited = states.get(callback.state_key, {}).get("wait_count", 0)
            if waited >= callback.patience:
                return True
    epochs = state["position"]["epoch"] + (state["position"]["batch"] == len(run.data.train_loader))
    by_epochs = 0 < (run.trainer.max_epochs or -1) <= epochs
    return by_epochs or limits.is_reached(content["global_step"])


def load_pretrained(model: nn.Module, path: Path) -> str:
    """Load the weights that match by name and shape; return a line on what was loaded.

    Those of nnU-Net and MONAI are renamed first.
    """
    initial = model.state_dict()
    content = load_checkpoint(path)
    given = {
        name.removeprefix("model."): value for name, value in extract_weights(path, content).items()
    }
    axes = get_axes_of_nnunet(content.get("init_args", {}).get("plans", {}))
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
