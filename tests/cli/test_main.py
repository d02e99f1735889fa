import subprocess
import sys

import pytest

from unet3d.cli import error_messages
from unet3d.cli import main as cli
from unet3d.cli.main import import_within_limits, main


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep a folder that is in use")
def test_a_command_says_that_its_working_folder_was_deleted(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["train"]) == 2
    error = "unet3d: the working folder was deleted: change to another one\n"
    assert capsys.readouterr().err == error


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limits")
def test_libraries_are_not_imported_where_memory_is_limited_to_less_than_they_need(monkeypatch):
    monkeypatch.setattr(error_messages, "list_memory_limits", lambda: ["ulimit -d, now 1 KiB"])
    monkeypatch.setattr(cli, "LIBRARY_BYTES", 2**60)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    with pytest.raises(OSError, match="allocate memory"):
        import_within_limits()


def test_python_m_unet3d_is_the_command():
    command = [sys.executable, "-m", "unet3d", "trian"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "unknown command 'trian'; did you mean train?" in ended.stderr
