"""A field is read as its annotation says, or the key is named with what it must be."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, nan
from pathlib import Path
from typing import Annotated, Literal

import pytest
from omegaconf import OmegaConf

from unet3d.config.fields import (
    DURATION,
    convert_option,
    integer,
    number,
    read_settings,
)
from unet3d.config.instantiate import Factory
from unet3d.errors import UsageError
from unet3d.types import Triple


def read_value(value, hint):
    return convert_option(OmegaConf.create({"group": {"key": value}}), "group.", "key", hint)


@pytest.mark.parametrize(
    ("hint", "value", "expected"),
    [
        (Triple, [1, 20, 300], (1, 20, 300)),
        (bool | Literal["auto"], "auto", "auto"),
        (Path | None, "~/b", Path.home() / "b"),
        (tuple[str, ...], ["a", 1], ("a", "1")),
        (Annotated[float, number()], 2, 2.0),
        (Annotated[float, number("above 0", "<= 4")], 4, 4.0),
    ],
)
def test_a_value_is_stored_as_its_type_says(hint, value, expected):
    result = read_value(value, hint)
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize(
    ("hint", "expected", "values"),
    [
        (str, "text", ["", None, True, ["a"]]),
        (Path | None, "a path", ["", [1]]),
        (Triple, "three ints >= 1", ["888", 8, None, [8, 8], [8, 8, 0], [8, 8, 8.0]]),
        (tuple[str, ...], "a list of names", ["my_package", 3, [""]]),
        (tuple[Path, ...], "a path or a list of paths", [True, [], [None]]),
        (Literal["stop", "skip"], "one of stop, skip", ["ignore", None, 3, "Stop", ["stop"]]),
        (Annotated[int | Literal["auto"], integer(">= 1")], "an int >= 1 or auto", [0, "x", True]),
        (Annotated[float, number(">= 0")], "a number >= 0", [-0.1, nan, inf, True, "1", None]),
        (
            Annotated[float, DURATION],
            "DD:HH:MM:SS above zero",
            ["10m", 90, "00:00:00:00", "a:1:1:1"],
        ),
    ],
)
def test_a_wrong_value_is_refused_with_key_expectation_and_value(hint, expected, values):
    for value in values:
        with pytest.raises(UsageError) as caught:
            read_value(value, hint)
        message = str(caught.value)
        assert message.startswith(f"group.key must be {expected}")
        assert message.endswith(f", got {value!r}")


@dataclass(frozen=True, kw_only=True)
class Part:
    size: Annotated[int, integer(">= 1")]


@dataclass(frozen=True, kw_only=True)
class Whole:
    part: Part
    other: Annotated[bool, "part.flag"]
    built: Factory
    several: Mapping[str, Factory]
    given: int
    count: int = 1


def test_settings_are_read_from_the_keys_of_their_fields():
    relu = {"_target_": "torch.nn.ReLU"}
    values = {"part": {"size": 2, "flag": True}, "built": relu, "several": {"a": relu, "b": None}}
    config = OmegaConf.create({"top": values})
    whole = read_settings(Whole, config, "top.", given=5)
    assert (whole.part, whole.other, whole.given, whole.count) == (Part(size=2), True, 5, 1)
    assert whole.built.key == "top.built"
    assert whole.several == {"a": Factory("top.several.a", relu)}
    config.top.part.size = 0
    with pytest.raises(UsageError, match=r"^top\.part\.size must be an int >= 1, got 0$"):
        read_settings(Whole, config, "top.", given=5)
    config.top.several = relu
    config.top.part.size = 1
    with pytest.raises(UsageError, match=r"^top\.several must have names below it"):
        read_settings(Whole, config, "top.", given=5)


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("x,y.nii", ["x,y.nii"]),  # a file that exists is one path
        ("a.nii,c.txt", ["a.nii", "c.txt"]),
        (["*.txt", "?.nii"], ["c.txt", "a.nii", "b.nii"]),
        ("missing.nii", ["missing.nii"]),
    ],
)
def test_paths_may_be_one_several_or_patterns(value, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.nii", "b.nii", "c.txt", "x,y.nii"):
        (tmp_path / name).touch()
    assert read_value(value, tuple[Path, ...]) == tuple(map(Path, names))
    assert read_value(f"{tmp_path}/*.txt", tuple[Path, ...]) == (tmp_path / "c.txt",)
    for pattern in ("*.gz", f"{tmp_path}/*.gz"):
        with pytest.raises(UsageError, match=r"^no file matches .*\*\.gz"):
            read_value(pattern, tuple[Path, ...])
