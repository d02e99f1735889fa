from collections.abc import Mapping

import nibabel
import numpy as np
import pytest
from scipy.ndimage import binary_opening

from unet3d.data.layouts.generated import make_grid
from unet3d.data.layouts.synthetic_hard import CLASSES, SyntheticHard, draw_smooth_field
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
def layout(tmp_path_factory):
    return SyntheticHard(str(tmp_path_factory.mktemp("hard")), **SETTINGS)


@pytest.fixture(scope="module")
def volumes(layout):
    """Return (image, label) of each case."""
    return [
        (nibabel.load(c.images[0]).get_fdata(), np.asarray(nibabel.load(c.label).dataobj))
        for c in layout.list_cases()
    ]


def get_percentages(volumes, name):
    """Return the percentage of voxels of a class for each case."""
    return [100 * np.mean(label == CLASSES.index(name)) for _, label in volumes]


def test_structures_have_between_2_and_0_05_percent_of_the_voxels(volumes):
    means = [np.mean(get_percentages(volumes, name)) for name in CLASSES[1:]]
    assert means == sorted(means, reverse=True)
    assert 2 < means[0] < 4
    assert means[-1] == pytest.approx(0.05, abs=0.01)
    assert all(min(get_percentages(volumes, name)) > 0.03 for name in CLASSES)


def test_sheets_are_one_or_two_voxels_thick(volumes):
    thick_fractions = []
    for _, label in volumes:
        sheet = label == CLASSES.index("sheet")
        runs = [binary_opening(sheet, np.ones(line)) for line in ((3, 1, 1), (1, 3, 1))]
        thick_fractions.append(np.sum(runs[0] & runs[1]) / sheet.sum())  # 3 voxels along both axes
    assert np.mean(thick_fractions) < 0.1


@pytest.mark.parametrize("pair", [("body", "cap"), ("sheet", "sheath"), ("body", "nodule")])
def test_neighboring_structures_have_the_same_intensity(volumes, pair):
    one, other = (
        np.mean([image[label == CLASSES.index(name), 0].mean() for image, label in volumes])
        for name in pair
    )
    assert one == pytest.approx(other, abs=0.2)
    assert one > 0.7  # and the background is at 0


def test_decoys_in_the_background_have_the_intensity_of_every_structure(volumes):
    background = np.concatenate([image[label == 0, 0] for image, label in volumes])
    for c in range(1, len(CLASSES)):
        typical = np.median(np.concatenate([image[label == c, 0] for image, label in volumes]))
        assert np.sum(np.abs(background - typical) < 0.2) > 50


def test_the_second_channel_is_randomly_bright_or_dark(volumes):
    body = [image[label == 1, 1].mean() for image, label in volumes]
    assert min(body) < -0.4
    assert max(body) > 0.4


def test_a_bias_field_has_a_standard_deviation_of_about_1():
    rng, grid = np.random.default_rng(0), make_grid([16, 16, 8], [1.0, 1.0, 3.0])
    assert np.std([draw_smooth_field(rng, grid) for _ in range(200)]) == pytest.approx(1, abs=0.1)


def test_volumes_have_anisotropic_voxels_and_two_channels(layout):
    image = nibabel.load(layout.list_cases()[0].images[0])
    assert image.shape == (48, 48, 24, 2)
    assert image.header.get_zooms()[:3] == (1.0, 1.0, 3.0)
    assert layout.describe().channels == ("structures", "misleading")
    assert layout.describe().classes == CLASSES


def test_the_same_seed_makes_the_same_bytes(layout, tmp_path):
    same_seed = SyntheticHard(str(tmp_path), **SETTINGS)
    other_seed = SyntheticHard(str(tmp_path), **{**SETTINGS, "seed": 1})
    cases = zip(layout.list_cases(), same_seed.list_cases(), other_seed.list_cases(), strict=True)
    for case, same, other in cases:
        for get_file in (lambda c: c.images[0], lambda c: c.label):
            assert get_file(case).read_bytes() == get_file(same).read_bytes()
            assert get_file(case).read_bytes() != get_file(other).read_bytes()


@pytest.mark.parametrize(
    "invalid", [{"size": [4, 8, 8]}, {"spacing_mm": [0, 1, 1]}, {"num_cases": 0}, {"noise": -1}]
)
def test_invalid_settings_are_refused(tmp_path, invalid):
    with pytest.raises(UsageError, match="got"):
        SyntheticHard(str(tmp_path), **{**SETTINGS, **invalid})
