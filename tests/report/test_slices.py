import numpy as np

from unet3d.report.slices import (
    EDGES,
    GAP,
    LINE,
    PANEL,
    draw_case_slices,
    find_fullest_slices,
    get_class_colors,
    get_palette,
    orient_for_display,
)


def draw_empty(shape, **options):
    volume = np.zeros(shape, np.uint8)
    slices = find_fullest_slices(volume)
    options = {"spacing_mm": (1.0, 1.0, 1.0), "legend": [("organ", "#e69f00")], **options}
    return draw_case_slices(volume, {"reference": volume}, slices=slices, **options)


def test_views_are_drawn_to_scale_and_thin_ones_are_skipped():
    height = draw_empty((216, 256, 10), spacing_mm=(1.5, 1.5, 10.0)).shape[0]
    assert height == 3 * (LINE + GAP) + 2 * (LINE + GAP) + PANEL + 2 * round(100 / 384 * PANEL)
    assert draw_empty((320, 150, 26)).shape[0] == 3 * (LINE + GAP) + 150  # only the axial view


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
        plane = orient_for_display(np.moveaxis(volume, axis, 0)[-1])
        assert plane[0, 0] == 1
        assert plane.shape == ((8, 6), (8, 4), (6, 4))[axis]
    assert (tuple("APSI"), tuple("RLSI"), tuple("RLAP")) == EDGES


def test_a_class_has_the_color_of_its_label_and_a_region_the_next_one():
    palette = get_palette(31)
    assert len(set(palette)) == 30
    assert palette[30] == palette[0]
    for classes, numbers in (
        ({"c": (3,), "a": (1,)}, (2, 0)),
        ({"c": (3,), "a": (1,), "far": (33,)}, (0, 1, 2)),
        ({"whole": (1, 2, 3), "b": (2,), "core": (2, 3), "edge": (1, 3)}, (0, 1, 2, 3)),
        ({"all": (1, 2), "a": (1,), "b": (2,), "rest": (2, 3)}, (2, 0, 1, 3)),
    ):
        assert list(get_class_colors(classes).values()) == [palette[n] for n in numbers]
