"""Images of validation cases, in any orientation."""

import numpy as np
import pytest
import torch

from unet3d.data.preprocessing.channels import find_orientation, reorient
from unet3d.training.callbacks.dashboard import CaseImages
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
    images = CaseImages()
    images.set_up_views(("background", "a", "b"), code, {"x": [mm[axis] for axis in axes]})
    return images.draw("x", *reoriented), images.slices["x"]


@pytest.mark.parametrize("code", ["SPL", "LAI", "PIR"])
def test_a_case_looks_the_same_in_every_orientation(code):
    expected, slices = draw("RAS")
    image, same_slices = draw(code)
    assert same_slices == slices
    assert 2 <= slices[2] < 7  # ignored voxels do not count
    assert (image == expected).all()
