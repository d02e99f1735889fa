"""Errors of training are explained by what caused them."""

import pytest
from lightning.pytorch.callbacks import Callback

from tests.helpers.training import fit
from unet3d.commands.train import build_training
from unet3d.errors import UsageError
from unet3d.stop_signals import SignalListener


class RaiseOnLoad(Callback):
    def __init__(self, error):
        self.error = error

    def on_load_checkpoint(self, trainer, pl_module, checkpoint):
        raise self.error


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (KeyError("x"), UsageError, r"last\.ckpt: it cannot be restored: KeyError: 'x'"),
        (RuntimeError("NCCL communicator was aborted"), RuntimeError, "^NCCL communicator"),
        (RuntimeError("CUDA error: unspecified launch failure"), RuntimeError, "^CUDA error"),
    ],
)
def test_a_checkpoint_is_blamed_only_for_what_its_content_can_cause(
    composed, tmp_path, error, expected, message
):
    settings = composed("trainer.max_steps=1", "fold=none", "logger=none")
    fit(build_training(settings, tmp_path), None, SignalListener())
    run = build_training(settings, tmp_path)
    run.trainer.callbacks.append(RaiseOnLoad(error))
    with pytest.raises(expected, match=message):
        fit(run, tmp_path / "checkpoints" / "last.ckpt", SignalListener())
