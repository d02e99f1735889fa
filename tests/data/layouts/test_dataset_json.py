import json

import pytest

from unet3d.data.layouts.dataset_json import find_label_names
from unet3d.data.layouts.decathlon import Decathlon
from unet3d.errors import UsageError

DECATHLON = {"modality": {"0": "CT"}, "labels": {"0": "a"}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as JSON"),
        (json.dumps(DECATHLON), "no training cases"),
        (json.dumps({**DECATHLON, "labels": {"1": "a"}}), "labels must name"),
        (json.dumps({**DECATHLON, "labels": None}), "labels must name"),
        (json.dumps({**DECATHLON, "training": ["x"]}), "needs image and label, got 'x'"),
        (json.dumps({"channel_names": {"0": "CT"}}), "is that of nnU-Net's raw layout: use data=n"),
    ],
)
def test_an_invalid_dataset_json_is_refused(tmp_path, content, message):
    (tmp_path / "dataset.json").write_text(content)
    layout = Decathlon(str(tmp_path))
    with pytest.raises(UsageError, match=message):
        (layout.describe(), layout.list_cases())


def read_names(folder, labels):
    (folder / "labelsTr").mkdir(exist_ok=True)
    (folder / "dataset.json").write_text(json.dumps({"labels": labels}))
    return find_label_names(folder / "labelsTr")


def test_the_names_of_labels_are_read_in_both_layouts_from_the_folder_or_its_parent(tmp_path):
    assert find_label_names(tmp_path) is None
    names = read_names(tmp_path, {"0": "background", "1": "liver", "2": "tumor"})
    assert names.classes == {"liver": (1,), "tumor": (2,)}
    assert names == find_label_names(tmp_path)
    names = read_names(tmp_path, {"background": 0, "whole": [1, 2], "core": [2], "ignore": 3})
    assert names.classes == {"whole": (1, 2), "core": (2,)}
    assert (names.known_labels, names.ignore_labels) == ({0, 1, 2, 3}, (3,))


@pytest.mark.parametrize(
    "labels", [None, ["a"], {"liver": "one"}, {"0": "a", "1": "b", "2": "b"}, {"odd": [1, -1]}]
)
def test_invalid_labels_are_refused(tmp_path, labels):
    with pytest.raises(UsageError, match=r"dataset\.json: labels .*set classes=|odd: labels must"):
        read_names(tmp_path, labels)
