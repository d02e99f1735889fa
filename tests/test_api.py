"""Training and evaluation from Python refuse what the commands refuse, as an error to catch."""

import pytest

import unet3d
from unet3d.errors import UsageError


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: unet3d.train(["experiment=none.json"]), "no file "),
        (lambda: unet3d.train([], config_dir="nothing"), "config_dir: no folder "),
        (lambda: unet3d.evaluate(".", "nowhere"), "nowhere is neither a file nor a folder"),
        (lambda: unet3d.evaluate(".", ".", metrics="medal"), "no option metrics=medal"),
        (lambda: unet3d.evaluate(".", ".", tolerance_mm={"a": -1}), "must be a distance in mm"),
    ],
)
def test_a_wrong_argument_is_a_usage_error(call, message):
    with pytest.raises(UsageError, match=message):
        call()
