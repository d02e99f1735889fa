from pathlib import Path

import pytest

from tests.config.helpers.configs import with_values
from unet3d.config.settings.inference import parse_inference
from unet3d.errors import UsageError
from unet3d.units import GIB


def parse(**values):
    return parse_inference(with_values("predict", values))


def test_the_defaults_leave_to_the_checkpoint_and_the_machine_what_they_know():
    settings = parse()
    assert settings.checkpoints == (Path("a.ckpt"),)
    assert settings.precision is None
    assert settings.memory_bytes is None
    assert settings.keep_largest_component is None
    assert settings.flip_axes == ()
    assert (settings.windows.overlap, settings.windows.batch_size) == (0.5, 1)


@pytest.mark.parametrize(
    ("values", "field", "expected"),
    [
        ({"checkpoint": "a.ckpt,b.ckpt"}, "checkpoints", (Path("a.ckpt"), Path("b.ckpt"))),
        ({"tta": True}, "flip_axes", None),
        ({"tta": [2, 0]}, "flip_axes", (2, 0)),
        ({"tta": []}, "flip_axes", ()),
        ({"precision": 16}, "precision", "16"),
        ({"memory_gib": 0.5}, "memory_bytes", GIB // 2),
        ({"keep_largest_component": "none"}, "keep_largest_component", ()),
        ({"keep_largest_component": None}, "keep_largest_component", ()),
        ({"keep_largest_component": "liver, tumor"}, "keep_largest_component", ("liver", "tumor")),
        ({"keep_largest_component": ["liver"]}, "keep_largest_component", ("liver",)),
    ],
)
def test_a_value_is_parsed(values, field, expected):
    assert getattr(parse(**values), field) == expected


@pytest.mark.parametrize(
    ("key", "values", "expected"),
    [
        ("overlap", [1], "overlap must be in [0, 1), got 1"),
        ("overlap", [-0.1, "half"], "overlap must be a number >= 0"),
        ("batch_size", [0], "batch_size must be an int >= 1"),
        ("tta", ["x", 3, [0, 0], [-1], [True], [[0]]], "tta must be true, false or a list of"),
        ("precision", [17, "half"], "precision must be one of 32, 16, bf16, 16-true, bf16-true"),
        (
            "device",
            ["tpu", "gpu", "h100", "cuda:", 0],
            "device must be auto, cpu, cuda, cuda:N or mps",
        ),
        (
            "memory_gib",
            [0, -1, "much", True, None],
            "memory_gib must be auto or a number above 0",
        ),
        ("save_probabilities", ["some"], "save_probabilities must be true or false"),
        ("overwrite", [1], "overwrite must be true or false"),
        ("allow_targets", ["x"], "allow_targets must be a list of names"),
    ],
)
def test_a_wrong_value_is_refused(key, values, expected):
    for value in values:
        with pytest.raises(UsageError) as caught:
            parse(**{key: value})
        assert str(caught.value).startswith(expected)
