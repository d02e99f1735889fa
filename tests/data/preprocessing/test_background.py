import numpy as np
import pytest

from tests.data.helpers.cases import noise, preprocess, write_case, zero_padded_noise
from unet3d.data.preprocessing.channels import find_border_value
from unet3d.data.preprocessing.pipeline import find_background
from unet3d.errors import UsageError

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
    with pytest.raises(UsageError, match="one value or one for each of the 2 channels"):
        find_background(np.moveaxis(both, -1, 0), (0, 0, 0))


def test_a_border_that_varies_is_not_background():
    assert find_border_value(noise(8, 8, 8)) is None
    volume = zero_padded_noise() - 4
    volume[:, :, 0] = noise(12, 12)
    assert find_border_value(volume) is None  # the corners differ
    volume[:, :, 0] = -4
    volume[2:10, 2:10, 0] = noise(8, 8)
    assert find_border_value(volume) == -4
    assert find_background(noise(1, 8, 8, 8), AUTO) == [0]
