"""Write measured values into the documents, and draw the pictures of them.

The text between `<!-- NAME -->` and `<!-- end -->`, in README.md and in docs/, is what the function
NAME of one of the three modules of tables returns; a test compares.
"""

import re
from pathlib import Path

from scripts.bench.results import ROOT
from scripts.docs import cpu_tables, gpu_tables, run_tables
from scripts.docs.drawing import PICTURES

TABLES = {**vars(cpu_tables), **vars(run_tables), **vars(gpu_tables)}
PLACE = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(text: str) -> str:
    """Return a page with all its tables made again."""

    def write(place: re.Match[str]) -> str:
        start, name, end = place.groups()
        table = TABLES[name]()
        return f"{start}{table}\n{end}" if table else start + end

    return PLACE.sub(write, text)


def list_documents() -> list[Path]:
    """List the pages that may have tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main() -> None:
    for name, draw in PICTURES.items():
        (ROOT / name).write_text(draw())
    for document in list_documents():
        text = document.read_text()
        if (filled := fill(text)) != text:
            document.write_text(filled)
            print(document.relative_to(ROOT))


if __name__ == "__main__":
    main()
