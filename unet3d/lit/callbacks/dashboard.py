"""What TensorBoard shows beside curves: pages of charts, config, pictures of a step, hparams."""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import numpy as np
import yaml
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.tensorboard.summary import hparams

from unet3d.memory.estimate import MemoryEstimate
from unet3d.memory.plots import layer_bars, timeline
from unet3d.units import MIB

PAGES = {
    "Quality": {
        "loss": ["^train/loss$"],
        "Dice, mean and classes": ["^val/dice$", "^val/dice/"],
        "HD95 in mm, mean and classes": ["^val/hd95_mm$", "^val/hd95_mm/"],
        "voxels predicted for each of the reference": ["^val/volume_ratio/"],
    },
    "Memory": {
        "peak of a step in MiB": ["^memory/step_peak_", "^memory/predicted_step_peak_mib$"],
        "peak by phase in MiB": [
            r"^memory/(forward|backward|optimizer|validation)_peak_(allocated|resident)_mib$"
        ],
        "predicted peak by kind in MiB": ["^memory/predicted_kind_mib/"],
    },
    "Speed": {
        "seconds of a step": ["^speed/step_seconds$"],
        "volumes per second": ["^speed/volumes_per_second$"],
        "share of a step that waits for data": ["^speed/data_wait_share$"],
        "use of the GPU in percent": ["^speed/gpu_use_percent$"],
    },
}
"""Custom Scalars: charts by page, each of the tags that match; the first words of a tag match too,
unless it ends with a $."""

FINAL = ("dice", "hd95_mm", "peak_mib", "step_seconds")
"""What hparams compare runs by."""


class Dashboard(Callback):
    """Writes what stays the same as the run starts, and its final figures when it is over.

    `choices` are what makes this run another one than those beside it. Hparams are told at the
    start, so that a run that never ends is there as well; figures come to them once there are some.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        choices: Mapping[str, Any],
        prediction: MemoryEstimate | None,
        title: str,
    ):
        self.config, self.choices = config, choices
        self.prediction, self.title = prediction, title
        self.writers: list[Any] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        self.writers = [x.experiment for x in trainer.loggers if isinstance(x, TensorBoardLogger)]
        step = trainer.global_step
        config = yaml.safe_dump(self.config, sort_keys=False)
        begun, told, _ = hparams(dict(self.choices), {f"final/{name}": 0.0 for name in FINAL})
        for writer in self.writers:
            writer.add_text("config", f"```yaml\n{config}```", step)
            writer.add_custom_scalars(make_scalar_layout(pl_module.device.type))
            for summary in (begun, told):
                writer._get_file_writer().add_summary(summary)
        if self.prediction is not None:
            for name, draw in (("timeline", timeline), ("layers", layer_bars)):
                picture = figure_to_array(draw(self.prediction, self.title))
                for writer in self.writers:
                    writer.add_image(f"memory/{name}", picture, step, dataformats="HWC")
            self._kinds(step)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._kinds(trainer.global_step - 1)

    def _kinds(self, step: int) -> None:
        """The prediction does not change; two points make a line."""
        kinds = {} if self.prediction is None else self.prediction.kinds
        for writer in self.writers:
            for kind, nbytes in kinds.items():
                tag = f"memory/predicted_kind_mib/{kind.replace(' ', '_')}"
                writer.add_scalar(tag, nbytes / MIB, step)

    def finish(self, figures: Mapping[str, float], step: int) -> None:
        """The run is over."""
        for writer in self.writers:
            for name in FINAL:
                if name in figures:
                    writer.add_scalar(f"final/{name}", figures[name], step)
            writer.close()
        self.writers = []


def make_scalar_layout(device: str) -> dict[str, dict[str, list[Any]]]:
    """As TensorBoard's Custom Scalars take them; a CPU's run has no GPU to show."""
    return {
        page: {
            chart: ["Multiline", tags]
            for chart, tags in charts.items()
            if device == "cuda" or "GPU" not in chart
        }
        for page, charts in PAGES.items()
    }


def figure_to_array(figure: Any) -> np.ndarray:
    """(H, W, 3), without a window or a file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]
