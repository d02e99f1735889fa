"""Download from Hugging Face's hub: hf://OWNER/NAME, or hf://OWNER/NAME@REVISION."""

import logging
import re
from collections.abc import Sequence
from pathlib import Path

from unet3d.errors import UsageError, explain_missing_packages

PREFIX = "hf:/"
"""What is left of hf:// in a path."""


def is_on_hub(path: Path) -> bool:
    """Return whether a path names a repository on the hub.

    >>> is_on_hub(Path("hf://lab/liver@v2"))
    True
    """
    return str(path).startswith(PREFIX)


def download(path: Path, patterns: Sequence[str], *, is_a: str) -> Path:
    """Return a folder with the files of a repository that match, downloaded unless they are there.

    The first pattern is a file without which the repository is not what it should be.
    """
    name = f"hf://{str(path).removeprefix(PREFIX).lstrip('/')}"
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
