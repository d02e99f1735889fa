"""Images of validation cases, in any orientation."""

from types import SimpleNamespace

import nibabel
import numpy as np
import pytest
import torch

from unet3d.data.preprocessing.resampling import find_orientation, reorient
from unet3d.training.callbacks.case_images import CaseImages
from unet3d.training.loggers import ResumableCSVLogger
from unet3d.types import IGNORE_LABEL


def draw(code):
    """Draw the same case in an orientation."""
    rng = np.random.default_rng(0)
    image = rng.random((16, 20, 12), np.float32)
    label = np.zeros(image.shape, np.uint8)
    label[4:9, 3:12, 2:7] = 1
    label[5:7, 5:9, 4:6] = 2
    label[:, :, 9] = IGNORE_LABEL
    prediction = label.clip(max=1)
    axes, flips = find_orientation(np.eye(4), code)
    reoriented = [torch.tensor(reorient(v, axes, flips).copy()) for v in (image, label, prediction)]
    mm = (1.0, 2.0, 3.0)
    images = CaseImages(
        class_names=("background", "a", "b"),
        orientation=code,
        spacing_mm={"x": [mm[axis] for axis in axes]},
    )
    return images.draw("x", *reoriented), images.slices["x"]


def test_the_name_of_a_case_has_no_control_characters_in_a_log(tmp_path):
    images = CaseImages(
        class_names=("background", "a"), orientation="RAS", spacing_mm={"a\x1b[2J": [1.0] * 3}
    )
    voxels = torch.zeros(1, 1, 4, 4, 4)
    batch = {"case": ["a\x1b[2J"], "image": voxels, "label": voxels[0].long()}
    loggers = [ResumableCSVLogger(tmp_path)]
    trainer = SimpleNamespace(
        sanity_checking=False, global_step=1, loggers=loggers, is_global_zero=True
    )
    images.on_validation_batch_end(trainer, None, voxels[0].long(), batch, 0)
    assert (tmp_path / "csv" / "images" / "cases" / r"a\x1b[2J" / "0.png").exists()


@pytest.mark.parametrize("code", ["SPL", "LAI", "PIR"])
def test_a_case_looks_the_same_in_every_orientation(code):
    assert nibabel.aff2axcodes(np.eye(4)) == tuple("RAS")
    expected, slices = draw("RAS")
    image, same_slices = draw(code)
    assert same_slices == slices
    assert 2 <= slices[2] < 7  # ignored voxels do not count
    assert (image == expected).all()
