import pytest
import torch

from unet3d.checkpoint_file import load_checkpoint
from unet3d.commands.train import build_training
from unet3d.components.network import build_saved_network
from unet3d.errors import UsageError
from unet3d.training.checkpoints import PREVIOUS, AtomicCheckpointIO, remove_leftovers
from unet3d.training.resume import load_pretrained, load_resume


def fit(run, checkpoint=None):
    run.trainer.fit(run.module, run.data, ckpt_path=checkpoint, weights_only=True)
    return run


def test_a_run_leaves_last_and_best_that_load_without_code(composed, tmp_path):
    fit(build_training(composed(), tmp_path))
    for name in ("last.ckpt", "best.ckpt"):
        content = torch.load(tmp_path / "checkpoints" / name, weights_only=True)
        assert content["global_step"] == 1
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "best.ckpt",
        "last.ckpt",
    ]


def test_a_checkpoint_alone_is_enough_to_predict(composed, tmp_path):
    run = fit(build_training(composed("model.width=4", "pool=median"), tmp_path))
    content = load_checkpoint(tmp_path / "checkpoints" / "last.ckpt")
    metadata = content["unet3d"]
    network = build_saved_network(metadata, ())
    network.load_state_dict({k.removeprefix("model."): v for k, v in content["state_dict"].items()})
    x = torch.randn(1, 1, 16, 16, 16)
    with torch.no_grad():
        assert network.eval()(x).equal(run.module.model.eval()(x))
    assert metadata["classes"] == ["background", "ball", "tube", "box"]
    assert metadata["preprocessing"]["orientation"] == "RAS"


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


def test_a_failed_save_keeps_the_existing_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    io = AtomicCheckpointIO()
    io.save_checkpoint({"a": 1}, path)

    def fail(content, file):
        file.write(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", fail)
    io.save_checkpoint({"a": 2}, path)
    assert "no space" in io.failed_saves["last.ckpt"]
    assert torch.load(path, weights_only=True) == {"a": 1}
    assert {p.name for p in tmp_path.iterdir()} == {"last.ckpt", "previous.ckpt"}


def test_a_resumed_run_continues_to_count_steps(composed, tmp_path):
    fit(build_training(composed("trainer.max_steps=2"), tmp_path))
    resumed = build_training(composed("trainer.max_steps=4"), tmp_path)
    fit(resumed, load_resume("auto", tmp_path / "checkpoints").path)
    assert resumed.trainer.global_step == 4


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


def test_pretrained_weights_that_match_are_loaded_and_the_others_listed(composed, tmp_path):
    run = fit(build_training(composed(), tmp_path))
    other = build_training(composed("data.num_classes=5"), tmp_path / "other")
    message = load_pretrained(other.module.model, tmp_path / "checkpoints" / "last.ckpt")
    assert "heads.0.weight" in message
    assert "encoder" not in message.split("randomly")[1]
    key = "encoder.0.convs.0.conv.weight"
    assert other.module.model.state_dict()[key].equal(run.module.model.state_dict()[key])
