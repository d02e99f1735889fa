"""The LightningModule: training, validation and optimizer steps of a segmentation network."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, distributed, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from unet3d.checkpoint_file import FORMAT_VERSION
from unet3d.cuda_graphs import CudaGraphs, GraphedPass
from unet3d.data.dataset import get_network_sizes
from unet3d.data.formats.volumes import find_format
from unet3d.data.preprocessing.statistics import summarize_statistics
from unet3d.errors import UsageError
from unet3d.evaluation.options import build_metrics
from unet3d.inference.label_writer import choose_label_function
from unet3d.inference.sliding_window import SlidingWindow
from unet3d.loss.build import check_loss
from unet3d.machine import Precision
from unet3d.metric.case_scores import CaseMetricAccumulator
from unet3d.metric.dice import Dice, mask_unannotated
from unet3d.step.build import group_parameters, list_head_parameters, make_optimizer_factory
from unet3d.step.config import list_data_values
from unet3d.step.training_step import TrainingStep
from unet3d.text import MANY_CLASSES
from unet3d.training.callbacks.stopping import StoppingLimits
from unet3d.training.config import TrainConfig
from unet3d.training.datamodule import VolumeDataModule
from unet3d.training.distributed import gather_in_case_order
from unet3d.training.loggers import get_metric, log_values
from unet3d.training.nonfinite import NonFiniteGuard
from unet3d.training.schedules import FractionSchedule, build_scheduler, get_rate
from unet3d.types import Sample


class SegmentationModule(LightningModule):
    """Train and validate a segmentation network.

    `metadata` is saved in every checkpoint: plain values from which the network and the
    preprocessing are rebuilt, so that a checkpoint alone is enough to predict. With `graphs`,
    forward and backward are replayed as CUDA graphs.
    """

    def __init__(
        self,
        data: VolumeDataModule,
        precision: Precision,
        network: nn.Module,
        *,
        limits: StoppingLimits,
        graphs: CudaGraphs | None,
    ):
        super().__init__()
        settings, dataset, step = data.settings, data.dataset, data.settings.step
        step.checkpointing().apply(network)
        if step.compile:
            network.compile()  # in place: names and checkpoints do not change
        self.model, self.loss = network, step.build_loss()
        check_loss(self.loss, dataset.num_outputs, len(dataset.classes))
        self.step = TrainingStep(
            model=network,
            loss=self.loss,
            sliding_window=SlidingWindow(
                list(step.data.patch_size),
                decide=choose_label_function(dataset.regions, dataset.region_labels),
                overlap=step.windows.overlap,
                batch_size=step.windows.batch_size,
            ),
            clip_norm=step.clip_norm,
        )
        if graphs is not None:
            self.step.graphed_pass = GraphedPass(
                network,
                self.loss,
                graphs,
                accumulates=step.micro_batches > 1,
                trusted=step.cuda_graph is True,
            )
        self.nonfinite_guard = NonFiniteGuard(network, limits.ranks, settings.max_skipped_steps)
        self.metadata: dict[str, Any] = {}

        make_optimizer = make_optimizer_factory(step.optimizer, precision)
        groups = partial(group_parameters, network, step.head_warmup, step.lr_factors)
        self.optimizer: Callable[[], Optimizer] = lambda: make_optimizer(groups())
        self.scheduler, self.limits = settings.scheduler, limits
        self.head_warmup = step.head_warmup  # fraction of the run in which only the heads learn
        self.heads = list_head_parameters(network) if step.head_warmup else set()
        groups()  # refuse what the network does not have before any volume is read
        build_scheduler(self.scheduler, make_optimizer([nn.Parameter(torch.zeros(1))]), lambda: 0.0)

        self.metric = Dice(dataset.classes, dataset.regions)
        classes = self.metric.scored_classes
        extra = build_metrics(settings.metrics, dataset.regions)
        self.case_scores = CaseMetricAccumulator(
            extra, classes, data.spacing_mm, hd95=settings.validate_hd95
        )
        self.metrics: tuple[Any, ...] = self.metric, self.case_scores
        self.annotations = dataset.annotations
        self.unannotated_classes = step.data.unannotated_classes  # for which a label may stand
        self.patch_size, self.num_classes = step.data.patch_size, len(dataset.classes)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("model", "loss") and "step" in self.__dict__:
            raise UsageError(f"a callback replaces the {name} of the run: change its attributes")
        super().__setattr__(name, value)

    def on_train_start(self) -> None:
        schedule = self.lr_schedulers()
        if isinstance(schedule, FractionSchedule):
            schedule.recompute()

    def on_train_batch_start(self, batch: Sample, batch_idx: int) -> None:
        log_values(self, {"train/lr": get_rate(self.trainer.optimizers[0])})

    def training_step(self, batch: Sample, batch_idx: int) -> Tensor:
        self.nonfinite_guard.begin()
        inspect = partial(self.nonfinite_guard.check_loss, self, batch)
        loss = self.step.compute_loss(batch["image"], batch["label"], inspect)
        value = self.nonfinite_guard.step_loss  # has been read from the device
        log_values(self, {"loss": value}, prog_bar=True, logger=False)
        log_values(self, {"train/loss": value})
        weight = self.get_loss_weight(batch_idx)
        return loss if weight == 1 else loss * weight

    def get_loss_weight(self, batch_idx: int) -> float:
        """Return the weight of a batch whose gradient is accumulated with fewer others than most.

        Lightning divides by `accumulate_grad_batches` even where an epoch ends before.
        """
        batches, whole = self.trainer.num_training_batches, self.trainer.accumulate_grad_batches
        rest = int(batches % whole)
        return whole / rest if rest and batch_idx >= batches - rest else 1.0

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
        recorded, observe = self.step.graphed_pass, self.case_scores.begin(batch["label"][0])
        with nullcontext() if recorded is None else recorded.use_memory():
            patch = crop_foreground(
                batch["image"], batch["label"], self.patch_size, self.num_classes
            )
            loss, prediction = self.step.validate_volume(batch["image"], patch, observe)
        if recorded is not None:
            prediction = prediction.clone()  # the next replay overwrites the original
        case, annotations = batch["case"][0], self.annotations
        background = annotations.get_background_label(case) if annotations else 0
        unknown = self.unannotated_classes.get(background, ())
        known, batch["label"] = mask_unannotated(prediction, batch["label"], background, unknown)
        self.metric.update(known, batch["label"])
        self.case_scores.end(case, known[0], batch["label"][0], loss=loss)
        return prediction

    def on_validation_start(self) -> None:
        if self.trainer.world_size > 1:  # all ranks validate with the statistics of a checkpoint
            for buffer in self.model.buffers():
                distributed.broadcast(buffer, 0)

    def on_validation_epoch_start(self) -> None:
        for metric in self.metrics:
            metric.reset()

    def on_validation_epoch_end(self) -> None:
        scores: dict[str, float] = {}
        for metric in self.metrics:
            metric.cases = gather_in_case_order(self.trainer, metric.cases)
            scores |= metric.compute()
        for name, (reference, predicted) in self.metric.voxels().items():
            if reference:
                scores[f"volume_ratio/{name}"] = predicted / reference
        values = {f"val/{name}": value for name, value in scores.items()}
        schedule: Any = self.lr_schedulers()
        if isinstance(schedule, ReduceLROnPlateau) and not self.trainer.sanity_checking:
            known = {**self.trainer.callback_metrics, **values}
            schedule.step(get_metric(known, schedule.monitor))
        means = {name: value for name, value in values.items() if name.count("/") == 1}
        shows_all = len(self.metric.scored_classes) <= MANY_CLASSES
        self.log_dict({n: v for n, v in values.items() if shows_all or n in means})
        if not shows_all:  # a logger would have a curve for each
            self.log_dict({n: v for n, v in values.items() if n not in means}, logger=False)
        self.log("dice", scores["dice"], prog_bar=True, logger=False)

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        for group in optimizer.param_groups:
            group["lr"] *= group.get("lr_factor", 1.0)
        scheduler = build_scheduler(
            self.scheduler, optimizer, lambda: self.limits.fraction_done(self.trainer)
        )
        for group in optimizer.param_groups:  # not before: some schedulers begin at their own rate
            group.setdefault("initial_lr", group["lr"])
        schedule = {
            "scheduler": scheduler,
            "interval": "step",
            "reduce_on_plateau": False,  # Lightning would not step it after a resumed validation
        }
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Step after an optimizer step; those that follow a metric step with each validation."""
        if not isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step()

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """In the head warmup, let the optimizer change nothing but the heads."""
        if self.head_warmup and self.limits.fraction_done(self.trainer) < self.head_warmup:
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
        if gradient_clip_val is not None:  # that a callback has set
            self.step.clip_norm = gradient_clip_val
        norm = self.nonfinite_guard.check_gradients(self, optimizer)
        if norm is not None:
            self.step.clip_gradients(norm)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any]
    ) -> None:
        """Run forward and backward, and the optimizer unless the step is skipped."""
        losses, take_step = [optimizer_closure()], super().optimizer_step
        name = type(self.trainer.optimizers[0]).__name__

        def get_loss() -> Any:
            if not losses:
                raise UsageError(
                    f"{name} computes the loss more than once in a step, as LBFGS and SAM do: "
                    "choose another optimizer"
                )
            return losses.pop()

        def update() -> None:
            if not self.nonfinite_guard.skipping:
                take_step(epoch, batch_idx, optimizer, get_loss)
                if losses:  # gradients were neither checked nor clipped
                    raise UsageError(f"{name}.step(closure) must call the closure first")

        self.step.update(self.trainer.optimizers[0], update)
        self.nonfinite_guard.end_step()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["unet3d"] = self.metadata
        checkpoint["skipped_steps"] = self.nonfinite_guard.skipped

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.nonfinite_guard.skipped = checkpoint.get("skipped_steps", 0)


