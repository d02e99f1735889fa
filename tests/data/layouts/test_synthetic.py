import nibabel
import numpy as np
import pytest

from unet3d.data.layouts.synthetic import Synthetic
from unet3d.errors import UsageError

SETTINGS = {"num_cases": 3, "size": [48, 48, 24], "spacing_mm": [1.0, 1.0, 3.0], "seed": 0}
SETTINGS |= {"num_classes": 6, "noise": 0.5}


def load(layout):
    """Return the images and the labels of all cases."""
    return tuple(
        np.stack([np.asarray(nibabel.load(file).dataobj) for file in files])
        for files in zip(*((c.images[0], c.label) for c in layout.list_cases()), strict=True)
    )


def test_volumes_are_written_once_and_not_in_a_folder_with_other_data(tmp_path):
    first = Synthetic(str(tmp_path), **SETTINGS).list_cases()[0]
    image = nibabel.load(first.images[0])
    assert image.shape == (48, 48, 24)
    assert image.header.get_zooms() == (1.0, 1.0, 3.0)
    written = first.images[0].stat().st_mtime_ns
    again = Synthetic(str(tmp_path), **SETTINGS).list_cases()[0]
    assert again.images[0].stat().st_mtime_ns == written
    Synthetic(str(tmp_path), **{**SETTINGS, "seed": 1}).describe()  # this one is no obstacle
    (tmp_path / "imagesTr").mkdir()
    Synthetic(str(tmp_path), **SETTINGS).describe()
    with pytest.raises(UsageError, match="holds imagesTr, and volumes would be generated there"):
        Synthetic(str(tmp_path), **{**SETTINGS, "seed": 2}).describe()
    assert len(list(tmp_path.iterdir())) == 3


def test_invalid_settings_are_refused(tmp_path):
    for invalid in ({"size": [7, 8, 8]}, {"spacing_mm": [0, 1, 1]}, {"num_cases": 0}):
        with pytest.raises(UsageError, match=r"data\.layout needs a size of three ints"):
            Synthetic(str(tmp_path), **{**SETTINGS, **invalid})


def test_a_structure_of_each_class_has_an_intensity_of_its_own(tmp_path):
    images, labels = load(Synthetic(str(tmp_path), **SETTINGS))
    counts = [151828, 3479, 1662, 3592, 1791, 3536]
    assert np.bincount(labels.ravel()).tolist() == pytest.approx(counts, abs=3)
    expected = [0.0, 0.6, 0.95, 1.3, 1.65, 2.0]
    means = [images[labels == c].mean() for c in range(6)]
    np.testing.assert_allclose(means, expected, atol=0.05)
    assert images[labels == 0].std() == pytest.approx(0.5, abs=0.01)
