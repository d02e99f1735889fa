"""Reference and prediction of a case side by side, at its fullest slice and at its worst.

Slices are shown, counted and lettered as in `unet3d.report.slices`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.atomic_write import atomic_write
from unet3d.report.slices import (
    EDGES,
    THIN,
    class_colors,
    fullest_slice,
    get_plane,
    overlay,
    slice_title,
    stretch,
    upright,
    window,
)

MARGIN_MM = 10
PANEL_INCHES = 3.4


@dataclass(frozen=True, kw_only=True)
class CaseFigure:
    """Volumes (D, H, W) whose axes point right, anterior and superior."""

    reference: np.ndarray
    prediction: np.ndarray
    image: np.ndarray | None
    spacing_mm: tuple[float, float, float]
    classes: Mapping[str, Sequence[int]]  # each a number of labels; they may overlap


def draw_case(case: CaseFigure, path: Path, *, title: str, legend: Mapping[str, str]) -> None:
    """Write the picture; `legend` says of each class what to put beside its colour."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    axis = slicing_axis(case.reference.shape, case.spacing_mm)
    first, second = (case.spacing_mm[a] for a in range(3) if a != axis)
    wrong = wrong_voxels(case, axis)
    fullest = shown_slice(case, axis)
    worst = int(wrong.argmax()) if wrong[fullest] < wrong.max() else fullest
    names = {fullest: "most of the classes"}
    names[worst] = "most errors" if worst != fullest else "most of the classes and most errors"
    shown = find_crop_box(case, axis)
    rows = panels(case, axis, list(names), shown)

    sides_mm = [(w.stop - w.start) * mm for w, mm in zip(shown, (first, second), strict=True)]
    inches = PANEL_INCHES * min(max(sides_mm[0] / sides_mm[1], 0.5), 2)
    width = max(len(rows[0]) * (inches + 0.1) + 0.8, 6)
    figure = Figure(figsize=(width, len(rows) * (PANEL_INCHES + 0.3) + 1), layout="constrained")
    axes = figure.subplots(len(rows), len(rows[0]), squeeze=False)
    for row, pictures, (index, name) in zip(axes, rows, names.items(), strict=True):
        for panel, (what, picture) in zip(row, pictures.items(), strict=True):
            panel.imshow(upright(picture), aspect=second / first, interpolation="nearest")
            panel.set(title=what, xticks=[], yticks=[])
            panel.title.set_fontsize(9)
        reference = make_class_map(get_plane(case.reference, axis, index)[shown], case.classes)
        _outline(row[-1], upright(reference))
        _letter(row[0], axis)
        wrong_here = f"{wrong[index]:,} wrong voxels" if wrong[index] else "no wrong voxel"
        where = slice_title(axis, index, len(wrong))
        row[0].set_ylabel(f"{where}\n{name}: {wrong_here}", fontsize=9)
    handles = [
        Patch(color=color, label=f"{name}: {legend[name]}")
        for name, color in zip(case.classes, class_colors(case.classes)[1:], strict=True)
        if name in legend
    ]
    longest = max((len(str(patch.get_label())) for patch in handles), default=0)
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(max(int(width / (0.07 * longest + 0.6)), 1), 3),  # inches of text in 9 points
        fontsize=9,
        frameon=False,
    )
    figure.suptitle(title, wrap=True)
    with atomic_write(path) as draft:
        figure.savefig(draft, dpi=110, format="png")


def panels(
    case: CaseFigure, axis: int, slices: Sequence[int], shown: tuple[slice, slice]
) -> list[dict[str, np.ndarray]]:
    """The colored planes (first axis, second axis, 3) of each slice, by what they show."""
    colors = class_colors(case.classes)
    rows = []
    for index in slices:
        volumes = {"reference": case.reference, "prediction, reference outlined": case.prediction}
        rows.append(
            {
                k: make_class_map(get_plane(v, axis, index)[shown], case.classes)
                for k, v in volumes.items()
            }
        )
    if case.image is None:
        return [{k: colors[classes] for k, classes in row.items()} for row in rows]
    planes = [get_plane(case.image, axis, i)[shown] for i in slices]
    grey = stretch(np.stack(planes), *window(planes))  # one contrast for all slices
    image = np.repeat(grey[..., None], 3, axis=-1)
    return [
        {"image": below} | {k: overlay(below, c, colors) for k, c in row.items()}
        for below, row in zip(image, rows, strict=True)
    ]


