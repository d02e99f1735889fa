"""Segment a scan with the networks of this bundle: python scripts/predict.py SCAN LABELS.

Needs numpy, scipy, nibabel, and onnxruntime (for models/*.onnx) or torch (for models/*.pt2).
`pipeline/` holds what unet3d itself preprocesses and orders windows with. It is written to be read:
the whole volume's logits are held in memory, 4 bytes per class and voxel.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import nibabel
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from unet3d.data.preprocessing.channels import (
    FileGrid,
    convert_to_mm,
    make_interpolation_matrix,
    preprocess_channels,
)
from unet3d.inference.postprocess import keep_largest_component
from unet3d.inference.window_grid import WindowGrid, make_gaussian_importance

ROOT = Path(__file__).resolve().parents[1]
OVERLAP = 0.5

Network = Callable[[np.ndarray], np.ndarray]
"""(1, C, D, H, W) -> logits (1, K, D, H, W)."""


class Pipeline:
    """Preprocessing, sliding windows and postprocessing, as bundle.json describes them."""

    def __init__(self, settings: dict[str, Any]):
        self.settings = settings

    def segment(
        self, channels: np.ndarray, affine: np.ndarray, networks: list[Network]
    ) -> np.ndarray:
        """Return the labels (D, H, W) of an image (C, D, H, W) that nibabel has read."""
        image, grid = self.preprocess(channels, affine)
        return self.postprocess(self.slide(image, networks), grid)

    def preprocess(self, channels: np.ndarray, affine: np.ndarray) -> tuple[np.ndarray, FileGrid]:
        """Reorient, crop, normalize and resample; also return the grid to go back to."""
        if not np.isfinite(channels).all():
            raise SystemExit("the scan holds NaN or infinite values")
        settings, known = self.settings, self.settings["intensities"]
        keys = ("mean", "deviation", "percentile_0_5", "percentile_99_5")
        return preprocess_channels(
            channels,
            affine,
            orientation=settings["orientation"],
            spacing_mm=settings["spacing_mm"],
            background=settings["background"],
            crop_to_foreground=settings["crop"] == "nonzero",
            normalize=settings["normalize"],
            intensities=known and [tuple(channel[key] for key in keys) for channel in known],
        )

    def slide(self, image: np.ndarray, networks: list[Network]) -> np.ndarray:
        """Return the mean logits (K, D, H, W) of overlapping windows with Gaussian weights."""
        size, patch = image.shape[1:], tuple(self.settings["patch_size"])
        logits = np.zeros((len(self.settings["outputs"]), *size), np.float32)
        total, weights = np.zeros(size, np.float32), make_gaussian_importance(patch)
        schedule = WindowGrid(size=size, patch=patch, overlap=OVERLAP)
        for window in schedule.windows:
            inside, missing = schedule.locate_window(window)
            batch = np.pad(image[(slice(None), *inside)], [(0, 0), *missing])[None]
            pairs = zip(missing, patch, strict=True)
            valid = tuple(slice(before, side - after) for (before, after), side in pairs)
            for network in networks:
                output = network(batch)[0]
                logits[(slice(None), *inside)] += weights[valid] * output[(slice(None), *valid)]
                total[inside] += weights[valid]
        return logits / total

    def postprocess(self, logits: np.ndarray, grid: FileGrid) -> np.ndarray:
        """Return labels (D, H, W), uint8 or uint16, on the grid of the file."""
        settings, classes = self.settings, self.settings["classes"]
        labels = np.zeros(grid.file_shape, np.uint8 if len(classes) < 256 else np.uint16)
        target = grid.crop(labels)
        rows, columns, depths = (
            make_interpolation_matrix(old, new, 1)
            for old, new in zip(logits.shape[1:], target.shape, strict=True)
        )
        for n, row in enumerate(rows):  # one plane of the file after the other
            used = np.flatnonzero(row)
            plane = columns @ np.tensordot(row[used], logits[:, used], (0, 1)) @ depths.T
            if settings["activation"] == "softmax":
                target[n] = plane.argmax(0)
                continue
            for region, label in zip(plane, settings["labels"], strict=True):
                target[n][region > 0] = label
        cleaned = [classes.index(name) for name in settings["keep_largest_component"]]
        keep_largest_component(labels, cleaned)
        if settings["activation"] == "softmax" and len(settings["labels"]) == len(classes):
            values = np.array(settings["labels"])  # of the classes in files
            labels = values.astype(np.uint8 if values.max() < 256 else np.uint16)[labels]
        return labels


def read_pipeline(bundle: str | Path) -> dict[str, Any]:
    """Return the part of bundle.json that describes the pipeline."""
    return json.loads(Path(bundle).read_text("utf-8"))["pipeline"]


def load_networks(folder: Path) -> list[Network]:
    """Load the networks of the bundle, for onnxruntime if it is installed, else for torch."""
    try:
        import onnxruntime
    except ImportError:
        return [load_torch(path) for path in sorted(folder.glob("*.pt2"))]
    return [load_onnx(onnxruntime, path) for path in sorted(folder.glob("*.onnx"))]


def load_onnx(onnxruntime: Any, path: Path) -> Network:
    """Load a network for onnxruntime, on the devices that it has."""
    available = onnxruntime.get_available_providers()
    session = onnxruntime.InferenceSession(str(path), providers=available)
    return lambda patch: np.asarray(session.run(["logits"], {"image": patch})[0])


def load_torch(path: Path) -> Network:
    """Load a network for torch, on the CPU."""
    import torch

    module = torch.export.load(path).module()
    return torch.inference_mode()(lambda patch: module(torch.from_numpy(patch)).numpy())


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
    return np.moveaxis(arrays[0], -1, 0) if arrays[0].ndim == 4 else np.stack(arrays), first


def write_labels(file: Path, labels: np.ndarray, like: Any) -> None:
    """Write labels with the affines of the image."""
    header = like.header.copy()
    header.set_data_dtype(labels.dtype)
    header.set_slope_inter(1, 0)
    header["cal_min"] = header["cal_max"] = 0  # the window of the image
    nibabel.save(type(like)(labels, None, header), file)


def main() -> None:
    """Segment the scan of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("scan", nargs="+", type=Path, help="NIfTI file, or one per channel")
    parser.add_argument("labels", type=Path, help="NIfTI file to write")
    args = parser.parse_args()
    settings, (channels, image) = read_pipeline(ROOT / "bundle.json"), read_channels(args.scan)
    if len(channels) != len(settings["channels"]):
        parser.error(f"the scan has {len(channels)} channels: give {settings['channels']}")
    affine = convert_to_mm(image.affine, image.header["xyzt_units"])
    labels = Pipeline(settings).segment(channels, affine, load_networks(ROOT / "models"))
    write_labels(args.labels, labels, image)


if __name__ == "__main__":
    main()
