"""Slices of a case in millimeters, with reference and prediction in the colors of their classes.

Volumes are (D, H, W) with axes that point right, anterior and superior. Pictures follow the
radiological convention: the patient's right is on the left of axial and coronal slices, anterior on
the left of sagittal ones; anterior is at the top of axial slices and superior at the top of others.
Slices are counted from the patient's left, posterior and inferior end.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont

VIEWS = ("sagittal", "coronal", "axial")
"""What slices across each axis are called."""

EDGES = (("A", "P", "S", "I"), ("R", "L", "S", "I"), ("R", "L", "A", "P"))
"""Where the left, right, upper and lower edge of each view lie in the patient."""

THIN = 4
"""A view is left out if it is thinner than the volume's longest side, in mm, by more than this."""

COLORS = (
    *("e69f00", "56b4e9", "009e73", "cc79a7", "0072b2", "f0e442", "d55e00"),  # Okabe and Ito's
    *("a22e2e", "5de85d", "8b8bff"),  # the three that stay farthest from them to color-blind eyes
)

COLUMNS = ("image", "reference", "prediction")

PANEL = 320
"""Pixels of the longest side of a panel."""

GAP, FONT_PIXELS, LINE = 8, 14, 20


def palette(classes: int) -> np.ndarray:
    """Return (K, 3): black for the background, then a color that a class has everywhere.

    Ten colors that color-blind people tell apart; then the same ten lighter, then darker. They
    repeat from the 31st class on.
    """
    ten = np.array([[int(color[i : i + 2], 16) / 255 for i in (0, 2, 4)] for color in COLORS])
    thirty = np.concatenate([ten, 1 - 0.45 * (1 - ten), 0.45 * ten])
    return np.concatenate([np.zeros((1, 3)), thirty[np.arange(classes - 1) % len(thirty)]])


def class_colors(classes: Mapping[str, Sequence[int]]) -> np.ndarray:
    """Return (K, 3): the background's color, then that of each class, given by its labels.

    A class of one label has that label's color; classes of several have the first ones left over.

    >>> regions = {"whole tumor": (1, 2, 3), "core": (2, 3), "enhancing": (3,)}
    >>> (class_colors(regions) == palette(4)).all()
    np.True_
    """
    alone = [labels[0] if len(labels) == 1 else None for labels in classes.values()]
    rest = (n for n in range(1, 2 * len(alone) + 1) if n not in alone)
    numbers = [next(rest) if label is None else label for label in alone]
    return palette(max(numbers, default=0) + 1)[[0, *numbers]]


def choose_views(shape: Sequence[int], spacing_mm: Sequence[float]) -> list[int]:
    """Return the axes to slice across, axial first.

    Views with a side below a quarter of the volume's longest, in mm, are left out: there is little
    to see. The view with the largest area always stays.

    >>> choose_views((216, 256, 10), (1.5, 1.5, 10)), choose_views((320, 150, 26), (1, 1, 1))
    ([2, 1, 0], [2])
    """
    sides = np.multiply(shape, spacing_mm)
    across = {axis: np.delete(sides, axis) for axis in (2, 1, 0)}
    wide = [axis for axis, mm in across.items() if mm.min() >= sides.max() / THIN]
    return wide or [max(across, key=lambda axis: across[axis].prod())]


def get_plane(volume: np.ndarray, axis: int, index: int) -> np.ndarray:
    """Return a slice, without copying the volume."""
    return np.moveaxis(volume, axis, 0)[index]


