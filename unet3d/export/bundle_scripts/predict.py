"""Segment a scan with the networks of this bundle: python scripts/predict.py SCAN LABELS.

Needs numpy, nibabel, and onnxruntime (for models/*.onnx) or torch (for models/*.pt2). It is written
to be read: the whole volume's logits are held in memory, 4 bytes per class and voxel.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import nibabel
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
OVERLAP = 0.5

Network = Callable[[np.ndarray], np.ndarray]
"""(1, C, D, H, W) -> logits (1, K, D, H, W)."""


class Pipeline:
    """Preprocessing, sliding windows and postprocessing, as bundle.json describes them."""

    def __init__(self, settings: dict[str, Any]):
        self.settings = settings
        self.patch = tuple(settings["patch_size"])
        for c, method in enumerate(settings["normalize"] if settings["intensities"] else ()):
            known = settings["intensities"][c]
            low, high = known["percentile_0_5"], known["percentile_99_5"]
            finite = np.isfinite([known["mean"], known["deviation"]]).all()
            if method == "ct" and not (finite and known["deviation"] > 0 and low < high):
                raise ValueError(f"bundle.json has invalid intensities of channel {c}: {known}")

    def segment(self, channels: np.ndarray, affine: np.ndarray, networks: list[Network]):
        """Return the labels (D, H, W) of an image (C, D, H, W) that nibabel has read."""
        image, grid = self.preprocess(channels, affine)
        return self.postprocess(self.slide(image, networks), grid)

    def preprocess(self, channels: np.ndarray, affine: np.ndarray) -> tuple[np.ndarray, dict]:
        """Reorient, crop, normalize and resample; also return the grid to go back to."""
        settings = self.settings
        codes = nibabel.orientations.axcodes2ornt(tuple(settings["orientation"]))
        change = nibabel.orientations.ornt_transform(nibabel.io_orientation(affine), codes)
        axes = [int(axis) for axis in np.argsort(change[:, 0])]
        flips = [bool(change[axis, 1] < 0) for axis in axes]
        grid = {"file_shape": list(channels.shape[1:]), "axes": axes, "flips": flips}
        channels = reorient(channels, axes, flips)
        values = settings["background"]
        values = values if len(values) == len(channels) else values * len(channels)
        pairs = zip(channels, values, strict=True)
        background = [find_border_value(c) if v == "auto" else float(v) for c, v in pairs]
        grid["box"] = [[0, n] for n in channels.shape[1:]]
        if settings["crop"] == "nonzero":
            pairs = zip(channels, background, strict=True)
            grid["box"] = find_box(np.logical_or.reduce([c != v for c, v in pairs]))
        inside = tuple(slice(*span) for span in grid["box"])
        size = [stop - start for start, stop in grid["box"]]
        old_mm = np.linalg.norm(affine[:3, :3], axis=0)[axes].tolist()
        new_mm = settings["spacing_mm"] or old_mm
        spans = zip(size, old_mm, new_mm, strict=True)
        shape = [max(1, round(n * old / new)) for n, old, new in spans]
        orders = choose_orders(old_mm, new_mm)
        image = np.empty((len(channels), *shape), np.float32)
        for c, method in enumerate(settings["normalize"]):
            known = settings["intensities"] and settings["intensities"][c]
            channel = channels[c][inside].astype(np.float32)
            channel = normalize(channel, method, np.float32(background[c]), known)
            image[c] = resample(channel, shape, orders)
        return image, grid

    def slide(self, image: np.ndarray, networks: list[Network]) -> np.ndarray:
        """Return the mean logits (K, D, H, W) of overlapping windows with Gaussian weights."""
        size = image.shape[1:]
        logits = np.zeros((len(self.settings["outputs"]), *size), np.float32)
        total = np.zeros(size, np.float32)
        weights = np.ones(1, np.float32)
        for n in self.patch:
            offset = np.arange(n, dtype=np.float32) - (n - 1) / 2
            weights = weights[..., None] * np.exp(-(offset**2) / (2 * (n / 8) ** 2))
        weights = np.maximum(weights[0], 1e-3).astype(np.float32)
        starts = [list_starts(n, side) for n, side in zip(size, self.patch, strict=True)]
        for window in product(*starts):
            spans = list(zip(window, self.patch, size, strict=True))
            inside = tuple(slice(max(s, 0), min(s + side, n)) for s, side, n in spans)
            missing = [(max(-s, 0), max(s + side - n, 0)) for s, side, n in spans]
            patch = np.pad(image[(slice(None), *inside)], [(0, 0), *missing])[None]
            pairs = zip(missing, self.patch, strict=True)
            own = tuple(slice(before, side - after) for (before, after), side in pairs)
            for network in networks:
                output = network(patch)[0]
                logits[(slice(None), *inside)] += weights[own] * output[(slice(None), *own)]
                total[inside] += weights[own]
        return logits / total

    def postprocess(self, logits: np.ndarray, grid: dict) -> np.ndarray:
        """Return labels (D, H, W), uint8, on the grid of the file."""
        settings = self.settings
        labels = np.zeros(grid["file_shape"], np.uint8)
        inside = tuple(slice(*span) for span in grid["box"])
        target = reorient(labels, grid["axes"], grid["flips"])[inside]
        rows, columns, depths = (
            make_matrix(old, new, 1)
            for old, new in zip(logits.shape[1:], target.shape, strict=True)
        )
        for n, row in enumerate(rows):  # one plane of the file after the other
            used = np.flatnonzero(row)
            plane = np.tensordot(row[used], logits[:, used], (0, 1))
            plane = columns @ plane @ depths.T
            if settings["activation"] == "softmax":
                target[n] = plane.argmax(0)
                continue
            for region, label in zip(plane, settings["labels"], strict=True):
                target[n][region > 0] = label
        for name in settings["keep_largest_component"]:
            keep_largest_component(labels, settings["classes"].index(name))
        return labels


def reorient(volume: np.ndarray, axes: Sequence[int], flips: Sequence[bool]) -> np.ndarray:
    """Return a view of (..., D, H, W) with its last three axes transposed and flipped."""
    extra = volume.ndim - 3
    turned = volume.transpose(*range(extra), *(extra + axis for axis in axes))
    return turned[(..., *(slice(None, None, -1 if flip else 1) for flip in flips))]


def find_border_value(channel: np.ndarray) -> float:
    """Return the value of all corners if half of the faces have it, else 0."""
    corners = {channel[corner].item() for corner in product((0, -1), repeat=3)}
    faces = [np.moveaxis(channel, axis, 0)[end] for axis in range(3) for end in (0, -1)]
    value = corners.pop()
    equal = sum(np.count_nonzero(face == value) for face in faces)
    is_border = not corners and equal >= 0.5 * sum(face.size for face in faces)
    return float(value) if is_border else 0.0


def find_box(mask: np.ndarray) -> list[list[int]]:
    """Return the smallest box around a mask; all of it if the mask is empty."""
    rows = [np.flatnonzero(mask.any(tuple(a for a in range(3) if a != axis))) for axis in range(3)]
    spans = zip(rows, mask.shape, strict=True)
    return [[int(r[0]), int(r[-1]) + 1] if len(r) else [0, n] for r, n in spans]


def normalize(
    channel: np.ndarray, method: str, background: np.float32, known: dict[str, float] | None
) -> np.ndarray:
    """Normalize a channel in place."""
    foreground = channel != background
    if method == "none" or (method == "zscore_nonzero" and foreground.any()):
        channel[~foreground] = 0
    selected = foreground if method == "zscore_nonzero" and foreground.any() else ...
    if method == "none":
        return channel
    if method == "ct" and known is not None:
        np.clip(channel, known["percentile_0_5"], known["percentile_99_5"], out=channel)
        mean, deviation = known["mean"], known["deviation"]
    else:
        mean, deviation = channel[selected].mean(dtype=float), channel[selected].std(dtype=float)
    channel[selected] -= mean
    channel[selected] /= max(deviation, 1e-8)
    return channel


def choose_orders(old_mm: Sequence[float], new_mm: Sequence[float]) -> list[int]:
    """Return the order of each axis: cubic, but nearest along a coarse one."""
    for sizes in (old_mm, new_mm):
        if max(sizes) > 3 * min(sizes):
            return [0 if axis == int(np.argmax(sizes)) else 3 for axis in range(3)]
    return [3, 3, 3]


def resample(volume: np.ndarray, shape: Sequence[int], orders: Sequence[int]) -> np.ndarray:
    """Resample (D, H, W) axis by axis."""
    for axis in sorted(range(3), key=lambda a: shape[a] / volume.shape[a]):
        if volume.shape[axis] != shape[axis]:
            matrix = make_matrix(volume.shape[axis], shape[axis], orders[axis])
            volume = np.moveaxis(np.tensordot(matrix, volume, (1, axis)), 0, axis)
    return volume


def make_matrix(old: int, new: int, order: int) -> np.ndarray:
    """Return a (new, old) matrix that interpolates along an axis; order 3 is a cubic spline."""
    if old == new:
        return np.eye(old, dtype=np.float32)
    position = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
    matrix = np.zeros((new, old))
    rows = np.arange(new)
    if order == 0:
        matrix[rows, np.floor(position + 0.5).astype(int).clip(max=old - 1)] = 1
    elif order == 1 or old < 4:
        below = np.floor(position).astype(int)
        matrix[rows, below] = 1 - (position - below)
        matrix[rows, np.minimum(below + 1, old - 1)] += position - below
    else:
        margin = 12  # of repeated edge values
        count = old + 2 * margin
        spline = np.eye(count) * 4 + np.eye(count, k=1) + np.eye(count, k=-1)
        spline[0, 1] = spline[-1, -2] = 2
        padded = np.pad(np.eye(old), [(margin, margin), (0, 0)], mode="edge")
        coefficients = 6 * np.linalg.solve(spline, padded)
        first = np.floor(position).astype(int) + margin - 1
        distance = np.abs(position + margin - (first + np.arange(4)[:, None]))
        near = 2 / 3 - distance**2 + distance**3 / 2
        weights = np.where(distance < 1, near, np.maximum(2 - distance, 0) ** 3 / 6)
        for n, weight in enumerate(weights):
            matrix += weight[:, None] * coefficients[first + n]
    return matrix.astype(np.float32)


def list_starts(size: int, patch: int) -> list[int]:
    """Return where windows start along an axis."""
    if size <= patch:
        return [-((patch - size) // 2)]
    return [*range(0, size - patch, max(1, int(patch * (1 - OVERLAP)))), size - patch]


def keep_largest_component(labels: np.ndarray, label: int) -> None:
    """Turn all but the largest component of a label into background, in place.

    Voxels are connected across faces, edges and corners.
    """
    mask = labels == label
    if not mask.any():
        return
    inside = tuple(slice(*span) for span in find_box(mask))
    mask = mask[inside]
    d, h, w = mask.shape
    change = np.diff(np.pad(mask.astype(np.int8), [(0, 0), (0, 0), (1, 1)]), axis=2)
    row, column, begin = np.nonzero(change == 1)  # runs of voxels along the last axis
    end = np.nonzero(change == -1)[2]
    line, width = row * h + column, w + 2
    pairs = []
    for down, right in ((0, 1), (1, -1), (1, 0), (1, 1)):  # lines beside each line
        near = np.flatnonzero((row + down < d) & (column + right >= 0) & (column + right < h))
        other = line[near] + down * h + right
        low = np.searchsorted(line * width + end, other * width + begin[near], "left")
        high = np.searchsorted(line * width + begin, other * width + end[near], "right")
        count = np.maximum(high - low, 0)
        offset = np.arange(count.sum()) - np.repeat(count.cumsum() - count, count)
        pairs.append((np.repeat(near, count), np.repeat(low, count) + offset))
    one, two = (np.concatenate(part) for part in zip(*pairs, strict=True))
    root = np.arange(len(row))
    while (root[one] != root[two]).any():
        a, b = root[one], root[two]
        np.minimum.at(root, np.maximum(a, b), np.minimum(a, b))
        while (root[root] != root).any():
            root = root[root]
    sizes = np.bincount(root, weights=end - begin)
    for n in np.flatnonzero(root != np.argmax(sizes)):
        labels[inside][row[n], column[n], begin[n] : end[n]] = 0


def load_networks(folder: Path) -> list[Network]:
    """Load the networks of the bundle, for onnxruntime if it is installed, else for torch."""
    try:
        import onnxruntime
    except ImportError:
        return [load_torch(path) for path in sorted(folder.glob("*.pt2"))]
    available = onnxruntime.get_available_providers()

    def load_onnx(path: Path) -> Network:
        session = onnxruntime.InferenceSession(str(path), providers=available)
        return lambda patch: np.asarray(session.run(["logits"], {"image": patch})[0])

    return [load_onnx(path) for path in sorted(folder.glob("*.onnx"))]


def load_torch(path: Path) -> Network:
    """Load a network for torch, on the CPU."""
    import torch

    module = torch.export.load(path).module()

    def run(patch: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return module(torch.from_numpy(patch)).numpy()

    return run


def read_channels(files: Sequence[Path]) -> tuple[np.ndarray, Any]:
    """Return the channels (C, D, H, W) of NIfTI files, and the first image."""
    images: list[Any] = [nibabel.load(file) for file in files]
    first, shape = images[0], images[0].shape[:3]
    corners = np.array([(*c, 1) for c in product(*((0, n - 1) for n in shape))])
    for file, image in zip(files, images, strict=True):
        offset = np.linalg.norm(corners @ (image.affine - first.affine).T, axis=1).max()
        if image.shape[:3] != shape or not offset <= 0.1 * min(first.header.get_zooms()[:3]):
            raise SystemExit(
                f"{file} has another grid than {files[0]}: resample it onto that one, or copy the "
                "correct header"
            )
    arrays = [np.asarray(image.dataobj) for image in images]
    while arrays[0].ndim > 3 and arrays[0].shape[-1] == 1:
        arrays = [array[..., 0] for array in arrays]
    if arrays[0].ndim == 4:
        return np.moveaxis(arrays[0], -1, 0), images[0]
    return np.stack(arrays), images[0]


def write_labels(file: Path, labels: np.ndarray, like: Any) -> None:
    """Write labels with the affines of the image."""
    header = like.header.copy()
    header.set_data_shape(labels.shape)
    header.set_data_dtype(np.uint8)
    header.set_slope_inter(1, 0)
    nibabel.save(type(like)(labels, None, header), file)


def main() -> None:
    """Segment the scan of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("scan", nargs="+", type=Path, help="NIfTI file, or one per channel")
    parser.add_argument("labels", type=Path, help="NIfTI file to write")
    args = parser.parse_args()
    settings = json.loads((ROOT / "bundle.json").read_text("utf-8"))["pipeline"]
    try:
        pipeline = Pipeline(settings)
    except ValueError as error:
        parser.error(str(error))
    channels, image = read_channels(args.scan)
    if len(channels) != len(settings["channels"]):
        parser.error(f"the scan has {len(channels)} channels: give {settings['channels']}")
    labels = pipeline.segment(channels, image.affine, load_networks(ROOT / "models"))
    write_labels(args.labels, labels, image)


if __name__ == "__main__":
    main()
