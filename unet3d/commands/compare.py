"""`unet3d compare RUN ...`: compare runs in a table, a page and a figure."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from unet3d.config.compose import ComposedConfig
from unet3d.config.fields import read_settings
from unet3d.errors import UsageError, summarize_error
from unet3d.files import write_figure, write_output, write_text
from unet3d.report.comparison import (
    RunSummary,
    comparison_to_dict,
    describe_data_sets,
    explain_comparison,
    find_runs,
    make_comparison_rows,
    plot_runs,
    render_comparison,
)
from unet3d.text import format_columns


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Which runs to compare, and where to write what."""

    runs: tuple[Path, ...]
    format: Literal["table", "json"]
    output: Path | None
    report: Path | None
    figure: Path | None


def main(composed: ComposedConfig, folder: Path) -> int:
    """Print the comparison; return 1 if an argument is not a run."""
    settings = read_settings(CompareConfig, composed.config)
    runs, errors = find_runs(settings.runs)
    if not runs:
        raise UsageError("; ".join(errors))
    for error in errors:
        print(error, file=sys.stderr)
    as_json = settings.format == "json"
    text = json.dumps(comparison_to_dict(runs)) if as_json else format_comparison(runs)
    write_output(text, settings.output)
    if settings.figure is not None:
        write_figure(plot_runs(runs), settings.figure)
        print(settings.figure, file=sys.stderr)
    if settings.report is not None:
        write_text(settings.report, render_comparison(runs, settings.runs, errors))
        print(settings.report, file=sys.stderr)
    return 1 if errors else 0


def format_comparison(runs: Sequence[RunSummary]) -> str:
    """Return a table, what its columns mean, and which runs cannot be compared."""
    table = format_columns(make_comparison_rows(runs), left=1 + len(runs[0].differs))
    return "\n".join([table, *explain_comparison(runs), *describe_data_sets(runs)])


def print_sweep_summary(folder: Path) -> None:
    """Compare the runs of a sweep, if at least two of them have results."""
    runs, _ = find_runs([folder])
    if len(runs) < 2:
        return
    print("\n" + format_comparison(runs))
    figure, page = folder / "comparison.png", folder / "comparison.html"
    try:
        if any(run.has_costs for run in runs):
            write_figure(plot_runs(runs), figure)
            print(figure)
        write_text(page, render_comparison(runs, [folder], []))
        print(page)
    except Exception as error:  # the sweep has its results
        print(f"the comparison was not written: {summarize_error(error)}")
