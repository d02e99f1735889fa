"""Show the volumes of cases: as slices in a picture, and in NiiVue, a 3D viewer in JavaScript.

For NiiVue they are cropped, in 8 bits, and coarser if they must be. Its module is in the
distribution ipyniivue, whose script is a widget for notebooks and exports nothing else. But it
carries NiiVue's own module as a string, percent-encoded, to write it into HTML files (`save_html`).
Read in ipyniivue 2.4.4, which has NiiVue 0.65.
"""

import base64
import gzip
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
from PIL import Image

from unet3d.report.slices import draw_case_slices, find_fullest_slices
from unet3d.text import escape_unprintable, join_first
from unet3d.types import Triple

MARGIN_MM = 15  # shown around the labels
WINDOW = (0.5, 99.5)  # percentiles of the intensities that become black and white
SAMPLE = 200_000  # voxels from which these percentiles are computed
COARSER = (1, 1.5, 2, 3, 4, 6)  # sizes of a voxel, relative to the shortest side of the original


@dataclass(frozen=True, kw_only=True)
class LabelLayer:
    """Labels to show over an image."""

    labels: np.ndarray  # uint8 (D, H, W): the number of a class, from 1; 0 for none
    classes: Sequence[Mapping[str, str]]  # name and color of each class


@dataclass(frozen=True, kw_only=True)
class CaseVolumes:
    """Volumes (D, H, W) of a case, whose axes point right, anterior and superior."""

    name: str
    title: str
    image: np.ndarray  # uint8
    layers: Mapping[str, LabelLayer]
    spacing_mm: Sequence[float]

    @property
    def slices(self) -> Triple:
        """Return the slices to show: the fullest ones of the last layer that has a label."""
        labels = [layer.labels for layer in self.layers.values() if layer.labels.any()]
        return find_fullest_slices(labels[-1] if labels else np.zeros_like(self.image))

    def take(self, box: tuple[slice, ...]) -> "CaseVolumes":
        layers = {k: replace(v, labels=v.labels[box]) for k, v in self.layers.items()}
        return replace(self, image=self.image[box], layers=layers)


@cache
def find_niivue() -> dict[str, str] | None:
    """Return NiiVue's module, packed by gzip in base64, and its license; None without ipyniivue."""
    try:
        distribution = metadata.distribution("ipyniivue")
    except metadata.PackageNotFoundError:
        return None
    widget = Path(str(distribution.locate_file("ipyniivue/static/widget.js"))).read_text("utf-8")
    module = re.search(r'"([^"]*export%7B[^"]*Niivue[^"]*)"', widget)
    if module is None:
        return None
    packed = gzip.compress(unquote(module[1]).encode(), 9, mtime=0)
    text = distribution.read_text("licenses/LICENSE") or distribution.read_text("LICENSE")
    return {"packed": base64.b64encode(packed).decode("ascii"), "license": text or "BSD-2-Clause"}


def embed_viewer(cases: Iterable[CaseVolumes], count: int, budget: int) -> dict[str, Any] | None:
    """Return NiiVue, and the first cases of `count` that fit into `budget` bytes of a page.

    None without NiiVue. Cases are read one at a time, so that only one is in memory.
    """
    niivue = find_niivue()
    if niivue is None:
        return None
    budget -= len(niivue["packed"]) + 20_000  # and the script
    shown, left_out = [], []
    for number, case in enumerate(cases):
        for factor in COARSER:
            packed = pack(coarsen(case, factor * min(case.spacing_mm)))
            size = len(json.dumps(packed))
            if size <= budget // (count - number):
                shown.append(packed)
                budget -= size
                break
        else:
            left_out.append(case.name)
    viewer = {"cases": shown, "niivue": niivue, "left_out": join_first(left_out)}
    return viewer if shown else None


