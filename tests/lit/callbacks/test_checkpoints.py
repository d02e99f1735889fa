import random

import pytest
import torch

from unet3d.config.instantiate import build_network_from_metadata
from unet3d.errors import UsageError
from unet3d.lit.callbacks.checkpoints import PREVIOUS, AtomicCheckpointIO, remove_leftovers
from unet3d.lit.resume import load_checkpoint, load_pretrained, resolve_resume
from unet3d.workflows.training.build import build_training


def fitted(run, checkpoint=None):
    run.trainer.fit(
        run.task, run.train_loader, run.val_loader, ckpt_path=checkpoint, weights_only=True
    )
    return run


def test_a_run_leaves_last_and_best_that_load_without_code(composed, tmp_path):
    fitted(build_training(composed(), tmp_path))
    for name in ("last.ckpt", "best.ckpt"):
        content = torch.load(tmp_path / "checkpoints" / name, weights_only=True)
        assert content["global_step"] == 1
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "best.ckpt",
        "last.ckpt",
    ]


def test_a_checkpoint_alone_is_enough_to_predict_with(composed, tmp_path):
    run = fitted(build_training(composed("model.width=4", "pool=median"), tmp_path))
    content = load_checkpoint(tmp_path / "checkpoints" / "last.ckpt")
    card = content["unet3d"]
    network = build_network_from_metadata(card)
    network.load_state_dict({k.removeprefix("model."): v for k, v in content["state_dict"].items()})
    x = torch.randn(1, 1, 16, 16, 16)
    with torch.no_grad():
        assert network.eval()(x).equal(run.task.model.eval()(x))
    assert card["classes"] == ["background", "ball", "tube", "box"]
    assert card["preparation"]["orientation"] == "RAS"


def test_a_run_that_breaks_leaves_its_last_state(composed, tmp_path):
    run = build_training(composed("trainer.max_steps=5"), tmp_path)
    calls = []

    def breaks(*_):
        calls.append(1)
        if len(calls) > 6 and run.task.training:
            raise RuntimeError("broken on purpose")

    run.task.model.register_forward_pre_hook(breaks)
    with pytest.raises(RuntimeError, match="on purpose"):
        fitted(run)
    assert (
        load_checkpoint(tmp_path / "checkpoints" / "last.ckpt")["global_step"]
        == run.trainer.global_step
    )


def test_a_failed_write_leaves_the_checkpoint_that_was_there(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    io = AtomicCheckpointIO()
    io.save_checkpoint({"a": 1}, path)

    def full(content, file):
        file.write(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="no space"):
        io.save_checkpoint({"a": 2}, path)
    assert torch.load(path, weights_only=True) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_resumed_run_goes_on_counting(composed, tmp_path):
    fitted(build_training(composed("trainer.max_steps=2"), tmp_path))
    again = build_training(composed("trainer.max_steps=4"), tmp_path)
    fitted(again, resolve_resume("auto", tmp_path / "checkpoints")[0])
    assert again.trainer.global_step == 4


def test_resume_finds_a_file_a_folder_or_nothing(tmp_path):
    folder = tmp_path / "checkpoints"
    assert resolve_resume("auto", folder) == (None, [])
    folder.mkdir()
    last = folder / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"a": 1}, last)
    for resume in ("auto", str(tmp_path), str(last)):
        assert resolve_resume(resume, folder)[0] == last
    with pytest.raises(UsageError, match="there is no checkpoint at"):
        resolve_resume(str(tmp_path / "other"), folder)


def test_two_damaged_checkpoints_are_no_reason_to_begin_anew_silently(tmp_path):
    (tmp_path / "last.ckpt").write_bytes(b"half")
    (tmp_path / PREVIOUS).write_bytes(b"half")
    with pytest.raises(UsageError, match="no whole one before it"):
        resolve_resume("auto", tmp_path)


def test_every_flipped_bit_that_matters_is_seen(tmp_path):
    path = tmp_path / "x.ckpt"
    content = {"weights": torch.arange(50.0), "name": "a network"}
    AtomicCheckpointIO().save_checkpoint(content, path)
    good = path.read_bytes()
    rng = random.Random(0)
    for _ in range(300):
        bad = bytearray(good)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        try:
            found = load_checkpoint(path)
        except UsageError:
            continue
        assert found["weights"].equal(content["weights"])
        assert found["name"] == content["name"]


def test_drafts_of_killed_runs_are_swept(tmp_path):
    for name in (".123-last.ckpt", "best.ckpt", ".hidden"):
        (tmp_path / name).touch()
    remove_leftovers(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".hidden", "best.ckpt"]


def test_init_takes_what_fits_and_says_what_was_left_out(composed, tmp_path):
    run = fitted(build_training(composed(), tmp_path))
    other = build_training(composed("data.num_classes=5"), tmp_path / "other")
    said = load_pretrained(other.task.model, tmp_path / "checkpoints" / "last.ckpt")
    assert "heads.0.weight" in said
    assert "encoder" not in said.split("random")[1]
    key = "encoder.0.convs.0.conv.weight"
    assert other.task.model.state_dict()[key].equal(run.task.model.state_dict()[key])


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", [1, 2]])
def test_a_file_that_is_no_checkpoint_is_refused(tmp_path, content):
    path = tmp_path / "x.ckpt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(UsageError, match=r"x\.ckpt"):
        load_checkpoint(path)
