import numpy as np
import pytest

from tests.data.preprocessing.test_pipeline import a_case, framed, noise, volume_of
from unet3d.data.preprocessing.background import (
    StreamedBorder,
    auto_background,
    border_value,
    find_background,
)
from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.errors import UsageError

AUTO = ("auto",)


@pytest.mark.parametrize("background", [AUTO, (-4,)])
@pytest.mark.parametrize("how", ["zscore", "zscore_nonzero"])
@pytest.mark.parametrize("crop", ["nonzero", "none"])
def test_a_volume_and_its_background_may_lie_at_any_value(tmp_path, background, how, crop):
    zero, other = a_case(tmp_path, framed()), a_case(tmp_path, framed() - 4, name="other")
    settings = {"normalize": (how,), "crop": crop}
    expected = volume_of(zero, tmp_path, **settings).image
    found = volume_of(other, tmp_path, background=background, **settings).image
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_each_channel_of_each_case_has_its_own_background(tmp_path):
    both = np.stack([framed() - 4, framed() * 2 - 3], axis=-1)
    settings = {"normalize": ("zscore_nonzero",), "background": AUTO, "crop": "none"}
    image = volume_of(a_case(tmp_path, both), tmp_path, **settings).image
    empty = framed() == 0
    assert (image[:, empty] == 0).all()
    np.testing.assert_allclose(image[0], image[1], atol=1e-5)
    with pytest.raises(UsageError, match="one value or one for each of the 2 channels"):
        find_background(np.moveaxis(both, -1, 0), (0, 0, 0))


def test_where_nothing_was_scanned_is_what_patches_have_outside_of_a_volume(tmp_path):
    case = a_case(tmp_path, framed() - 4)
    settings = {"crop": "none", "normalize": ("none",)}
    image = volume_of(case, tmp_path, background=AUTO, **settings).image[0]
    assert (image[framed() == 0] == 0).all()
    assert (image[framed() != 0] == (framed() - 4)[framed() != 0]).all()
    assert (volume_of(case, tmp_path, **settings).image[0] == framed() - 4).all()


def test_a_border_that_varies_is_no_background():
    assert border_value(noise(8, 8, 8)) is None
    cut_off = framed() - 4
    cut_off[:, :, 0] = noise(12, 12)
    assert border_value(cut_off) is None  # other corners
    cut_off[:, :, 0] = -4
    cut_off[2:10, 2:10, 0] = noise(8, 8)
    assert border_value(cut_off) == -4
    assert find_background(noise(1, 8, 8, 8), AUTO) == [0]


@pytest.mark.parametrize("shape", [(12, 12, 12), (1, 5, 4), (5, 4, 1)])
@pytest.mark.parametrize("piece", [7, 1000, 10_000])
def test_a_border_in_pieces_is_the_same(shape, piece):
    for drawn in (framed() - 4, noise(12, 12, 12)):
        volume = drawn[tuple(slice(n) for n in shape)]
        values, border = volume.ravel(order="F"), StreamedBorder(shape)
        for start in range(0, len(values), piece):
            border.add(values[start : start + piece])
        assert border.value == border_value(volume)


def test_air_in_ct_is_a_value_like_others():
    assert auto_background(["CT", "PET"]) == (0, "auto")


@pytest.mark.parametrize("bad", [(), ("border",), (True,), (float("nan"),), ([0],)])
def test_a_background_is_a_number_or_auto(bad):
    with pytest.raises(UsageError, match=r"data\.background must be auto or a number"):
        Preprocessing(num_classes=2, background=bad)


def test_a_background_is_kept_in_checkpoints_and_zero_leaves_older_ones_as_they_are():
    settings = Preprocessing(num_classes=2, background=(-3.5, "auto"))
    assert Preprocessing.from_dict(settings.to_dict()) == settings
    assert "background" not in Preprocessing(num_classes=2, background=(0.0,)).to_dict()
