"""Read, verify and save checkpoint files with torch alone; Lightning is not imported for it."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unet3d.atomic_write import atomic_write
from unet3d.checkpoint_archive import NotPlainError, check_structure, find_corruption
from unet3d.errors import UsageError, summarize_error
from unet3d.text import is_utf8

FORMAT_VERSION = 1
"""Version of checkpoints; raised when an older unet3d could not read them any more."""

PREVIOUS = "previous.ckpt"

FALLBACKS = (PREVIOUS, "best.ckpt")
"""Checkpoints with the full state that a run resumes from if it has no last one."""

DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
)
"""Kinds of numbers that weights may be."""

NUMPY_NUMBERS: list[Any] = [
    np.float64(0).__reduce__()[0],
    *(np.dtype, np.dtypes.Float64DType, np.dtypes.Float32DType),
]
"""The only classes besides torch's that a checkpoint may name: nnU-Net saves its scores as such."""


def has_checkpoint(checkpoints: Path) -> bool:
    """Return whether a folder has a checkpoint to resume from."""
    return any((checkpoints / name).exists() for name in ("last.ckpt", *FALLBACKS))


def load_checkpoint(path: Path, *, mmap: bool = True) -> dict[str, Any]:
    """Return the content of an intact checkpoint, on the CPU; code in it is never run.

    With `mmap`, values that nobody reads are never loaded; the file must not change meanwhile.
    """
    if not path.is_file():
        raise UsageError(f"no checkpoint at {path.absolute()}")
    corruption = find_corruption(path)
    if corruption is not None:
        raise UsageError(f"{path} is corrupted: {corruption}")
    return read_verified_checkpoint(path, mmap=mmap)


def read_verified_checkpoint(path: Path, *, mmap: bool = True) -> dict[str, Any]:
    """Return what `load_checkpoint` does, after `find_corruption` has found none."""
    try:
        check_structure(path)
        with torch.serialization.safe_globals(NUMPY_NUMBERS):
            mmap = mmap and is_utf8(str(path))  # torch maps no other files
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except NotPlainError as error:
        raise UsageError(f"{path} cannot be read as a checkpoint: {error}") from error
    except Exception as error:
        named = re.search(r"GLOBAL (\S+) was not an allowed global", str(error))
        reason = f"it holds a {named[1]}" if named else summarize_error(error)
        raise UsageError(f"{path} cannot be read as a checkpoint: {reason}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} is not a checkpoint: it holds a {type(content).__name__}")
    metadata = content.get("unet3d")
    if isinstance(metadata, dict) and "format_version" in metadata:
        check_format_version(path, metadata["format_version"], FORMAT_VERSION)
    return content


def check_format_version(path: Path, found: Any, known: int) -> None:
    """Refuse a file whose format is not known here."""
    if type(found) is not int or found < 1:
        raise UsageError(f"{path} has no valid format_version, but {found!r}")
    if found > known:
        raise UsageError(
            f"{path} has format version {found}, and this unet3d reads versions up to {known}: "
            "upgrade unet3d"
        )


def extract_weights(path: Path, content: dict[str, Any]) -> dict[str, Tensor]:
    """Return the finite weights in a checkpoint, also of nnU-Net, or in a file of weights alone."""
    weights = content.get("state_dict", content.get("network_weights", content))
    if not isinstance(weights, dict):
        kind = type(weights).__name__
        raise UsageError(f"{path} is not a checkpoint: its state_dict is a {kind}")
    for name, weight in weights.items():
        if not isinstance(name, str):
            raise UsageError(f"{path}: a weight is named {name!r}, which is not a string")
        if not isinstance(weight, Tensor):
            raise UsageError(f"{path}: {name} is not a tensor but a {type(weight).__name__}")
        if (
            weight.layout != torch.strided
            or weight.dtype not in DTYPES
            or weight.device.type != "cpu"
        ):
            raise UsageError(
                f"{path}: {name} is not a dense tensor of numbers, but {weight.layout} of "
                f"{weight.dtype} on {weight.device}"
            )
        if not weight.isfinite().all():
            raise UsageError(f"{path}: {name} contains NaN or infinite values")
    return weights


def find_mismatch(expected: Mapping[str, Tensor], given: Mapping[Any, Any]) -> str | None:
    """Return the first name whose tensor is not of the expected size or kind; None if none."""
    for name in sorted(expected.keys() | given.keys(), key=str):
        own, other = expected.get(name), given.get(name)
        if own is None or not isinstance(other, Tensor):
            size = "missing" if own is None else list(own.shape)
            found = "missing" if name not in given else type(other).__name__
            found = list(other.shape) if isinstance(other, Tensor) else found
            return f"{name} should be {size}, is {found}"
        if own.shape != other.shape:
            return f"{name} should be {list(own.shape)}, is {list(other.shape)}"
        if own.is_floating_point() != other.is_floating_point() or other.dtype not in DTYPES:
            return f"{name} should be of {own.dtype}, is of {other.dtype}"
    return None


def save_checkpoint(content: dict[str, Any], path: Path) -> None:
    """Save a checkpoint atomically; a kill leaves the previous file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as draft, draft.open("wb") as file:
        torch.save(content, file)


def update_metadata(path: Path, metadata: dict[str, Any]) -> None:
    """Add entries to the network's metadata in a checkpoint."""
    content = load_checkpoint(path, mmap=False)
    content["unet3d"] |= metadata
    save_checkpoint(content, path)
