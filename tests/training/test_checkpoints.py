import pytest

from unet3d.errors import UsageError
from unet3d.training.checkpoints import PREVIOUS, AtomicCheckpointIO, load_resume, remove_leftovers


def test_resume_finds_a_file_or_a_folder_or_starts_over(tmp_path):
    folder = tmp_path / "checkpoints"
    assert load_resume("auto", folder) is None
    folder.mkdir()
    last = folder / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"a": 1}, last)
    for resume in ("auto", str(tmp_path), str(last)):
        assert load_resume(resume, folder) == (last, {"a": 1}, [])
    with pytest.raises(UsageError, match="no checkpoint at"):
        load_resume(str(tmp_path / "other"), folder)


def test_a_run_with_two_corrupted_checkpoints_does_not_silently_start_over(tmp_path):
    (tmp_path / "last.ckpt").write_bytes(b"half")
    (tmp_path / PREVIOUS).write_bytes(b"half")
    with pytest.raises(UsageError, match="no intact previous checkpoint"):
        load_resume("auto", tmp_path)


def test_temporary_files_of_killed_runs_are_removed(tmp_path):
    for name in (".123-last.ckpt", "best.ckpt", ".hidden"):
        (tmp_path / name).touch()
    remove_leftovers(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".hidden", "best.ckpt"]
