"""The README as a package index shows it: without pictures and links into this repository.

The build runs it (pyproject.toml: tool.hatch.metadata.hooks.custom).
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class LongDescription(MetadataHookInterface):
    """Fills in what pyproject.toml leaves out: readme."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": standalone(text)}


def standalone(text: str) -> str:
    """The text alone; what lies at an address of its own stays."""
    text = re.sub(r"^!\[[^\]]*\]\((?!\w+://)[^)]*\)\n\n?", "", text, flags=re.MULTILINE)
    return re.sub(r"(?<!!)\[([^\]]*)\]\((?!\w+://|#)[^)]*\)", r"\1", text)
