from collections.abc import Mapping

import nibabel
import numpy as np
import pytest
from scipy.ndimage import binary_opening

from unet3d.data.layouts.synthetic_hard import CLASSES, SyntheticHard
from unet3d.errors import UsageError

SETTINGS: Mapping = {
    "num_cases": 6,
    "size": [48, 48, 24],
    "spacing_mm": [1.0, 1.0, 3.0],
    "noise": 0.35,
    "bias": 0.15,
    "seed": 0,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return SyntheticHard(str(tmp_path_factory.mktemp("hard")), **SETTINGS)


@pytest.fixture(scope="module")
def volumes(source):
    """(image, label) of each case."""
    return [
        (nibabel.load(c.images[0]).get_fdata(), np.asarray(nibabel.load(c.label).dataobj))
        for c in source.cases()
    ]


def share(volumes, name):
    """Percent of the voxels that are of a class, case by case."""
    return [100 * np.mean(label == CLASSES.index(name)) for _, label in volumes]


def test_structures_have_from_a_few_percent_of_the_voxels_to_a_twentieth_of_one(volumes):
    means = [np.mean(share(volumes, name)) for name in CLASSES[1:]]
    assert means == sorted(means, reverse=True)
    assert 2 < means[0] < 4
    assert means[-1] == pytest.approx(0.05, abs=0.01)
    assert all(min(share(volumes, name)) > 0.03 for name in CLASSES)


def test_sheets_are_one_or_two_voxels_thick(volumes):
    thick = []
    for _, label in volumes:
        sheet = label == CLASSES.index("sheet")
        runs = [binary_opening(sheet, np.ones(line)) for line in ((3, 1, 1), (1, 3, 1))]
        thick.append(np.sum(runs[0] & runs[1]) / sheet.sum())  # 3 voxels along both axes
    assert np.mean(thick) < 0.1


@pytest.mark.parametrize("pair", [("body", "cap"), ("sheet", "sheath"), ("body", "nodule")])
def test_brightness_does_not_tell_neighbors_apart(volumes, pair):
    one, other = (
        np.mean([image[label == CLASSES.index(name), 0].mean() for image, label in volumes])
        for name in pair
    )
    assert one == pytest.approx(other, abs=0.2)
    assert one > 0.7  # and the background is at 0


def test_some_of_the_background_is_as_bright_as_every_structure(volumes):
    background = np.concatenate([image[label == 0, 0] for image, label in volumes])
    for c in range(1, len(CLASSES)):
        typical = np.median(np.concatenate([image[label == c, 0] for image, label in volumes]))
        assert np.sum(np.abs(background - typical) < 0.2) > 50


def test_the_second_channel_is_brighter_or_darker_by_chance(volumes):
    body = [image[label == 1, 1].mean() for image, label in volumes]
    assert min(body) < -0.4
    assert max(body) > 0.4


def test_voxels_are_anisotropic_and_channels_are_two(source):
    image = nibabel.load(source.cases()[0].images[0])
    assert image.shape == (48, 48, 24, 2)
    assert image.header.get_zooms()[:3] == (1.0, 1.0, 3.0)
    assert source.describe().channels == ("structures", "misleading")
    assert source.describe().classes == CLASSES


def test_the_same_seed_makes_the_same_bytes(source, tmp_path):
    again = SyntheticHard(str(tmp_path), **SETTINGS)
    other = SyntheticHard(str(tmp_path), **{**SETTINGS, "seed": 1})
    for ours, theirs, others in zip(source.cases(), again.cases(), other.cases(), strict=True):
        for kind in (lambda c: c.images[0], lambda c: c.label):
            assert kind(ours).read_bytes() == kind(theirs).read_bytes()
            assert kind(ours).read_bytes() != kind(others).read_bytes()


@pytest.mark.parametrize(
    "bad", [{"size": [4, 8, 8]}, {"spacing_mm": [0, 1, 1]}, {"num_cases": 0}, {"noise": -1}]
)
def test_settings_that_make_no_volume_are_refused(tmp_path, bad):
    with pytest.raises(UsageError, match="got"):
        SyntheticHard(str(tmp_path), **{**SETTINGS, **bad})
