"""Download bundles from Hugging Face's hub: hf://OWNER/NAME, or hf://OWNER/NAME@REVISION."""

import logging
import re
from pathlib import Path

from unet3d.errors import UsageError, need_packages
from unet3d.export.bundle import DESCRIPTION_FILE

PREFIX = "hf:/"
"""What is left of hf:// in a path."""


def is_on_hub(path: Path) -> bool:
    """Return whether a path names a repository on the hub.

    >>> is_on_hub(Path("hf://lab/liver@v2"))
    True
    """
    return str(path).startswith(PREFIX)


def download_bundle(path: Path) -> Path:
    """Return the folder of a bundle with what is read of it, downloaded unless it is there."""
    name = f"hf://{str(path).removeprefix(PREFIX).lstrip('/')}"
    match = re.fullmatch(r"hf://([\w.-]+/[\w.-]+?)(?:@([\w./-]+))?", name)
    if match is None:
        raise UsageError(f"{name} must be hf://OWNER/NAME or hf://OWNER/NAME@REVISION")
    with need_packages("hf://", "huggingface_hub", "safetensors"):
        from huggingface_hub import snapshot_download
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request
    try:
        folder = snapshot_download(
            match[1],
            revision=match[2],
            allow_patterns=[DESCRIPTION_FILE, "models/*.safetensors"],
        )
    except Exception as error:  # of the hub, of the network, of the cache
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"hf://{match[1]} cannot be downloaded: {reason}") from error
    if not (Path(folder) / DESCRIPTION_FILE).is_file():
        raise UsageError(f"hf://{match[1]} is not a bundle: it has no {DESCRIPTION_FILE}")
    return Path(folder)
