"""A small ensemble, predictors of it, and scans of noise."""

import numpy as np
import pytest
import torch
from torch import nn

from tests.contract.helpers.datasets import save
from unet3d.data.layouts.scans import ScanFiles
from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.inference.ensemble import Ensemble
from unet3d.inference.predictor import Predictor
from unet3d.inference.tasks import ScanTask
from unet3d.machine import Precision


def make_ensemble(network, patch_size=(8, 8, 8)):
    return Ensemble(
        networks=(network.eval().requires_grad_(False),),
        channels=("MR",),
        classes=("background", "a", "b"),
        regions=None,
        keep_largest_component=(),
        preprocessing=Preprocessing(num_classes=3),
        patch_size=patch_size,
        precision="32",
    )


def build_predictor(ensemble, device="cpu", **options):
    options = {"overlap": 0.5, "batch_size": 1, **options}
    return Predictor(
        ensemble, device=torch.device(device), precision=Precision("32", "32"), **options
    )


@pytest.fixture
def ensemble():
    torch.manual_seed(0)
    return make_ensemble(nn.Conv3d(1, 3, 3, padding=1))


@pytest.fixture
def predictor(ensemble):
    return build_predictor(ensemble)


@pytest.fixture
def write_scans(tmp_path):
    """Write scans of noise; return the tasks of segmenting them."""

    def write(count=1, shape=(20, 12, 9)):
        tasks = []
        for n in range(count):
            voxels = np.random.default_rng(n).normal(0, 1, shape).astype(np.float32)
            file = save(tmp_path / f"{n}.nii", voxels, np.eye(4))
            scan = ScanFiles(name=str(n), files=(file,))
            labels = tmp_path / f"labels_{n}.nii"
            tasks.append(ScanTask(scan=scan, labels=labels, probabilities=None))
        return tasks

    return write
