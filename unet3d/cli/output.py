"""Print a command's result, or write it to a file."""

from pathlib import Path


def write_output(text: str, path: Path | None) -> None:
    """Print to standard output, or write to a file."""
    if path is None:
        print(text)
    else:
        path.write_text(text + "\n", "utf-8")
