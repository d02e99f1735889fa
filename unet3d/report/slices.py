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

from unet3d.text import MANY_CLASSES
from unet3d.types import Triple

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFont import FreeTypeFont

VIEWS = ("sagittal", "coronal", "axial")  # slices across each axis
EDGES = (("A", "P", "S", "I"), ("R", "L", "S", "I"), ("R", "L", "A", "P"))
"""Anatomical direction of the left, right, upper and lower edge of each view."""
ANCHORS = ("lm", "rm", "ma", "md")  # of a letter at these edges, for Pillow

THIN = 4  # views with a side this many times shorter than the longest, in mm, are skipped

COLORS = (
    *("#e69f00", "#56b4e9", "#009e73", "#cc79a7", "#0072b2", "#f0e442", "#d55e00"),  # Okabe and Ito
    *("#a22e2e", "#5de85d", "#8b8bff"),  # farthest from those for color-blind viewers
)

PANEL = 320  # pixels of the longest side of a panel
GAP, FONT_PIXELS, LINE = 8, 14, 20


def get_palette(count: int) -> list[str]:
    """Return colors such as #e69f00: ten, then the same ones lighter, then darker, then again."""
    from matplotlib.colors import to_hex, to_rgb

    ten = np.array([to_rgb(color) for color in COLORS])
    thirty = np.concatenate([ten, 1 - 0.45 * (1 - ten), 0.45 * ten])
    return [to_hex(thirty[n % len(thirty)]) for n in range(count)]


