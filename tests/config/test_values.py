"""Every reader returns a plain value, or names the key, what it must be and what was given."""

from math import inf, nan
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from unet3d.config.values import (
    parse_duration,
    read,
    read_bool,
    read_choice,
    read_duration,
    read_float,
    read_int,
    read_names,
    read_optional_int,
    read_optional_path,
    read_optional_shape,
    read_optional_str,
    read_paths,
    read_regions,
    read_shape,
)
from unet3d.errors import UsageError

KEY = "group.key"


def make_config(value):
    return OmegaConf.create({"group": {"key": value, "other": 7}})


def read_small_int(config, key):
    return read_int(config, key, minimum=1)


def read_optional_small_int(config, key):
    return read_optional_int(config, key, minimum=1)


def read_positive_float(config, key):
    return read_float(config, key, exclusive=True)


def read_word(config, key):
    return read_choice(config, key, ("stop", "skip"))


@pytest.mark.parametrize(
    ("reader", "value", "expected"),
    [
        (read_bool, True, True),
        (read_bool, False, False),
        (read_small_int, 1, 1),
        (read_optional_small_int, 2, 2),
        (read_optional_small_int, None, None),
        (read_float, 0, 0.0),
        (read_float, 2.5, 2.5),
        (read_positive_float, 1e-9, 1e-9),
        (read_word, "skip", "skip"),
        (read_optional_str, "a b", "a b"),
        (read_optional_str, 7, "7"),
        (read_optional_str, None, None),
        (read_optional_path, "a/b", Path("a/b")),
        (read_optional_path, None, None),
        (read_shape, [1, 20, 300], (1, 20, 300)),
        (read_optional_shape, [8, 8, 8], (8, 8, 8)),
        (read_optional_shape, None, None),
        (read_names, ["a", 1], ("a", "1")),
        (read_names, [], ()),
        (read_regions, {"whole": [1, 2], "core": 2}, {"whole": (1, 2), "core": (2,)}),
        (read_regions, None, None),
        (read_duration, "00:01:30:05", 5405.0),
        (read_duration, None, None),
    ],
)
def test_a_reader_returns_a_plain_value(reader, value, expected):
    result = reader(make_config(value), KEY)
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize(
    ("reader", "expected", "values"),
    [
        (read_bool, "true or false", ["maybe", 1, 0, None, [True]]),
        (read_small_int, "an int >= 1", [0, -3, 1.0, True, "2", None, [1]]),
        (read_optional_small_int, "an int >= 1", [0, 1.5, False, "many"]),
        (read_float, "a number >= 0", [-0.1, nan, inf, True, "1", None]),
        (read_positive_float, "a number above 0", [0, -1]),
        (read_word, "one of stop, skip", ["ignore", None, 3, "Stop"]),
        (
            read_shape,
            "three ints >= 1",
            ["888", 8, None, [8, 8], [8, 8, 0], [8, 8, 8.0]],
        ),
        (read_optional_shape, "three ints >= 1", [[], [8, 8, -8]]),
        (read_names, "a list", ["my_package", 3]),
        (read_regions, "names with their labels, as in", ["x", {}, [1, 2]]),
        (
            read_duration,
            "DD:HH:MM:SS above zero, as in 00:01:30:00",
            ["10m", 90, "01:30:00", "00:00:00:00"],
        ),
    ],
)
def test_a_wrong_value_is_refused_with_key_expectation_and_value(reader, expected, values):
    for value in values:
        with pytest.raises(UsageError) as caught:
            reader(make_config(value), KEY)
        message = str(caught.value)
        assert message.startswith(f"{KEY} must be {expected}")
        assert message.endswith(f", got {value!r}")


@pytest.mark.parametrize("labels", [[], ["x"], [1.5]])
def test_the_labels_of_a_region_are_ints(labels):
    with pytest.raises(UsageError, match=r"^group\.key\.a must be a list of labels, got "):
        read_regions(make_config({"a": labels}), KEY)


def test_bounds_are_those_that_the_caller_gives():
    assert read_int(make_config(-1), KEY, minimum=-1) == -1
    with pytest.raises(UsageError, match=r"group\.key must be an int >= 3, got 2"):
        read_int(make_config(2), KEY, minimum=3)
    assert read_float(make_config(0.5), KEY, minimum=0.5) == 0.5
    with pytest.raises(UsageError, match=r"group\.key must be a number above 0\.5, got 0\.5"):
        read_float(make_config(0.5), KEY, minimum=0.5, exclusive=True)


def test_lists_and_mappings_are_plain_and_resolved():
    value = read(make_config({"a": [1, "${group.other}"]}), KEY)
    assert value == {"a": [1, 7]}
    assert type(value) is dict
    assert type(value["a"]) is list


def test_the_duration_in_a_message_has_its_key():
    with pytest.raises(UsageError, match=r"^trainer\.max_time must be DD:HH:MM:SS"):
        parse_duration("1h", "trainer.max_time")


@pytest.fixture
def scans(tmp_path, monkeypatch):
    """Four files in the working folder, one of them with a comma in its name."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.nii", "b.nii", "c.txt", "x,y.nii"):
        (tmp_path / name).touch()


@pytest.mark.usefixtures("scans")
@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("a.nii", ["a.nii"]),
        ("x,y.nii", ["x,y.nii"]),  # a file that exists is one path
        ("a.nii,c.txt", ["a.nii", "c.txt"]),
        ("[a.nii, 'b.nii']", ["a.nii", "b.nii"]),
        (["a.nii", "x,y.nii"], ["a.nii", "x,y.nii"]),
        ("[ab].nii", ["a.nii", "b.nii"]),
        (["*.txt", "?.nii"], ["c.txt", "a.nii", "b.nii"]),
        ("missing.nii", ["missing.nii"]),
    ],
)
def test_paths_may_be_one_several_or_patterns(value, names):
    assert read_paths(make_config(value), KEY) == tuple(map(Path, names))


@pytest.mark.usefixtures("scans")
def test_a_pattern_that_matches_no_file_is_refused(tmp_path):
    for pattern in ("*.gz", f"{tmp_path}/*.gz"):
        with pytest.raises(UsageError, match=r"^group\.key: no file matches .*\*\.gz"):
            read_paths(make_config(pattern), KEY)


@pytest.mark.usefixtures("scans")
def test_an_absolute_pattern_is_expanded(tmp_path):
    assert read_paths(make_config(f"{tmp_path}/*.txt"), KEY) == (tmp_path / "c.txt",)
