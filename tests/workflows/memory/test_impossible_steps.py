"""A step that fits nowhere is refused before it is traced."""

import pytest

from unet3d.__main__ import main


@pytest.mark.parametrize("command", [["memory"], ["suggest", "budget_gib=8"]])
def test_a_patch_that_no_device_holds_is_not_traced(command, capsys):
    assert main([*command, "data.patch_size=[4096,4096,4096]"]) == 3
    error = capsys.readouterr().err
    assert "no device has beside the rest of a step: lower data.batch_size or" in error
    assert error.count("\n") == 1
