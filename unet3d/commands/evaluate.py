"""`unet3d evaluate`: how well predictions agree with references, by case and class."""

import sys
from collections.abc import Sequence
from pathlib import Path

from unet3d.build.evaluated import draw_worst, result, write
from unet3d.build.evaluating import evaluation
from unet3d.build.request import Request
from unet3d.meter.show import columns
from unet3d.report.evaluation import rows


def main(request: Request, folder: Path) -> int:
    """Compare every case, say how each went, and leave the files."""
    asked = evaluation(request)
    asked.output.mkdir(parents=True, exist_ok=True)
    judged = []
    for case in asked.judged():
        judged.append(case)
        said = f"FAULT {case.fault}" if case.fault is not None else f"Dice {case.dice:.4f}"
        print(f"{len(judged)}/{len(asked.pairs)} {case.name}: {said}", file=sys.stderr)
    if alone := asked.without_reference:
        print(f"{len(alone)} predictions without a reference: {few(alone)}", file=sys.stderr)
    found = result(asked, judged)
    files = write(found, asked.output)
    for line in draw_worst(asked, found):
        print(line, file=sys.stderr)
    if found["per_class"]:
        print(columns(rows(found)))
    if faults := found["faults"]:
        print(f"{len(faults)} of {len(judged)} cases could not be evaluated: {few(list(faults))}")
    pictures = [asked.output / "worst"] if found["worst"] else []
    print(*files, *pictures, sep=", ")
    return 1 if faults else 0


def few(names: Sequence[str]) -> str:
    """The first names of many."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
