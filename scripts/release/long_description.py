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
    """Remove pictures, with their captions, and the list of documents; keep the text of links."""
    text = re.sub(r"^!\[[^\]]*\]\((?!\w+://)[^)]*\)\n(.+\n)*\n?", "", text, flags=re.MULTILINE)
    text = re.sub(r"^## Documentation\n(.*\n)*?(?=## |\Z)", "", text, flags=re.MULTILINE)
    return re.sub(r"(?<!!)\[([^\]]*)\]\((?!\w+://|#)[^)]*\)", r"\1", text)
