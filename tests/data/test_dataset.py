"""Channels and classes come from the settings and from the dataset, which must not contradict."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.config.helpers.configs import with_values
from tests.data.helpers.cases import noise, write_case
from unet3d.data.case import Case, DatasetDescription, Finding, InvalidDatasetError
from unet3d.data.config import parse_data_config
from unet3d.data.dataset import (
    ValidCases,
    build_layout,
    build_preprocessing,
    get_network_sizes,
    resolve_dataset,
)
from unet3d.errors import UsageError
from unet3d.step.build import complete_step

UNKNOWN = {"root": "/no/such", "num_classes": None, "in_channels": None}
"""Settings that leave everything to the dataset."""

REGIONS = {"whole": (1, 2), "core": (2,)}


def parse(**values):
    """Parse the group `data` with other values."""
    data = {f"data.{key}": value for key, value in (UNKNOWN | values).items()}
    return parse_data_config(with_values("train", data).config)


def describe(channels=("MRI",), classes=("background", "a", "b"), **others):
    description = DatasetDescription(channels=channels, classes=classes, **others)
    return SimpleNamespace(describe=lambda: description, list_cases=list)


def test_the_dataset_says_what_the_settings_leave_open_and_settings_win():
    description = describe(ignore_labels=(9,), regions=REGIONS, region_labels=(2, 2))
    dataset = resolve_dataset(parse(), description)
    assert (dataset.channels, dataset.classes) == (("MRI",), ("background", "a", "b"))
    assert (dataset.regions, dataset.ignore_labels) == (REGIONS, (9,))
    assert dataset.region_labels == (2, 2)
    data = parse(regions={"b": [2], "a": [1]}, ignore_label=8)
    dataset = resolve_dataset(data, description)
    assert list(dataset.regions.items()) == [("b", (2,)), ("a", (1,))]
    assert (dataset.region_labels, dataset.ignore_labels) == (None, (8,))


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ((), ("background", "class_5")),
        (("class_0", "class_1"), ("background", "class_5")),  # of a recorded config
        (("air", "bone"), ("air", "bone")),
    ],
)
def test_classes_without_names_are_called_by_their_values(given, names):
    dataset = resolve_dataset(parse(label_values=[0, 5]), describe(classes=given))
    assert (dataset.classes, dataset.label_values) == (names, (0, 5))


def test_the_settings_name_classes_once():
    layout = {"_target_": "unet3d.data.layouts.pairs.Pairs", "classes": ["rest", "liver"]}
    values, names = {"rest": 0, "organ": 5}, ("rest", "liver")
    assert (
        resolve_dataset(parse(label_values=values), describe(classes=names)).classes[1] == "organ"
    )
    data = parse(label_values=values, layout=layout)
    with pytest.raises(UsageError, match=r"name 5 organ, and data\.classes liver: name"):
        resolve_dataset(data, describe(classes=names))


def test_names_of_values_are_text():
    with pytest.raises(UsageError, match=r"data\.label_values must be .* or a mapping of names to"):
        parse(label_values={"background": 0, 44: 5})


@pytest.mark.parametrize(
    ("values", "description", "message"),
    [
        ({"in_channels": 2}, describe(), r"data\.in_channels=2, but the dataset has 1: MRI"),
        ({"background": [0, 0]}, describe(), r"data\.background must be one value or one for each"),
        (
            {"normalize": ["ct"] * 2},
            describe(),
            r"data\.normalize must be one value or one for each",
        ),
        ({}, describe(classes=("background",)), r"data\.num_classes must be 2\.\.32,767, got 1"),
        ({}, describe(classes=()), "files alone do not define their classes"),
        ({"label_values": [0, 5]}, describe(), "label_values are 2 classes, .* name 3"),
        ({"label_values": [0, 5], "num_classes": 2}, describe(), "label_values are 2 .* name 3"),
        ({"label_values": [0, 5], "regions": {"a": [5]}}, describe(), "cannot be combined with r"),
        (
            {"num_classes": 255, "annotated": {"*": ["a"]}},
            describe(),
            r"data\.annotated: 255 classes and 1 set of annotated ones are more than 255 labels",
        ),
        ({"num_classes": 256, "regions": {"a": [5]}}, describe(), "take at most 255 classes"),
        ({}, describe(classes=("background", "a", "a")), "names must be unique, got background, a"),
        ({"regions": {"a": [3]}}, describe(), r"data\.regions\.a must be labels of 1\.\.2, got "),
        ({"regions": {"a": [1, 2]}}, describe(), r"data\.regions\.a must .* one label"),
        (
            {"regions": {"inner": [2], "outer": [1, 2]}, "region_labels": [2, 1]},
            describe(),
            r"data\.regions\.inner can never be predicted: outer has .*, as outer, inner$",
        ),
        ({"region_labels": [1]}, describe(), r"data\.region_labels needs data\.regions"),
        (
            {"regions": {"a": [1]}, "region_labels": [2]},
            describe(),
            r"data\.region_labels must name a label of each region, .* got \[2\] for",
        ),
        ({"ignore_label": 1}, describe(), r"ignore_label must be outside of the classes 0\.\.2"),
    ],
)
def test_a_contradiction_is_refused(values, description, message):
    with pytest.raises(UsageError, match=message):
        resolve_dataset(parse(**values), description)


def test_settings_that_give_both_sizes_need_no_dataset(composed):
    both = {"num_classes": 4, "in_channels": 2}
    assert get_network_sizes(parse(**both)) == (2, 4)
    regions = {"whole": [1, 3], "core": [3]}
    assert get_network_sizes(parse(**both, regions=regions)) == (2, 2)
    settings = composed("data.root=/no/such", base=[]).step
    assert complete_step(settings) is settings


@pytest.mark.parametrize("name", ["patient/1", ""])
def test_a_case_of_an_own_layout_has_a_name_that_a_file_may_have(name):
    with pytest.raises(UsageError, match="is no name of a file"):
        Case(name=name, images=(), label=Path("a.nii"))


def test_a_dataset_without_a_root_cannot_be_read():
    with pytest.raises(UsageError, match=r"^data\.root must be given"):
        build_layout(parse(root="???"))


def test_each_channel_has_its_normalization_which_leaves_out_a_background_other_than_zero():
    dataset = resolve_dataset(parse(), describe(channels=("T1", "T2")))
    for values, normalize in (
        ({}, "zscore"),
        ({"background": "auto"}, "zscore_nonzero"),
        ({"background": [-3.5], "normalize": "zscore"}, "zscore"),
    ):
        preprocessing = build_preprocessing(parse(**values), dataset, [])
        assert preprocessing.normalize == (normalize,) * 2
    named = resolve_dataset(parse(), describe(channels=("noNorm", "rgb_to_0_1", "T1")))
    preprocessing = build_preprocessing(parse(), named, [])
    assert preprocessing.normalize == ("none", "rgb_to_0_1", "zscore")


def test_cases_with_problems_that_are_found_one_after_the_other_are_all_skipped(tmp_path):
    cases = [write_case(tmp_path, noise(8, 8, 8), name=name) for name in ("a", "b", "c")]
    layout = SimpleNamespace(list_cases=lambda: cases, find_problems=list)
    dataset = SimpleNamespace(channels=["CT"], label_names={})
    usable = ValidCases(SimpleNamespace(skip_invalid_cases=True), layout, dataset)

    def refuse_the_first_two(cases):
        if len(cases) > 1:
            message = "is damaged"
            problem = Finding(case=cases[0].name, file=None, message=message, advice="remove it")
            raise InvalidDatasetError([problem])
        return [case.name for case in cases]

    assert usable.run_on_valid_cases(refuse_the_first_two) == ["c"]
    assert [finding.case for finding in usable.skipped] == ["a", "b"]