def get_class_colors(classes: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Return the color of each class: that of its label, of several labels the next unused one.

    >>> regions = {"whole tumor": (1, 2, 3), "core": (2, 3), "enhancing": (3,)}
    >>> list(get_class_colors(regions).values()) == get_palette(3)
    True
    >>> len(set(get_class_colors({"left": [17], "right": [47]}).values()))
    2
    """
    single = [labels[0] if len(labels) == 1 else None for labels in classes.values()]
    unused = (n for n in range(1, 2 * len(single) + 1) if n not in single)
    numbers = [next(unused) if label is None else label for label in single]
    if len({n % 30 for n in numbers}) < len(numbers):  # by position, if two would look alike
        numbers = list(range(1, len(numbers) + 1))
    palette = get_palette(30)
    return {name: palette[(n - 1) % 30] for name, n in zip(classes, numbers, strict=True)}


def choose_views(shape: Sequence[int], spacing_mm: Sequence[float]) -> list[int]:
    """Return the axes to slice across, axial first; thin views show little and are skipped.

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


def draw_case_slices(
    image: np.ndarray,
    layers: Mapping[str, np.ndarray],
    *,
    spacing_mm: Sequence[float],
    slices: Sequence[int],
    legend: Sequence[tuple[str, str]],
    title: str = "",
    first: Sequence[int] = (0, 0, 0),
    sizes: Sequence[int] | None = None,
) -> np.ndarray:
    """Return a uint8 image (H, W, 3) with a row per view: the image, then labels over it.

    `slices` is the slice to show of each axis; `legend` holds the text and the color, such as
    #ff0000, of the labels 1, 2, ..., others are not colored. Of many labels, only some of those
    that are shown are listed. All views share one scale in mm and one intensity window;
    `choose_views` skips thin views. Of a cropped case, slices are numbered as in the case: `first`
    is where the crop begins, `sizes` the shape of the case.
    """
    from PIL import Image, ImageDraw

    shape, volumes = image.shape, (image, *layers.values())
    views = choose_views(shape, spacing_mm)
    planes = {axis: [v.take(slices[axis], axis) for v in volumes] for axis in views}
    rows = _make_panels(planes, np.multiply(shape, spacing_mm), [color for _, color in legend])
    if len(legend) > MANY_CLASSES:
        present = {int(n) for own in planes.values() for plane in own[1:] for n in np.unique(plane)}
        shown = [entry for n, entry in enumerate(legend, start=1) if n in present]
        legend = [*shown[:MANY_CLASSES], *[("...", "#000000")][: len(shown) > MANY_CLASSES]]
    sizes = sizes or shape
    names = {a: f"{VIEWS[a]} slice {first[a] + slices[a] + 1} of {sizes[a]}" for a in rows}
    headings = ["image", *layers]
    column = GAP + max(_measure(headings), *(row[0].width for row in rows.values()))
    width = GAP + max(len(headings) * column, GAP + _measure([title, *names.values()]))
    entry = LINE + 2 * GAP + _measure([text for text, _ in legend])
    per_line = max(1, (width - GAP) // entry)
    lines = 1 + bool(title) + len(rows) + ceil(len(legend) / per_line)
    height = LINE * lines + GAP * (2 + len(rows)) + sum(row[0].height for row in rows.values())
    picture = Image.new("RGB", (width, height))
    draw = ImageDraw.Draw(picture)
    draw.font = _load_font()
    centers = [round(width / 2 + column * (n - len(layers) / 2)) for n in range(len(headings))]
    top = GAP
    if title:
        draw.text((width // 2, top), title, anchor="ma")
        top += LINE
    for center, heading in zip(centers, headings, strict=True):
        draw.text((center, top), heading, anchor="ma")
    for axis, row in rows.items():
        draw.text((width // 2, top + LINE), names[axis], anchor="ma", fill="#bbbbbb")
        top += 2 * LINE
        for center, panel in zip(centers, row, strict=True):
            picture.paste(panel, (center - panel.width // 2, top))
        top += row[0].height + GAP - LINE
    for n, (text, color) in enumerate(legend):
        x, y = GAP + n % per_line * entry, top + LINE + n // per_line * LINE
        draw.rectangle((x, y + 2, x + FONT_PIXELS - 2, y + FONT_PIXELS), fill=color)
        draw.text((x + LINE, y), text)
    return np.asarray(picture)


def _make_panels(
    planes: Mapping[int, Sequence[np.ndarray]], sides_mm: np.ndarray, colors: Sequence[str]
) -> dict[int, list["Image"]]:
    """Return the panels of each view: its gray plane, with directions, and its labels over it."""
    from matplotlib.colors import to_rgb
    from PIL import Image, ImageDraw

    palette = np.array([(0, 0, 0), *map(to_rgb, colors)])
    sides = {axis: np.delete(sides_mm, axis) for axis in planes}
    scale = PANEL / max(mm.max() for mm in sides.values())
    intensities = np.concatenate([gray.ravel() for gray, *_ in planes.values()])
    low, high = np.percentile(intensities, (1, 99))
    rows = {}
    for axis, (gray, *labels) in planes.items():
        scaled = np.clip((gray - low) / max(high - low, 1e-6), 0, 1)
        shown = [np.repeat(scaled[..., None], 3, axis=-1)]
        for plane in labels:
            known = (plane > 0) & (plane < len(palette))
            blended = 0.3 * shown[0] + 0.7 * palette[np.where(known, plane, 0)]
            shown.append(np.where(known[..., None], blended, shown[0]))
        w, h = (max(1, round(mm * scale)) for mm in sides[axis])
        turned = [(255 * orient_for_display(plane)).round().astype(np.uint8) for plane in shown]
        # This filter keeps enlarged voxels sharp.
        rows[axis] = [Image.fromarray(p).resize((w, h), Image.Resampling.BOX) for p in turned]
        draw = ImageDraw.Draw(rows[axis][0])
        draw.font = _load_font()
        places = (3, h // 2), (w - 3, h // 2), (w // 2, 2), (w // 2, h - 2)
        for place, anchor, letter in zip(places, ANCHORS, EDGES[axis], strict=True):
            draw.text(place, letter, anchor=anchor, stroke_width=1, stroke_fill="black")
    return rows


def orient_for_display(plane: np.ndarray) -> np.ndarray:
    """Turn a slice (first axis, second axis, ...) into rows and columns as displayed."""
    return plane.swapaxes(0, 1)[::-1, ::-1]


def _measure(texts: Sequence[str]) -> int:
    """Return the width of the longest text in pixels."""
    return ceil(max(map(_load_font().getlength, texts), default=0))


@cache
def _load_font() -> "FreeTypeFont":
    """Return matplotlib's font, which has more letters than Pillow's default."""
    from matplotlib import get_data_path
    from PIL import ImageFont

    return ImageFont.truetype(f"{get_data_path()}/fonts/ttf/DejaVuSans.ttf", FONT_PIXELS)
