from pathlib import Path

import pytest

from tests.data.helpers.datasets import make_image, make_label, save_volume, write_nnunet
from unet3d.data.layouts.nnunet import NnUnet
from unet3d.errors import UsageError


def make_layout(root, **content):
    return NnUnet(str(write_nnunet(root, 3, **content)))


def test_a_case_has_a_file_per_channel_or_a_label_alone(tmp_path):
    layout = make_layout(tmp_path)
    assert layout.describe().channels == ("T1", "T2")
    assert layout.describe().regions is None
    for file in (tmp_path / "imagesTr").glob("case_01*"):
        file.unlink()
    case = layout.list_cases()[1]
    assert (case.name, case.label) == ("case_01", tmp_path / "labelsTr" / "case_01.nii.gz")
    assert [f.name for f in case.images] == ["case_01_0000.nii.gz", "case_01_0001.nii.gz"]
    assert layout.find_problems() == []


def test_lists_of_labels_are_regions_and_single_labels_are_classes(tmp_path):
    labels = {"background": 0, "whole": [1, 2, 3], "core": [2, 3], "enhancing": 3, "ignore": 4}
    description = make_layout(tmp_path, labels=labels, regions_class_order=[3, 2, 1]).describe()
    assert description.classes == ("background", "class_1", "class_2", "enhancing")
    assert description.regions == {"whole": (1, 2, 3), "core": (2, 3), "enhancing": (3,)}
    assert list(description.regions) == ["whole", "core", "enhancing"]
    assert description.region_labels == (3, 2, 1)
    assert description.ignore_labels == (4,)


def test_a_file_that_is_not_a_channel_of_a_case_is_reported(tmp_path):
    layout = make_layout(tmp_path, numTraining=4)
    unexpected = [
        save_volume(tmp_path / "imagesTr" / "case_00_0002.nii.gz", make_image(9)),
        save_volume(tmp_path / "imagesTr" / "case_07.nii.gz", make_image(9)),
        save_volume(tmp_path / "labelsTr" / "case_00.nii", make_label(0)),
    ]
    findings = layout.find_problems()
    assert [f.file for f in findings] == [*unexpected, tmp_path / "dataset.json"]
    assert "channel 0000..0001" in findings[0].message
    assert "numTraining 4, but has 3 cases" in findings[-1].message
    assert {f.case for f in findings} == {None}


def test_cases_that_dataset_json_does_not_list_are_left_out(tmp_path, monkeypatch):
    layout = make_layout(tmp_path)
    images = [f"imagesTr/case_01_000{n}.nii.gz" for n in (0, 1)]
    monkeypatch.setenv("LABELS", str(tmp_path / "labelsTr"))
    layout.content["dataset"] = {"b": {"images": images, "label": "$LABELS/case_01.nii.gz"}}
    (case,) = layout.list_cases()
    assert (case.name, case.label) == ("b", tmp_path / "labelsTr" / "case_01.nii.gz")
    assert [file.name for file in case.images] == [Path(file).name for file in images]
    assert layout.find_problems() == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"dataset": {"a": {"image": "a.nii"}}}, "dataset must be {case"),
        ({"labels": {"front": 1, "back": 2}}, "labels must name background 0"),
        ({"labels": {"background": 0, "front": 1, "back": 1}}, "labels must name background 0"),
        ({"labels": {"background": 1, "front": 0, "back": 2}}, "labels must name background 0"),
        ({"labels": {"background": 0, "all": [1, 2], "ignore": 2}}, "labels must name background"),
        ({"file_ending": ".png"}, r"file_ending must be .nii.gz, .nii, .* or .dcm, got '.png'"),
        ({"channel_names": {"1": "T1"}}, "channel_names must name 0, 1, 2"),
    ],
)
def test_an_invalid_dataset_json_is_refused(tmp_path, content, message):
    layout = make_layout(tmp_path)
    layout.content.update(content)
    with pytest.raises(UsageError, match=rf"dataset\.json: {message}"):
        (layout.describe(), layout.list_cases())


def test_a_folder_without_images_or_json_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"no dataset\.json.*an nnU-Net raw dataset"):
        NnUnet(str(tmp_path)).list_cases()
    write_nnunet(tmp_path, 0)
    with pytest.raises(UsageError, match=r"holds no images named <case>_0000\.nii\.gz"):
        NnUnet(str(tmp_path)).list_cases()
