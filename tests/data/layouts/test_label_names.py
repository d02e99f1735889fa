import json

import pytest

from unet3d.data.layouts.label_names import find_label_names
from unet3d.errors import UsageError


def read_names(folder, labels):
    (folder / "labelsTr").mkdir(exist_ok=True)
    (folder / "dataset.json").write_text(json.dumps({"labels": labels}))
    return find_label_names(folder / "labelsTr")


def test_the_decathlon_maps_numbers_to_names(tmp_path):
    names = read_names(tmp_path, {"0": "background", "1": "liver", "2": "tumor"})
    assert names.classes == {"liver": (1,), "tumor": (2,)}
    assert names.known_labels == {0, 1, 2}
    assert names.ignore_labels == ()


def test_nnunet_maps_names_to_numbers_regions_and_the_ignore_label(tmp_path):
    names = read_names(tmp_path, {"background": 0, "whole": [1, 2], "core": [2], "ignore": 3})
    assert names.classes == {"whole": (1, 2), "core": (2,)}
    assert names.known_labels == {0, 1, 2, 3}
    assert names.ignore_labels == (3,)


def test_dataset_json_may_be_in_the_folder_in_its_parent_or_missing(tmp_path):
    assert find_label_names(tmp_path) is None
    read_names(tmp_path, {"0": "background", "1": "liver"})
    assert find_label_names(tmp_path) == find_label_names(tmp_path / "labelsTr")


@pytest.mark.parametrize(
    "labels",
    [None, {}, ["a"], {"liver": "one"}, {"0": "a", "1": "b", "2": "b"}, {"liver": None}],
)
def test_invalid_labels_are_refused_with_the_file(tmp_path, labels):
    with pytest.raises(UsageError, match=r"dataset\.json: labels .*set classes="):
        read_names(tmp_path, labels)


@pytest.mark.parametrize("label", [0, -1, 10**9])
def test_a_class_with_an_impossible_label_is_refused(tmp_path, label):
    with pytest.raises(UsageError, match=r"class odd: labels must be 1\.\.65535"):
        read_names(tmp_path, {"background": 0, "odd": [1, label]})
