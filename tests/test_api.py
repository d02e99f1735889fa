"""Training and evaluation from Python refuse what the commands refuse, as an error to catch."""

import logging
import warnings
from contextlib import nullcontext

import nibabel as nib
import numpy as np
import pytest
import torch

import unet3d
from unet3d.checkpoint_file import load_checkpoint
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


def test_scores_come_with_the_warnings_of_the_command_or_are_refused(tmp_path):
    for name, sizes in (("a", (8, 8, 8)), ("b", (9, 8, 8))):
        (tmp_path / name).mkdir()
        labels = nib.nifti1.Nifti1Image(np.ones(sizes, np.uint8), np.diag([0.001, 0.001, 0.001, 1]))
        nib.save(labels, tmp_path / name / "case.nii.gz")
    with pytest.warns(UserWarning, match="surface Dice accepts errors of 1 mm") as warned:
        unet3d.evaluate(tmp_path / "a", tmp_path / "a")
    assert warned[0].filename == __file__
    with pytest.raises(UsageError, match=r"no case could be scored; case: .* has shape"):
        unet3d.evaluate(tmp_path / "a", tmp_path / "b", tolerance_mm=0.001)


@pytest.mark.slow
@pytest.mark.parametrize("choice", [True, False])
def test_a_run_gives_the_callers_settings_back(small, tmp_path, monkeypatch, choice):
    def read_settings():
        level = logging.getLogger("lightning.pytorch").level
        return torch.get_deterministic_debug_mode(), cudnn.benchmark, cudnn.deterministic, level

    cudnn = torch.backends.cudnn
    for name in ("benchmark", "deterministic"):
        monkeypatch.setattr(cudnn, name, choice)
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "level", logging.DEBUG)
    torch.use_deterministic_algorithms(choice)
    before, filters = read_settings(), list(warnings.filters)
    try:
        unet3d.train([*small, f"trainer.deterministic={not choice}"], folder=tmp_path)
        assert (read_settings(), warnings.filters) == (before, filters)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.slow
def test_a_run_does_not_depend_on_the_modes_of_its_caller(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words, weights = [*small, "trainer.max_steps=2"], []
    modes = torch.autocast("cpu", torch.bfloat16), torch.no_grad(), torch.inference_mode()
    for n, mode in enumerate((nullcontext(), *modes)):
        name = ["1e3", "true", "null", "07"][n]  # a folder's name is no number or word of YAML
        with mode:
            unet3d.train(words, folder=name)
        content = load_checkpoint(tmp_path / name / "checkpoints" / "last.ckpt")
        weights.append(content["state_dict"])
    for others in weights[1:]:
        assert all(torch.equal(value, others[name]) for name, value in weights[0].items())
