"""A dataset of images and labels in two folders."""

from collections.abc import Callable
from pathlib import Path

import nibabel
import numpy as np

SIZE = (16, 16, 16)


def draw_label(number: int) -> np.ndarray:
    """Return labels 0, 1 and 2."""
    label = np.zeros(SIZE, np.uint8)
    label[2:7, 2:7, 2:7] = 1
    label[9:13, 4 + number : 9 + number, 9:14] = 2
    return label


def write_pairs(folder: Path, draw: Callable[[int], np.ndarray] = draw_label) -> list[str]:
    """Write case_0 to case_4; return the options that train on them."""
    for number in range(5):
        noise = np.random.default_rng(number).normal(0, 0.3, SIZE)
        image = (noise + draw_label(number)).astype(np.float32)
        for kind, voxels in {"images": image, "labels": draw(number)}.items():
            path = folder / kind / f"case_{number}.nii.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), path)
    return [
        *("data=pairs", f"data.root={folder}", f"data.cache={folder / 'cache'}"),
        *("data.num_classes=3", "data.patch_size=[16,16,16]", "data.batch_size=2"),
        *("trainer.max_steps=2", "trainer.enable_progress_bar=false", "trainer.accelerator=cpu"),
        *("memory.estimate=false", "evaluation.enabled=false", "hydra.run.dir=run"),
    ]
