import numpy as np
import pytest

from tests.data.helpers.cases import noise, preprocess, write_case, zero_padded_noise
from unet3d.data.case import Case
from unet3d.data.preprocessing.channels import (
    find_background,
    find_border_value,
    list_faces,
    normalize_in_place,
)
from unet3d.data.preprocessing.pipeline import (
    PREPROCESSING_VERSION,
    Preprocessing,
    check_label_values,
)


def test_channels_are_read_from_one_file_or_one_file_each(tmp_path):
    both = noise(6, 6, 6, 2)
    one_file = write_case(tmp_path, both)
    parts = [write_case(tmp_path, both[..., c], name=f"channel{c}") for c in range(2)]
    images = tuple(part.images[0] for part in parts)
    two_files = Case(name="two_files", images=images, label=one_file.label)
    one, other = (preprocess(case, tmp_path).image for case in (one_file, two_files))
    assert one.shape == (2, 6, 6, 6)
    assert np.array_equal(one, other)


OUTCOMES = {8: ([314, 13.8089, 1.9650, 9.2293], [-0.0873, 1.3535, -1.4033, 0.5401])}
"""What each PREPROCESSING_VERSION makes of one case: a new outcome needs a new version.

The voxels of the label and their center, and some values of the image.
"""


def test_the_version_of_preprocessing_changes_with_its_outcome(tmp_path):
    grid = np.stack(np.meshgrid(*map(np.arange, (14, 12, 10)), indexing="ij")).astype(np.float32)
    image = np.sin(grid[0]) * 3 + grid[1] * 0.5 + np.cos(grid[2] * grid[1] / 7)
    image[:2], image[:, -2:] = 0, 0
    label = (grid.sum(0) > 22).astype(np.uint8)
    case = write_case(tmp_path, image, label, affine=np.diag([1.5, -1.0, 2.0, 1.0]))
    settings = Preprocessing(num_classes=2, spacing_mm=(1.0, 1.0, 1.5))
    scan = settings.preprocess_scan(case.images)
    mapped, _ = settings.preprocess_label(case.label, scan)
    indices = [(2, 3, 4), (9, 5, 2), (15, 8, 11), (6, 1, 7)]
    values = [scan.image[0, *index].item() for index in indices]
    located = [mapped.sum(), *np.argwhere(mapped).mean(0)]
    for found, expected in zip((located, values), OUTCOMES[PREPROCESSING_VERSION], strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-3)


@pytest.mark.parametrize("spacing_mm", [(1, 1, 3), (1.05, 1.05, 3), (1, 1, 4)])
def test_a_label_is_resampled_along_the_axes_as_its_image(tmp_path, spacing_mm):
    """Rounding to whole voxels may make an axis over three times as coarse as another."""
    inside = np.linalg.norm(np.indices((27, 29, 28)).T - [13, 14, 12.5], axis=-1).T < 8
    affine = np.diag([1.5, 1.5, 1.5, 1])
    case = write_case(tmp_path, inside.astype(np.float32), inside.astype(np.uint8), affine=affine)
    settings = Preprocessing(
        num_classes=2, spacing_mm=spacing_mm, crop="none", normalize=("none",), background=(0.0,)
    )
    scan = settings.preprocess_scan(case.images)
    label, _ = settings.preprocess_label(case.label, scan)
    planes = np.arange(label.shape[2])
    centers = [(x.sum((0, 1)) * planes).sum() / x.sum() for x in (scan.image[0].clip(0), label)]
    assert abs(centers[0] - centers[1]) < 0.05


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("none", [10, 60, 110]),
        ("rescale_to_0_1", [0, 0.5, 1]),
        ("rgb_to_0_1", [2 / 51, 4 / 17, 22 / 51]),
    ],
)
def test_a_channel_keeps_its_values_or_is_scaled_to_0_1(method, expected):
    channel = np.array([10, 60, 110], np.float32)
    normalize_in_place(channel, method, np.float32(0), None)
    np.testing.assert_allclose(channel, expected, rtol=1e-6)


AUTO = ("auto",)


@pytest.mark.parametrize("background", [AUTO, (-4,)])
@pytest.mark.parametrize(("normalize", "crop"), [("zscore", "nonzero"), ("zscore_nonzero", "none")])
def test_preprocessing_does_not_depend_on_the_value_of_the_background(
    tmp_path, background, normalize, crop
):
    zero = write_case(tmp_path, zero_padded_noise())
    shifted = write_case(tmp_path, zero_padded_noise() - 4, name="shifted")
    settings = {"normalize": (normalize,), "crop": crop}
    expected = preprocess(zero, tmp_path, **settings).image
    image = preprocess(shifted, tmp_path, background=background, **settings).image
    np.testing.assert_allclose(image, expected, atol=1e-5)


def test_each_channel_of_each_case_has_its_own_background(tmp_path):
    both = np.stack([zero_padded_noise() - 4, zero_padded_noise() * 2 - 3], axis=-1)
    settings = {"normalize": ("zscore_nonzero",), "background": AUTO, "crop": "none"}
    image = preprocess(write_case(tmp_path, both), tmp_path, **settings).image
    assert (image[:, zero_padded_noise() == 0] == 0).all()
    np.testing.assert_allclose(image[0], image[1], atol=1e-5)
    foreground = image[:, zero_padded_noise() != 0]
    np.testing.assert_allclose((foreground.mean(), foreground.std()), (0, 1), atol=1e-5)


def test_a_border_that_varies_is_not_background():
    assert find_border_value(list_faces(noise(8, 8, 8))) is None
    volume = zero_padded_noise() - 4
    volume[:, :, 0] = noise(12, 12)
    assert find_border_value(list_faces(volume)) is None  # the corners differ
    volume[:, :, 0] = -4
    volume[2:10, 2:10, 0] = noise(8, 8)
    assert find_border_value(list_faces(volume)) == -4
    assert find_background(noise(1, 8, 8, 8), AUTO) == [0]


def test_a_label_that_is_nearly_an_integer_is_shown_as_it_is():
    ((problem, _),) = check_label_values(np.array([0, 0.9999999], np.float32), range(2), ())
    assert problem == "holds 0.9999999: labels must be integers"
