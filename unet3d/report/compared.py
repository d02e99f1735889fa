"""Reference and prediction of a case side by side, at its middle slice and at its worst."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.report.slices import overlay, palette, windowed
from unet3d.whole import whole

MARGIN_MM = 10
PANEL_INCHES = 3.4


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Volumes (D, H, W) whose axes point right, anterior and superior."""

    reference: np.ndarray
    prediction: np.ndarray
    image: np.ndarray | None
    spacing_mm: tuple[float, float, float]
    classes: Mapping[str, Sequence[int]]  # each a number of labels; they may overlap


def draw_compared(case: Compared, path: Path, *, title: str, legend: Mapping[str, str]) -> None:
    """Write the picture; `legend` says of each class what to put beside its colour."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    axis = slicing_axis(case.spacing_mm)
    first, second = (case.spacing_mm[a] for a in range(3) if a != axis)
    wrong = wrong_voxels(case, axis)
    middle = middle_slice(case, axis)
    worst = int(wrong.argmax()) if wrong.any() else middle
    names = {middle: "middle slice"}
    names[worst] = "worst slice" if worst != middle else "middle and worst slice"
    window = box(case, axis)
    rows = panels(case, axis, list(names), window)

    sides_mm = [(w.stop - w.start) * mm for w, mm in zip(window, (first, second), strict=True)]
    inches = PANEL_INCHES * min(max(sides_mm[0] / sides_mm[1], 0.5), 2)
    width = max(len(rows[0]) * (inches + 0.1) + 0.8, 6)
    figure = Figure(figsize=(width, len(rows) * (PANEL_INCHES + 0.3) + 1), layout="constrained")
    axes = figure.subplots(len(rows), len(rows[0]), squeeze=False)
    for row, pictures, (index, name) in zip(axes, rows, names.items(), strict=True):
        for panel, (what, picture) in zip(row, pictures.items(), strict=True):
            turned = picture.transpose(1, 0, 2)  # the second axis upwards
            panel.imshow(turned, origin="lower", aspect=second / first, interpolation="nearest")
            panel.set(title=what, xticks=[], yticks=[])
            panel.title.set_fontsize(9)
        _outline(row[-1], painted(plane(case.reference, axis, index)[window], case.classes))
        wrong_here = f"{wrong[index]:,} wrong voxels" if wrong[index] else "no wrong voxel"
        row[0].set_ylabel(f"{name} {index + 1} of {len(wrong)}\n{wrong_here}", fontsize=9)
    handles = [
        Patch(color=colour, label=f"{name}: {legend[name]}")
        for name, colour in zip(case.classes, palette(len(case.classes) + 1)[1:], strict=True)
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
    with whole(path) as draft:
        figure.savefig(draft, dpi=110, format="png")


def panels(
    case: Compared, axis: int, slices: Sequence[int], window: tuple[slice, slice]
) -> list[dict[str, np.ndarray]]:
    """The coloured planes (H, W, 3) of each slice, by what they show."""
    colours = palette(len(case.classes) + 1)
    rows = []
    for index in slices:
        volumes = {"reference": case.reference, "prediction, reference outlined": case.prediction}
        rows.append(
            {k: painted(plane(v, axis, index)[window], case.classes) for k, v in volumes.items()}
        )
    if case.image is None:
        return [{k: colours[classes] for k, classes in row.items()} for row in rows]
    grey = windowed(np.stack([plane(case.image, axis, i)[window] for i in slices]))
    image = np.repeat(grey[..., None], 3, axis=-1)  # one contrast for all slices
    return [
        {"image": below} | {k: overlay(below, c, colours) for k, c in row.items()}
        for below, row in zip(image, rows, strict=True)
    ]


def plane(volume: np.ndarray, axis: int, index: int) -> np.ndarray:
    """A slice, without copying the volume."""
    return np.moveaxis(volume, axis, 0)[index]


def _outline(panel: Any, reference: np.ndarray) -> None:
    """Draw the reference's borders over the prediction."""
    panel.autoscale(False)
    for number in np.unique(reference[reference > 0]):
        inside = np.pad(reference == number, 1).T.astype(float)
        places = (np.arange(-1, n - 1) for n in inside.shape[::-1])
        panel.contour(*places, inside, levels=[0.5], colors="white", linewidths=0.8)


def painted(labels: np.ndarray, classes: Mapping[str, Sequence[int]]) -> np.ndarray:
    """The number of each voxel's class from 1, 0 for none; where classes overlap, the smaller."""
    highest = max(max(members) for members in classes.values())
    numbers = np.zeros(highest + 2, np.int32)
    numbered = enumerate(classes.values(), start=1)
    for number, members in sorted(numbered, key=lambda item: -len(item[1])):
        numbers[list(members)] = number
    return numbers[labels.astype(np.int32).clip(0, highest + 1)]


def wrong_voxels(case: Compared, axis: int) -> np.ndarray:
    """How many voxels of each slice have another class in the prediction."""
    slabs = zip(*(np.moveaxis(a, axis, 0) for a in (case.prediction, case.reference)), strict=True)
    return np.array(
        [np.count_nonzero(painted(p, case.classes) != painted(r, case.classes)) for p, r in slabs]
    )


def slicing_axis(spacing_mm: Sequence[float]) -> int:
    """The last axis, or the one whose voxels are clearly the longest."""
    longest = int(np.argmax(spacing_mm))
    return longest if spacing_mm[longest] > 1.5 * spacing_mm[2] else 2


def middle_slice(case: Compared, axis: int) -> int:
    """The slice with as much of the reference below as above; of the prediction if it is empty."""
    for volume in (case.reference, case.prediction):
        filled = np.cumsum(np.count_nonzero(np.moveaxis(volume, axis, 0), axis=(1, 2)))
        if filled[-1]:
            return int(np.searchsorted(filled, filled[-1] / 2))
    return len(filled) // 2


def box(case: Compared, axis: int) -> tuple[slice, slice]:
    """The part of a slice that holds both structures in any slice, with a margin."""
    found = (case.reference != 0) | (case.prediction != 0)
    across = [a for a in range(3) if a != axis]
    sides = []
    for a in across:
        filled = np.flatnonzero(found.any(axis=tuple(b for b in range(3) if b != a)))
        margin = int(np.ceil(MARGIN_MM / case.spacing_mm[a]))
        if not len(filled):
            filled = np.array([0, found.shape[a] - 1])
        sides.append(slice(max(0, int(filled[0]) - margin), int(filled[-1]) + 1 + margin))
    first, second = (
        slice(s.start, min(s.stop, found.shape[a])) for s, a in zip(sides, across, strict=True)
    )
    return first, second
