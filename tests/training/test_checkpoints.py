import pytest

from unet3d.checkpoint_file import load_checkpoint
from unet3d.commands.train import build_training
from unet3d.errors import UsageError
from unet3d.training.checkpoints import PREVIOUS, AtomicCheckpointIO, remove_leftovers
from unet3d.training.resume import load_resume


def fit(run, checkpoint=None):
    run.trainer.fit(run.module, run.data, ckpt_path=checkpoint, weights_only=True)
    return run


def test_a_run_that_fails_saves_its_last_state(composed, tmp_path):
    run = build_training(composed("trainer.max_steps=5"), tmp_path)
    calls = []

    def fail(*_):
        calls.append(1)
        if len(calls) > 6 and run.module.training:
            raise RuntimeError("failed on purpose")

    run.module.model.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(run)
    assert (
        load_checkpoint(tmp_path / "checkpoints" / "last.ckpt")["global_step"]
        == run.trainer.global_step
    )


def test_resume_finds_a_file_or_a_folder_or_starts_over(tmp_path):
    folder = tmp_path / "checkpoints"
    assert load_resume("auto", folder) is None
    folder.mkdir()
    last = folder / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"a": 1}, last)
    for resume in ("auto", str(tmp_path), str(last)):
        loaded = load_resume(resume, folder)
        assert (loaded.path, loaded.content) == (last, {"a": 1})
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
