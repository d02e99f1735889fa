"""Adapt the README for a package index: remove images and links into this repository.

The build runs this as a hook (pyproject.toml: tool.hatch.metadata.hooks.custom).
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class LongDescription(MetadataHookInterface):
    """Sets the readme, which pyproject.toml declares as dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": remove_local_links(text)}


def remove_local_links(text: str) -> str:
    """Replace links to files by their text and remove images that are files."""
    text = re.sub(r"^!\[[^\]]*\]\((?!\w+://)[^)]*\)\n\n?", "", text, flags=re.MULTILINE)
    return re.sub(r"(?<!!)\[([^\]]*)\]\((?!\w+://|#)[^)]*\)", r"\1", text)
