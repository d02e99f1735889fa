import base64
import gzip
import json
from dataclasses import replace
from io import BytesIO

import nibabel
import numpy as np
from PIL import Image

from unet3d.report import slices
from unet3d.report.volumes import (
    CaseVolumes,
    LabelLayer,
    coarsen,
    draw_case,
    embed_viewer,
    find_label_box,
    find_niivue,
    make_class_map,
    pack,
    to_bytes,
)


def make_case(shape=(60, 50, 40), name="case", spacing_mm=(1.0, 1.0, 1.0)):
    """Noise, which cannot be compressed, and a box of labels in its middle."""
    image = np.random.default_rng(0).integers(0, 255, shape).astype(np.uint8)
    labels = np.zeros(shape, np.uint8)
    labels[tuple(slice(n // 3, 2 * n // 3) for n in shape)] = 2
    classes = [{"name": name, "color": "#ff0000"} for name in "ab"]
    layers = {"reference": LabelLayer(labels=labels, classes=classes)}
    return CaseVolumes(name=name, title=name, image=image, layers=layers, spacing_mm=spacing_mm)


def test_slices_of_a_crop_are_numbered_as_in_the_case(monkeypatch):
    texts: list[str] = []
    monkeypatch.setattr(slices, "_measure", lambda words: texts.extend(words) or 9)
    case = make_case((90, 80, 70))
    assert find_label_box(case)[0].start == 15
    draw_case(case, find_label_box(case))
    x, y, z = (n + 1 for n in case.slices)
    assert {f"axial slice {z} of 70", f"coronal slice {y} of 80", f"sagittal slice {x} of 90"} <= {
        *texts
    }


def test_volumes_are_packed_as_nifti_with_their_spacing():
    case = make_case(spacing_mm=(1.0, 2.0, 3.0))
    packed = pack(case)
    file = gzip.decompress(base64.b64decode(packed["image"]))
    image = nibabel.Nifti1Image.from_bytes(file)
    assert np.array_equal(image.dataobj, case.image)
    assert image.header.get_zooms() == (1.0, 2.0, 3.0)
    assert packed["slices"] == (30, 24, 19)  # the middle of the labels


def test_the_labels_are_shown_with_a_margin_in_mm():
    case = make_case((90, 90, 90), spacing_mm=(1.0, 3.0, 1.0))
    cropped = case.take(find_label_box(case))
    assert cropped.image.shape == (60, 40, 60)  # 30 voxels of labels, and 15 mm around them
    inside, whole = (c.layers["reference"].labels for c in (cropped, case))
    assert np.count_nonzero(inside) == np.count_nonzero(whole)
    assert np.array_equal(cropped.image, case.image[15:75, 25:65, 15:75])
    whole[:] = 0
    assert case.take(find_label_box(case)).image.shape == case.image.shape
    assert case.slices == (45, 45, 45)


def test_overlapping_classes_show_the_one_with_fewer_labels():
    labels = np.array([[0, 1, 2, 3, 300]])
    indices = make_class_map(labels, {"core": (2,), "whole": (1, 2, 3), "edge": (2, 3)})
    assert indices.tolist() == [[0, 2, 1, 3, 0]]
    many = make_class_map(labels, {str(n): (n,) for n in range(1, 302)})
    assert many.tolist() == labels.tolist()
    assert not make_class_map(labels, {}).any()


def test_a_picture_shows_each_layer_in_the_colors_of_its_classes():
    case = make_case()
    reference = case.layers["reference"]
    errors = [{"name": "missed", "color": "#0000ff"}]
    missed = LabelLayer(labels=(reference.labels > 0).astype(np.uint8), classes=errors)
    case = replace(case, layers={"reference": reference, "errors": missed})
    with Image.open(BytesIO(draw_case(case.take(find_label_box(case))))) as file:
        parts = np.array_split(np.asarray(file).astype(int)[:-40], 3, axis=1)  # without the legend
    is_red, is_blue = (
        [bool((part[..., a] > part[..., b] + 100).any()) for part in parts]
        for a, b in ((0, 2), (2, 0))
    )
    assert (is_red, is_blue) == ([False, True, False], [False, False, True])


def test_long_voxels_are_not_made_longer():
    case = coarsen(make_case((60, 50, 10), spacing_mm=(1.0, 1.0, 4.0)), 2.0)
    labels = case.layers["reference"].labels
    assert case.image.shape == labels.shape == (30, 25, 10)
    assert case.spacing_mm == [2.0, 2.0, 4.0]
    assert set(np.unique(labels)) == {0, 2}


def embed(*cases, budget):
    """Return the viewer of cases in so many bytes beside NiiVue and the script."""
    return embed_viewer(cases, len(cases), budget + len(find_niivue()["packed"]) + 20_000)


def test_a_case_is_as_fine_as_its_budget_allows():
    sizes = []
    for budget in (500_000, 30_000, 5_000):
        (packed,) = embed(make_case(), budget=budget)["cases"]
        assert len(json.dumps(packed)) <= budget
        sizes.append(packed["shape"])
    assert sizes[0] > sizes[1] > sizes[2]
    assert embed(make_case(), budget=300) is None


def test_intensities_fill_the_range_whatever_their_type_or_are_black():
    for without_contrast in (np.full((4, 4, 4), np.nan), np.full((4, 4, 4), 7)):
        assert (to_bytes(without_contrast) == 0).all()
    image = np.linspace(-1000, 3000, 1000).reshape(10, 10, 10)
    for kind in (np.int16, np.float32, np.float64):
        scaled = to_bytes(image.astype(kind))
        assert (scaled.min(), scaled.max()) == (0, 255)
        assert abs(float(scaled.mean()) - 127) < 3


def test_cases_that_do_not_fit_are_left_out_and_named():
    small = [make_case((12, 12, 12), name=f"small {n}") for n in range(2)]
    assert embed(*small, budget=10**6)["left_out"] == ""
    budget = 12_000 + sum(len(json.dumps(pack(case))) for case in small)
    viewer = embed(small[0], make_case((120, 120, 120), name="large"), small[1], budget=budget)
    assert [case["title"] for case in viewer["cases"]] == ["small 0", "small 1"]
    assert viewer["left_out"] == "large"
