from pathlib import Path

import pytest

from tests.config.helpers.configs import with_values
from unet3d.config.settings.data import parse_data
from unet3d.errors import UsageError


def parse(**values):
    """Parse the group `data` with other values."""
    data = {f"data.{key}": value for key, value in values.items()}
    return parse_data(with_values("train", data).config)


def test_the_defaults_of_the_synthetic_dataset():
    data = parse()
    assert data.layout.target.__name__ == "Synthetic"
    assert data.root == Path("data/synthetic")
    assert (data.in_channels, data.num_classes) == (1, 4)
    assert data.patch_size == (32, 32, 32)
    assert data.spacing_mm is None
    assert data.regions is None
    assert data.background == (0,)
    assert data.normalize == ("auto",)
    assert not data.skip_invalid_cases


def test_a_dataset_without_a_root_has_no_layout():
    data = parse(root="???")
    assert data.root is None
    assert data.layout is None


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("num_classes", None, None),
        ("in_channels", None, None),
        ("invalid_cases", "skip", True),
        ("regions", {"whole": [1, 2], "core": 2}, {"whole": (1, 2), "core": (2,)}),
        ("region_labels", [1, 2], (1, 2)),
        ("ignore_label", 255, (255,)),
        ("ignore_label", [3, 4], (3, 4)),
        ("splits", "splits.json", Path("splits.json")),
        ("group_by", r"(p\d+)_", r"(p\d+)_"),
        ("spacing_mm", "median", "median"),
        ("spacing_mm", [1, 2, 0.5], (1.0, 2.0, 0.5)),
        ("background", "auto", ("auto",)),
        ("background", [-1000, 0.5, "auto"], (-1000, 0.5, "auto")),
        ("normalize", "ct", ("ct",)),
        ("normalize", ["ct", "zscore"], ("ct", "zscore")),
        ("cache", "/fast/cache", Path("/fast/cache")),
        ("foreground_fraction", 1, 1.0),
    ],
)
def test_a_value_is_parsed(key, value, expected):
    fields = {"invalid_cases": "skip_invalid_cases", "ignore_label": "ignore_labels"}
    field = fields.get(key, key)
    assert getattr(parse(**{key: value}), field) == expected


@pytest.mark.parametrize(
    ("key", "values", "expected"),
    [
        ("num_classes", [1, 2.0, "4"], "data.num_classes must be an int >= 2"),
        ("in_channels", [0, True], "data.in_channels must be an int >= 1"),
        ("invalid_cases", ["ignore", None], "data.invalid_cases must be one of error, skip"),
        ("regions", ["x"], "data.regions must be names with their labels"),
        ("region_labels", [1, "x"], "data.region_labels must be a list of labels"),
        ("normalize", ["max"], "data.normalize must be auto, zscore"),
        ("crop", ["some"], "data.crop must be one of nonzero, none"),
        ("orientation", ["RAX", None], "data.orientation must hold one of L R"),
        ("ignore_label", [-1, "last"], "data.ignore_label must be an int >= 0"),
        (
            "spacing_mm",
            ["fine", 1, [1, 1], [1, 1, 0], [1, 1, "x"]],
            "data.spacing_mm must be three numbers > 0, median or null",
        ),
        (
            "background",
            ["air", None, True, [0, "air"], []],
            "data.background must be a number, auto, or a list",
        ),
        ("patch_size", ["abc", [8], [8, 8, 0]], "data.patch_size must be three ints >= 1"),
        ("batch_size", [0, 1.5, None], "data.batch_size must be an int >= 1"),
        ("patches_per_case", [0], "data.patches_per_case must be an int >= 1"),
        ("foreground_fraction", [1.01], "data.foreground_fraction must be in 0..1, got 1.01"),
        ("foreground_fraction", [-0.1], "data.foreground_fraction must be a number >= 0"),
        ("num_workers", [-1, "many"], "data.num_workers must be an int >= 0"),
    ],
)
def test_a_wrong_value_is_refused(key, values, expected):
    for value in values:
        with pytest.raises(UsageError) as caught:
            parse(**{key: value})
        assert str(caught.value).startswith(expected)
