"""Files are the old or the new one."""

import errno
import os
import stat
from pathlib import Path

import pytest

from unet3d.errors import RunError
from unet3d.files import (
    add_path_to_errors,
    atomic_write,
    create_kernel_folder,
    lock_file,
    write_text,
)


def test_a_file_that_cannot_be_completed_keeps_its_old_content(tmp_path):
    (tmp_path / "a").write_text("old")

    def fail():
        with atomic_write(tmp_path / "a") as draft:
            draft.write_text("half")
            raise OSError(errno.ENOSPC, "No space left on device", str(draft))

    with pytest.raises(OSError, match="No space") as failed:
        fail()
    assert failed.value.filename == str(tmp_path / "a")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "old")]


def test_a_file_is_on_the_disk_before_it_replaces_the_old_one(tmp_path, monkeypatch):
    calls, sync, replace = [], os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda file: calls.append("sync") or sync(file))
    monkeypatch.setattr(Path, "replace", lambda a, b: calls.append("replace") or replace(a, b))
    write_text(tmp_path / "a", "new")
    assert calls == ["sync", "replace"]


def test_errors_of_writing_get_the_name_of_their_file_unless_they_explain_it(tmp_path):
    full = Path("/dev/full")
    with pytest.raises(OSError, match="No space") as failed, add_path_to_errors(tmp_path):
        full.write_text("a")
    assert failed.value.filename == str(tmp_path)
    with pytest.raises(RunError, match="explained"), add_path_to_errors(tmp_path):
        raise RunError("explained") from OSError(errno.EIO, "Input/output error")


def test_a_text_replaces_a_file_and_is_written_to_a_device_or_a_link(tmp_path):
    write_text(tmp_path / "a", "1")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    write_text(tmp_path / "link", "2")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "a").read_text() == "2"
    write_text(Path(os.devnull), "3")
    assert Path(os.devnull).is_char_device()
    assert {path.name for path in tmp_path.iterdir()} == {"a", "link"}


def test_a_text_is_written_into_a_folder_that_is_created(tmp_path):
    file = tmp_path / "new" / "folder" / "a.txt"
    write_text(file, "a")
    assert file.read_text() == "a"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_where_a_file_system_has_no_locks_a_warning_says_so_once(
    tmp_path, monkeypatch, caplog, number
):
    fcntl = pytest.importorskip("fcntl")

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    for name in ("a", "b"):
        with lock_file(tmp_path / name, timeout=0) as is_locked:
            assert not is_locked
    message = f"{tmp_path} cannot be locked ({os.strerror(number)}): run one command at a time"
    assert caplog.text.count(message) == 1


def test_kernels_lie_in_a_closed_folder_of_their_user(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = create_kernel_folder("cpp")
    assert folder == tmp_path / "unet3d" / "cpp"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    assert create_kernel_folder("cpp") == tmp_path / f"unet3d-{os.geteuid()}" / "cpp"
