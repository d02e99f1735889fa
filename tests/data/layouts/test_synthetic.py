import nibabel
import numpy as np
import pytest

from unet3d.data.layouts.synthetic import Synthetic
from unet3d.errors import UsageError

SETTINGS = {
    "num_classes": 4,
    "num_cases": 4,
    "size": [40, 40, 32],
    "spacing_mm": [1.0, 1.0, 1.25],
    "noise": 0.5,
    "seed": 0,
}


def best_threshold_dice(values, labels, c):
    """Return the best Dice that an intensity interval can reach for a class."""
    edges = np.linspace(values.min(), values.max(), 80)
    inside = np.histogram(values[labels == c], edges)[0].cumsum()
    everywhere = np.histogram(values, edges)[0].cumsum()
    inside, everywhere = np.insert(inside, 0, 0), np.insert(everywhere, 0, 0)
    intersection = inside[None, :] - inside[:, None]
    predicted = everywhere[None, :] - everywhere[:, None]
    return np.triu(2 * intersection / (predicted + inside[-1])).max()


def test_no_intensity_threshold_separates_the_structures(tmp_path):
    cases = Synthetic(str(tmp_path), **SETTINGS).list_cases()
    images = np.concatenate([nibabel.load(c.images[0]).get_fdata().ravel() for c in cases])
    labels = np.concatenate([nibabel.load(c.label).get_fdata().ravel() for c in cases])
    scores = [best_threshold_dice(images, labels, c) for c in (1, 2, 3)]
    assert all(s > 0.02 for s in scores)
    assert np.mean(scores) < 0.7


def test_volumes_are_nifti_files_that_are_written_once(tmp_path):
    layout = Synthetic(str(tmp_path), **SETTINGS)
    first = layout.list_cases()[0]
    image = nibabel.load(first.images[0])
    assert image.shape == (40, 40, 32)
    assert image.header.get_zooms() == (1.0, 1.0, 1.25)
    written = first.images[0].stat().st_mtime_ns
    again = Synthetic(str(tmp_path), **SETTINGS).list_cases()[0]
    assert again.images[0].stat().st_mtime_ns == written
    assert [p.name[0] for p in tmp_path.iterdir()] != ["."]


@pytest.mark.parametrize("change", [{"num_classes": 5}, {"seed": 1}, {"noise": 0.1}])
def test_other_settings_make_another_dataset(tmp_path, change):
    one = Synthetic(str(tmp_path), **SETTINGS)
    other = Synthetic(str(tmp_path), **{**SETTINGS, **change})
    assert one.root != other.root
    assert len(other.describe().classes) == change.get("num_classes", 4)


def test_volumes_are_not_generated_in_a_folder_with_other_data(tmp_path):
    for change in ({}, {"seed": 1}):  # another generated dataset is no obstacle
        Synthetic(str(tmp_path), **{**SETTINGS, **change}).describe()
    (tmp_path / "imagesTr").mkdir()
    Synthetic(str(tmp_path), **SETTINGS).describe()
    with pytest.raises(UsageError, match="holds imagesTr, and volumes would be generated there"):
        Synthetic(str(tmp_path), **{**SETTINGS, "seed": 2}).describe()
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("classes", [2, 4, 9])
def test_every_class_occurs(tmp_path, classes):
    layout = Synthetic(str(tmp_path), **{**SETTINGS, "num_classes": classes, "num_cases": 3})
    present = [np.unique(nibabel.load(c.label).get_fdata()) for c in layout.list_cases()]
    assert set(np.concatenate(present)) == set(range(classes))


@pytest.mark.parametrize(
    "invalid",
    [
        *({"size": [4, 8, 8]}, {"spacing_mm": [0, 1, 1]}, {"num_classes": 1}),
        *({"num_cases": 0}, {"num_cases": 2**31}, {"seed": -1}),
    ],
)
def test_invalid_settings_are_refused(tmp_path, invalid):
    with pytest.raises(UsageError, match="got"):
        Synthetic(str(tmp_path), **{**SETTINGS, **invalid})
