"""Where a run starts: at a checkpoint of its own, at pretrained weights, or from scratch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unet3d.checkpoint_file import (
    BEST,
    FALLBACKS,
    LAST,
    CorruptedCheckpointError,
    has_checkpoint,
    load_checkpoint,
)
from unet3d.errors import UsageError
from unet3d.files import remove_temporary_files, replace_with_copy
from unet3d.training.loggers import purge_logs
from unet3d.training.pretrained import (
    describe_other_meaning,
    find_leak,
    list_training_cases,
    load_pretrained,
)
from unet3d.training.run import TrainingRun
from unet3d.training.same_experiment import find_differences, list_compared

CORRUPTED = "corrupted.ckpt"


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """Where a run starts, and messages about resume= and init_from=."""

    checkpoint: Path | None = None  # to resume from
    steps: int = 0  # of the checkpoint
    is_finished: bool = False  # whether the checkpoint is at the end of this run already
    messages: list[str]


def prepare_start(run: TrainingRun) -> RunStart:
    """Prepare the folder, the loggers and the network of a run for the step that it starts from."""
    folder, metadata = run.folder / "checkpoints", run.module.metadata
    found = load_resume(run.settings.resume, folder)
    if found is not None:
        path, content, problems = found
        logged = verify_resumable(run, path, content)
    # All checks have passed: files change only from here on.
    if run.is_main:
        remove_temporary_files(folder / "*.ckpt")
    if found is None:
        purge_logs(run.trainer, 0)
        return RunStart(messages=start_from_weights(run))
    metadata["pretrained_on"] = content["unet3d"].get("pretrained_on", [])
    if run.is_main:
        restore_checkpoints(folder, path, content, is_fallback=bool(problems))
    states, callbacks = content["callbacks"], run.callbacks
    callbacks.limits.load_state_dict(states[callbacks.limits.state_key])  # the time it has taken
    finished = has_reached_limit(run, content)
    if finished:  # what its report says; nothing else loads it
        run.module.on_load_checkpoint(content)
        for callback in (callbacks.curves, callbacks.training_warnings):
            callback.load_state_dict(states[callback.state_key])
    purge_logs(run.trainer, logged + finished)  # the last row of a finished run is its result
    # Lightning loads the file itself: the content must not stay in memory while it trains.
    return RunStart(
        checkpoint=path,
        steps=content["global_step"],
        is_finished=finished,
        messages=[*problems, f"resuming from {path}"],
    )


def start_from_weights(run: TrainingRun) -> list[str]:
    """Load the weights of `init_from`, if it is set; return messages about them."""
    source, metadata = run.settings.init_from, run.module.metadata
    if source is None:
        return []
    content = load_checkpoint(source)
    metadata["pretrained_on"] = list_training_cases(content)
    messages = [
        load_pretrained(run.module.model, source, content),
        describe_other_meaning(content.get("unet3d", {}), metadata),
        find_leak(run.data, metadata["pretrained_on"])[1],
    ]
    return [*filter(None, messages)]


def verify_resumable(run: TrainingRun, path: Path, content: Mapping[str, Any]) -> int:
    """Refuse the checkpoint of another experiment; return the steps that loggers have of it."""
    now = run.callbacks.resume_state
    state = content.get("callbacks", {}).get(now.state_key)
    if state is None:
        raise UsageError(f"resume={path}: it holds weights alone: start a new run with init_from=")
    different = find_differences(
        list_compared(content["unet3d"], state["fixed_settings"]),
        list_compared(run.module.metadata, now.fixed_settings()),
    )
    if different:
        raise UsageError(
            f"resume={path}: the settings differ from those of the run that saved the checkpoint: "
            f"{'; '.join(different)}: set back what changed, or use init_from= to start a new run "
            "from its weights"
        )
    return state["logged"]


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


def has_reached_limit(run: TrainingRun, content: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint's run has reached a limit and no validation is pending."""
    states = content["callbacks"]
    state = states[run.callbacks.resume_state.state_key]
    if state["pending"]:
        return False
    for stopping in run.trainer.early_stopping_callbacks:
        if states.get(stopping.state_key, {}).get("wait_count", 0) >= max(1, stopping.patience):
            return True
    epochs = state["position"]["epoch"] + (state["position"]["batch"] == len(run.data.train_loader))
    by_epochs = 0 < (run.trainer.max_epochs or -1) <= epochs
    return by_epochs or run.callbacks.limits.is_reached(content["global_step"])
