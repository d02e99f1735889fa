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

ORGAN = [("organ", "#e69f00")]


def draw(image, *layers, spacing_mm=(1.0, 1.0, 1.0), legend=ORGAN, **options):
    """Draw the fullest slices of the first layer."""
    names = dict(zip(("reference", "prediction"), layers, strict=False))
    slices = find_fullest_slices(layers[0])
    options |= {"slices": slices, "spacing_mm": spacing_mm, "legend": legend}
    return draw_case_slices(image, names, **options)


def draw_empty(shape, **options):
    volume = np.zeros(shape, np.uint8)
    return draw(volume.astype(np.float32), volume, volume, **options)


def test_columns_are_image_reference_and_prediction():
    image = np.random.default_rng(0).random((20, 30, 40), np.float32)
    reference = np.zeros((20, 30, 40), np.uint8)
    reference[3:9, 4:16, 5:17] = 1
    reference[0, 0] = 9  # not in the legend
    picture = draw(image, reference, 0 * reference).astype(int)
    colors = np.ptp(picture, axis=-1)
    bottom = -2 * LINE  # above the legend, which is colored too
    parts = np.array_split(colors[:bottom], 3, axis=1)
    assert [part.max() > 50 for part in parts] == [False, True, False]
    assert colors[bottom:].max() > 100
    assert 0.02 < (colors > 50).mean() < 0.08  # the 12 x 12 or 6 x 12 voxels of the box alone


def test_views_are_drawn_to_scale_and_thin_ones_are_skipped():
    height = draw_empty((216, 256, 10), spacing_mm=(1.5, 1.5, 10.0)).shape[0]
    assert height == 3 * (LINE + GAP) + 2 * (LINE + GAP) + PANEL + 2 * round(100 / 384 * PANEL)
    assert draw_empty((320, 150, 26)).shape[0] == 3 * (LINE + GAP) + 150  # only the axial view


def test_a_part_is_drawn_as_large_as_a_volume_of_its_size_and_a_title_takes_a_line():
    box = (slice(10, 20), slice(0, 12), slice(5, 99))
    whole, part = draw_empty((10, 12, 15)), draw_empty((30, 30, 20), box=box)
    assert part.shape == whole.shape
    assert draw_empty((10, 12, 15), title="a").shape[0] == whole.shape[0] + LINE


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


def test_a_legend_grows_with_the_number_of_names():
    few, many = (draw_empty((9, 9, 9), legend=[("n" * 30, "#fff")] * n).shape for n in (3, 30))
    assert few[1] == many[1]
    assert many[0] - few[0] == 9 * LINE  # three names per line


def test_a_class_has_the_color_of_its_label():
    palette = get_palette(31)
    assert get_class_colors({"c": (3,), "a": (1,), "far": (33,)}) == {
        "c": palette[2],
        "a": palette[0],
        "far": palette[2],
    }
    assert len(set(palette)) == 30
    assert palette[30] == palette[0]


def test_regions_have_the_first_colors_that_no_single_label_has():
    regions = {"whole": (1, 2, 3), "b": (2,), "core": (2, 3), "edge": (1, 3)}
    palette = get_palette(5)
    assert list(get_class_colors(regions).values()) == [palette[n] for n in (0, 1, 2, 3)]
    first = {"all": (1, 2), "a": (1,), "b": (2,), "rest": (2, 3)}
    assert list(get_class_colors(first).values()) == [palette[n] for n in (2, 0, 1, 3)]
