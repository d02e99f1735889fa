"""Read the results of benchmarks/, and write tables in Markdown."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from scripts.bench.results import BENCHMARKS
from unet3d.text import MIB

OPEN = "not measured yet"

Row = dict[str, Any]
Rows = dict[str, Row]


def read_result(name: str) -> Any:
    """Read a file of benchmarks/."""
    return json.loads((BENCHMARKS / f"{name}.json").read_text())


def read_estimates(part: str) -> Rows:
    """Return the estimated rows of a part of cpu-step.json."""
    return read_result("cpu-step")["predicted"][part]["rows"]


def read_times(case: str = "96x64x32") -> Rows:
    """Return the timed rows of a size of cpu-step.json; the default has all networks."""
    return read_result("cpu-step")["times, 32"]["cases"][case]["rows"]


def read_gpu_part(part: str) -> Row:
    """Return a part of the report of scripts.gpu.report, of the device with the most parts."""
    return find_gpu_report(part).get(part, {})


def find_gpu_report(part: str) -> Row:
    """Return the parts of a device that has measured this one, of several that with the most."""
    contents = [json.loads(path.read_text()) for path in sorted(BENCHMARKS.glob("*.json"))]
    reports = [c["parts"] for c in contents if c.get("parts", {}).get(part, {}).get("rows")]
    return max(reports, key=len, default={})


def read_gpu(part: str) -> Rows:
    """Return the rows of a part of the GPU report; none if it has not been measured."""
    return read_gpu_part(part).get("rows", {})


def make_table(heads: str, lines: Iterable[str]) -> str:
    """Return a table of lines with ` | ` between cells; a head that ends with `:` aligns right.

    >>> print(make_table(" | Dice:", ["`max` | 0.9"]))
    | | Dice |
    | --- | ---: |
    | `max` | 0.9 |
    """
    names = heads.split(" | ")
    rows = [[name.removesuffix(":") for name in names]]
    rows.append(["---:" if name.endswith(":") else "---" for name in names])
    rows += [line.split(" | ") for line in lines]
    return "\n".join("|" + "".join(f" {cell} |" if cell else " |" for cell in row) for row in rows)


def format_mib(nbytes: float) -> str:
    """Format bytes in MiB."""
    return f"{nbytes / MIB:,.0f} MiB"


def format_shape(shape: Sequence[int], separator: str = "x") -> str:
    """Format a shape.

    >>> format_shape([2, 1, 128, 128, 64])
    '2x1x128x128x64'
    """
    return separator.join(map(str, shape))


def format_time(row: Row | None) -> str:
    """Format the relative time of a step, with its range over processes."""
    if row is None:
        return ""
    low, high = row["time_ratio_range"]
    return f"{row['time_ratio']:.2f}x" + (f" ({low:.2f} to {high:.2f})" if low < high else "")


def format_strategy(name: str) -> str:
    """Format a checkpointing strategy, with the size of its tiles, as code; others as they are.

    >>> format_strategy("lean"), format_strategy("fused, 4 MiB"), format_strategy("plain modules")
    ('`lean`', '`fused`, 4', 'plain modules')
    """
    strategy, comma, size = name.removesuffix(" MiB").partition(", ")
    return name if " " in strategy else f"`{strategy}`{comma}{size}"
