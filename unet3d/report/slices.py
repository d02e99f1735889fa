"""Draw slices of a case to scale, with reference and prediction in the colors of their classes.

Volumes are (D, H, W) with axes that point right, anterior and superior. Figures follow the
radiological convention: the patient's right is on the left of axial and coronal slices, anterior on
the left of sagittal ones; anterior is at the top of axial slices, superior at the top of others.
Slices are numbered from the patient's left, posterior and inferior end.
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
"""Name of the slices across each axis."""

EDGES = (("A", "P", "S", "I"), ("R", "L", "S", "I"), ("R", "L", "A", "P"))
"""Anatomical direction of the left, right, upper and lower edge of each view."""

THIN = 4
"""Views with a side this many times shorter than the volume's longest side, in mm, are skipped."""

COLORS = (
    *("e69f00", "56b4e9", "009e73", "cc79a7", "0072b2", "f0e442", "d55e00"),  # Okabe and Ito's
    *("a22e2e", "5de85d", "8b8bff"),  # farthest from those for color-blind viewers
)

PANEL = 320
"""Pixels of the longest side of a panel."""

GAP, FONT_PIXELS, LINE = 8, 14, 20


def get_palette(classes: int) -> np.ndarray:
    """Return (K, 3) RGB colors: black for the background, then a fixed color per class.

    Ten colors that color-blind people can distinguish, then the same ten lighter, then darker;
    they repeat from the 31st class on.
    """
    ten = np.array([[int(color[i : i + 2], 16) / 255 for i in (0, 2, 4)] for color in COLORS])
    thirty = np.concatenate([ten, 1 - 0.45 * (1 - ten), 0.45 * ten])
    return np.concatenate([np.zeros((1, 3)), thirty[np.arange(classes - 1) % len(thirty)]])


def get_class_colors(classes: Mapping[str, Sequence[int]]) -> np.ndarray:
    """Return (K, 3) RGB colors of the background and of classes given by their labels.

    A class of one label has that label's color; a class of several labels has the next unused one.

    >>> regions = {"whole tumor": (1, 2, 3), "core": (2, 3), "enhancing": (3,)}
    >>> (get_class_colors(regions) == get_palette(4)).all()
    np.True_
    """
    single = [labels[0] if len(labels) == 1 else None for labels in classes.values()]
    unused = (n for n in range(1, 2 * len(single) + 1) if n not in single)
    numbers = [next(unused) if label is None else label for label in single]
    return get_palette(max(numbers, default=0) + 1)[[0, *numbers]]


