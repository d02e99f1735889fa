"""One step of training and validation, as Lightning calls them."""

from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unet3d.infer.sliding import SlidingWindow
from unet3d.metric.dice import Dice
from unet3d.types import Fault, Sample


class SegmentationTask(pl.LightningModule):
    """A network, what it is judged by, and how it learns.

    `card` goes into every checkpoint: plain values from which the network can be built again and
    volumes prepared, so that a checkpoint alone is enough to predict with.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        loss: nn.Module,
        metric: Dice,
        infer: SlidingWindow,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        card: dict[str, Any],
    ):
        super().__init__()
        self.model = model
        self.loss = loss
        self.metric = metric
        self.infer = infer
        self.optimizer = optimizer
        self.card = card

    def training_step(self, batch: Sample, batch_idx: int) -> Tensor:
        """The loss of a batch of patches."""
        loss = self.loss(self.model(batch["image"]), batch["label"])
        self.log("loss", loss, prog_bar=True, logger=False)
        self.log("train/loss", loss)
        if not torch.isfinite(loss):
            cases = ", ".join(batch["case"])
            raise Fault(f"the loss is {loss.item()} at step {self.global_step}, cases {cases}")
        return loss

    def validation_step(self, batch: Sample, batch_idx: int) -> Tensor | None:
        """The predicted classes (B, D, H, W) of whole volumes; None for a stand-in."""
        if not batch["case"][0]:
            return None
        prediction = self.infer(batch["image"], self.model)
        self.metric.update(prediction, batch["label"])
        return prediction

    def on_validation_epoch_start(self) -> None:
        self.metric.reset()

    def on_validation_epoch_end(self) -> None:
        scores = self.metric.compute()
        self.log_dict({f"val/{name}": value for name, value in scores.items()})
        self.log("dice", scores["dice"], prog_bar=True, logger=False)

    def configure_optimizers(self) -> Optimizer:
        optimizer = self.optimizer(self.model.parameters())
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        return optimizer

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Gradients go at once; left to Lightning, they would live through the next forward."""
        super().optimizer_step(*args, **kwargs)
        self.trainer.optimizers[0].zero_grad()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["unet3d"] = self.card
