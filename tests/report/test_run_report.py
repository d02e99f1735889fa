import json
import math
import shlex

import numpy as np
import pytest
from tensorboard.backend.event_processing.data_ingester import _parse_event_files_spec
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from torch.utils.tensorboard.writer import SummaryWriter

from unet3d.report.run_report import tensorboard_command, write_report
from unet3d.report.slices import (
    EDGES,
    GAP,
    LINE,
    PANEL,
    choose_views,
    class_colors,
    draw_case,
    fullest_slices,
    get_plane,
    palette,
    upright,
)


def test_a_report_is_json_that_any_reader_takes(tmp_path):
    write_report({"a": math.nan, "b": [math.inf, 1.0], "c": {1: "x"}}, tmp_path / "report.json")
    text = (tmp_path / "report.json").read_text()
    assert json.loads(text, parse_constant=str) == {"a": None, "b": [None, 1.0], "c": {"1": "x"}}
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.parametrize("name", ["14-30-00", "my run's", "pool=max,fold=0", "a:b"])
def test_tensorboard_names_a_run_by_its_folder_with_the_command_that_is_printed(tmp_path, name):
    with SummaryWriter(str(tmp_path / name / "tensorboard")) as writer:
        writer.add_scalar("loss", 1.0)
    option, value = shlex.split(tensorboard_command(str(tmp_path / name)))[1:]
    shown, spec = EventMultiplexer(), option == "--logdir_spec"
    for path, group in (_parse_event_files_spec(value) if spec else {value: None}).items():
        shown.AddRunsFromDirectory(path, group)
    assert list(shown.Runs()) == [f"{name}/tensorboard"]


VIEW = {"spacing_mm": (1.0, 1.0, 1.0), "class_names": ("background", "organ")}


def drawn(shape, spacing_mm=(1.0, 1.0, 1.0), class_names=("background", "organ")):
    """A picture of an empty volume."""
    volume = np.zeros(shape, np.uint8)
    slices = fullest_slices(volume)
    grey = volume.astype(np.float32)
    return draw_case(
        grey, volume, volume, spacing_mm=spacing_mm, slices=slices, class_names=class_names
    )


def test_slices_show_image_reference_and_prediction_side_by_side():
    image = np.random.default_rng(0).random((20, 30, 40), np.float32)
    reference = np.zeros((20, 30, 40), np.uint8)
    reference[3:9, 4:16, 5:17] = 1
    slices = fullest_slices(reference)
    picture = draw_case(image, reference, 0 * reference, slices=slices, **VIEW).astype(int)
    bottom = -2 * LINE  # without the legend, which is colored too
    colored = [
        np.ptp(part, axis=-1).max() > 50 for part in np.array_split(picture[:bottom], 3, axis=1)
    ]
    assert colored == [False, True, False]
    assert np.ptp(picture[bottom:], axis=-1).max() > 100


def test_a_view_is_drawn_in_millimeters_and_never_a_sliver():
    height = drawn((216, 256, 10), (1.5, 1.5, 10.0)).shape[0]
    assert height == 3 * (LINE + GAP) + 2 * (LINE + GAP) + PANEL + 2 * round(100 / 384 * PANEL)
    assert drawn((320, 150, 26)).shape[0] == 3 * (LINE + GAP) + 150  # the axial view alone


@pytest.mark.parametrize(
    ("shape", "spacing_mm", "axes"),
    [
        ((10, 10, 10), (1, 1, 1), [2, 1, 0]),
        ((320, 26, 150), (1, 1, 1), [1]),
        ((26, 320, 150), (1, 1, 1), [0]),
        ((320, 20, 20), (1, 1, 1), [2]),  # nothing is wide: the first of the largest
    ],
)
def test_views_that_are_too_thin_are_left_out(shape, spacing_mm, axes):
    assert choose_views(shape, spacing_mm) == axes


def test_the_fullest_slice_shows_every_class_and_not_the_largest_alone():
    labels = np.zeros((12, 20, 20), np.uint8)
    labels[:10, :, 3] = 1  # large
    labels[0:2, 0:10, 5] = 1
    labels[4:8, 4:8, 5] = 2  # small
    labels[4:8, 4:7, 6:9] = 2
    assert fullest_slices(labels)[2] == 5
    assert fullest_slices(0 * labels) == (6, 10, 10)
    labels[...] = 1
    assert fullest_slices(labels) == (6, 10, 10)


def test_a_slice_has_right_on_the_left_and_anterior_or_superior_on_top():
    right = np.zeros((4, 6, 8))
    right[-1, -1, -1] = 1  # the right, anterior and superior corner
    for axis in range(3):
        plane = upright(get_plane(right, axis, -1))
        assert plane[0, 0] == 1
        assert plane.shape == ((8, 6), (8, 4), (6, 4))[axis]
    assert (tuple("APSI"), tuple("RLSI"), tuple("RLAP")) == EDGES


def test_a_legend_has_as_many_lines_as_its_names_need():
    few, many = (drawn((9, 9, 9), class_names=["n" * 30] * n).shape for n in (4, 31))
    assert few[1] == many[1]
    assert many[0] - few[0] == 9 * LINE  # three names a line


CONFUSED = {  # linear RGB as color-blind people see it: Machado, Oliveira, Fernandes 2009
    "normal": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]],
    "deuteranopia": [
        *([0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]),
    ],
    "tritanopia": [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]],
}


def least_distance(colors, sight):
    """Between two of them in CIE Lab; 2.3 can just be noticed."""
    linear = np.where(colors <= 0.04045, colors / 12.92, ((colors + 0.055) / 1.055) ** 2.4)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    seen = (linear @ np.array(CONFUSED[sight]).T).clip(0, 1) @ xyz.T / (0.9505, 1, 1.089)
    x, y, z = np.where(seen > 0.008856, np.cbrt(seen), 7.787 * seen + 16 / 116).T
    lab = np.stack([116 * y, 500 * (x - y), 200 * (y - z)], axis=1)
    distances = np.linalg.norm(lab[:, None] - lab, axis=-1)
    return distances[np.triu_indices(len(lab), 1)].min()


@pytest.mark.parametrize("sight", CONFUSED)
def test_color_blind_people_tell_ten_classes_apart_and_all_thirty_differ(sight):
    assert least_distance(palette(11)[1:], sight) > 15
    assert least_distance(palette(31)[1:], sight) > 6


def test_a_class_has_its_color_however_many_classes_there_are():
    assert (palette(3) == palette(300)[:3]).all()
    assert (palette(300)[31] == palette(300)[1]).all()


def test_a_class_is_colored_by_its_label_and_a_region_by_what_is_left():
    colors = class_colors({"c": (3,), "all": (1, 2, 3), "a": (1,)})
    assert (colors == palette(4)[[0, 3, 2, 1]]).all()