def get_hex_colors(classes: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Return the color of each class for pages."""
    from matplotlib.colors import to_hex

    return dict(zip(classes, map(to_hex, get_class_colors(classes)[1:]), strict=True))


def choose_views(shape: Sequence[int], spacing_mm: Sequence[float]) -> list[int]:
    """Return the axes to slice across, axial first.

    Views with a side below a quarter of the volume's longest, in mm, are skipped, since they show
    little. The view with the largest area is always included.

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


def find_fullest_slice(slices: Iterable[np.ndarray], classes: int) -> int | None:
    """Return the index of the slice with the most foreground; None if all are empty.

    Each class counts relative to its own fullest slice, so that small structures are not lost to
    large ones. Of equally full slices, the middle one is returned. `slices` hold labels below
    `classes`.
    """
    counts = np.stack([np.bincount(s.ravel(), minlength=classes)[1:] for s in slices])
    if not counts.any():
        return None
    fullness = (counts / counts.max(0).clip(min=1)).sum(1)
    fullest = np.flatnonzero(fullness > fullness.max() - 1e-6)
    return int(fullest[len(fullest) // 2])


def find_fullest_slices(labels: np.ndarray) -> tuple[int, int, int]:
    """Return the fullest slice of each axis; the middle one without foreground."""
    classes = int(labels.max(initial=0)) + 1
    fullest = [find_fullest_slice(np.moveaxis(labels, axis, 0), classes) for axis in range(3)]
    d, h, w = (n // 2 if s is None else s for s, n in zip(fullest, labels.shape, strict=True))
    return d, h, w


def format_slice_title(axis: int, index: int, count: int) -> str:
    """Return the view and number of a slice.

    >>> format_slice_title(2, 4, 10)
    'axial slice 5 of 10'
    """
    return f"{VIEWS[axis]} slice {index + 1} of {count}"


def orient_for_display(plane: np.ndarray) -> np.ndarray:
    """Turn a slice (first axis, second axis, ...) into rows and columns as displayed."""
    return plane.swapaxes(0, 1)[::-1, ::-1]


def get_intensity_window(planes: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the 1st and 99th percentile of all planes together."""
    low, high = np.percentile(np.concatenate([plane.ravel() for plane in planes]), (1, 99))
    return float(low), float(high)


def scale_intensity(plane: np.ndarray, low: float, high: float) -> np.ndarray:
    """Map intensities from `low`..`high` to 0..1, clipped."""
    return np.clip((plane - low) / max(high - low, 1e-6), 0, 1)


def overlay_classes(plane: np.ndarray, classes: np.ndarray, colors: np.ndarray) -> np.ndarray:
    """Blend the colors of the classes (H, W) over a plane (H, W, 3)."""
    return np.where(classes[..., None] > 0, 0.3 * plane + 0.7 * colors[classes], plane)


def draw_case_slices(
    image: np.ndarray,
    layers: Mapping[str, np.ndarray],
    *,
    spacing_mm: Sequence[float],
    slices: Sequence[int],
    class_names: Sequence[str],
) -> np.ndarray:
    """Return a uint8 image (H, W, 3) with a row per view: the image, then labels over it.

    `slices` is the slice to show of each axis; labels without a class name are not colored. All
    views share one scale in mm and one intensity window; `choose_views` skips thin views.
    """
    from PIL import Image, ImageDraw

    axes, volumes = choose_views(image.shape, spacing_mm), (image, *layers.values())
    sides = {a: np.delete(np.multiply(image.shape, spacing_mm), a) for a in axes}  # mm
    scale = PANEL / max(mm.max() for mm in sides.values())
    rows, colors = [], get_palette(len(class_names))
    planes = {a: [get_plane(v, a, slices[a]) for v in volumes] for a in axes}
    low, high = get_intensity_window([gray for gray, *_ in planes.values()])
    for axis, (gray, *labels) in planes.items():
        background = np.repeat(scale_intensity(gray, low, high)[..., None], 3, axis=-1)
        known = [np.where(plane < len(class_names), plane, 0) for plane in labels]
        panels = [background, *(overlay_classes(background, plane, colors) for plane in known)]
        pixels = [max(1, round(mm * scale)) for mm in sides[axis]]
        rows.append([_make_panel(panel, (pixels[0], pixels[1])) for panel in panels])

    titles = [format_slice_title(axis, slices[axis], image.shape[axis]) for axis in axes]
    columns = ("image", *layers)
    column = GAP + max(*(row[0].width for row in rows), *map(_get_text_width, columns))
    width = GAP + max(len(columns) * column, *(_get_text_width(title) + GAP for title in titles))
    legend, lines = _lay_out_legend(class_names[1:], width)
    height = LINE * (1 + len(rows) + lines) + GAP * (2 + len(rows)) + sum(r[0].height for r in rows)
    picture = Image.new("RGB", (width, height))
    draw = ImageDraw.Draw(picture)
    centers = [round(width / 2 + column * (n - len(layers) / 2)) for n in range(len(columns))]
    for center, name in zip(centers, columns, strict=True):
        draw.text((center, GAP), name, font=_font(), anchor="ma")
    top = GAP + LINE
    for axis, title, row in zip(axes, titles, rows, strict=True):
        draw.text((width // 2, top), title, font=_font(), anchor="ma", fill="#bbbbbb")
        top += LINE
        for center, panel in zip(centers, row, strict=True):
            picture.paste(panel, (center - panel.width // 2, top))
        w, h = row[0].size
        _draw_edge_letters(draw, axis, (centers[0] - w // 2, top, w, h))
        top += h + GAP
    for (line, left), name, color in zip(legend, class_names[1:], colors[1:], strict=True):
        y = top + line * LINE
        square = (left, y + 2, left + FONT_PIXELS - 2, y + FONT_PIXELS)
        draw.rectangle(square, fill=tuple(round(255 * part) for part in color))
        draw.text((left + LINE, y), name, font=_font())
    return np.asarray(picture)


def _make_panel(plane: np.ndarray, pixels: tuple[int, int]) -> "Image":
    """Return a plane (first axis, second axis, 3) resized to `pixels`."""
    from PIL import Image

    panel = Image.fromarray((255 * orient_for_display(plane)).round().astype(np.uint8))
    return panel.resize(pixels, Image.Resampling.BOX)  # keeps enlarged voxels sharp


def _draw_edge_letters(draw: "ImageDraw", axis: int, panel: tuple[int, int, int, int]) -> None:
    """Write the anatomical direction at each edge of a panel (left, top, width, height)."""
    left, top, w, h = panel
    middle, center = top + h // 2, left + w // 2
    places = {
        "lm": (left + 3, middle),
        "rm": (left + w - 3, middle),
        "ma": (center, top + 2),
        "md": (center, top + h - 2),
    }
    for (anchor, place), letter in zip(places.items(), EDGES[axis], strict=True):
        draw.text(place, letter, "white", _font(), anchor, stroke_width=1, stroke_fill="black")


def _lay_out_legend(names: Sequence[str], width: int) -> tuple[list[tuple[int, int]], int]:
    """Return the line and left edge of each legend entry, and the number of lines."""
    positions, line, left = [], 0, GAP
    for name in names:
        entry_width = LINE + _get_text_width(name) + 2 * GAP
        if left > GAP and left + entry_width > width:
            line, left = line + 1, GAP
        positions.append((line, left))
        left += entry_width
    return positions, line + 1 if positions else 0


def _get_text_width(text: str) -> int:
    """Return the width of a text in pixels."""
    return ceil(_font().getlength(text))


@cache
def _font() -> "FreeTypeFont":
    """Return matplotlib's font, which has more letters than Pillow's default."""
    from matplotlib import get_data_path
    from PIL import ImageFont

    return ImageFont.truetype(f"{get_data_path()}/fonts/ttf/DejaVuSans.ttf", FONT_PIXELS)
