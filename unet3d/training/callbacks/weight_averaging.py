"""Validate with an exponential moving average of the weights, and save it.

Lightning's WeightAveraging saves the average as if it were trained when validation is interrupted,
and when training ends, so a resumed run is another one.
"""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from unet3d.model.weights import WeightAverage


class WeightAveraging(Callback):
    """Average the network's weights after each optimizer step.

    The step updates it, and validation runs with it. The weights of a checkpoint are the average;
    those that are trained on are beside it.
    """

    PREFIX = "model."  # of the network in the module
    average: WeightAverage  # once the run starts

    def __init__(self, decay: float):
        self.decay = decay
        self.loaded: dict[str, Tensor] = {}
        self.updates = 0

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self.loaded = {
            name.removeprefix(self.PREFIX): value
            for name, value in checkpoint["state_dict"].items()
        }
        pl_module.load_state_dict(checkpoint["trained_weights"], strict=False)
        self.updates = checkpoint["averaged_steps"]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module: Any = pl_module
        self.average = module.step.average = WeightAverage(module.model, self.decay)
        if self.loaded:
            for name, average in self.average.values.items():
                average.copy_(self.loaded[name])
            self.average.updates, self.loaded = self.updates, {}

    def on_validation_start(self, *_: Any) -> None:
        self.average.apply()

    def on_validation_end(self, *_: Any) -> None:
        self.average.restore()

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        trained = self.average.get_trained()
        named = {f"{self.PREFIX}{name}": value for name, value in self.average.values.items()}
        checkpoint["state_dict"] = {**checkpoint["state_dict"], **named}
        checkpoint["trained_weights"] = {f"{self.PREFIX}{k}": v for k, v in trained.items()}
        checkpoint["averaged_steps"] = self.average.updates
