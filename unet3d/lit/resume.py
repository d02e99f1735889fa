"""Where a run starts from: another run's checkpoint, or weights alone."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unet3d.errors import UsageError
from unet3d.lit.callbacks.checkpoints import PREVIOUS, find_corruption, replace_with_copy
from unet3d.lit.callbacks.resume_state import ResumeState
from unet3d.lit.callbacks.stopping import StoppingLimits


def resolve_resume(resume: str | None, checkpoints: Path) -> tuple[Path | None, list[str]]:
    """The checkpoint that `resume=` names, or None to start anew; and what to say of it."""
    if resume is None:
        return None, []
    if resume == "auto":
        if not (checkpoints / "last.ckpt").exists():
            return None, []
        return intact_checkpoint(checkpoints)
    path = Path(resume)
    if path.is_dir() and (path / "checkpoints" / "last.ckpt").is_file():
        return intact_checkpoint(path / "checkpoints")
    if not path.is_file():
        raise UsageError(f"resume={resume}: there is no checkpoint at {path.absolute()}")
    return path, [f"resumes from {path}"]


def intact_checkpoint(checkpoints: Path) -> tuple[Path, list[str]]:
    """The last checkpoint of a run, or the one before it if that is damaged."""
    last, previous = checkpoints / "last.ckpt", checkpoints / PREVIOUS
    why = find_corruption(last)
    if why is None:
        return last, [f"resumes from {last}"]
    if not previous.exists() or find_corruption(previous) is not None:
        raise UsageError(
            f"{last} is damaged: {why}; there is no whole one before it. Without resume= the run "
            "starts anew"
        )
    set_aside = last.with_name("damaged.ckpt")
    last.replace(set_aside)
    replace_with_copy(previous, last)
    return last, [
        f"{last} is damaged: {why} (now {set_aside.name})",
        f"resumes from the one before it, {previous}",
    ]


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The content of a checkpoint, on the CPU; it can hold values but no code."""
    if not path.is_file():
        raise UsageError(f"there is no checkpoint at {path.absolute()}")
    why = find_corruption(path)
    if why is not None:
        raise UsageError(f"{path} is damaged: {why}")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise UsageError(
            f"{path} is not a whole checkpoint: {str(error).splitlines()[0]}"
        ) from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} is not a checkpoint: it holds a {type(content).__name__}")
    return content


def extract_weights(path: Path, content: dict[str, Any]) -> dict[str, Tensor]:
    """The weights in a checkpoint, or in a file of nothing else: finite numbers."""
    weights = content.get("state_dict", content)
    if not isinstance(weights, dict):
        raise UsageError(f"{path} is not a checkpoint: its weights are a {type(weights).__name__}")
    for name, weight in weights.items():
        if not isinstance(weight, Tensor):
            raise UsageError(f"{path} holds no weights: its {name} is a {type(weight).__name__}")
        if weight.is_complex() or not weight.isfinite().all():
            raise UsageError(f"{path}: {name} holds NaN, infinite or complex numbers")
    return weights


def is_finished(
    content: dict[str, Any], limits: StoppingLimits, position: ResumeState, epochs: int
) -> bool:
    """Whether a checkpoint is at a limit of the run, and nothing is left to validate."""
    state = content["callbacks"][position.state_key]
    limits.load_state_dict(content["callbacks"][limits.state_key])
    if state["pending"]:
        return False
    over = state["batch"] == len(position.feed)
    return limits.reached(content["global_step"]) or 0 < epochs <= state["epoch"] + over


def load_pretrained(model: nn.Module, path: Path) -> str:
    """Load the weights that match by name and shape; say in a sentence what was left out."""
    given = extract_weights(path, load_checkpoint(path))
    given = {name.removeprefix("model."): value for name, value in given.items()}
    own = model.state_dict()
    fitting = {k: v for k, v in given.items() if k in own and own[k].shape == v.shape}
    if not fitting:
        raise UsageError(f"init_from={path}: none of its {len(given)} tensors fits this network")
    model.load_state_dict({**own, **fitting})
    left = sorted(set(own) - set(fitting))
    missing = f"; these start at random: {', '.join(left)}" if left else ""
    return f"init_from: {len(fitting)} of {len(own)} tensors from {path}{missing}"
