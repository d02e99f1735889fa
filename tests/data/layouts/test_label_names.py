import json

import pytest

from unet3d.data.layouts.label_names import label_names
from unet3d.errors import UsageError


def described(folder, labels):
    (folder / "labelsTr").mkdir(exist_ok=True)
    (folder / "dataset.json").write_text(json.dumps({"labels": labels}))
    return label_names(folder / "labelsTr")


def test_the_decathlons_way_numbers_names(tmp_path):
    found = described(tmp_path, {"0": "background", "1": "liver", "2": "tumour"})
    assert found.classes == {"liver": (1,), "tumour": (2,)}
    assert found.known == {0, 1, 2}
    assert found.ignore_label is None


def test_nnunets_way_names_numbers_regions_and_what_to_ignore(tmp_path):
    found = described(tmp_path, {"background": 0, "whole": [1, 2], "core": [2], "ignore": 3})
    assert found.classes == {"whole": (1, 2), "core": (2,)}
    assert found.known == {0, 1, 2, 3}
    assert found.ignore_label == 3


def test_a_dataset_json_may_lie_in_the_folder_itself_and_need_not_be(tmp_path):
    assert label_names(tmp_path) is None
    described(tmp_path, {"0": "background", "1": "liver"})
    assert label_names(tmp_path) == label_names(tmp_path / "labelsTr")


@pytest.mark.parametrize(
    "labels",
    [None, {}, 5, ["a"], {"liver": "one"}, {"0": "a", "1": "b", "2": "b"}, {"liver": None}],
)
def test_labels_that_cannot_be_read_are_answered_with_the_file(tmp_path, labels):
    with pytest.raises(UsageError, match=r"dataset\.json: labels .*give classes="):
        described(tmp_path, labels)


@pytest.mark.parametrize("label", [0, -1, 10**9])
def test_a_class_of_labels_that_no_file_can_hold_is_refused(tmp_path, label):
    with pytest.raises(UsageError, match=r"class odd: labels must be 1\.\.65535"):
        described(tmp_path, {"background": 0, "odd": [1, label]})


def test_a_dataset_json_that_is_no_json_is_named(tmp_path):
    (tmp_path / "dataset.json").write_text("{")
    with pytest.raises(UsageError, match=r"dataset\.json: labels cannot be read"):
        label_names(tmp_path)
