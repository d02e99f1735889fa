"""Small datasets on disk: each case has a noisy image with two blocks of known labels."""

import json
from pathlib import Path

import nibabel
import numpy as np

SIZE = (16, 16, 16)
AFFINE = np.diag([1.0, 1.0, 2.0, 1.0])


def save(path: Path, voxels: np.ndarray, affine: np.ndarray = AFFINE) -> Path:
    """Write a volume; create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(voxels, affine), path)
    return path


def make_label(number: int) -> np.ndarray:
    """Return labels 0, 1 and 2 at a place of their own."""
    label = np.zeros(SIZE, np.uint8)
    label[2:7, 2:7, 2:7] = 1
    label[9:13, 4:9, 9:14] = 2
    return np.roll(label, (number % 4, number // 4), (0, 1))


def make_image(number: int) -> np.ndarray:
    """Return the image of `make_label(number)`."""
    noise = np.random.default_rng(number).normal(10, 1, SIZE)
    return (noise + 3 * make_label(number)).astype(np.float32)


def write_decathlon(root: Path, names: list[str]) -> Path:
    """Write imagesTr/, labelsTr/ and dataset.json."""
    for number, name in enumerate(names):
        save(root / "imagesTr" / f"{name}.nii.gz", make_image(number))
        save(root / "labelsTr" / f"{name}.nii.gz", make_label(number))
    files = [
        {folder: f"./{folder}sTr/{name}.nii.gz" for folder in ("image", "label")} for name in names
    ]
    content = {
        "modality": {"0": "MRI"},
        "labels": {"0": "background", "1": "front", "2": "back"},
        "numTraining": len(names),
        "training": files,
    }
    (root / "dataset.json").write_text(json.dumps(content))
    return root


def write_nnunet(root: Path, names: list[str]) -> Path:
    """Write a raw dataset of nnU-Net with two channels."""
    for number, name in enumerate(names):
        for channel in range(2):
            image = make_image(number) * (1 - 2 * channel)
            save(root / "imagesTr" / f"{name}_{channel:04d}.nii.gz", image)
        save(root / "labelsTr" / f"{name}.nii.gz", make_label(number))
    content = {
        "channel_names": {"0": "T1", "1": "T2"},
        "labels": {"background": 0, "front": 1, "back": 2},
        "file_ending": ".nii.gz",
        "numTraining": len(names),
    }
    (root / "dataset.json").write_text(json.dumps(content))
    return root


def write_pairs(root: Path, names: list[str]) -> Path:
    """Write images/ and labels/, matched by name."""
    for number, name in enumerate(names):
        save(root / "images" / f"{name}.nii.gz", make_image(number))
        save(root / "labels" / f"{name}.nii.gz", make_label(number))
    return root
