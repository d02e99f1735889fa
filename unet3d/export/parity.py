"""Compare an exported network's logits with those of its checkpoint, on patches of scans."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unet3d.config.instantiate import LAYOUTS, Factory, check_saved_config
from unet3d.data.layouts.scans import find_scans
from unet3d.data.loading.datasets import crop_padded
from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.errors import UsageError, summarize_error
from unet3d.types import Triple

NUM_PATCHES = 3
"""One for a batch of one, and two for a batch of two."""

NUM_CANDIDATES = 8
"""Random positions tried in a volume."""

TOLERANCE = 1e-3
"""Largest difference of two logits, relative to the largest logit, that counts as rounding.

Our networks' were 4e-6 on patches of noise, and 4e-4 where a 512th of a patch was not constant. On
a constant patch, 2e-2: instance norm divides it by almost 0.
"""


@dataclass(frozen=True, kw_only=True)
class Parity:
    """Differences of two networks' outputs on some patches."""

    max_difference: float  # of two logits
    max_logit: float  # absolute value
    agreement: float  # fraction of voxels with the same label

    @property
    def passed(self) -> bool:
        """Return whether the outputs are equal up to rounding; False for NaN."""
        return self.max_difference <= TOLERANCE * self.max_logit < torch.inf

    def __str__(self) -> str:
        percent = int(self.agreement * 1e6) / 1e4  # rounded down: 100 only if all voxels agree
        return (
            f"logits differ by at most {self.max_difference:.1e} (the largest is "
            f"{self.max_logit:.1f}), {percent:g}% of voxels get the same class"
        )


def compare_outputs(
    reference: Callable[[Tensor], Tensor],
    exported: Callable[[Tensor], Tensor],
    batches: Iterable[Tensor],
    decide: Callable[[Tensor], Tensor],
) -> Parity:
    """Run two networks on batches (B, C, D, H, W); `decide` turns logits (K, D, H, W) to labels."""
    differences, logits, equal = [], [], []
    for batch in batches:
        expected, actual = reference(batch), exported(batch)
        differences.append((expected - actual).abs().max())
        logits.append(expected.abs().max())
        pairs = zip(expected, actual, strict=True)
        equal += [(decide(one) == decide(other)).double().mean() for one, other in pairs]
    return Parity(  # torch's max keeps NaN, Python's does not
        max_difference=float(torch.stack(differences).max()),
        max_logit=float(torch.stack(logits).max()),
        agreement=float(torch.stack(equal).mean()),
    )


def load_sample_patches(
    scans: Path | None,
    metadata: Mapping[str, Any],
    patch_size: Triple,
    allow_targets: Sequence[str],
) -> tuple[list[Tensor], str]:
    """Cut patches (C, D, H, W) from scans, else from the training dataset; else make noise.

    Also return where they come from.
    """
    channels, data = metadata["channels"], metadata["config"]["data"]
    preprocessing = Preprocessing.from_dict(metadata["preprocessing"])
    try:
        if scans is None:
            cases, source = list_training_images(data, allow_targets), data["root"]
        else:
            cases, source = [scan.files for scan in find_scans(scans, channels)], scans
        images = select_varied_patches(cases, preprocessing, patch_size, channels)
        return images, f"{NUM_PATCHES} patches of {source}"
    except Exception as error:
        if scans is not None:
            raise
        # The dataset may have been moved, changed or damaged.
        generator = torch.Generator().manual_seed(0)
        images = list(torch.randn(NUM_PATCHES, len(channels), *patch_size, generator=generator))
        reason = f"{summarize_error(error)}: give scans with input="
        return images, f"seeded noise instead of scans ({reason}),"


def list_training_images(
    data: Mapping[str, Any], allow_targets: Sequence[str]
) -> list[tuple[Path, ...]]:
    """Return the images of the cases that a checkpoint was trained on."""
    root = Path(str(data["root"]))
    if root.is_dir():
        saved = data["layout"]
        check_saved_config(saved, "data.layout", packages=LAYOUTS, allow_targets=allow_targets)
        layout = Factory("data.layout", saved)()
        if Path(getattr(layout, "root", root)).is_dir():  # or synthetic data would be generated
            return [case.images for case in layout.list_cases()]
    raise UsageError(f"the training dataset was not found at {root.absolute()}")


def select_varied_patches(
    cases: Sequence[Sequence[Path]],
    preprocessing: Preprocessing,
    patch_size: Triple,
    channels: Sequence[str],
) -> list[Tensor]:
    """Return patches of the first volumes, from each those that vary most among the candidates.

    In a constant patch a norm divides by almost nothing, and rounding errors reach the logits.
    """
    rng = np.random.default_rng(0)
    images: list[np.ndarray] = []
    chosen = list(cases)[:NUM_PATCHES]
    for index, files in enumerate(chosen):
        image = preprocessing.preprocess_scan(files, channels).image
        slack = np.subtract(image.shape[1:], patch_size)
        positions = rng.integers(np.maximum(slack, 0) + 1, size=(NUM_CANDIDATES, 3))
        starts = np.where(slack > 0, positions, slack // 2).tolist()
        candidates = [crop_padded(image, start, patch_size) for start in starts]
        candidates.sort(key=lambda patch: patch.std(), reverse=True)
        images += candidates[: len(range(index, NUM_PATCHES, len(chosen)))]
    return [torch.from_numpy(image) for image in images]
