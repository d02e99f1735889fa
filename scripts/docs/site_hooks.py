"""Hooks of mkdocs: add files outside of docs/ to the site, and point links to them.

Pages link to each other by their paths in the repository, so a link works in both places. In the
site, files of docs/ are at the root, next to the files that are added here.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = ("CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")
NOTEBOOKS = sorted(f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb"))
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the files outside of docs/."""
    for name in (*OUTSIDE, *NOTEBOOKS):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Translate the links of a page from the repository's paths to the site's."""
    source = page.file.src_uri
    folder = posixpath.dirname(source if source in OUTSIDE else f"docs/{source}")

    def translate(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[1]))
        return posixpath.relpath(target.removeprefix("docs/"), posixpath.dirname(source) or ".")

    return LINK.sub(translate, markdown)