def fullest_slice(slices: Iterable[np.ndarray], classes: int) -> int | None:
    """Return the slice with the most foreground, every class counting alike; None without any.

    A class counts by its share of what it has in its own fullest slice, so that small structures
    are not lost to large ones. Of slices that are equally full, the middle one is taken. `slices`
    hold labels below `classes`.
    """
    counts = np.stack([np.bincount(s.ravel(), minlength=classes)[1:] for s in slices])
    if not counts.any():
        return None
    shown = (counts / counts.max(0).clip(min=1)).sum(1)
    fullest = np.flatnonzero(shown > shown.max() - 1e-6)
    return int(fullest[len(fullest) // 2])


def fullest_slices(labels: np.ndarray) -> tuple[int, int, int]:
    """Return the slice of each axis that shows the most; the middle if there is no foreground."""
    classes = int(labels.max(initial=0)) + 1
    found = [fullest_slice(np.moveaxis(labels, axis, 0), classes) for axis in range(3)]
    d, h, w = (n // 2 if s is None else s for s, n in zip(found, labels.shape, strict=True))
    return d, h, w


def slice_title(axis: int, index: int, count: int) -> str:
    """Name a slice.

    >>> slice_title(2, 4, 10)
    'axial slice 5 of 10'
    """
    return f"{VIEWS[axis]} slice {index + 1} of {count}"


def upright(plane: np.ndarray) -> np.ndarray:
    """Turn a slice (first axis, second axis, ...) to the rows and columns that a reader sees."""
    return plane.swapaxes(0, 1)[::-1, ::-1]


def window(planes: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the 1st and 99th percentile of all planes together."""
    low, high = np.percentile(np.concatenate([plane.ravel() for plane in planes]), (1, 99))
    return float(low), float(high)


def stretch(plane: np.ndarray, low: float, high: float) -> np.ndarray:
    """Return grey values 0..1 from `low` to `high`."""
    return np.clip((plane - low) / max(high - low, 1e-6), 0, 1)


def overlay(plane: np.ndarray, classes: np.ndarray, colors: np.ndarray) -> np.ndarray:
    """Color the foreground of the classes (H, W) on a plane (H, W, 3)."""
    return np.where(classes[..., None] > 0, 0.3 * plane + 0.7 * colors[classes], plane)


def draw_case(
    image: np.ndarray,
    reference: np.ndarray,
    prediction: np.ndarray,
    *,
    spacing_mm: Sequence[float],
    slices: Sequence[int],
    class_names: Sequence[str],
) -> np.ndarray:
    """Return (H, W, 3) uint8: a row for each view with image, reference and prediction.

    `slices` has the slice to show of each axis; labels that are no class stay without color. All
    views have one scale in mm and one window; see `choose_views` for those that are left out.
    """
    from PIL import Image, ImageDraw

    axes, volumes = choose_views(image.shape, spacing_mm), (image, reference, prediction)
    sides = {a: np.delete(np.multiply(image.shape, spacing_mm), a) for a in axes}  # mm
    scale = PANEL / max(mm.max() for mm in sides.values())
    rows, colors = [], palette(len(class_names))
    planes = {a: [get_plane(v, a, slices[a]) for v in volumes] for a in axes}
    low, high = window([grey for grey, *_ in planes.values()])
    for axis, (grey, *labels) in planes.items():
        below = np.repeat(stretch(grey, low, high)[..., None], 3, axis=-1)
        known = [np.where(found < len(class_names), found, 0) for found in labels]
        panels = [below, *(overlay(below, found, colors) for found in known)]
        pixels = [max(1, round(mm * scale)) for mm in sides[axis]]
        rows.append([_panel(panel, (pixels[0], pixels[1])) for panel in panels])

    titles = [slice_title(axis, slices[axis], image.shape[axis]) for axis in axes]
    column = GAP + max(*(row[0].width for row in rows), *map(_long, COLUMNS))
    width = GAP + max(len(COLUMNS) * column, *(_long(title) + GAP for title in titles))
    legend, lines = _lay_out(class_names[1:], width)
    height = LINE * (1 + len(rows) + lines) + GAP * (2 + len(rows)) + sum(r[0].height for r in rows)
    picture = Image.new("RGB", (width, height))
    draw = ImageDraw.Draw(picture)
    centers = [round(width / 2 + column * (n - 1)) for n in range(len(COLUMNS))]
    for center, name in zip(centers, COLUMNS, strict=True):
        draw.text((center, GAP), name, font=_font(), anchor="ma")
    top = GAP + LINE
    for axis, title, row in zip(axes, titles, rows, strict=True):
        draw.text((width // 2, top), title, font=_font(), anchor="ma", fill="#bbbbbb")
        top += LINE
        for center, panel in zip(centers, row, strict=True):
            picture.paste(panel, (center - panel.width // 2, top))
        w, h = row[0].size
        _letter(draw, axis, (centers[0] - w // 2, top, w, h))
        top += h + GAP
    for (line, left), name, color in zip(legend, class_names[1:], colors[1:], strict=True):
        y = top + line * LINE
        square = (left, y + 2, left + FONT_PIXELS - 2, y + FONT_PIXELS)
        draw.rectangle(square, fill=tuple(round(255 * part) for part in color))
        draw.text((left + LINE, y), name, font=_font())
    return np.asarray(picture)


def _panel(plane: np.ndarray, pixels: tuple[int, int]) -> "Image":
    """Return a plane (first axis, second axis, 3) at its size in the picture."""
    from PIL import Image

    panel = Image.fromarray((255 * upright(plane)).round().astype(np.uint8))
    return panel.resize(pixels, Image.Resampling.BOX)  # voxels that are enlarged stay sharp


def _letter(draw: "ImageDraw", axis: int, panel: tuple[int, int, int, int]) -> None:
    """Write at each edge of a panel (left, top, width, height) where it lies in the patient."""
    left, top, w, h = panel
    middle, center = top + h // 2, left + w // 2
    places = [(left + 3, middle), (left + w - 3, middle), (center, top + 2), (center, top + h - 2)]
    for place, anchor, letter in zip(places, ("lm", "rm", "ma", "md"), EDGES[axis], strict=True):
        draw.text(place, letter, font=_font(), anchor=anchor, stroke_width=1, stroke_fill="black")


def _lay_out(names: Sequence[str], width: int) -> tuple[list[tuple[int, int]], int]:
    """Return the line and left edge of each name of a legend, and how many lines it has."""
    places, line, left = [], 0, GAP
    for name in names:
        long = LINE + _long(name) + 2 * GAP
        if left > GAP and left + long > width:
            line, left = line + 1, GAP
        places.append((line, left))
        left += long
    return places, line + 1 if places else 0


def _long(text: str) -> int:
    """Return the pixels of a text."""
    return ceil(_font().getlength(text))


@cache
def _font() -> "FreeTypeFont":
    """Return the font that matplotlib brings: it has more letters than Pillow's own."""
    from matplotlib import get_data_path
    from PIL import ImageFont

    return ImageFont.truetype(f"{get_data_path()}/fonts/ttf/DejaVuSans.ttf", FONT_PIXELS)
