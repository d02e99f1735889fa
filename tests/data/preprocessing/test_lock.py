import errno
import os
import shutil
from types import SimpleNamespace

import pytest

from unet3d.data.preprocessing import lock
from unet3d.data.preprocessing.lock import has_locks, lock_cache


def refuse(handle, operation):
    raise OSError(errno.ENOSYS, "Function not implemented")


NO_LOCKS = {
    "no fcntl": None,
    "a file system without locks": SimpleNamespace(flock=refuse, LOCK_EX=0),
}

without_locks = pytest.mark.parametrize("system", NO_LOCKS)


def test_a_folder_that_is_finished_just_before_our_lock_is_used(tmp_path, monkeypatch):
    folder, original = tmp_path / "case", lock.fcntl.flock

    def finish_first(handle, operation):
        folder.mkdir()
        original(handle, operation)

    monkeypatch.setattr(lock.fcntl, "flock", finish_first)
    with lock_cache(folder) as draft:
        assert draft is None
    assert [f.name for f in tmp_path.iterdir()] == ["case"]


def test_a_draft_that_another_process_renames_before_it_is_locked_is_not_an_error(
    tmp_path, monkeypatch
):
    folder, original = tmp_path / "case", lock.lock_folder

    def rename_first(draft):
        draft.rename(folder)
        return original(draft)

    monkeypatch.setattr(lock, "lock_folder", rename_first)
    with lock_cache(folder) as draft:
        assert draft is None


def interrupt_while_writing(folder):
    with lock_cache(folder) as draft:
        (draft / "image.npy").write_text("half")
        raise KeyboardInterrupt


@pytest.mark.parametrize("system", ["locks", *NO_LOCKS])
def test_an_interrupted_folder_is_removed(tmp_path, monkeypatch, system):
    monkeypatch.setattr(lock, "fcntl", NO_LOCKS.get(system, lock.fcntl))
    with pytest.raises(KeyboardInterrupt):
        interrupt_while_writing(tmp_path / "case")
    assert not list(tmp_path.iterdir())


def test_the_draft_of_a_killed_process_is_not_used_as_a_case(tmp_path):
    (tmp_path / ".case").mkdir()
    (tmp_path / ".case" / "image.npy").write_text("half")
    with lock_cache(tmp_path / "case") as draft:
        assert not list(draft.iterdir())
    assert not list((tmp_path / "case").iterdir())


@without_locks
def test_without_locks_the_first_folder_is_kept_and_the_second_removed(
    tmp_path, monkeypatch, system
):
    monkeypatch.setattr(lock, "fcntl", NO_LOCKS[system])
    assert not has_locks(tmp_path)
    folder = tmp_path / "case"
    with lock_cache(folder) as second:
        with lock_cache(folder) as first:
            (first / "image.npy").write_text("first")
        (second / "image.npy").write_text("second")
    assert (folder / "image.npy").read_text() == "first"
    assert [f.name for f in tmp_path.iterdir()] == ["case"]
    with lock_cache(folder) as third:
        assert third is None


def test_a_link_in_the_place_of_a_draft_erases_nothing(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("kept")
    (tmp_path / ".case").symlink_to("home")
    with lock_cache(tmp_path / "case") as draft:
        (draft / "image.npy").write_text("made")
    assert (tmp_path / "home" / "thesis.txt").read_text() == "kept"
    assert not (tmp_path / "case").is_symlink()


def test_a_file_in_the_place_of_a_draft_is_removed(tmp_path):
    (tmp_path / ".case").write_text("")
    with lock_cache(tmp_path / "case") as draft:
        (draft / "image.npy").write_text("made")
    assert (tmp_path / "case" / "image.npy").exists()


def test_a_draft_that_becomes_a_link_is_not_locked(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(NotADirectoryError):
        lock.lock_folder(tmp_path / "link")
    assert has_locks(tmp_path / "link")


@without_locks
def test_without_locks_a_damaged_folder_is_replaced_before_another_run_finishes(
    tmp_path, monkeypatch, system
):
    monkeypatch.setattr(lock, "fcntl", NO_LOCKS[system])
    folder = tmp_path / "case"
    folder.mkdir()
    with lock_cache(folder, lambda _: False):
        folder.mkdir()
        (folder / "image.npy").write_text("of another run")
    assert (folder / "image.npy").read_text() == "of another run"
    assert [f.name for f in tmp_path.iterdir()] == ["case"]


@without_locks
def test_without_locks_an_error_of_the_file_system_is_not_hidden(tmp_path, monkeypatch, system):
    monkeypatch.setattr(lock, "fcntl", NO_LOCKS[system])

    def remove_before_the_rename():
        with lock_cache(tmp_path / "case") as draft:
            shutil.rmtree(draft)

    with pytest.raises(FileNotFoundError):
        remove_before_the_rename()


def test_a_folder_on_this_system_can_be_locked(tmp_path):
    assert has_locks(tmp_path)


def test_a_draft_that_is_renamed_while_another_thread_creates_it_is_no_error(tmp_path, monkeypatch):
    folder, mkdir = tmp_path / "case", os.mkdir

    def finish_first(path, *mode):
        """Finish another thread's work between its creation of the draft and ours."""
        monkeypatch.setattr(os, "mkdir", mkdir)
        mkdir(folder)
        raise FileExistsError(path)

    monkeypatch.setattr(os, "mkdir", finish_first)
    with lock_cache(folder) as draft:
        assert draft is None