def crop_foreground(
    image: Tensor, label: Tensor, size: Sequence[int], num_classes: int
) -> tuple[Tensor, Tensor]:
    """Return the patch around the middle of the foreground of a volume (1, C, D, H, W).

    Labels that are no class stand for ignored or unannotated voxels. A volume that is smaller is
    padded with zeros.
    """
    is_foreground = (label[0] > 0) & (label[0] < num_classes)
    box, padding = [], []
    for axis, (length, whole) in enumerate(zip(size, label.shape[1:], strict=True)):
        others = [n for n in range(3) if n != axis]
        found = is_foreground.any(others[1]).any(others[0]).nonzero().flatten()
        middle = (int(found[[0, -1]].sum()) + 1) // 2 if len(found) else whole // 2
        start = max(0, min(middle - length // 2, whole - length))
        box.append(slice(start, start + length))
        padding = [0, max(0, length - whole), *padding]  # F.pad counts axes from the last
    image, label = image[:, :, *box], label[:, *box]
    return (F.pad(image, padding), F.pad(label, padding)) if any(padding) else (image, label)


def make_config_record(settings: TrainConfig) -> dict[str, Any]:
    """Return the config from which the network can be built again; the settings are complete."""
    step, resolved = settings.step, settings.resolved
    in_channels, num_outputs = get_network_sizes(step.data)
    model = step.network.bind(in_channels=in_channels, num_outputs=num_outputs).model
    return {
        **resolved,
        "model": {**resolved["model"], **model.arguments},
        "data": {**resolved["data"], **list_data_values(step.data)},
        "loss": dict(step.loss.arguments),
        "checkpointing": dict(step.checkpointing.arguments),
    }


def make_metadata(config: dict[str, Any], data: VolumeDataModule) -> dict[str, Any]:
    """Return what a checkpoint says about its network and the data that it was trained on."""
    statistics = summarize_statistics([volume.statistics for volume in data.training])
    return {
        "format_version": FORMAT_VERSION,
        "config": config,
        "classes": list(data.dataset.classes),
        "channels": list(data.dataset.channels),
        "regions": config["data"]["regions"],
        "region_labels": config["data"]["region_labels"],
        "preprocessing": data.preprocessing.to_dict(),
        "training_statistics": statistics.to_dict(),
        # Axes of the network's input; None if a user's augmentation does not report them.
        "mirroring_axes": getattr(data.augment, "mirroring_axes", None),
        "names_axes": any(find_format(v.case.images[0]).names_axes for v in data.training),
    }
