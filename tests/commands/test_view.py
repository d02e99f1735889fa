"""`unet3d view`: volumes on one grid, their classes, and the page in a browser."""

import json

import numpy as np
import pytest

from tests.contract.helpers.datasets import save
from tests.helpers.browser import needs_browser, open_page, turn_slices
from unet3d.__main__ import main
from unet3d.commands.view import read_case
from unet3d.errors import UsageError
from unet3d.report import volumes


@pytest.fixture
def files(tmp_path):
    """An image of two channels, and two label files of the same name."""
    image = np.random.default_rng(0).normal(size=(12, 10, 8, 2)).astype(np.float32)
    labels = np.zeros((12, 10, 8), np.uint8)
    labels[2:6, 3:7, 2:5], labels[6:9, 3:7, 2:6] = 1, 5
    return [
        save(tmp_path / "image.nii.gz", image),
        save(tmp_path / "reference" / "x.nii.gz", labels),
        save(tmp_path / "prediction" / "x.nii.gz", np.roll(labels, 1, 0)),
    ]


def test_labels_are_named_by_file_and_classes_by_number(files):
    case = read_case(files[0], files[1:], channel=1)
    assert list(case.layers) == ["reference/x", "prediction/x"]
    labels = case.layers["reference/x"]
    assert [c["name"] for c in labels.classes] == ["1", "5"]
    assert set(np.unique(labels.labels)) == {0, 1, 2}
    assert case.image.shape == (12, 10, 8)
    assert case.spacing_mm == (1.0, 1.0, 2.0)
    assert not np.array_equal(case.image, read_case(files[0], [], channel=0).image)


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        ({"liver": 1, "tumor": 5}, ["liver", "tumor"]),
        ({"liver": 1}, ["1", "5"]),  # it does not name every label
        ({"background": 0, "all": [1, 5], "tumor": 5, "ignore": 9}, ["all", "tumor"]),
    ],
)
def test_a_dataset_beside_the_files_names_the_classes_if_it_names_every_label(files, labels, names):
    (files[2].parent / "dataset.json").write_text(json.dumps({"labels": labels}))
    empty = save(files[0].with_name("empty.nii.gz"), np.zeros((12, 10, 8), np.uint8))
    layers = read_case(files[0], [*files[1:], empty], channel=0).layers
    assert [c["name"] for c in layers["prediction/x"].classes] == names


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cut", "have different shapes"),
        ("moved", "have different affines"),
        ("image", "different values: is it an image?"),
        ("missing", "is missing"),
        ("channel", "has the channels 0 to 0"),
    ],
)
def test_what_is_no_label_file_of_the_image_is_refused(files, name, message):
    folder = files[0].parent
    save(folder / "cut.nii.gz", np.zeros((12, 10, 7), np.uint8))
    save(folder / "moved.nii.gz", np.zeros((12, 10, 8), np.uint8), np.eye(4))
    one = save(folder / "image.nii.gz", np.arange(960).reshape(12, 10, 8).astype(np.int16))
    with pytest.raises(UsageError, match=message):
        read_case(one, [folder / f"{name}.nii.gz"], channel=2 if name == "channel" else 0)


@needs_browser
@pytest.mark.slow
def test_the_page_turns_slices_and_opens_at_the_one_with_most_labels(files, tmp_path):
    """The last label file with a voxel has all of them in one slice."""
    full, empty = np.zeros((2, 12, 10, 8), np.uint8)
    full[1:9, 1:9, 6] = 1
    more = [save(tmp_path / "full.nii.gz", full), save(tmp_path / "empty.nii.gz", empty)]
    path = tmp_path / "view.html"
    words = [*map(str, [*files, *more]), f"output={path}", "open_browser=false"]
    assert main(["view", *words]) == 0
    with open_page(path.as_uri()) as (page, messages, requests):
        assert page.get_by_text("axial 7 of 8").is_visible()
        first, last = turn_slices(page)
        assert first != last
        page.get_by_text("prediction/x", exact=True).click()
        page.wait_for_timeout(300)
        assert page.locator("#viewer canvas").screenshot() != last
        assert not page.locator("#pictures").is_visible()
        assert messages == []
        assert [url for url in requests if not url.startswith("blob:")] == [path.as_uri()]


def test_without_ipyniivue_the_page_shows_slices(files, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(volumes, "find_niivue", lambda: None)
    path = tmp_path / "slices.html"
    assert main(["view", *map(str, files), f"output={path}", "open_browser=false"]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    page = path.read_text()
    assert "data:image/png;base64," in page
    assert "<script" not in page
