"""Where a run starts from: another run's checkpoint, or weights alone."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from unet3d.lit.limits import timer_of
from unet3d.types import Misuse


def resumed_from(resume: str | None, checkpoints: Path) -> Path | None:
    """The checkpoint that `resume=` names, or None to start anew."""
    if resume is None:
        return None
    if resume == "auto":
        last = checkpoints / "last.ckpt"
        return last if last.exists() else None
    path = Path(resume)
    if path.is_dir():
        path = path / "checkpoints" / "last.ckpt"
    if not path.is_file():
        raise Misuse(f"resume={resume}: there is no checkpoint at {path.absolute()}")
    return path


def loaded(path: Path) -> dict[str, Any]:
    """The content of a checkpoint, on the CPU; it can hold values but no code."""
    if not path.is_file():
        raise Misuse(f"there is no checkpoint at {path.absolute()}")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise Misuse(f"{path} is not a whole checkpoint: {str(error).splitlines()[0]}") from error
    if not isinstance(content, dict):
        raise Misuse(f"{path} is not a checkpoint: it holds a {type(content).__name__}")
    return content


def weights_of(path: Path, content: dict[str, Any]) -> dict[str, Tensor]:
    """The weights in a checkpoint, or in a file of nothing else: finite numbers."""
    weights = content.get("state_dict", content)
    if not isinstance(weights, dict):
        raise Misuse(f"{path} is not a checkpoint: its weights are a {type(weights).__name__}")
    for name, weight in weights.items():
        if not isinstance(weight, Tensor):
            raise Misuse(f"{path} holds no weights: its {name} is a {type(weight).__name__}")
        if weight.is_complex() or not weight.isfinite().all():
            raise Misuse(f"{path}: {name} holds NaN, infinite or complex numbers")
    return weights


def finished(checkpoint: Path, trainer: pl.Trainer) -> bool:
    """Whether a limit of the trainer is reached in this checkpoint already."""
    content = loaded(checkpoint)
    weights_of(checkpoint, content)
    steps, epochs = trainer.max_steps, trainer.max_epochs or -1
    try:
        step = content["global_step"]
        completed = content["loops"]["fit_loop"]["epoch_progress"]["current"]["completed"]
    except (KeyError, TypeError):
        raise Misuse(f"{checkpoint} says nothing of a run to go on with; init= takes it") from None
    if 0 < steps <= step:
        return True
    if 0 < epochs <= completed:
        return True
    timer = timer_of(trainer)
    if timer is None or timer.time_remaining() is None:
        return False
    before = content["callbacks"].get(timer.state_key, {}).get("time_elapsed", {}).get("train", 0.0)
    return before >= (timer.time_remaining() or 0.0)


def initialised(model: nn.Module, path: Path) -> str:
    """Load the weights that match by name and shape; say in a sentence what was left out."""
    given = weights_of(path, loaded(path))
    given = {name.removeprefix("model."): value for name, value in given.items()}
    own = model.state_dict()
    fitting = {k: v for k, v in given.items() if k in own and own[k].shape == v.shape}
    if not fitting:
        raise Misuse(f"init={path}: none of its {len(given)} tensors fits this network")
    model.load_state_dict({**own, **fitting})
    left = sorted(set(own) - set(fitting))
    missing = f"; these start at random: {', '.join(left)}" if left else ""
    return f"init: {len(fitting)} of {len(own)} tensors from {path}{missing}"
