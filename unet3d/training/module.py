"""The LightningModule: training, validation and optimizer steps of a segmentation network."""

from collections.abc import Callable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from unet3d.errors import RunError
from unet3d.inference.sliding_window import SlidingWindow
from unet3d.metric.case_scores import CaseScores, ValidationHD95
from unet3d.metric.dice import Dice, mask_unknown
from unet3d.training.cuda_graph import RecordedPass
from unet3d.training.distributed import gather_in_case_order, share_buffers
from unet3d.training.loggers import log_values
from unet3d.training.nonfinite import NonFiniteGuard
from unet3d.training.schedules import RunSchedule, get_rate
from unet3d.types import Sample


class SegmentationModule(pl.LightningModule):
    """Train and validate a segmentation network.

    `metadata` is saved in every checkpoint: plain values from which the network and the
    preprocessing are rebuilt, so that a checkpoint alone is enough to predict. `scheduler` takes
    the optimizer, and a function that returns the fraction of the run that is done; up to
    `head_warmup`, only `heads` learn. With a `recorded_pass`, forward and backward are replayed as
    CUDA graphs. `unknown_classes` are those that a label may stand for, besides the background.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        loss: nn.Module,
        metric: Dice,
        validation_hd95: ValidationHD95 | None,
        case_scores: CaseScores | None = None,
        sliding_window: SlidingWindow,
        optimizer: Callable[[], Optimizer],
        scheduler: Callable[[Optimizer, Callable[[], float]], LRScheduler],
        fraction_done: Callable[[pl.Trainer], float],
        head_warmup: float = 0.0,
        heads: Set[nn.Parameter] = frozenset(),
        max_skipped_steps: int = 0,
        recorded_pass: RecordedPass | None = None,
        unknown_classes: Mapping[int, Sequence[int]] = MappingProxyType({}),
    ):
        super().__init__()
        self.model = model
        self.loss = loss
        self.metric = metric
        self.validation_hd95 = validation_hd95
        self.case_scores = case_scores
        self.sliding_window = sliding_window
        self.optimizer, self.scheduler = optimizer, scheduler
        self.fraction_done = fraction_done
        self.head_warmup, self.heads = head_warmup, heads
        self.metadata: dict[str, Any] = {}
        self.nonfinite_guard = NonFiniteGuard(max_skipped_steps)
        self.recorded_pass = recorded_pass
        self.unknown_classes = unknown_classes

    def on_train_start(self) -> None:
        schedule = self.lr_schedulers()
        if isinstance(schedule, RunSchedule):
            schedule.refresh()

    def on_train_batch_start(self, batch: Sample, batch_idx: int) -> None:
        log_values(self, {"train/lr": get_rate(self.trainer.optimizers[0])})

    def training_step(self, batch: Sample, batch_idx: int) -> Tensor:
        """Return the loss of a batch of patches."""
        self.nonfinite_guard.begin(self.model)
        if self.recorded_pass is None:
            outputs = self.model(batch["image"])
            loss = self.loss(outputs, batch["label"])
        else:
            loss, outputs = self.recorded_pass(batch["image"], batch["label"])
        self.nonfinite_guard.check_loss(self, self.model, batch, outputs, loss)
        value = self.nonfinite_guard.loss  # has been read from the device
        log_values(self, {"loss": value}, prog_bar=True, logger=False)
        log_values(self, {"train/loss": value})
        return loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward, unless the step is skipped."""
        if not self.nonfinite_guard.skipping:
            super().backward(loss, *args, **kwargs)

    def on_train_epoch_end(self) -> None:
        self.nonfinite_guard.finish(self)

    def validation_step(self, batch: Sample, batch_idx: int) -> Tensor | None:
        """Return the predicted classes (B, D, H, W) of full volumes; None for a placeholder."""
        if not batch["case"][0]:
            return None
        scores = self.case_scores
        observe = None if scores is None else scores.begin(batch["label"][0])
        if self.recorded_pass is None:
            prediction = self.sliding_window(batch["image"], self.model, observe)
        else:
            with self.recorded_pass.use_memory():
                prediction = self.sliding_window(batch["image"], self.model, observe)
            prediction = prediction.clone()  # the next replay overwrites the original
        known, batch["label"] = mask_unknown(prediction, batch["label"], self.unknown_classes)
        self.metric.update(known, batch["label"])
        if self.validation_hd95 is not None:
            self.validation_hd95.update(batch["case"], known, batch["label"])
        if scores is not None:
            scores.end(batch["case"][0], known[0], batch["label"][0])
        return prediction

    def on_validation_start(self) -> None:
        share_buffers(self.model, self.trainer.world_size)

    def on_validation_epoch_start(self) -> None:
        self.metric.reset()
        if self.validation_hd95 is not None:
            self.validation_hd95.reset()
        if self.case_scores is not None:
            self.case_scores.reset()

    def on_validation_epoch_end(self) -> None:
        self.metric.matrices = gather_in_case_order(self.trainer, self.metric.matrices)
        scores = self.metric.compute()
        for name, (reference, predicted) in self.metric.voxels().items():
            if reference:
                scores[f"volume_ratio/{name}"] = predicted / reference
        if self.validation_hd95 is not None:
            self.validation_hd95.distances_mm = gather_in_case_order(
                self.trainer, self.validation_hd95.distances_mm
            )
            scores |= self.validation_hd95.compute()
        if self.case_scores is not None:
            self.case_scores.cases = gather_in_case_order(self.trainer, self.case_scores.cases)
            scores |= self.case_scores.compute()
        if not self.trainer.sanity_checking:
            self._step_plateau({f"val/{name}": value for name, value in scores.items()})
        self.log_dict({f"val/{name}": value for name, value in scores.items()})
        self.log("dice", scores["dice"], prog_bar=True, logger=False)

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        for group in optimizer.param_groups:
            group["lr"] *= group.get("lr_factor", 1.0)
            group["initial_lr"] = group["lr"]
        scheduler = self.scheduler(optimizer, lambda: self.fraction_done(self.trainer))
        # A ReduceLROnPlateau is stepped here: Lightning would not after a resumed validation.
        schedule = {"scheduler": scheduler, "interval": "step", "reduce_on_plateau": False}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Step after an optimizer step; those that follow a metric step with each validation."""
        if isinstance(scheduler, ReduceLROnPlateau):
            return
        try:
            scheduler.step()
        except ValueError as error:  # OneCycleLR after its last step
            raise RunError(f"scheduler: {error}") from error

    def _step_plateau(self, scores: Mapping[str, float]) -> None:
        scheduler: Any = self.lr_schedulers()
        if isinstance(scheduler, ReduceLROnPlateau):
            known = {**self.trainer.callback_metrics, **scores}
            scheduler.step(float(known[scheduler.monitor]))

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """In the head warmup, let the optimizer change nothing but the heads."""
        if self.head_warmup and self.fraction_done(self.trainer) < self.head_warmup:
            for parameter in self.model.parameters():
                if parameter not in self.heads:
                    parameter.grad = None

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip with the norm that the check for finite gradients has computed anyway."""
        norm = self.nonfinite_guard.check_gradients(self, self.model, optimizer)
        if norm is not None and gradient_clip_val is not None:
            clip_grads_with_norm_(self.model.parameters(), gradient_clip_val, norm)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any]
    ) -> None:
        """Run forward and backward, and the optimizer unless the step is skipped.

        Gradients are freed at once; Lightning would keep them through the next forward.
        """
        loss = optimizer_closure()
        if not self.nonfinite_guard.skipping:
            super().optimizer_step(epoch, batch_idx, optimizer, lambda: loss)
        self.trainer.optimizers[0].zero_grad()
        self.nonfinite_guard.end_step()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["unet3d"] = self.metadata
        checkpoint["skipped_steps"] = self.nonfinite_guard.skipped

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.nonfinite_guard.skipped = checkpoint.get("skipped_steps", 0)
