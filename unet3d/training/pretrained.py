"""`init_from=`: the weights that a new run starts from, and the cases that they were trained on."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from unet3d.checkpoint_file import download, extract_weights, find_mismatch, is_on_hub
from unet3d.errors import UsageError
from unet3d.files import find_run_checkpoint
from unet3d.model.foreign_weights import (
    adapt_input_channels,
    get_nnunet_axes,
    is_first_convolution,
    rename_nnssl_encoder,
    rename_weights,
)
from unet3d.text import join_first, pluralize
from unet3d.training.datamodule import VolumeDataModule

PRETRAINED = "checkpoint_final.pth"
"""The file of a repository on the hub that nnssl or nnU-Net has trained."""


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
    pairs = {"classes": (list_outputs(before) or list_outputs(now), list_outputs(now))}
    pairs["channels"] = list(before.get("channels") or now["channels"]), now["channels"]
    different = [
        f"{key} were {', '.join(one)} and are {', '.join(other)}"
        for key, (one, other) in pairs.items()
        if one != other
    ]
    if not different:
        return None
    return f"init_from: {'; '.join(different)}: weights are matched by position, not by name"


def list_outputs(metadata: Mapping[str, Any]) -> list[str]:
    """Return the names of a network's outputs, by the metadata of its checkpoint."""
    return list(metadata.get("regions") or metadata.get("classes") or ())


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
            f"init_from={path}: none of its {len(weights)} tensors fits this network "
            f"({find_mismatch(initial, weights)}): set model= and model.* as in the run of the file"
        )
    model.load_state_dict({**initial, **matching})
    others = sorted(set(initial) - set(matching))
    missing = f"; randomly initialized: {', '.join(others)}" if others else ""
    return (
        f"init_from: loaded {len(matching)} of {len(initial)} tensors from {path}{changes}{missing}"
    )


def list_training_cases(checkpoint: Mapping[str, Any]) -> list[str]:
    """Return digests of the cases on which a network was trained, also before its `init_from`."""
    state = checkpoint.get("callbacks", {}).get("ResumeState", {}).get("fixed_settings", {})
    before = checkpoint.get("unet3d", {}).get("pretrained_on", [])
    return sorted({*before, *state.get("cases", {}).get("training", {}).values()})


def find_leak(data: VolumeDataModule, trained_on: Sequence[str]) -> tuple[list[str], str | None]:
    """Return the validation cases on which the network of `init_from` was trained, and a line."""
    cases, known = data.digest_cases()["validation"], set(trained_on)
    seen = [name for name, digest in cases.items() if digest in known]
    warning = (
        f"the network of init_from= was trained on {len(seen)} of "
        f"{pluralize(len(cases), 'validation case')} ({join_first(seen)}), which inflates the "
        "scores: start from a network of the same fold"
    )
    return seen, warning if seen else None
