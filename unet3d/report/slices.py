"""Draw slices of a case to scale, with reference and prediction in the colors of their classes.

Volumes are (D, H, W) with axes that point right, anterior and superior. Figures follow the
radiological convention: the patient's right is on the left of axial and coronal slices, anterior on
the left of sagittal ones; anterior is at the top of axial slices, superior at the top of others.
Slices are numbered from the patient's left, posterior and inferior end.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from unet3d.types import Triple

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
    *("#e69f00", "#56b4e9", "#009e73", "#cc79a7", "#0072b2", "#f0e442", "#d55e00"),  # Okabe and Ito
    *("#a22e2e", "#5de85d", "#8b8bff"),  # farthest from those for color-blind viewers
)

PANEL = 320
"""Pixels of the longest side of a panel."""

GAP, FONT_PIXELS, LINE = 8, 14, 20


def get_palette(count: int) -> list[str]:
    """Return colors such as #e69f00, the same first ones for any number.

    Ten colors that color-blind people can distinguish, then the same ten lighter, then darker;
    they repeat from the 31st on.
    """
    from matplotlib.colors import to_hex, to_rgb

    ten = np.array([to_rgb(color) for color in COLORS])
    thirty = np.concatenate([ten, 1 - 0.45 * (1 - ten), 0.45 * ten])
    return [to_hex(thirty[n % len(thirty)]) for n in range(count)]


def get_class_colors(classes: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Return the colors of classes given by their labels.

    A class of one label has that label's color; a class of several labels has the next unused one.

    >>> regions = {"whole tumor": (1, 2, 3), "core": (2, 3), "enhancing": (3,)}
    >>> list(get_class_colors(regions).values()) == get_palette(3)
    True
    """
    single = [labels[0] if len(labels) == 1 else None for labels in classes.values()]
    unused = (n for n in range(1, 2 * len(single) + 1) if n not in single)
    numbers = [next(unused) if label is None else label for label in single]
    palette = get_palette(30)
    return {
        name: palette[(number - 1) % len(palette)]
        for name, number in zip(classes, numbers, strict=True)
    }


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


def find_fullest_slices(labels: np.ndarray) -> Triple:
    """Return the slice of each axis with the most foreground; of equally full ones, the middle.

    Each class counts relative to its own fullest slice, so that small structures are not lost to
    large ones.
    """
    classes = int(labels.max(initial=0)) + 1
    fullest = []
    for axis in range(3):
        planes = np.moveaxis(labels, axis, 0)
        counts = np.stack([np.bincount(p.ravel(), minlength=classes)[1:] for p in planes])
        fullness = (counts / counts.max(0).clip(min=1)).sum(1)
        equally_full = np.flatnonzero(fullness > fullness.max() - 1e-6)
        fullest.append(int(equally_full[len(equally_full) // 2]))
    return fullest[0], fullest[1], fullest[2]


def orient_for_display(plane: np.ndarray) -> np.ndarray:
    """Turn a slice (first axis, second axis, ...) into rows and columns as displayed."""
    return plane.swapaxes(0, 1)[::-1, ::-1]


def draw_case_slices(
    image: np.ndarray,
    layers: Mapping[str, np.ndarray],
    *,
    spacing_mm: Sequence[float],
    slices: Sequence[int],
    legend: Sequence[tuple[str, str]],
    box: Sequence[slice] = (slice(None),) * 3,
    title: str = "",
) -> np.ndarray:
    """Return a uint8 image (H, W, 3) with a row per view: the image, then labels over it.

    `slices` is the slice to show of each axis, `box` the part of it; `legend` holds the text and
    the color, such as #ff0000, of the labels 1, 2, ..., others are not colored. All views share one
    scale in mm and one intensity window; `choose_views` skips thin views.
    """
    from matplotlib.colors import to_rgb
    from PIL import Image, ImageDraw

    colors = np.array([(0, 0, 0), *(to_rgb(color) for _, color in legend)])
    shape = [len(range(n)[inside]) for n, inside in zip(image.shape, box, strict=True)]
    axes, volumes = choose_views(shape, spacing_mm), (image, *layers.values())
    sides = {a: np.delete(np.multiply(shape, spacing_mm), a) for a in axes}  # mm
    scale = PANEL / max(mm.max() for mm in sides.values())
    planes = {a: [v[(*box[:a], slices[a], *box[a + 1 :])] for v in volumes] for a in axes}
    low, high = np.percentile(
        np.concatenate([gray.ravel() for gray, *_ in planes.values()]), (1, 99)
    )
    rows = []
    for axis, (gray, *labels) in planes.items():
        scaled = np.clip((gray - low) / max(high - low, 1e-6), 0, 1)
        background = np.repeat(scaled[..., None], 3, axis=-1)
        pixels = [max(1, round(mm * scale)) for mm in sides[axis]]
        rows.append([_make_panel(background, pixels)])
        for plane in labels:
            known = ((plane > 0) & (plane < len(colors)))[..., None]
            blended = 0.3 * background + 0.7 * colors[np.where(known[..., 0], plane, 0)]
            rows[-1].append(_make_panel(np.where(known, blended, background), pixels))

    titles = [f"{VIEWS[a]} slice {slices[a] + 1} of {image.shape[a]}" for a in axes]
    columns = ("image", *layers)
    column = GAP + max(*(row[0].width for row in rows), *map(_get_text_width, columns))
    widest = max(map(_get_text_width, (title, *titles)))
    width = GAP + max(len(columns) * column, widest + GAP)
    places, lines = _lay_out_legend([text for text, _ in legend], width)
    height = LINE * (1 + bool(title) + len(rows) + lines) + GAP * (2 + len(rows))
    picture = Image.new("RGB", (width, height + sum(row[0].height for row in rows)))
    draw = ImageDraw.Draw(picture)
    centers = [round(width / 2 + column * (n - len(layers) / 2)) for n in range(len(columns))]
    top = GAP
    if title:
        draw.text((width // 2, top), title, font=_font(), anchor="ma")
        top += LINE
    for center, name in zip(centers, columns, strict=True):
        draw.text((center, top), name, font=_font(), anchor="ma")
    top += LINE
    for axis, name, row in zip(axes, titles, rows, strict=True):
        draw.text((width // 2, top), name, font=_font(), anchor="ma", fill="#bbbbbb")
        top += LINE
        for center, panel in zip(centers, row, strict=True):
            picture.paste(panel, (center - panel.width // 2, top))
        w, h = row[0].size
        _draw_edge_letters(draw, axis, (centers[0] - w // 2, top, w, h))
        top += h + GAP
    for (line, left), (text, color) in zip(places, legend, strict=True):
        y = top + line * LINE
        draw.rectangle((left, y + 2, left + FONT_PIXELS - 2, y + FONT_PIXELS), fill=color)
        draw.text((left + LINE, y), text, font=_font())
    return np.asarray(picture)


def _make_panel(plane: np.ndarray, pixels: Sequence[int]) -> "Image":
    """Return a plane (first axis, second axis, 3) resized to `pixels`."""
    from PIL import Image

    panel = Image.fromarray((255 * orient_for_display(plane)).round().astype(np.uint8))
    return panel.resize((pixels[0], pixels[1]), Image.Resampling.BOX)  # keeps enlarged voxels sharp


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
