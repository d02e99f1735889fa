"""Download bundles from Hugging Face's hub: hf://OWNER/NAME, or hf://OWNER/NAME@REVISION."""

import logging
import re
from dataclasses import dataclass
from pathlib import Path

from unet3d.errors import UsageError, need_packages
from unet3d.export.bundle import DESCRIPTION_FILE

PREFIX = "hf:/"
"""What is left of hf:// in a path."""


@dataclass(frozen=True)
class HubReference:
    """A repository on the hub."""

    repository: str
    revision: str | None


def parse_hub_reference(path: Path) -> HubReference | None:
    """Return the repository that a path names; None for other paths.

    >>> parse_hub_reference(Path("hf://lab/liver@v2"))
    HubReference(repository='lab/liver', revision='v2')
    """
    if not str(path).startswith(PREFIX):
        return None
    match = re.fullmatch(r"hf:/+([\w.-]+/[\w.-]+?)(?:@([\w./-]+))?", str(path))
    if match is None:
        name = str(path).removeprefix(PREFIX)
        raise UsageError(f"hf://{name} must be hf://OWNER/NAME or hf://OWNER/NAME@REVISION")
    return HubReference(match[1], match[2])


def download_bundle(reference: HubReference) -> Path:
    """Return the folder of a bundle with what is read of it, downloaded unless it is there."""
    with need_packages("hf://", "huggingface_hub", "safetensors"):
        from huggingface_hub import snapshot_download
    previous_level = logging.root.manager.disable
    logging.disable(logging.INFO)  # every request is logged
    try:
        folder = snapshot_download(
            reference.repository,
            revision=reference.revision,
            allow_patterns=[DESCRIPTION_FILE, "models/*.safetensors"],
        )
    except Exception as error:  # of the hub, of the network, of the cache
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"hf://{reference.repository} cannot be downloaded: {reason}") from error
    finally:
        logging.disable(previous_level)
    if not (Path(folder) / DESCRIPTION_FILE).is_file():
        raise UsageError(
            f"hf://{reference.repository} is not a bundle: it has no {DESCRIPTION_FILE}"
        )
    return Path(folder)
