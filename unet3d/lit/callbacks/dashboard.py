"""What TensorBoard shows besides scalars: custom charts, config, memory plots, hyperparameters."""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import numpy as np
import yaml
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.tensorboard.summary import hparams

from unet3d.lit.lightning_internals import get_file_writer
from unet3d.memory.estimate import MemoryEstimate
from unet3d.memory.plots import plot_layers, plot_timeline
from unet3d.units import MIB

CHARTS = {
    "Quality": {
        "loss": ["^train/loss$"],
        "Dice, mean and classes": ["^val/dice$", "^val/dice/"],
        "HD95 in mm, mean and classes": ["^val/hd95_mm$", "^val/hd95_mm/"],
        "predicted voxels / reference voxels": ["^val/volume_ratio/"],
    },
    "Memory": {
        "peak of a step in MiB": ["^memory/step_peak_", "^memory/estimated_step_peak_mib$"],
        "peak by phase in MiB": [
            r"^memory/(forward|backward|optimizer|validation)_peak_(allocated|resident)_mib$"
        ],
        "estimated peak by kind in MiB": ["^memory/estimated_kind_mib/"],
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

FINAL_METRICS = ("dice", "hd95_mm", "peak_mib", "step_seconds")
"""Metrics by which TensorBoard's HParams page compares runs."""


class Dashboard(Callback):
    """Write the config and the estimated memory at the start, and the final metrics at the end.

    `choices` are the hyperparameters in which this run differs from its neighbors. They are written
    at the start, so that HParams also lists runs that never end.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        choices: Mapping[str, Any],
        estimate: MemoryEstimate | None,
        title: str,
    ):
        self.config, self.choices = config, choices
        self.estimate, self.title = estimate, title
        self.writers: list[Any] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        self.writers = [x.experiment for x in trainer.loggers if isinstance(x, TensorBoardLogger)]
        step = trainer.global_step
        config = yaml.safe_dump(self.config, sort_keys=False)
        metrics = {f"final/{name}": 0.0 for name in FINAL_METRICS}
        experiment, session_start, _ = hparams(dict(self.choices), metrics)
        for writer in self.writers:
            writer.add_text("config", f"```yaml\n{config}```", step)
            writer.add_custom_scalars(make_scalar_layout(pl_module.device.type))
            for summary in (experiment, session_start):
                get_file_writer(writer).add_summary(summary)
        if self.estimate is not None:
            for name, draw in (("timeline", plot_timeline), ("layers", plot_layers)):
                image = figure_to_array(draw(self.estimate, self.title))
                for writer in self.writers:
                    writer.add_image(f"memory/{name}", image, step, dataformats="HWC")
            self._write_kinds(step)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._write_kinds(trainer.global_step - 1)

    def _write_kinds(self, step: int) -> None:
        """Repeat the estimated bytes by kind, which are constant: a line needs two points."""
        kinds = {} if self.estimate is None else self.estimate.kinds
        for writer in self.writers:
            for kind, nbytes in kinds.items():
                tag = f"memory/estimated_kind_mib/{kind.replace(' ', '_')}"
                writer.add_scalar(tag, nbytes / MIB, step)

    def finish(self, metrics: Mapping[str, float], step: int) -> None:
        """Write the final metrics and close the writers."""
        for writer in self.writers:
            for name in FINAL_METRICS:
                if name in metrics:
                    writer.add_scalar(f"final/{name}", metrics[name], step)
            writer.close()
        self.writers = []


def make_scalar_layout(device: str) -> dict[str, dict[str, list[Any]]]:
    """Return the layout of TensorBoard's Custom Scalars; without GPU charts for a run on a CPU."""
    return {
        page: {
            chart: ["Multiline", tags]
            for chart, tags in charts.items()
            if device == "cuda" or "GPU" not in chart
        }
        for page, charts in CHARTS.items()
    }


def figure_to_array(figure: Any) -> np.ndarray:
    """Return a matplotlib figure as an RGB array (H, W, 3), drawn in memory."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]
