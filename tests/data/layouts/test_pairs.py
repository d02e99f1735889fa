import pytest

from tests.data.helpers.datasets import make_image, make_label, save_volume, write_pairs
from unet3d.data.layouts.pairs import Pairs
from unet3d.errors import UsageError


def make_layout(root, **options):
    defaults = {"images": "images/*.nii.gz", "labels": "labels/*.nii.gz", "num_classes": 3}
    return Pairs(str(root), **{**defaults, "channels": None, "classes": None, **options})


def test_classes_and_channels_are_named_or_numbered(tmp_path):
    numbered = make_layout(tmp_path).describe()
    assert numbered.classes == ("class_0", "class_1", "class_2")
    assert numbered.channels == ("channel_0",)
    named = make_layout(tmp_path, classes=["background", "organ"], channels=["CT"]).describe()
    assert (named.classes, named.channels) == (("background", "organ"), ("CT",))


def test_one_pattern_per_channel_finds_files_in_a_folder_per_case(tmp_path):
    for name in ("a", "b_c"):
        for number, kind in enumerate(("t1", "t2")):
            save_volume(tmp_path / name / f"{name}_{kind}.nii", make_image(number))
        save_volume(tmp_path / name / f"{name}_seg.nii", make_label(0))
    save_volume(tmp_path / "a" / "other_t1.nii", make_image(5))  # not named like its folder
    layout = make_layout(tmp_path, images=["*/*_t1.nii", "*/*_t2.nii"], labels="*/*_seg.nii")
    cases = layout.list_cases()
    assert [case.name for case in cases] == ["a", "b_c"]
    assert [file.name for file in cases[1].images] == ["b_c_t1.nii", "b_c_t2.nii"]
    assert layout.describe().channels == ("channel_0", "channel_1")


def test_a_file_belongs_to_the_longest_matching_pattern(tmp_path):
    for name in ("scan_1", "scan_2"):
        save_volume(tmp_path / f"{name}.nii.gz", make_image(1))
        save_volume(tmp_path / f"{name}_label.nii.gz", make_label(0))
    save_volume(tmp_path / "._scan_1.nii.gz", make_image(1))  # macOS metadata is ignored
    cases = make_layout(tmp_path, images="*.nii.gz", labels="*_label.nii.gz").list_cases()
    assert [case.name for case in cases] == ["scan_1", "scan_2"]
    assert cases[0].label.name == "scan_1_label.nii.gz"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"images": "images/case.nii.gz"}, "data.images must be a pattern"),
        ({"images": "../*.nii.gz"}, "data.images must be a pattern within data.root"),
        ({"images": "a/*.nii", "labels": "a/*.nii"}, "one pattern per channel"),
        (
            {"labels": "labels/*.mgz"},
            "got 'labels/.*; convert it by nibabel's command: nib-convert",
        ),
        ({"channels": "CT"}, "data.channels must be a list"),
        ({"labels": ["a/*.nii", "b/*.nii"]}, "data.labels must be one pattern, got .* to one file"),
    ],
)
def test_invalid_options_are_refused(tmp_path, options, message):
    with pytest.raises(UsageError, match=message):
        make_layout(tmp_path, **options)


def test_a_missing_folder_or_a_pattern_without_matches_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"data\.root: no folder"):
        make_layout(tmp_path / "nowhere").list_cases()
    write_pairs(tmp_path, 2)
    with pytest.raises(UsageError, match=r"data.images: no file in .* matches scans/\*.nii"):
        make_layout(tmp_path, images="scans/*.nii").list_cases()
    with pytest.raises(UsageError, match=r"data\.labels: no file in"):
        make_layout(tmp_path, labels="labels/*_x.nii.gz").list_cases()


def test_a_pattern_for_part_of_an_ending_is_refused(tmp_path):
    """Elsewhere a.ome.tif is called a, so its labels and predictions would not be found."""
    write_pairs(tmp_path, 2)
    for file in (tmp_path / "images").iterdir():
        file.rename(file.with_name(file.name.replace(".nii.gz", ".ome.tif")))
    with pytest.raises(
        UsageError, match=r"matches images/\*\.tif: the files there end in \.ome\.t"
    ):
        make_layout(tmp_path, images="images/*.tif").list_cases()


def test_volumes_that_match_no_pattern_are_one_hint_with_their_number(tmp_path):
    write_pairs(tmp_path, 2)
    layout = make_layout(tmp_path)
    assert layout.find_problems() == []
    (tmp_path / "images" / "site" / "x.zarr").mkdir(parents=True)
    (tmp_path / "preprocessed").mkdir()
    (tmp_path / "preprocessed" / "image.npy").touch()
    for name in ("c.nii", "site/c.nii.gz", "D.NII.GZ", "._c.nii.gz", "c.txt", "site/x.zarr/0.0.0"):
        (tmp_path / "images" / name).touch()
    (hint,) = layout.find_problems()
    assert hint.is_hint
    assert hint.message == (
        "4 volumes match no pattern of data.images and data.labels, and are left out: "
        "images/D.NII.GZ, images/c.nii, images/site/c.nii.gz and 1 more"
    )


def test_labels_may_lie_within_the_images_of_ome_zarr(tmp_path):
    for name in "ab":
        for folder in (tmp_path / f"{name}.zarr", tmp_path / f"{name}.zarr" / "labels" / "cells"):
            folder.mkdir(parents=True)
            (folder / "zarr.json").touch()
    layout = make_layout(tmp_path, images="*.zarr", labels="*.zarr/labels/cells")
    first, second = layout.list_cases()
    assert (first.name, second.name) == ("a", "b")
    assert first.images == (tmp_path / "a.zarr",)
    assert first.label == tmp_path / "a.zarr" / "labels" / "cells"
    assert layout.find_problems() == []
