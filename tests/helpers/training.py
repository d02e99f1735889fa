"""Train a run that was built, as `unet3d train` does, and choose what it measures."""

from lightning.pytorch.callbacks import Callback

from unet3d.signals import SignalListener
from unet3d.training.run import explain_errors


def fit(run, checkpoint=None, signals=None):
    with explain_errors(run, checkpoint, signals or SignalListener()):
        path = None if checkpoint is None else str(checkpoint)
        run.trainer.fit(run.module, run.data, ckpt_path=path, weights_only=True)


class GiveDistances(Callback):
    """Let validations measure these distances, one after another."""

    def __init__(self, *values):
        self.values = iter(values)

    def on_validation_start(self, trainer, module):
        if not trainer.sanity_checking:
            module.case_scores.compute = lambda: {"hd95_mm": next(self.values)}
