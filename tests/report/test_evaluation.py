import csv
import math

import numpy as np
import pytest

from unet3d.report.case_figure import (
    CaseFigure,
    draw_case,
    find_crop_box,
    make_class_map,
    panels,
    shown_slice,
    slicing_axis,
    wrong_voxels,
)
from unet3d.report.evaluation import draw_boxes, make_score_rows, write_csv
from unet3d.report.slices import palette, upright

NAN = math.nan


def scores(dice, hd95_mm=1.0, reference_ml=1.0, prediction_ml=1.0):
    keys = {"hd95_mm": hd95_mm, "reference_ml": reference_ml, "prediction_ml": prediction_ml}
    return {"dice": dice, **keys}


def volumes(**changed):
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
    return CaseFigure(**(settings | changed))


def size_of(path):
    from matplotlib.image import imread

    return imread(path).shape


def test_the_table_of_cases_has_a_row_per_case_and_class(tmp_path):
    cases = {"x": {"a": scores(0.25), "b": scores(NAN)}, "y, z": {"a": scores(1.0)}}
    write_csv(cases, tmp_path / "e.csv")
    with (tmp_path / "e.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [(r["case"], r["class"], r["dice"]) for r in found] == [
        ("x", "a", "0.25"),
        ("x", "b", ""),
        ("y, z", "a", "1.0"),
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["e.csv"]


def test_the_short_table_shows_means_intervals_and_what_was_left_out():
    mean = {"mean": 0.5, "low": 0.25, "high": 0.75}
    alone = {"mean": 0.5, "low": NAN, "high": NAN}
    none = {"mean": NAN, "low": NAN, "high": NAN}
    per_class = {
        name: {k: m | {"cases": n} for k in ("dice", "iou", "hd95_mm", "surface_dice")}
        | {"absent_from_one": 3}
        for name, m, n in (("a", mean, 7), ("b", alone, 1), ("c", none, 0))
    }
    overall = dict.fromkeys(("dice", "iou", "hd95_mm", "surface_dice"), mean)
    assert make_score_rows({"per_class": per_class, "mean": overall})[1:] == [
        ("a", "0.5000 [0.2500, 0.7500]", "0.5000", "0.50", "0.5000", "7", "3"),
        ("b", "0.5000", "0.5000", "0.50", "0.5000", "1", "3"),
        ("c", "-", "-", "-", "-", "0", "3"),
        ("mean", "0.5000 [0.2500, 0.7500]", "0.5000", "0.50", "0.5000", "", ""),
    ]


def test_the_box_plot_grows_with_the_classes_and_takes_ones_without_cases(tmp_path):
    few = {"x": {"a": scores(0.5)}, "y": {"a": scores(0.0, 9.0, prediction_ml=0.0)}}
    many = {"x": {f"class {n}": scores(NAN if n == 3 else 0.5) for n in range(10)}}
    for name, cases in (("few", few), ("many", many)):
        draw_boxes(
            cases, {c: (n,) for n, c in enumerate(cases["x"], start=1)}, tmp_path / f"{name}.png"
        )
    assert size_of(tmp_path / "many.png")[0] > 2 * size_of(tmp_path / "few.png")[0]


def test_the_worst_slice_has_the_most_wrong_voxels_and_the_shown_one_most_of_the_classes():
    case = volumes()
    wrong = wrong_voxels(case, 2)
    assert {int(i): int(wrong[i]) for i in np.flatnonzero(wrong)} == {8: 48, 12: 32}
    assert shown_slice(case, 2) == 6
    case.reference[0:2, 0:4, 4:6] = [1, 2]  # beside the others, and the second has both
    assert shown_slice(case, 2) == 5
    assert shown_slice(volumes(reference=0 * case.reference), 2) == 6  # the prediction's
    empty = 0 * case.reference
    assert shown_slice(volumes(reference=empty, prediction=empty), 2) == 10


@pytest.mark.parametrize(
    ("shape", "spacing_mm", "axis"),
    [
        ((30, 40, 20), (1, 1, 1), 2),
        ((30, 40, 20), (1.2, 1.1, 1), 2),
        ((30, 40, 20), (3, 1, 1), 0),
        ((216, 256, 10), (1.5, 1.5, 10), 2),
        ((26, 320, 150), (1, 1, 1), 0),  # axial slices would be slivers
        ((300, 100, 9), (1, 3, 1), 2),  # and coronal ones, although their voxels are long
        ((9, 200, 9), (1, 1, 1), 1),  # two of three are slivers
    ],
)
def test_slices_are_axial_unless_another_axis_has_long_voxels_or_they_were_slivers(
    shape, spacing_mm, axis
):
    assert slicing_axis(shape, spacing_mm) == axis


def test_the_window_holds_both_structures_with_a_margin_and_ends_at_the_border():
    assert find_crop_box(volumes(), 2) == (slice(0, 26), slice(2, 30))
    assert find_crop_box(volumes(spacing_mm=(1, 10, 1)), 2) == (slice(0, 30), slice(11, 21))
    empty = np.zeros((30, 40, 20), np.uint8)
    assert find_crop_box(volumes(reference=empty, prediction=empty), 2) == (
        slice(0, 30),
        slice(0, 40),
    )


def test_the_window_of_a_thin_structure_is_no_sliver():
    thin = np.zeros((200, 200, 3), np.uint8)
    thin[100, 20:180] = 1
    first, second = find_crop_box(volumes(reference=thin, prediction=thin), 2)
    assert (second.start, second.stop) == (10, 190)
    assert (first.start, first.stop) == (55, 146)


def test_where_classes_overlap_the_smaller_is_on_top():
    labels = np.array([[0, 1, 2, 3, 300]])
    found = make_class_map(labels, {"core": (2,), "whole": (1, 2, 3), "edge": (2, 3)})
    assert found.tolist() == [[0, 2, 1, 3, 0]]
    assert make_class_map(labels.astype(np.uint8), {"far": (300,)}).tolist() == [[0, 0, 0, 0, 0]]


def test_labels_alone_have_their_colours_and_an_image_shines_through():
    case, colours = volumes(), palette(3)
    (alone,) = panels(case, 2, [6], (slice(0, 30), slice(0, 40)))
    assert (alone["reference"][12, 15] == colours[1]).all()
    image = np.random.default_rng(0).random(case.reference.shape)
    (over,) = panels(volumes(image=image), 2, [6], (slice(0, 30), slice(0, 40)))
    assert list(over) == ["image", *alone]
    below = over["image"][12, 15]
    assert over["reference"][12, 15] == pytest.approx(0.3 * below + 0.7 * colours[1])
    assert (over["reference"][0, 0] == over["image"][0, 0]).all()


def test_a_picture_has_a_row_for_the_middle_and_one_for_the_worst_slice(tmp_path):
    same = volumes(prediction=volumes().reference)
    for name, case in (("two", volumes()), ("one", same)):
        draw_case(case, tmp_path / f"{name}.png", title=name, legend={"a": "Dice 0.5"})
    heights = {name: size_of(tmp_path / f"{name}.png")[0] for name in ("two", "one")}
    assert heights["two"] > 1.5 * heights["one"]


def test_a_picture_names_its_slices_and_shows_them_as_a_radiologist_does(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    case, shown, said = volumes(), [], []
    monkeypatch.setattr(Axes, "set_ylabel", lambda self, label, **_: said.append(label))
    imshow = Axes.imshow
    monkeypatch.setattr(
        Axes, "imshow", lambda self, x, **k: shown.append((x, k["aspect"])) or imshow(self, x, **k)
    )
    spacing_mm = (1.0, 2.0, 1.0)
    both = volumes(spacing_mm=spacing_mm, image=np.zeros(case.reference.shape))
    draw_case(both, tmp_path / "c.png", title="c", legend={})
    assert said == [
        "coronal slice 17 of 40\nmost of the classes and most errors: 10 wrong voxels",
    ]
    reference, aspect = shown[1]
    (row,) = panels(both, 1, [16], find_crop_box(both, 1))
    assert (reference == upright(row["reference"])).all()
    assert aspect == 1.0
