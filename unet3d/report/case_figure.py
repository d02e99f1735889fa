"""Draw a case's reference and prediction side by side: the fullest slice and the worst one.

Orientation, slice numbers and edge letters are those of `unet3d.report.slices`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.report.figures import save_png
from unet3d.report.slices import (
    EDGES,
    THIN,
    find_fullest_slice,
    format_slice_title,
    get_class_colors,
    get_intensity_window,
    get_plane,
    orient_for_display,
    overlay_classes,
    scale_intensity,
)
from unet3d.text import escape_mathtext

MARGIN_MM = 10
PANEL_INCHES = 3.4


@dataclass(frozen=True, kw_only=True)
class CaseFigure:
    """Volumes (D, H, W) whose axes point right, anterior and superior."""

    reference: np.ndarray
    prediction: np.ndarray
    image: np.ndarray | None
    spacing_mm: tuple[float, float, float]
    classes: Mapping[str, Sequence[int]]  # name -> labels; classes may overlap


def draw_case_figure(
    case: CaseFigure, path: Path, *, title: str, legend: Mapping[str, str]
) -> None:
    """Write the figure as a PNG; `legend` maps class names to the text after them."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    case = replace(
        case,
        reference=make_class_map(case.reference, case.classes),
        prediction=make_class_map(case.prediction, case.classes),
    )
    axis = choose_slicing_axis(case.reference.shape, case.spacing_mm)
    first, second = (case.spacing_mm[a] for a in range(3) if a != axis)
    errors = count_wrong_voxels(case, axis)
    fullest = choose_slice(case, axis)
    worst = int(errors.argmax()) if errors[fullest] < errors.max() else fullest
    names = {fullest: "most foreground"}
    names[worst] = "most errors" if worst != fullest else "most foreground and most errors"
    box = find_crop_box(case, axis)
    rows = make_panels(case, axis, list(names), box)

    sides_mm = [(w.stop - w.start) * mm for w, mm in zip(box, (first, second), strict=True)]
    inches = PANEL_INCHES * min(max(sides_mm[0] / sides_mm[1], 0.5), 2)
    width = max(len(rows[0]) * (inches + 0.1) + 0.8, 6)
    figure = Figure(figsize=(width, len(rows) * (PANEL_INCHES + 0.3) + 1), layout="constrained")
    axes = figure.subplots(len(rows), len(rows[0]), squeeze=False)
    for row, planes, (index, name) in zip(axes, rows, names.items(), strict=True):
        for panel, (label, plane) in zip(row, planes.items(), strict=True):
            panel.imshow(orient_for_display(plane), aspect=second / first, interpolation="nearest")
            panel.set(title=label, xticks=[], yticks=[])
            panel.title.set_fontsize(9)
        reference = get_plane(case.reference, axis, index)[box]
        _draw_outline(row[-1], orient_for_display(reference))
        _draw_edge_letters(row[0], axis)
        count = f"{errors[index]:,} wrong voxels" if errors[index] else "no wrong voxels"
        slice_title = format_slice_title(axis, index, len(errors))
        row[0].set_ylabel(f"{slice_title}\n{name}: {count}", fontsize=9)
    handles = [
        Patch(color=color, label=escape_mathtext(f"{name}: {legend[name]}"))
        for name, color in zip(case.classes, get_class_colors(case.classes)[1:], strict=True)
        if name in legend
    ]
    longest = max((len(str(patch.get_label())) for patch in handles), default=0)
    entry_inches = 0.07 * longest + 0.6  # 9-point text
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(max(int(width / entry_inches), 1), 3),
        fontsize=9,
        frameon=False,
    )
    figure.suptitle(escape_mathtext(title), wrap=True)
    save_png(figure, path)


def make_panels(
    case: CaseFigure, axis: int, slices: Sequence[int], box: tuple[slice, slice]
) -> list[dict[str, np.ndarray]]:
    """Return, for each slice, its panels: title -> colored plane (first axis, second axis, 3)."""
    colors = get_class_colors(case.classes)
    rows = []
    for index in slices:
        volumes = {"reference": case.reference, "prediction, reference outlined": case.prediction}
        rows.append({title: get_plane(v, axis, index)[box] for title, v in volumes.items()})
    if case.image is None:
        return [{t: colors[classes] for t, classes in row.items()} for row in rows]
    gray = [get_plane(case.image, axis, i)[box] for i in slices]
    scaled = scale_intensity(np.stack(gray), *get_intensity_window(gray))  # same for all slices
    images = np.repeat(scaled[..., None], 3, axis=-1)
    return [
        {"image": image} | {t: overlay_classes(image, c, colors) for t, c in row.items()}
        for image, row in zip(images, rows, strict=True)
    ]