def _outline(panel: Any, reference: np.ndarray) -> None:
    """Draw the reference's borders over the prediction."""
    panel.autoscale(False)
    for number in np.unique(reference[reference > 0]):
        inside = np.pad(reference == number, 1).astype(float)
        places = (np.arange(-1, n - 1) for n in inside.shape[::-1])
        panel.contour(*places, inside, levels=[0.5], colors="white", linewidths=0.8)


def _letter(panel: Any, axis: int) -> None:
    """Write at each edge of a panel where it lies in the patient."""
    from matplotlib.patheffects import withStroke

    places = ((0.01, 0.5), (0.99, 0.5), (0.5, 0.99), (0.5, 0.01))
    for (x, y), letter in zip(places, EDGES[axis], strict=True):
        panel.text(
            x,
            y,
            letter,
            transform=panel.transAxes,
            ha={0.01: "left", 0.99: "right"}.get(x, "center"),
            va={0.01: "bottom", 0.99: "top"}.get(y, "center"),
            fontsize=9,
            color="white",
            path_effects=[withStroke(linewidth=2, foreground="black")],
        )


def make_class_map(labels: np.ndarray, classes: Mapping[str, Sequence[int]]) -> np.ndarray:
    """The number of each voxel's class from 1, 0 for none; where classes overlap, the smaller."""
    highest = max(max(members) for members in classes.values())
    numbers = np.zeros(highest + 2, np.int32)
    numbered = enumerate(classes.values(), start=1)
    for number, members in sorted(numbered, key=lambda item: -len(item[1])):
        numbers[list(members)] = number
    return numbers[labels.astype(np.int32).clip(0, highest + 1)]


def wrong_voxels(case: CaseFigure, axis: int) -> np.ndarray:
    """How many voxels of each slice have another class in the prediction."""
    slabs = zip(*(np.moveaxis(a, axis, 0) for a in (case.prediction, case.reference)), strict=True)
    return np.array(
        [
            np.count_nonzero(make_class_map(p, case.classes) != make_class_map(r, case.classes))
            for p, r in slabs
        ]
    )


def slicing_axis(shape: Sequence[int], spacing_mm: Sequence[float]) -> int:
    """The last axis, or the one whose voxels are clearly the longest, if such a slice is no sliver.

    A slice with a side below a quarter of the other, in mm, gives way to another view.
    """
    longest, sides = int(np.argmax(spacing_mm)), np.multiply(shape, spacing_mm)
    coarse = [longest] if spacing_mm[longest] > 1.5 * spacing_mm[2] else []
    across = {axis: np.delete(sides, axis) for axis in (*coarse, 2, 1, 0)}
    wide = [axis for axis, mm in across.items() if mm.min() >= mm.max() / THIN]
    return wide[0] if wide else max(across, key=lambda axis: across[axis].prod())


def shown_slice(case: CaseFigure, axis: int) -> int:
    """The fullest slice of the reference; of the prediction if it is empty."""
    for volume in (case.reference, case.prediction):
        slices = (make_class_map(labels, case.classes) for labels in np.moveaxis(volume, axis, 0))
        found = fullest_slice(slices, len(case.classes) + 1)
        if found is not None:
            return found
    return case.reference.shape[axis] // 2


def find_crop_box(case: CaseFigure, axis: int) -> tuple[slice, slice]:
    """The part of a slice that holds both structures in any slice, with a margin.

    Its shorter side is at least half of the longer one, in mm, as far as the volume goes.
    """
    found = (case.reference != 0) | (case.prediction != 0)
    across = [a for a in range(3) if a != axis]
    sides_mm = []  # where each side begins and ends
    for a in across:
        filled = np.flatnonzero(found.any(axis=tuple(b for b in range(3) if b != a)))
        if not len(filled):
            filled = np.array([0, found.shape[a] - 1])
        mm = case.spacing_mm[a]
        sides_mm.append((filled[0] * mm - MARGIN_MM, (filled[-1] + 1) * mm + MARGIN_MM))
    least = max(stop - start for start, stop in sides_mm) / 2
    window = []
    for a, (start, stop) in zip(across, sides_mm, strict=True):
        lacking, mm = max(0.0, least - (stop - start)) / 2, case.spacing_mm[a]
        first, last = floor((start - lacking) / mm), ceil((stop + lacking) / mm)
        window.append(slice(max(0, first), min(found.shape[a], last)))
    return window[0], window[1]
