"""Show an image and its labels in a browser on this machine."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from unet3d.data.formats.labels import read_labels
from unet3d.data.formats.volumes import open_header, read_volume, split_suffix
from unet3d.data.layouts.label_names import find_label_names
from unet3d.data.preprocessing.resampling import find_orientation, get_spacing, reorient
from unet3d.errors import UsageError
from unet3d.report.case_figure import make_class_map
from unet3d.report.html.evaluation_page import get_hex_colors
from unet3d.report.html.local_server import Content, LocalServer
from unet3d.report.html.page import Section, render_page
from unet3d.report.html.viewer import (
    Viewer,
    describe_case,
    find_niivue,
    list_volumes,
    make_viewer,
    read_script,
)
from unet3d.report.html.volumes import CaseVolumes, PackedVolumes, pack, to_bytes

AFFINE_TOLERANCE_MM = 1e-3

MAX_LABELS = 255
"""A file with more different labels than this is taken for an image."""


def build_server(image: Path, labels: Sequence[Path], *, channel: int, port: int) -> LocalServer:
    """Read the volumes, and return a server of a page that shows them."""
    case = read_case(image, labels, channel=channel)
    packed = pack(case, level=1)  # they are sent to this machine alone
    contents = {"": Content(type="text/html; charset=utf-8", data=render(case, packed).encode())}
    for number, data in list_volumes(packed):
        contents[str(number)] = Content(type="application/octet-stream", data=data)
    try:
        return LocalServer(contents, port)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"port={port} cannot be used: {reason}; port=0 is any free one") from error


def render(case: CaseVolumes, packed: PackedVolumes) -> str:
    """Return the page; it fetches the volumes by their numbers."""
    markup = make_viewer([describe_case(packed, "", "url")], [], find_niivue())
    shape = " x ".join(map(str, case.shape))
    spacing = " x ".join(f"{mm:.3g}" for mm in case.spacing_mm)
    return render_page(
        kind="Viewer",
        title=case.name,
        subtitle=f"{shape} voxels of {spacing} mm, axes to the right, anterior and superior",
        sections=[Section(title=None, content=[markup])],
        viewer=Viewer(markup=markup, script=read_script()),
        connect="'self'",
        is_wide=True,
    )


def read_case(image: Path, labels: Sequence[Path], *, channel: int) -> CaseVolumes:
    """Read an image and labels on its grid; their axes are turned to right, anterior, superior."""
    channels, affine = read_volume(image)
    if not 0 <= channel < len(channels):
        raise UsageError(f"channel={channel}: {image} has the channels 0 to {len(channels) - 1}")
    if not np.isfinite(affine).all() or not np.linalg.det(affine[:3, :3]):
        raise UsageError(f"{image}: its affine is singular or not finite")
    axes, flips = find_orientation(affine, "RAS")
    volumes = {name: read_layer(file, image, channels.shape[1:], affine)
               for name, file in name_files(labels).items()}  # fmt: skip
    classes = find_classes(labels, list(volumes.values()))
    gray = channels[channel]
    d, h, w = get_spacing(affine, axes)
    return CaseVolumes(
        name=image.name,
        title=", ".join(volumes) or "Image",
        image=to_bytes(reorient(gray.real if np.iscomplexobj(gray) else gray, axes, flips)),
        layers={
            name: number_classes(reorient(volume, axes, flips), classes)
            for name, volume in volumes.items()
        },
        spacing_mm=(d, h, w),
        classes=get_hex_colors(classes),
        notes={},
    )


def number_classes(labels: np.ndarray, classes: Mapping[str, Sequence[int]]) -> np.ndarray:
    """Return the number of each voxel's class, from 1; 0 for none."""
    if not classes:
        return np.zeros(labels.shape, np.uint8)
    return make_class_map(labels, classes).astype(np.uint8)


def read_layer(file: Path, image: Path, shape: Sequence[int], affine: np.ndarray) -> np.ndarray:
    """Read labels; refuse another grid than that of the image."""
    volume, own = read_labels(file, open_header(image))
    if volume.shape != tuple(shape):
        raise UsageError(
            f"{file} has shape {list(volume.shape)}, {image} has {list(shape)}: labels must be on "
            "the grid of the image"
        )
    if np.abs(own - affine).max() > AFFINE_TOLERANCE_MM:
        raise UsageError(
            f"{file} and {image} have different affines: labels must be on the grid of the image"
        )
    return volume


def find_classes(labels: Sequence[Path], volumes: Sequence[np.ndarray]) -> dict[str, list[int]]:
    """Return the classes that a dataset.json near the labels names, else one per label."""
    found = sorted({int(label) for volume in volumes for label in np.unique(volume)} - {0})
    if len(found) > MAX_LABELS:
        raise UsageError(
            f"{labels[0]} holds {len(found)} different values: is it an image? The first file is "
            "the image, the others are labels"
        )
    for file in labels:
        names = find_label_names(file.absolute().parent)
        known = set() if names is None else {n for c in names.classes.values() for n in c}
        if names is not None and known >= set(found) and len(names.classes) <= MAX_LABELS:
            return {name: list(numbers) for name, numbers in names.classes.items()}
    return {str(label): [label] for label in found if label > 0}


def name_files(files: Sequence[Path]) -> dict[str, Path]:
    """Return the files by name, with their folders where names are the same.

    >>> list(name_files([Path("a/x.nii.gz"), Path("b/x.nii.gz")]))
    ['a/x', 'b/x']
    """
    names = [split_suffix(file)[0] for file in files]
    if len(set(names)) < len(names):
        names = [f"{file.absolute().parent.name}/{n}" for file, n in zip(files, names, strict=True)]
    if len(set(names)) < len(names):
        names = [str(file) for file in files]
    return dict(zip(names, files, strict=True))
