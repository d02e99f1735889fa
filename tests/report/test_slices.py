import numpy as np
import pytest

from unet3d.report.slices import (
    EDGES,
    GAP,
    LINE,
    PANEL,
    choose_views,
    draw_case_slices,
    find_fullest_slices,
    get_class_colors,
    get_palette,
    get_plane,
    orient_for_display,
)

VIEW = {"spacing_mm": (1.0, 1.0, 1.0), "class_names": ("background", "organ")}


def draw_empty(shape, spacing_mm=(1.0, 1.0, 1.0), class_names=("background", "organ")):
    """Draw an empty volume."""
    volume = np.zeros(shape, np.uint8)
    slices = find_fullest_slices(volume)
    image = volume.astype(np.float32)
    return draw_case_slices(
        image,
        {"reference": volume, "prediction": volume},
        spacing_mm=spacing_mm,
        slices=slices,
        class_names=class_names,
    )


def test_columns_are_image_reference_and_prediction():
    image = np.random.default_rng(0).random((20, 30, 40), np.float32)
    reference = np.zeros((20, 30, 40), np.uint8)
    reference[3:9, 4:16, 5:17] = 1
    slices = find_fullest_slices(reference)
    layers = {"reference": reference, "prediction": 0 * reference}
    picture = draw_case_slices(image, layers, slices=slices, **VIEW).astype(int)
    bottom = -2 * LINE  # above the legend, which is colored too
    colored = [
        np.ptp(part, axis=-1).max() > 50 for part in np.array_split(picture[:bottom], 3, axis=1)
    ]
    assert colored == [False, True, False]
    assert np.ptp(picture[bottom:], axis=-1).max() > 100


def test_views_are_drawn_to_scale_and_thin_ones_are_skipped():
    height = draw_empty((216, 256, 10), (1.5, 1.5, 10.0)).shape[0]
    assert height == 3 * (LINE + GAP) + 2 * (LINE + GAP) + PANEL + 2 * round(100 / 384 * PANEL)
    assert draw_empty((320, 150, 26)).shape[0] == 3 * (LINE + GAP) + 150  # only the axial view


@pytest.mark.parametrize(
    ("shape", "spacing_mm", "axes"),
    [
        ((10, 10, 10), (1, 1, 1), [2, 1, 0]),
        ((320, 26, 150), (1, 1, 1), [1]),
        ((26, 320, 150), (1, 1, 1), [0]),
        ((320, 20, 20), (1, 1, 1), [2]),  # all are thin: the first of the largest
    ],
)
def test_thin_views_are_not_chosen(shape, spacing_mm, axes):
    assert choose_views(shape, spacing_mm) == axes


def test_the_fullest_slice_shows_every_class_not_only_the_largest():
    labels = np.zeros((12, 20, 20), np.uint8)
    labels[:10, :, 3] = 1  # large
    labels[0:2, 0:10, 5] = 1
    labels[4:8, 4:8, 5] = 2  # small
    labels[4:8, 4:7, 6:9] = 2
    assert find_fullest_slices(labels)[2] == 5
    assert find_fullest_slices(0 * labels) == (6, 10, 10)
    labels[...] = 1
    assert find_fullest_slices(labels) == (6, 10, 10)


def test_slices_have_right_on_the_left_and_anterior_or_superior_at_the_top():
    volume = np.zeros((4, 6, 8))
    volume[-1, -1, -1] = 1  # the right, anterior and superior corner
    for axis in range(3):
        plane = orient_for_display(get_plane(volume, axis, -1))
        assert plane[0, 0] == 1
        assert plane.shape == ((8, 6), (8, 4), (6, 4))[axis]
    assert (tuple("APSI"), tuple("RLSI"), tuple("RLAP")) == EDGES


def test_a_legend_grows_with_the_number_of_names():
    few, many = (draw_empty((9, 9, 9), class_names=["n" * 30] * n).shape for n in (4, 31))
    assert few[1] == many[1]
    assert many[0] - few[0] == 9 * LINE  # three names per line


def test_a_color_does_not_depend_on_the_number_of_classes():
    assert (get_palette(3) == get_palette(300)[:3]).all()
    assert (get_palette(300)[31] == get_palette(300)[1]).all()


def test_a_class_has_the_color_of_its_label_and_a_region_an_unused_one():
    colors = get_class_colors({"c": (3,), "all": (1, 2, 3), "a": (1,)})
    assert (colors == get_palette(4)[[0, 3, 2, 1]]).all()
