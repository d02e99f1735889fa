"""Pictures of validation cases, however volumes are turned."""

import nibabel
import numpy as np
import pytest
import torch

from unet3d.data.preprocessing.resampling import orientation, reorient
from unet3d.lit.callbacks.images import CaseImages
from unet3d.types import IGNORE_LABEL


def picture(code):
    """The same patient, turned to `code`."""
    rng = np.random.default_rng(0)
    image = rng.random((16, 20, 12), np.float32)
    label = np.zeros(image.shape, np.uint8)
    label[4:9, 3:12, 2:7] = 1
    label[5:7, 5:9, 4:6] = 2
    label[:, :, 9] = IGNORE_LABEL
    found = label.clip(max=1)
    axes, flips = orientation(np.eye(4), code)
    turned = [torch.tensor(reorient(v, axes, flips).copy()) for v in (image, label, found)]
    mm = (1.0, 2.0, 3.0)
    shown = CaseImages(
        class_names=("background", "a", "b"),
        orientation=code,
        spacing_mm={"x": [mm[axis] for axis in axes]},
    )
    return shown.draw("x", *turned), shown.slices["x"]


@pytest.mark.parametrize("code", ["SPL", "LAI", "PIR"])
def test_a_case_is_drawn_the_same_however_volumes_are_turned(code):
    assert nibabel.aff2axcodes(np.eye(4)) == tuple("RAS")
    expected, slices = picture("RAS")
    drawn, same = picture(code)
    assert same == slices
    assert 2 <= slices[2] < 7  # what is ignored shows nothing
    assert (drawn == expected).all()
