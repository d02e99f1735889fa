"""The pages of the documents, and what is in them: blocks, inline code, headings."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
IGNORED = {"site", "outputs", "build", "dist"}

COMMANDS_OR_FILES = ("bash", "python", "text", "")
"""Languages of blocks that need no title; a block without a language has commands."""


def is_document(path: Path) -> bool:
    folders = path.relative_to(ROOT).parts
    return not any(name[0] == "." or name in IGNORED for name in folders)


DOCUMENTS = sorted(path for path in ROOT.rglob("*.md") if is_document(path))


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    language: str
    file: str  # its title: a file to write
    content: str


def is_module(name: str) -> bool:
    """Whether `python -m NAME` runs a file of the project."""
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


def page_name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def read_blocks(page: Path) -> list[Block]:
    fenced = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
    return [Block(b[1], b[2] or "", b[3]) for b in fenced.finditer(page.read_text())]


def strip_blocks(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def strip_code(page: Path) -> str:
    return re.sub(r"`[^`\n]*`", "code", strip_blocks(page))


def inline_code(page: Path) -> list[str]:
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", strip_blocks(page))]


def split_commands(block: str) -> list[list[str]]:
    """The words of each line; one that ends with a backslash continues."""
    lines = block.replace("\\\n", " ").splitlines()
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


def iter_headings(page: Path) -> Iterator[str]:
    for heading in re.findall(r"^#+ (.*)$", strip_blocks(page), re.MULTILINE):
        yield re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)


def read_anchors(page: Path) -> list[str]:
    """The anchors of the headings, as GitHub and the site make them."""
    return [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in iter_headings(page)]


PAGES = [page for page in DOCUMENTS if any(not b.file for b in read_blocks(page))]
"""Pages with commands or programs."""
