"""Read, verify and save checkpoint files with torch alone, and get those of Hugging Face's hub."""

import codecs
import io
import logging
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unet3d.errors import UsageError, explain_missing_packages, summarize_error
from unet3d.files import atomic_write
from unet3d.text import join_first

FORMAT_VERSION = 1
"""Version of checkpoints; raised when an older unet3d could not read them any more."""

LAST, PREVIOUS, BEST = "last.ckpt", "previous.ckpt", "best.ckpt"

FALLBACKS = (PREVIOUS, BEST)
"""Checkpoints with the full state that a run resumes from if it has no last one."""

_SCALAR: Any = np.float64(0).__reduce__()[0]
_ARRAY: Any = np.zeros(0).__reduce__()[0]

NUMPY_NUMBERS: list[Any] = [
    *(_SCALAR, (_SCALAR, "numpy.core.multiarray.scalar")),  # the second name is of numpy 1
    *(_ARRAY, (_ARRAY, "numpy.core.multiarray._reconstruct")),
    *(np.ndarray, np.dtype, codecs.encode),  # by which bytes are saved
    *{type(np.dtype(code)) for code in "?bhilqBHILQefd"},
]
"""The only classes besides torch's that a checkpoint may name: numbers and arrays of them."""


class CorruptedCheckpointError(UsageError):
    """A checkpoint is incomplete, or its bytes have changed since it was saved."""


def has_checkpoint(checkpoints: Path) -> bool:
    """Return whether a folder has a checkpoint to resume from."""
    return any((checkpoints / name).exists() for name in (LAST, *FALLBACKS))


def load_checkpoint(path: Path, *, mmap: bool = True) -> dict[str, Any]:
    """Return the content of an intact checkpoint, on the CPU; code in it is never run.

    With `mmap`, values that nobody reads are never loaded; the file must not change meanwhile.
    """
    if not path.is_file():
        raise UsageError(f"no checkpoint at {path.absolute()}")
    _verify_checksums(path)
    try:
        content = _load(path, mmap=mmap)
    except UsageError as error:
        raise UsageError(f"{path} cannot be read as a checkpoint: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} is not a checkpoint: it holds a {type(content).__name__}")
    check_format_version(path, content.get("unet3d", {}), FORMAT_VERSION)
    return content


def _load(file: Any, *, mmap: bool = False) -> Any:
    """Return what is in a file of torch.save; a UsageError says what it may not hold."""
    try:
        with torch.serialization.safe_globals(NUMPY_NUMBERS):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:
        named = re.search(r"(?:GLOBAL|class) '?([\w.]+)", str(error))
        # torch adds advice to run the code to its reason, which is the context.
        reason = f"it holds a {named[1]}" if named else summarize_error(error.__context__ or error)
        raise UsageError(reason) from error


def _verify_checksums(path: Path) -> None:
    """Refuse a file that is not as it was saved; torch does not look at the checksums."""
    try:
        with zipfile.ZipFile(path) as archive:
            changed = archive.testzip()
    except Exception as error:  # a flipped bit in a header can raise anything
        raise CorruptedCheckpointError(
            f"{path} is corrupted: incomplete or not a checkpoint ({error})"
        ) from error
    if changed is not None:
        raise CorruptedCheckpointError(f"{path} is corrupted: wrong checksum in {changed}")


def check_format_version(path: Path, description: Mapping[str, Any], known: int) -> None:
    """Refuse a file that a later unet3d has written in a format that is not known here."""
    version = description.get("format_version", known)
    if version > known:
        raise UsageError(
            f"{path} has format version {version}, and this unet3d reads versions up to {known}: "
            "upgrade unet3d"
        )


