"""What loggers show besides curves: cases, config, choices, memory, final metrics."""

import re
from collections.abc import Mapping, Sequence
from textwrap import indent
from typing import Any

import numpy as np
import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from torch import Tensor

from unet3d.data.preprocessing.channels import get_directions, reorient
from unet3d.errors import UsageError
from unet3d.memory.estimate import MemoryEstimate
from unet3d.memory.report import plot_layers, plot_timeline
from unet3d.report.slices import draw_case_slices, find_fullest_slices, get_palette
from unet3d.text import MANY_CLASSES
from unet3d.training.datamodule import VolumeDataModule
from unet3d.training.loggers import FINAL_METRICS, close_logger, log_image
from unet3d.types import Sample, Triple, get_ignore_label

CHARTS = {
    "Quality": {
        "loss": ["^train/loss$", "^val/loss$"],
        "Dice, mean": ["^val/dice$"],
        "HD95 in mm, mean and classes": ["^val/hd95_mm$", "^val/hd95_mm/"],
        "predicted voxels / reference voxels": ["^val/volume_ratio/"],
    },
    "Memory": {
        "peak of a step in MiB": [
            "^memory/step_peak_(allocated|reserved|process|above_start)_mib$",
            "^memory/estimated_step_peak_mib$",
        ],
        "peak by phase in MiB": [
            "^memory/(forward|backward|optimizer|validation)_peak_(allocated|above_start)_mib$"
        ],
        "RAM of the process in MiB": ["^memory/step_peak_resident_mib$"],
    },
    "Speed": {
        "seconds of a step": ["^speed/step_seconds$"],
        "volumes per second": ["^speed/volumes_per_second$"],
        "fraction of a step spent waiting for data": ["^speed/data_wait_fraction$"],
        "GPU utilization in percent": ["^speed/gpu_utilization_percent$"],
    },
}
"""Charts of TensorBoard's Custom Scalars by page, each with regular expressions for its tags; one
without a final $ matches every tag that starts so."""


class RunLogger(Callback):
    """Log the config and the estimated memory at the start, and the final metrics at the end.

    `choices` are the hyperparameters in which this run differs from its neighbors.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        choices: Mapping[str, Any],
        title: str,
        class_names: Sequence[str],
    ):
        self.config, self.choices, self.title = config, choices, title
        self.class_names = class_names
        self.estimate: MemoryEstimate | None = None
        self.loggers: list[Logger] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.loggers = trainer.loggers if trainer.is_global_zero else []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        step = trainer.global_step
        for logger in self.loggers:
            logger.log_hyperparams(dict(self.choices))
            self._log_config(logger, step, has_gpu=pl_module.device.type == "cuda")
        if self.estimate is not None and self.loggers:
            from matplotlib.backends.backend_agg import FigureCanvasAgg

            for name, draw in (("timeline", plot_timeline), ("layers", plot_layers)):
                canvas = FigureCanvasAgg(draw(self.estimate, self.title))
                canvas.draw()
                image = np.asarray(canvas.buffer_rgba())[..., :3]  # (H, W, 3)
                for logger in self.loggers:
                    log_image(logger, f"memory/{name}", image, step)

    def _log_config(self, logger: Logger, step: int, *, has_gpu: bool) -> None:
        """Show the config; in TensorBoard, also group the curves into charts."""
        text = yaml.safe_dump(self.config, sort_keys=False)
        match logger:
            case TensorBoardLogger():
                writer: Any = logger.experiment
                writer.add_text("config", indent(text, "    "), step)  # Markdown for code
                layout = {
                    page: {
                        name: ["Multiline", tags]
                        for name, tags in charts.items()
                        if not name.startswith("RAM" if has_gpu else "GPU")
                    }
                    for page, charts in CHARTS.items()
                }
                # All lines of a run have its color, so each class has a chart of its own.
                if len(self.class_names) <= MANY_CLASSES:
                    layout["Dice by class"] = {
                        name: ["Multiline", [f"^val/dice/{re.escape(name)}$"]]
                        for name in self.class_names
                    }
                writer.add_custom_scalars(layout)
            case WandbLogger():
                logger.log_hyperparams({"config": self.config})
            case MLFlowLogger():
                logger.experiment.log_text(logger.run_id, text, "config.yaml")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the Dice of many classes as a histogram, in TensorBoard."""
        if trainer.sanity_checking or len(self.class_names) <= MANY_CLASSES:
            return
        metrics = trainer.callback_metrics
        dice = np.array([float(metrics[f"val/dice/{name}"]) for name in self.class_names])
        for logger in self.loggers:
            if isinstance(logger, TensorBoardLogger) and not np.isnan(dice).all():
                step = trainer.global_step - 1
                logger.experiment.add_histogram("val/dice by class", dice[~np.isnan(dice)], step)

    def finish(self, metrics: Mapping[str, float], step: int, *, finished: bool) -> None:
        """Log the final metrics and close the loggers."""
        values = {f"final/{name}": value for name, value in metrics.items()}
        final = {name: values[name] for name in FINAL_METRICS if name in values}
        for logger in self.loggers:
            if final:
                logger.log_metrics(final, step)
            close_logger(logger, finished=finished)
        self.loggers = []


