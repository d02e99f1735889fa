"""`unet3d plan data=... budget_gib=...`: what to train on a data set, as an experiment to edit."""

import re
from collections.abc import Sequence
from pathlib import Path

from unet3d.build.planning import Plan, Told, experiment, look, planned
from unet3d.build.request import Request
from unet3d.commands.fit import budget_bytes
from unet3d.report.fingerprint import draw, summary
from unet3d.types import Misuse, size


def main(request: Request, folder: Path) -> int:
    """Look at the data, search, and write the experiment and a picture beside it."""
    cfg = request.config
    if not re.fullmatch(r"[A-Za-z0-9_-]+", str(cfg.name)):
        raise Misuse(f"name must be of letters, digits, - and _, got {cfg.name!r}")
    path = Path("conf") / "experiment" / f"{cfg.name}.yaml"
    if path.exists() and not cfg.overwrite:
        raise Misuse(f"{path} is there already: choose another name=, or overwrite=true")
    budget = budget_bytes(cfg.budget_gib)
    told = look(request)
    left_out = [f"left out: {reason}" for reason in told.left_out]
    print(*left_out, summary(told.prints, told.classes), sep="\n")
    found = planned(request, told, budget)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(header(found, told, budget) + experiment(request, found))
    draw(told.prints, told.classes, told.channels, path.with_suffix(".png"))
    print(*lines(found, budget), "", f"wrote {path} and {path.with_suffix('.png')}", sep="\n")
    print(f"unet3d train experiment={cfg.name}")
    return 0


def lines(found: Plan, budget: int) -> list[str]:
    """The plan in words."""
    windows = " ".join("x".join(map(str, w)) for w in found.levels.windows)
    return [
        f"spacing {times(found.spacing_mm)} mm; the median case has {times(found.median)} voxels",
        f"patch {times(found.patch)}, batch {found.batch}, {' '.join(found.strategy)}",
        f"{len(found.levels.kernels)} levels, pooling {windows}",
        f"a step is predicted to reserve {size(found.peak.reserved or 0)} of {size(budget)}",
        *([] if found.patch == found.first else [f"patch {times(found.first)} would not fit"]),
    ]


def header(found: Plan, told: Told, budget: int) -> str:
    """The same as comments at the file's head."""
    said = [*summary(told.prints, told.classes).splitlines(), *lines(found, budget)]
    return "".join(f"# {line}\n" for line in ["@package _global_", *said])


def times(numbers: Sequence[float]) -> str:
    """Numbers with x between them.

    >>> times((1.0, 0.5, 3))
    '1 x 0.5 x 3'
    """
    return " x ".join(f"{n:g}" for n in numbers)
