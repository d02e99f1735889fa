"""Small datasets on disk in every layout."""

import json
from pathlib import Path

import numpy as np

from tests.contract.helpers.datasets import AFFINE as AFFINE
from tests.contract.helpers.datasets import save as save_volume

SIZE = (12, 10, 8)


def make_image(seed: int, size=SIZE) -> np.ndarray:
    return np.random.default_rng(seed).normal(5, 2, size).astype(np.float32)


def make_label(seed: int, size=SIZE) -> np.ndarray:
    """Draw classes 0, 1 and 2; different for every seed."""
    array = np.zeros(size, np.uint8)
    array[2:5, 2:5, 2:4] = 1
    array[6:8, seed % 8, 5:7] = 2
    array[0, 0, seed // 8] = 1
    return array


def write_decathlon(root: Path, cases: int) -> Path:
    """Write case_00, case_01, ... with one channel."""
    training = []
    for n in range(cases):
        name = f"case_{n:02d}.nii.gz"
        save_volume(root / "imagesTr" / name, make_image(n))
        save_volume(root / "labelsTr" / name, make_label(n))
        training.append({"image": f"./imagesTr/{name}", "label": f"./labelsTr/{name}"})
    content = {
        "modality": {"0": "MRI"},
        "labels": {"0": "background", "1": "front", "2": "back"},
        "numTraining": cases,
        "training": training,
    }
    (root / "dataset.json").write_text(json.dumps(content))
    return root


def write_nnunet(root: Path, cases: int, *, ending: str = ".nii.gz", **content) -> Path:
    """Write case_00, case_01, ... with two channels."""
    for n in range(cases):
        for channel in range(2):
            image = root / "imagesTr" / f"case_{n:02d}_{channel:04d}{ending}"
            save_volume(image, make_image(2 * n + channel))
        save_volume(root / "labelsTr" / f"case_{n:02d}{ending}", make_label(n))
    defaults = {
        "channel_names": {"0": "T1", "1": "T2"},
        "labels": {"background": 0, "front": 1, "back": 2},
        "file_ending": ending,
        "numTraining": cases,
    }
    (root / "dataset.json").write_text(json.dumps({**defaults, **content}))
    return root


def write_pairs(root: Path, cases: int) -> Path:
    """Write case_00, case_01, ... in images/ and labels/."""
    for n in range(cases):
        save_volume(root / "images" / f"case_{n:02d}.nii.gz", make_image(n))
        save_volume(root / "labels" / f"case_{n:02d}.nii.gz", make_label(n))
    return root
