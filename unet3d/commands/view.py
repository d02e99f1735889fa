"""`unet3d view IMAGE [LABELS ...]`: look at volumes in a browser."""

import base64
import os
import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from unet3d.config.compose import ComposedConfig
from unet3d.config.fields import integer, read_settings
from unet3d.data.formats.volumes import read_header, read_labels, read_volume, split_suffix
from unet3d.data.layouts.dataset_json import find_label_names
from unet3d.data.preprocessing.channels import find_orientation, get_spacing, reorient
from unet3d.errors import UsageError
from unet3d.evaluation.evaluate import MAX_LABELS, is_same_grid
from unet3d.files import write_text
from unet3d.report.page import render_page
from unet3d.report.slices import get_class_colors
from unet3d.report.volumes import (
    CaseVolumes,
    LabelLayer,
    draw_case,
    embed_viewer,
    make_class_map,
    to_bytes,
)

MAX_BYTES = 100_000_000
"""Size of a page; a volume of 512 x 512 x 400 voxels is half of it, and larger ones are coarser."""


@dataclass(frozen=True, kw_only=True)
class ViewConfig:
    """What to show, and where."""

    image: Path
    labels: tuple[str, ...]  # files
    channel: Annotated[int, integer(">= 0")]
    output: Path
    open_browser: bool


def main(composed: ComposedConfig, folder: Path) -> int:
    """Write the page, with NiiVue or as slices without it; print its path and open it."""
    settings = read_settings(ViewConfig, composed.config)
    labels = list(map(Path, settings.labels))
    case = read_case(settings.image, labels, channel=settings.channel)
    shape = " x ".join(map(str, case.image.shape))
    spacing = " x ".join(f"{mm:.3g}" for mm in case.spacing_mm)
    page = render_page(
        "view.html",
        title=case.name,
        subtitle=f"{shape} voxels of {spacing} mm, axes to the right, anterior and superior",
        viewer=embed_viewer([case], 1, MAX_BYTES),
        pictures={case.title: base64.b64encode(draw_case(case)).decode("ascii")},
    )
    write_text(settings.output, page)
    print(settings.output)
    # Elsewhere a browser would take over the terminal.
    has_screen = {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()
    if settings.open_browser and (has_screen or sys.platform in ("darwin", "win32")):
        webbrowser.open(settings.output.resolve().as_uri())
    return 0


def read_case(image: Path, labels: Sequence[Path], *, channel: int) -> CaseVolumes:
    """Read an image and labels on its grid; their axes are turned to right, anterior, superior."""
    channels, affine = read_volume(image)
    if channel >= len(channels):
        raise UsageError(f"channel={channel}: {image} has the channels 0 to {len(channels) - 1}")
    axes, flips = find_orientation(affine, "RAS")
    volumes = {
        name: read_layer(file, image, channels.shape[1:], affine)
        for name, file in name_files(labels).items()
    }
    classes = find_classes(labels, list(volumes.values()))
    legend = [{"name": n, "color": c} for n, c in get_class_colors(classes).items()]
    maps = {n: reorient(make_class_map(v, classes), axes, flips) for n, v in volumes.items()}
    layers = {name: LabelLayer(labels=numbers, classes=legend) for name, numbers in maps.items()}
    return CaseVolumes(
        name=image.name,
        title=", ".join(volumes) or "Image",
        image=to_bytes(reorient(channels[channel].real, axes, flips)),
        layers=layers,
        spacing_mm=get_spacing(affine, axes),
    )


def read_layer(file: Path, image: Path, shape: Sequence[int], affine: np.ndarray) -> np.ndarray:
    """Read labels; refuse another grid than that of the image."""
    volume, own = read_labels(file, read_header(image))
    same_shape = volume.shape == tuple(shape)
    if same_shape and is_same_grid(own, affine):
        return volume
    difference = "affines" if same_shape else f"shapes, {list(volume.shape)} and {list(shape)}"
    raise UsageError(
        f"{file} and {image} have different {difference}: labels must be on the grid of the image"
    )


def find_classes(labels: Sequence[Path], volumes: Sequence[np.ndarray]) -> dict[str, list[int]]:
    """Return the classes that a dataset.json near the labels names, else one per label."""
    found = {int(label) for volume in volumes for label in np.unique(volume)} - {0}
    if len(found) > MAX_LABELS:
        raise UsageError(
            f"{labels[0]} holds {len(found)} different values: is it an image? The first file is "
            "the image, the others are labels"
        )
    for file in labels:
        names = find_label_names(file.absolute().parent)
        classes = {} if names is None else names.classes
        known = {label for members in classes.values() for label in members}
        if classes and found <= known and len(classes) <= MAX_LABELS:
            return {name: list(members) for name, members in classes.items()}
    return {str(label): [label] for label in sorted(found) if label > 0}


def name_files(files: Sequence[Path]) -> dict[str, Path]:
    """Return the files by name, with their folders where names are the same.

    >>> list(name_files([Path("a/x.nii.gz"), Path("b/x.nii.gz")]))
    ['a/x', 'b/x']
    """
    names = [split_suffix(file)[0] for file in files]
    if len(set(names)) < len(names):
        names = [f"{file.absolute().parent.name}/{n}" for file, n in zip(files, names, strict=True)]
    if len(set(names)) < len(names):
        names = list(map(str, files))
    return dict(zip(names, files, strict=True))
