import numpy as np
import pytest

from unet3d.report.case_figure import (
    CaseFigure,
    choose_slice,
    choose_slicing_axis,
    count_wrong_voxels,
    draw_case_figure,
    find_crop_box,
    make_class_map,
    make_panels,
)
from unet3d.report.slices import get_palette


def make_case(**changes):
    reference, prediction = np.zeros((2, 30, 40, 20), np.uint8)
    reference[10:16, 12:20, 4:9] = 1
    prediction[10:16, 12:20, 4:8] = 1
    prediction[10:14, 12:20, 12] = 2
    settings = {
        "reference": reference,
        "prediction": prediction,
        "image": None,
        "spacing_mm": (1.0, 1.0, 1.0),
        "classes": {"a": (1,), "b": (2,)},
    }
    return CaseFigure(**(settings | changes))


def read_shape(path):
    from matplotlib.image import imread

    return imread(path).shape


def test_wrong_voxels_are_counted_per_slice_and_the_fullest_slice_is_chosen():
    case = make_case()
    errors = count_wrong_voxels(case, 2)
    assert {int(i): int(errors[i]) for i in np.flatnonzero(errors)} == {8: 48, 12: 32}
    assert choose_slice(case, 2) == 6
    case.reference[0:2, 0:4, 4:6] = [1, 2]  # slice 5 has both classes
    assert choose_slice(case, 2) == 5
    assert choose_slice(make_case(reference=0 * case.reference), 2) == 6  # of the prediction
    empty = 0 * case.reference
    assert choose_slice(make_case(reference=empty, prediction=empty), 2) == 10


@pytest.mark.parametrize(
    ("shape", "spacing_mm", "axis"),
    [
        ((30, 40, 20), (1, 1, 1), 2),
        ((30, 40, 20), (1.2, 1.1, 1), 2),
        ((30, 40, 20), (3, 1, 1), 0),
        ((216, 256, 10), (1.5, 1.5, 10), 2),
        ((26, 320, 150), (1, 1, 1), 0),  # axial slices are too thin
        ((300, 100, 9), (1, 3, 1), 2),  # coronal slices too, although their voxels are long
        ((9, 200, 9), (1, 1, 1), 1),  # two of three views are too thin
    ],
)
def test_slices_are_axial_unless_another_axis_has_long_voxels_or_they_are_too_thin(
    shape, spacing_mm, axis
):
    assert choose_slicing_axis(shape, spacing_mm) == axis


def test_the_crop_box_covers_both_label_maps_with_a_margin_up_to_the_border():
    assert find_crop_box(make_case(), 2) == (slice(0, 26), slice(2, 30))
    assert find_crop_box(make_case(spacing_mm=(1, 10, 1)), 2) == (slice(0, 30), slice(11, 21))
    empty = np.zeros((30, 40, 20), np.uint8)
    assert find_crop_box(make_case(reference=empty, prediction=empty), 2) == (
        slice(0, 30),
        slice(0, 40),
    )


def test_the_crop_box_of_a_thin_structure_has_a_minimum_width():
    thin = np.zeros((200, 200, 3), np.uint8)
    thin[100, 20:180] = 1
    first, second = find_crop_box(make_case(reference=thin, prediction=thin), 2)
    assert (second.start, second.stop) == (10, 190)
    assert (first.start, first.stop) == (55, 146)


def test_overlapping_classes_show_the_one_with_fewer_labels():
    labels = np.array([[0, 1, 2, 3, 300]])
    indices = make_class_map(labels, {"core": (2,), "whole": (1, 2, 3), "edge": (2, 3)})
    assert indices.tolist() == [[0, 2, 1, 3, 0]]
    assert make_class_map(labels.astype(np.uint8), {"far": (300,)}).tolist() == [[0, 0, 0, 0, 0]]


def test_classes_have_their_colors_and_blend_over_an_image():
    case, colors = make_case(), get_palette(3)
    (plain,) = make_panels(case, 2, [6], (slice(0, 30), slice(0, 40)))
    assert (plain["reference"][12, 15] == colors[1]).all()
    image = np.random.default_rng(0).random(case.reference.shape)
    (blended,) = make_panels(make_case(image=image), 2, [6], (slice(0, 30), slice(0, 40)))
    assert list(blended) == ["image", *plain]
    gray = blended["image"][12, 15]
    assert blended["reference"][12, 15] == pytest.approx(0.3 * gray + 0.7 * colors[1])
    assert (blended["reference"][0, 0] == blended["image"][0, 0]).all()


def test_a_figure_has_a_row_for_the_fullest_and_one_for_the_worst_slice(tmp_path):
    perfect = make_case(prediction=make_case().reference)
    for name, case in (("two", make_case()), ("one", perfect)):
        draw_case_figure(case, tmp_path / f"{name}.png", title=name, legend={"a": "Dice 0.5"})
    heights = {name: read_shape(tmp_path / f"{name}.png")[0] for name in ("two", "one")}
    assert heights["two"] > 1.5 * heights["one"]


@pytest.mark.parametrize("name", [r"$\frac$", "\udcff", "a\x1bb"])
def test_a_figure_shows_names_that_are_no_formula_and_no_text(tmp_path, name):
    case = make_case(classes={name: (1,)})
    draw_case_figure(case, tmp_path / "a.png", title=name, legend={name: "Dice 0.5"})
    assert read_shape(tmp_path / "a.png")
