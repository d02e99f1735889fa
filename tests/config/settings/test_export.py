from pathlib import Path

import pytest

from tests.config.helpers.configs import with_values
from unet3d.config.settings.export import parse_export
from unet3d.errors import UsageError


def parse(**values):
    return parse_export(with_values("export", values))


def test_a_file_takes_any_patch_unless_one_is_given():
    assert parse().patch_size is None
    assert parse(patch_size=[8, 16, 24]).patch_size == (8, 16, 24)


def test_each_format_has_its_ending():
    assert parse(format="torch_export", output="a.pt2").output == Path("a.pt2")
    with pytest.raises(UsageError) as caught:
        parse(format="torch_export")
    assert str(caught.value) == (
        "output=a.onnx does not fit format=torch_export: onnx writes .onnx, torch_export writes "
        ".pt2, nnunet writes a folder, bundle writes a folder, which has no ending"
    )


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        (
            "format",
            "onxx",
            "format must be one of onnx, torch_export, nnunet, bundle, got 'onxx'; "
            "did you mean onnx?",
        ),
        ("format", "zip", "format must be one of onnx, torch_export, nnunet, bundle, got 'zip'"),
        ("patch_size", [8, 8], "patch_size must be three ints >= 1, got [8, 8]"),
        (
            "allow_targets",
            "x",
            "allow_targets must be a list of names, got 'x'",
        ),
    ],
)
def test_a_wrong_value_is_refused(key, value, expected):
    with pytest.raises(UsageError) as caught:
        parse(**{key: value})
    assert str(caught.value) == expected
