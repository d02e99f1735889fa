"""Write the page of a comparison, with the curves of its runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from unet3d.errors import summarize_error
from unet3d.json_file import read_json
from unet3d.report.curves import Points
from unet3d.report.html.comparison_page import render_comparison
from unet3d.report.html.page import write_html
from unet3d.report.run_comparison import RunSummary


def try_write_comparison_page(
    runs: Sequence[RunSummary], path: Path, *, problems: Sequence[str], command: str
) -> str:
    """Write the page and return its path, or in one line what prevented that."""
    try:
        write_comparison_page(runs, path, problems=problems, command=command)
    except Exception as error:  # the comparison itself has been printed
        return f"{path} was not written: {summarize_error(error)}"
    return str(path)


def write_comparison_page(
    runs: Sequence[RunSummary], path: Path, *, problems: Sequence[str], command: str
) -> None:
    """Write the page."""
    curves = [read_curves(run.folder / "curves.json") for run in runs]
    page = render_comparison(runs, curves=curves, problems=problems, command=command)
    write_html(page, path)


def read_curves(path: Path) -> Mapping[str, Points]:
    """Return the curves of a run; none if it has no such file."""
    try:
        curves = read_json(path)["curves"]
        return {name: [(float(x), float(y)) for x, y in points] for name, points in curves.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
