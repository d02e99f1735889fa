import gzip

import numpy as np
import pytest

from unet3d.report.html.viewer import embed_viewer
from unet3d.report.html.volumes import CaseVolumes, coarsen, crop, pack, pack_within, to_bytes


def make_case(shape=(60, 50, 40), name="case", spacing_mm=(1.0, 1.0, 1.0)):
    """Noise, which cannot be compressed, and a box of labels in its middle."""
    image = np.random.default_rng(0).integers(0, 255, shape).astype(np.uint8)
    labels = np.zeros(shape, np.uint8)
    labels[tuple(slice(n // 3, 2 * n // 3) for n in shape)] = 2
    return CaseVolumes(
        name=name,
        title=name,
        image=image,
        layers={"reference": labels},
        spacing_mm=spacing_mm,
        classes={"a": "#ff0000", "b": "#00ff00"},
        notes={"b": "Dice 0.5"},
    )


def test_volumes_are_packed_with_the_first_axis_fastest():
    case = make_case()
    packed = pack(case, level=1)
    assert packed.facts["shape"] == [60, 50, 40]
    flat = np.frombuffer(gzip.decompress(packed.image), np.uint8)
    assert np.array_equal(flat.reshape(case.shape, order="F"), case.image)
    assert packed.facts["classes"][1] == {"name": "b", "color": "#00ff00", "note": "Dice 0.5"}


def test_the_labels_are_shown_with_a_margin_in_mm():
    case = make_case((90, 90, 90), spacing_mm=(1.0, 3.0, 1.0))
    cropped = crop(case)
    assert cropped.shape == (60, 40, 60)  # 30 voxels of labels, and 15 mm around them
    assert (cropped.layers["reference"] > 0).sum() == (case.layers["reference"] > 0).sum()
    assert np.array_equal(cropped.image, case.image[15:75, 25:65, 15:75])


def test_a_case_without_labels_is_shown_as_a_whole():
    case = make_case()
    case.layers["reference"][:] = 0
    assert crop(case).shape == case.shape


def test_long_voxels_are_not_made_longer():
    case = coarsen(make_case((60, 50, 10), spacing_mm=(1.0, 1.0, 4.0)), 2.0)
    assert case.shape == (30, 25, 10)
    assert case.spacing_mm == (2.0, 2.0, 4.0)
    assert case.layers["reference"].shape == case.image.shape
    assert set(np.unique(case.layers["reference"])) == {0, 2}
    assert case.image.std() < make_case().image.std() / 1.5  # means of blocks


def test_a_case_is_as_fine_as_its_budget_allows():
    case = make_case()
    sizes = {}
    for budget in (500_000, 30_000, 5_000):
        packed = pack_within(case, budget)
        assert packed.size <= budget
        sizes[budget] = packed.facts["shape"]
    assert sizes[500_000] > sizes[30_000] > sizes[5_000]
    assert pack_within(case, 300) is None


@pytest.mark.parametrize("image", [np.full((4, 4, 4), np.nan), np.full((4, 4, 4), 7)])
def test_an_image_without_contrast_is_black(image):
    assert (to_bytes(image) == 0).all()


def test_intensities_fill_the_range_whatever_their_type():
    image = np.linspace(-1000, 3000, 1000).reshape(10, 10, 10)
    for kind in (np.int16, np.float32, np.float64):
        scaled = to_bytes(image.astype(kind))
        assert (scaled.min(), scaled.max()) == (0, 255)
        assert abs(float(scaled.mean()) - 127) < 3


def measure(viewer):
    return len(viewer.markup) + len(viewer.script)


def test_cases_that_do_not_fit_are_left_out_and_named():
    small = [make_case((12, 12, 12), name=f"small {n}") for n in range(2)]
    cases = [small[0], make_case((240, 240, 240), name="large"), small[1]]
    without_limit = embed_viewer(small, 2, 10**8)
    assert "Left out" not in without_limit.markup
    budget = measure(without_limit) + 12_000
    viewer = embed_viewer(cases, 3, budget)
    assert measure(viewer) <= budget
    assert "Left out, since the file would exceed 5 MB: large." in viewer.markup
    assert "small 1" in viewer.markup
    assert embed_viewer(cases, 3, 1000) is None
