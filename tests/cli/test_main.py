import sys

import pytest

from unet3d.cli.main import main


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep a folder that is in use")
def test_a_command_says_that_its_working_folder_was_deleted(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["train"]) == 2
    error = "unet3d: the working folder was deleted: change to another one\n"
    assert capsys.readouterr().err == error
