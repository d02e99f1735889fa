"""Small datasets on disk in every layout."""

import json
from pathlib import Path

import nibabel
import numpy as np

AFFINE = np.diag([1.0, 1.0, 2.0, 1.0])
SIZE = (12, 10, 8)


def save(path: Path, array: np.ndarray, affine: np.ndarray = AFFINE) -> Path:
    """Write a volume; create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(array, affine), path)
    return path


def image(seed: int, size=SIZE) -> np.ndarray:
    return np.random.default_rng(seed).normal(5, 2, size).astype(np.float32)


def label(seed: int, size=SIZE) -> np.ndarray:
    """Draw classes 0, 1 and 2; different for every seed."""
    array = np.zeros(size, np.uint8)
    array[2:5, 2:5, 2:4] = 1
    array[6:8, seed % 8, 5:7] = 2
    array[0, 0, seed // 8] = 1
    return array


def decathlon(root: Path, cases: int) -> Path:
    """Write case_00, case_01, ... with one channel."""
    training = []
    for n in range(cases):
        name = f"case_{n:02d}.nii.gz"
        save(root / "imagesTr" / name, image(n))
        save(root / "labelsTr" / name, label(n))
        training.append({"image": f"./imagesTr/{name}", "label": f"./labelsTr/{name}"})
    content = {
        "modality": {"0": "MRI"},
        "labels": {"0": "background", "1": "front", "2": "back"},
        "numTraining": cases,
        "training": training,
    }
    (root / "dataset.json").write_text(json.dumps(content))
    return root


def nnunet(root: Path, cases: int, *, ending: str = ".nii.gz", **content) -> Path:
    """Write case_00, case_01, ... with two channels."""
    for n in range(cases):
        for channel in range(2):
            save(root / "imagesTr" / f"case_{n:02d}_{channel:04d}{ending}", image(2 * n + channel))
        save(root / "labelsTr" / f"case_{n:02d}{ending}", label(n))
    defaults = {
        "channel_names": {"0": "T1", "1": "T2"},
        "labels": {"background": 0, "front": 1, "back": 2},
        "file_ending": ending,
        "numTraining": cases,
    }
    (root / "dataset.json").write_text(json.dumps({**defaults, **content}))
    return root


def pairs(root: Path, cases: int) -> Path:
    """Write case_00, case_01, ... in images/ and labels/."""
    for n in range(cases):
        save(root / "images" / f"case_{n:02d}.nii.gz", image(n))
        save(root / "labels" / f"case_{n:02d}.nii.gz", label(n))
    return root
