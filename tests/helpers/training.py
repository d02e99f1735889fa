"""Train a run that was built, as `unet3d train` does."""

from unet3d.errors import SignalListener
from unet3d.training.run import explain_errors


def fit(run, checkpoint=None, signals=None):
    with explain_errors(run, checkpoint, signals or SignalListener()):
        path = None if checkpoint is None else str(checkpoint)
        run.trainer.fit(run.module, run.data, ckpt_path=path, weights_only=True)