class CaseImages(Callback):
    """Log slices of the first `cases` volumes, with reference and prediction."""

    def __init__(self, *, cases: int = 3):
        if cases < 0:
            raise UsageError(f"callbacks.case_images.cases must be 0 or more, got {cases}")
        self.cases = cases
        self.slices: dict[str, Triple] = {}
        self.latest: tuple[str, np.ndarray] | None = None  # the first case, with a title

    def on_validation_start(self, trainer: Any, pl_module: LightningModule) -> None:
        data: VolumeDataModule = trainer.datamodule
        self.set_up_views(data.dataset.classes, data.settings.data.orientation, data.spacing_mm)

    def set_up_views(
        self,
        class_names: Sequence[str],
        orientation: str,
        spacing_mm: Mapping[str, Sequence[float]],
    ) -> None:
        """Take the orientation code of the preprocessed volumes, and their spacing by case."""
        self.spacing_mm = spacing_mm
        colors = get_palette(len(class_names) - 1)
        self.legend = list(zip(class_names[1:], colors, strict=True))
        directions = get_directions(orientation)
        across = ("left-right", "front-back", "up-down")  # sagittal, coronal and axial slices
        sagittal, coronal, axial = map(directions.index, across)
        self.axes: Triple = (sagittal, coronal, axial)
        self.flips = [orientation[axis] in "LPI" for axis in self.axes]

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Sample,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if batch_idx >= self.cases or trainer.sanity_checking or outputs is None:
            return
        if not trainer.is_global_zero:
            return
        case = batch["case"][0]
        rgb = self.draw(case, batch["image"][0, 0], batch["label"][0], outputs[0])
        if batch_idx == 0:
            self.latest = f"{case} after {trainer.global_step:,} steps", rgb
        for logger in trainer.loggers:
            log_image(logger, f"cases/{case}", rgb, trainer.global_step - 1)

    def draw(self, case: str, image: Tensor, reference: Tensor, prediction: Tensor) -> np.ndarray:
        """Return an RGB image (H, W, 3) of volumes (D, H, W)."""
        image_array, labels, predicted = (
            reorient(volume.cpu().numpy(), self.axes, self.flips)
            for volume in (image.float(), reference, prediction)
        )
        if case not in self.slices:
            is_ignored = labels == get_ignore_label(labels)
            self.slices[case] = find_fullest_slices(np.where(is_ignored, 0, labels))
        return draw_case_slices(
            image_array,
            {"reference": labels, "prediction": predicted},
            spacing_mm=[self.spacing_mm[case][axis] for axis in self.axes],
            slices=self.slices[case],
            legend=self.legend,
        )