def extract_weights(path: Path, content: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """Return the weights in a checkpoint, also of nnU-Net, or in a file of weights alone."""
    weights = content.get("state_dict", content.get("network_weights", content))
    for name, weight in weights.items():
        if not isinstance(weight, Tensor):
            raise UsageError(
                f"{path} holds no weights of a network: {name} is not a tensor but a "
                f"{type(weight).__name__}"
            )
    return weights


def find_mismatch(expected: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> str | None:
    """Return the first name whose weight is missing, unknown or of another shape, and the shapes.

    >>> find_mismatch({"bias": torch.zeros(3)}, {"bias": torch.zeros(2)})
    'bias should be [3], is [2]'
    >>> find_mismatch({"encoder.bias": torch.zeros(3)}, {"encoders.bias": torch.zeros(3)})
    'encoder.bias should be [3], is missing; the file has encoders.bias'
    """
    others = [f"; the file has {name}" for name in sorted(weights.keys() - expected.keys())]
    for name in sorted(expected.keys() | weights.keys()):
        should_be, found = (
            list(tensors[name].shape) if name in tensors else "missing"
            for tensors in (expected, weights)
        )
        if should_be != found:
            other = "".join(others[:1]) if found == "missing" else ""
            return f"{name} should be {should_be}, is {found}{other}"
    return None


def save_checkpoint(content: dict[str, Any], path: Path) -> None:
    """Save a checkpoint atomically; a kill leaves the previous file or the new one.

    Refuse what could not be read again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as draft:
        with draft.open("wb") as file:
            torch.save(content, file)
        try:
            _load(draft, mmap=True)
        except UsageError as error:
            parts = {**content, **content.get("callbacks", {})}
            parts.pop("callbacks", None)
            names = [name for name, part in parts.items() if not _is_readable(part)]
            if not names and error.__cause__:  # a signal's, such as that of a dead data worker
                raise error.__cause__ from None
            raise UsageError(
                f"{path.name} could not be read again: {error}, saved by {join_first(names)}: save "
                "tensors, numbers, text, lists and dicts"
            ) from error


def _is_readable(part: Any) -> bool:
    """Return whether a checkpoint may hold this."""
    file = io.BytesIO()
    torch.save(part, file)
    file.seek(0)
    try:
        _load(file)
    except UsageError:
        return False
    return True


def update_metadata(path: Path, metadata: dict[str, Any]) -> None:
    """Add entries to the network's metadata in a checkpoint."""
    content = load_checkpoint(path, mmap=False)
    content["unet3d"] |= metadata
    save_checkpoint(content, path)


HUB_PREFIX = "hf:/"
"""What is left of hf://OWNER/NAME or hf://OWNER/NAME@REVISION in a path."""


def is_on_hub(path: Path) -> bool:
    """Return whether a path names a repository on the hub.

    >>> is_on_hub(Path("hf://lab/liver@v2"))
    True
    """
    return str(path).startswith(HUB_PREFIX)


def download(path: Path, patterns: Sequence[str], *, is_a: str) -> Path:
    """Return a folder with the files of a repository that match, downloaded unless they are there.

    The first pattern is a file without which the repository is not what it should be.
    """
    name = f"hf://{str(path).removeprefix(HUB_PREFIX).lstrip('/')}"
    match = re.fullmatch(r"hf://([\w.-]+/[\w.-]+?)(?:@([\w./-]+))?", name)
    if match is None:
        raise UsageError(f"{name} must be hf://OWNER/NAME or hf://OWNER/NAME@REVISION")
    with explain_missing_packages("hf://", "huggingface_hub"):
        from huggingface_hub import snapshot_download
    logging.getLogger("httpx").setLevel(logging.WARNING)  # every request is logged
    try:
        folder = snapshot_download(match[1], revision=match[2], allow_patterns=list(patterns))
    except Exception as error:  # of the hub, of the network, of the cache
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"hf://{match[1]} cannot be downloaded: {reason}") from error
    if not (Path(folder) / patterns[0]).is_file():
        raise UsageError(f"hf://{match[1]} is not a {is_a}: it has no {patterns[0]}")
    return Path(folder)
