"""Show the volumes of cases: as slices in a picture, and in NiiVue, a 3D viewer in JavaScript.

For NiiVue they are cropped, in 8 bits, and coarser if they must be. Its module is in the
distribution ipyniivue, whose script is a widget for notebooks and exports nothing else. But it
carries NiiVue's own module as a string, percent-encoded, to write it into HTML files (`save_html`).
Read in ipyniivue 2.4.4, which has NiiVue 0.65.
"""

import base64
import gzip
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import nibabel
import numpy as np
import torch
from PIL import Image
from torch.nn.functional import avg_pool3d

from unet3d.report.slices import draw_case_slices, find_fullest_slices
from unet3d.text import escape_unprintable, join_first
from unet3d.types import Triple

MARGIN_MM = 15
"""What is shown around the labels."""

WINDOW = (0.5, 99.5)
"""Percentiles of the intensities that become black and white."""

SAMPLE = 200_000
"""Voxels from which these percentiles are computed."""

COARSER = (1, 1.5, 2, 3, 4, 6)
"""Sizes of a voxel that are tried, relative to the shortest side of the original one."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Labels to show over an image."""

    labels: np.ndarray  # uint8 (D, H, W): the number of a class, from 1; 0 for none
    classes: Sequence[Mapping[str, str]]  # name, color and note of each class


@dataclass(frozen=True, kw_only=True)
class CaseVolumes:
    """Volumes (D, H, W) of a case, whose axes point right, anterior and superior."""

    name: str
    title: str
    image: np.ndarray  # uint8
    layers: Mapping[str, Layer]
    spacing_mm: Sequence[float]

    @property
    def slices(self) -> Triple:
        """Return the slices to show: the fullest ones of the last layer that has a label."""
        labels = [layer.labels for layer in self.layers.values() if layer.labels.any()]
        return find_fullest_slices(labels[-1] if labels else np.zeros_like(self.image))

    def map(
        self,
        change_image: Callable[[np.ndarray], np.ndarray],
        change_labels: Callable[[np.ndarray], np.ndarray],
    ) -> "CaseVolumes":
        """Return the case with each volume changed."""
        layers = {
            name: replace(layer, labels=change_labels(layer.labels))
            for name, layer in self.layers.items()
        }
        return replace(self, image=change_image(self.image), layers=layers)


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
    packed, left_out = [], []
    for number, case in enumerate(cases):
        facts = pack_within(case, budget // (count - number))
        if facts is None:
            left_out.append(case.name)
        else:
            packed.append(facts)
            budget -= measure(facts)
    viewer = {"cases": packed, "niivue": niivue, "left_out": join_first(left_out)}
    return viewer if packed else None


def pack_within(case: CaseVolumes, budget: int) -> dict[str, Any] | None:
    """Return the finest volumes that fit into `budget` bytes of a page; None if none do."""
    for factor in COARSER:
        packed = pack(coarsen(case, factor * min(case.spacing_mm)))
        if measure(packed) <= budget:
            return packed
    return None


def pack(case: CaseVolumes) -> dict[str, Any]:
    """Return what the script of the viewer reads: facts, and a NIfTI file of each volume."""

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


def measure(packed: Mapping[str, Any]) -> int:
    """Return about how many bytes a packed case takes in a page."""
    files = [packed["image"], *(layer["file"] for layer in packed["layers"])]
    return sum(map(len, files)) + 2000


def make_class_map(labels: np.ndarray, classes: Mapping[str, Sequence[int]]) -> np.ndarray:
    """Return each voxel's class index, 0 for none; where classes overlap, the one of fewer labels.

    The first class has the index 1.
    """
    highest = max(max(members) for members in classes.values())
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


def draw_case(case: CaseVolumes, box: Sequence[slice] = (slice(None),) * 3) -> bytes:
    """Return slices of a part of a case as a PNG."""
    legend: list[tuple[str, str]] = []  # text and color of each class that the case has
    layers = {}
    for name, layer in case.layers.items():
        indices = np.zeros(len(layer.classes) + 1, np.uint16)
        for number in np.unique(layer.labels[layer.labels > 0]):
            shown = layer.classes[number - 1]
            text = f"{shown['name']}: {shown['note']}" if shown["note"] else shown["name"]
            entry = (escape_unprintable(text), shown["color"])
            if entry not in legend:
                legend.append(entry)
            indices[number] = legend.index(entry) + 1
        layers[name] = indices[layer.labels]
    picture = draw_case_slices(
        case.image,
        layers,
        spacing_mm=case.spacing_mm,
        slices=case.slices,
        legend=legend,
        box=box,
        title=escape_unprintable(case.title),
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


def crop(case: CaseVolumes) -> CaseVolumes:
    """Return the part around all labels."""
    box = find_label_box(case)
    return case.map(lambda image: image[box], lambda labels: labels[box])


def coarsen(case: CaseVolumes, voxel_mm: float) -> CaseVolumes:
    """Return volumes whose voxels are about `voxel_mm` long where they are shorter now.

    Of each block of voxels this is the mean intensity, and the label in the middle; an incomplete
    block at the end is left out.
    """
    shape = case.image.shape
    steps = [max(1, round(voxel_mm / mm)) for mm in case.spacing_mm]
    steps = [min(step, n) for step, n in zip(steps, shape, strict=True)]
    if steps == [1, 1, 1]:
        return case
    middle = tuple(
        slice(step // 2, n // step * step, step) for step, n in zip(steps, shape, strict=True)
    )

    def average(image: np.ndarray) -> np.ndarray:
        means = avg_pool3d(torch.from_numpy(image.copy()).float()[None], steps)[0]
        return means.round().byte().numpy()

    coarser = case.map(average, lambda labels: labels[middle])
    spacing = [mm * step for mm, step in zip(case.spacing_mm, steps, strict=True)]
    return replace(coarser, spacing_mm=spacing)
