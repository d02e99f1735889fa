"""One step of training and validation, as Lightning calls them."""

from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from unet3d.inference.sliding_window import SlidingWindow
from unet3d.lit.distributed import gather_in_case_order
from unet3d.lit.nonfinite import NonFiniteGuard
from unet3d.metric.dice import Dice
from unet3d.metric.validation_hd95 import ValidationHD95
from unet3d.types import Sample


class SegmentationModule(pl.LightningModule):
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
        distances: ValidationHD95 | None,
        infer: SlidingWindow,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        card: dict[str, Any],
        max_skipped_steps: int = 0,
    ):
        super().__init__()
        self.model = model
        self.loss = loss
        self.metric = metric
        self.distances = distances
        self.infer = infer
        self.optimizer = optimizer
        self.card = card
        self.finite = NonFiniteGuard(max_skipped_steps)

    def training_step(self, batch: Sample, batch_idx: int) -> Tensor:
        """The loss of a batch of patches."""
        self.finite.begin(self.model)
        outputs = self.model(batch["image"])
        loss = self.loss(outputs, batch["label"])
        self.log("loss", loss, prog_bar=True, logger=False)
        self.log("train/loss", loss)
        self.finite.check_loss(self, self.model, batch, outputs, loss)
        return loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Not for a step that is left out."""
        if not self.finite.leaving:
            super().backward(loss, *args, **kwargs)

    def on_train_epoch_end(self) -> None:
        self.finite.finish(self)

    def validation_step(self, batch: Sample, batch_idx: int) -> Tensor | None:
        """The predicted classes (B, D, H, W) of whole volumes; None for a stand-in."""
        if not batch["case"][0]:
            return None
        prediction = self.infer(batch["image"], self.model)
        self.metric.update(prediction, batch["label"])
        if self.distances is not None:
            self.distances.update(batch["case"], prediction, batch["label"])
        return prediction

    def on_validation_epoch_start(self) -> None:
        self.metric.reset()
        if self.distances is not None:
            self.distances.reset()

    def on_validation_epoch_end(self) -> None:
        self.metric.matrices = gather_in_case_order(self.trainer, self.metric.matrices)
        scores = self.metric.compute()
        for name, (reference, predicted) in self.metric.voxels().items():
            if reference:
                scores[f"volume_ratio/{name}"] = predicted / reference
        if self.distances is not None:
            self.distances.found = gather_in_case_order(self.trainer, self.distances.found)
            scores |= self.distances.compute()
        self.log_dict({f"val/{name}": value for name, value in scores.items()})
        self.log("dice", scores["dice"], prog_bar=True, logger=False)

    def configure_optimizers(self) -> Optimizer:
        optimizer = self.optimizer(self.model.parameters())
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        return optimizer

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """By the norm that is needed anyway to see whether gradients are finite."""
        norm = self.finite.check_gradients(self, self.model, optimizer)
        if norm is None or gradient_clip_algorithm == "value":
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        elif gradient_clip_val is not None:
            clip_grads_with_norm_(self.model.parameters(), gradient_clip_val, norm)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any]
    ) -> None:
        """Forward and backward, and unless it is left out the optimizer's step.

        Gradients go at once; left to Lightning, they would live through the next forward.
        """
        loss = optimizer_closure()
        if not self.finite.leaving:
            super().optimizer_step(epoch, batch_idx, optimizer, lambda: loss)
        self.trainer.optimizers[0].zero_grad()
        self.finite.end_step()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["unet3d"] = self.card
        checkpoint["skipped_steps"] = self.finite.skipped

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.finite.skipped = checkpoint.get("skipped_steps", 0)
