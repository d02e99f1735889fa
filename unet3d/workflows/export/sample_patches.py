"""The patches on which an exported network is compared with its checkpoint, real ones if any."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from unet3d.config.instantiate import build_source, summarize_error
from unet3d.data.layouts.unlabelled import find_scans
from unet3d.data.loading.datasets import crop_padded
from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.errors import UsageError
from unet3d.types import Triple

COUNT = 3
"""One for a batch of one, and two for a batch of two."""

TRIED = 8
"""Places in a volume: its middle, and others by chance."""


@dataclass(frozen=True, kw_only=True)
class SamplePatches:
    """`COUNT` patches (C, D, H, W), and where they come from."""

    images: list[Tensor]
    told: str

    def batches(self) -> Iterator[Tensor]:
        """Of different sizes, since an exported network has to take any."""
        yield torch.stack(self.images[:1])
        yield torch.stack(self.images[1:])


def load_sample_patches(
    asked: Any, card: Mapping[str, Any], patch: Triple, allow_targets: Sequence[str]
) -> SamplePatches:
    """Of the scans that are asked for; else of the data set that was trained on; else noise."""
    channels = card["channels"]
    preparation = Preprocessing.from_dict(card["preparation"])
    if asked is not None:
        found = [scan.files for scan in find_scans(Path(str(asked)), channels)]
        images = most_varied_patches(found, preparation, patch, len(channels))
        return SamplePatches(images=images, told=f"{COUNT} patches of {asked}")
    try:
        root, found = training_images(card, allow_targets)
        images = most_varied_patches(found, preparation, patch, len(channels))
        return SamplePatches(images=images, told=f"{COUNT} patches of {root}")
    except Exception as error:  # it may have been moved, changed or damaged since
        generator = torch.Generator().manual_seed(0)
        images = list(torch.randn(COUNT, len(channels), *patch, generator=generator))
        why = f"no input= is given, and {summarize_error(error)}"
        return SamplePatches(images=images, told=f"seeded noise, not on scans ({why}),")


def training_images(
    card: Mapping[str, Any], allow_targets: Sequence[str]
) -> tuple[Path, list[tuple[Path, ...]]]:
    """The folder that a checkpoint was trained on and its cases' images; nothing is made there."""
    config = OmegaConf.create({**card["config"], "allow_targets": list(allow_targets)})
    assert isinstance(config, DictConfig)
    root = Path(str(config.data.root))
    if root.is_dir():
        source = build_source(config)
        if Path(getattr(source, "root", root)).is_dir():  # a synthetic one would be made anew
            return root, [case.images for case in source.cases()]
    raise UsageError(f"the data set of the training is not at {root.absolute()}")


def most_varied_patches(
    cases: Sequence[Sequence[Path]], preparation: Preprocessing, patch: Triple, channels: int
) -> list[Tensor]:
    """From the first volumes, as many of each as it takes, those that vary most among some.

    In a patch that is the same all over a norm divides by almost nothing, and what was rounding is
    seen in the logits.
    """
    if not cases:
        raise UsageError("there are no scans")
    rng = np.random.default_rng(0)
    images: list[np.ndarray] = []
    used = list(cases)[:COUNT]
    for number, files in enumerate(used):
        image = preparation.scan(files).image
        if len(image) != channels:
            raise UsageError(
                f"{len(image)} channels in {', '.join(f.name for f in files)}, but the network "
                f"takes {channels}"
            )
        room = [n - p for n, p in zip(image.shape[1:], patch, strict=True)]
        starts = [[r // 2 for r in room]]
        for _ in range(TRIED - 1):
            starts.append([int(rng.integers(r + 1)) if r > 0 else r // 2 for r in room])
        tried = [crop_padded(image, start, patch) for start in starts]
        tried.sort(key=lambda one: one.std(), reverse=True)
        images += tried[: len(range(number, COUNT, len(used)))]
    return [torch.from_numpy(image) for image in images]