def _draw_outline(panel: Any, reference: np.ndarray) -> None:
    """Outline the reference's classes on a panel."""
    panel.autoscale(False)
    for index in np.unique(reference[reference > 0]):
        inside = np.pad(reference == index, 1).astype(float)
        grid = (np.arange(-1, n - 1) for n in inside.shape[::-1])
        panel.contour(*grid, inside, levels=[0.5], colors="white", linewidths=0.8)


def _draw_edge_letters(panel: Any, axis: int) -> None:
    """Write the anatomical direction (L, R, A, P, S, I) at each edge of a panel."""
    from matplotlib.patheffects import withStroke

    style = {
        "xycoords": "axes fraction",
        "fontsize": 9,
        "color": "white",
        "path_effects": [withStroke(linewidth=2, foreground="black")],
    }
    left, right, top, bottom = EDGES[axis]
    panel.annotate(left, (0.01, 0.5), ha="left", va="center", **style)
    panel.annotate(right, (0.99, 0.5), ha="right", va="center", **style)
    panel.annotate(top, (0.5, 0.99), ha="center", va="top", **style)
    panel.annotate(bottom, (0.5, 0.01), ha="center", va="bottom", **style)


def make_class_map(labels: np.ndarray, classes: Mapping[str, Sequence[int]]) -> np.ndarray:
    """Return each voxel's class index, 0 for none; where classes overlap, the one of fewer labels.

    The first class has the index 1.
    """
    highest = max(max(members) for members in classes.values())
    indices = np.zeros(highest + 2, np.int32)
    indexed = enumerate(classes.values(), start=1)
    for index, members in sorted(indexed, key=lambda item: -len(item[1])):
        indices[list(members)] = index
    return indices[labels.astype(np.int32).clip(0, highest + 1)]


def count_wrong_voxels(case: CaseFigure, axis: int) -> np.ndarray:
    """Count the voxels of each slice whose class differs from the reference."""
    others = tuple({0, 1, 2} - {axis})
    return (case.prediction != case.reference).sum(others)


def choose_slicing_axis(shape: Sequence[int], spacing_mm: Sequence[float]) -> int:
    """Return the axis to slice across: the one with clearly the longest voxels, else the last.

    An axis whose slices have a side below a quarter of the other, in mm, is avoided.
    """
    longest, sides = int(np.argmax(spacing_mm)), np.multiply(shape, spacing_mm)
    coarse = [longest] if spacing_mm[longest] > 1.5 * spacing_mm[2] else []
    across = {axis: np.delete(sides, axis) for axis in (*coarse, 2, 1, 0)}
    wide = [axis for axis, mm in across.items() if mm.min() >= mm.max() / THIN]
    return wide[0] if wide else max(across, key=lambda axis: across[axis].prod())


def choose_slice(case: CaseFigure, axis: int) -> int:
    """Return the fullest slice of the reference, or of the prediction if the reference is empty."""
    for volume in (case.reference, case.prediction):
        fullest = find_fullest_slice(np.moveaxis(volume, axis, 0), len(case.classes) + 1)
        if fullest is not None:
            return fullest
    return case.reference.shape[axis] // 2


def find_crop_box(case: CaseFigure, axis: int) -> tuple[slice, slice]:
    """Return the in-plane box around all labels of all slices, with a margin.

    Its shorter side is at least half of the longer one, in mm, unless the volume ends before.
    """
    foreground = (case.reference != 0) | (case.prediction != 0)
    across = [a for a in range(3) if a != axis]
    sides_mm = []  # start and stop of each side
    for a in across:
        filled = np.flatnonzero(foreground.any(axis=tuple(b for b in range(3) if b != a)))
        if not len(filled):
            filled = np.array([0, foreground.shape[a] - 1])
        mm = case.spacing_mm[a]
        sides_mm.append((filled[0] * mm - MARGIN_MM, (filled[-1] + 1) * mm + MARGIN_MM))
    min_side_mm = max(stop - start for start, stop in sides_mm) / 2
    box = []
    for a, (start, stop) in zip(across, sides_mm, strict=True):
        padding, mm = max(0.0, min_side_mm - (stop - start)) / 2, case.spacing_mm[a]
        first, last = floor((start - padding) / mm), ceil((stop + padding) / mm)
        box.append(slice(max(0, first), min(foreground.shape[a], last)))
    return box[0], box[1]