def pack(case: CaseVolumes) -> dict[str, Any]:
    """Return what the script of the viewer reads: facts, and a NIfTI file of each volume."""
    import nibabel

    def compress(volume: np.ndarray) -> str:
        file = nibabel.Nifti1Image(volume, np.diag([*case.spacing_mm, 1.0])).to_bytes()
        return base64.b64encode(gzip.compress(file, mtime=0)).decode("ascii")

    return {
        "title": case.title,
        "shape": case.image.shape,
        "slices": case.slices,
        "image": compress(case.image),
        "layers": [
            {"name": name, "classes": layer.classes, "file": compress(layer.labels)}
            for name, layer in case.layers.items()
        ],
    }


def make_class_map(labels: np.ndarray, classes: Mapping[str, Sequence[int]]) -> np.ndarray:
    """Return the index of each voxel's class, from 1; 0 for none.

    Where classes overlap, it is that of the class with the fewest labels.
    """
    highest = max((max(members) for members in classes.values()), default=0)
    indices = np.zeros(highest + 2, np.min_scalar_type(len(classes)))
    indexed = enumerate(classes.values(), start=1)
    for index, members in sorted(indexed, key=lambda item: -len(item[1])):
        indices[list(members)] = index
    return indices[labels.astype(np.int32).clip(0, highest + 1)]


def to_bytes(image: np.ndarray) -> np.ndarray:
    """Map intensities between two percentiles to 0..255, plane by plane to bound memory."""
    sample = image.reshape(-1)[:: max(1, image.size // SAMPLE)].astype(np.float32)
    finite = sample[np.isfinite(sample)]
    low, high = np.percentile(finite, WINDOW) if len(finite) else (0.0, 1.0)
    result = np.empty(image.shape, np.uint8)
    for plane, out in zip(image, result, strict=True):
        scaled = (np.nan_to_num(plane.astype(np.float32)) - low) / max(high - low, 1e-6)
        out[:] = (255 * scaled.clip(0, 1)).round()
    return result


def draw_case(whole: CaseVolumes, box: tuple[slice, ...] = (slice(None),) * 3) -> bytes:
    """Return slices of a box of a case as a PNG."""
    case = whole.take(box)
    legend: dict[tuple[str, str], int] = {}  # text and color of each class that the case has
    layers = {}
    for name, layer in case.layers.items():
        numbers = np.zeros(len(layer.classes) + 1, np.uint16)
        for index in np.unique(layer.labels[layer.labels > 0]):
            shown = layer.classes[index - 1]
            entry = (escape_unprintable(shown["name"]), shown["color"])
            numbers[index] = legend.setdefault(entry, len(legend) + 1)
        layers[name] = numbers[layer.labels]
    picture = draw_case_slices(
        case.image,
        layers,
        spacing_mm=case.spacing_mm,
        slices=case.slices,
        legend=list(legend),
        title=escape_unprintable(case.title),
        first=[side.start or 0 for side in box],
        sizes=whole.image.shape,
    )
    with BytesIO() as file:
        Image.fromarray(picture).save(file, format="png")
        return file.getvalue()


def find_label_box(case: CaseVolumes) -> tuple[slice, ...]:
    """Return the part around all labels, with a margin; everything if there is no label."""
    foreground = np.any([layer.labels > 0 for layer in case.layers.values()], axis=0)
    if not foreground.any():
        return (slice(None),) * 3
    box = []
    for filled, mm in zip(foreground.nonzero(), case.spacing_mm, strict=True):
        margin = round(MARGIN_MM / mm)
        box.append(slice(max(0, filled.min() - margin), filled.max() + 1 + margin))
    return tuple(box)


def coarsen(case: CaseVolumes, voxel_mm: float) -> CaseVolumes:
    """Take every second voxel or so, where voxels are shorter than `voxel_mm`."""
    steps = [max(1, round(voxel_mm / mm)) for mm in case.spacing_mm]
    spacing = [mm * step for mm, step in zip(case.spacing_mm, steps, strict=True)]
    part = case.take(tuple(slice(None, None, step) for step in steps))
    return replace(part, spacing_mm=spacing)
