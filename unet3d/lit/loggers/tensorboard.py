"""Log to TensorBoard: curves, charts, images, config and hyperparameters."""

from contextlib import nullcontext
from textwrap import indent
from typing import Any

import numpy as np
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.tensorboard.summary import hparams

from unet3d.lit.lightning_internals import (
    get_file_writer,
    has_writer,
    replace_event_files,
    set_purge_step,
)
from unet3d.lit.loggers.append_only_file import AppendOnlyFile
from unet3d.lit.loggers.run_logger import RunFacts

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


class FaultTolerantTensorBoardLogger(TensorBoardLogger):
    """Continue training when metrics cannot be written."""

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """Return TensorBoard's writer."""
        with replace_event_files(AppendOnlyFile) if not has_writer(self) else nullcontext():
            return super().experiment

    def start(self, facts: RunFacts, step: int) -> None:
        """Write the config, the charts and the hyperparameters.

        Hyperparameters are written at the start, so that HParams also lists runs that never end.
        """
        writer = self.experiment
        writer.add_text("config", indent(facts.config, "    "), step)  # Markdown for code
        writer.add_custom_scalars(make_scalar_layout(facts.device))
        metrics = {f"final/{name}": 0.0 for name in facts.final_metrics}
        experiment, session_start, _ = hparams(dict(facts.choices), metrics)
        for summary in (experiment, session_start):
            get_file_writer(writer).add_summary(summary)

    def log_image(self, name: str, image: np.ndarray, step: int) -> None:
        """Write an image (H, W, 3)."""
        self.experiment.add_image(name, image, step, dataformats="HWC")

    def forget_after(self, step: int) -> None:
        """Hide events of earlier runs from `step` on."""
        set_purge_step(self, step)

    def flush(self) -> None:
        """Write what is in the queue."""
        self.experiment.flush()

    def close(self, *, finished: bool) -> None:
        """Close the writer."""
        self.experiment.close()

    def save(self) -> None:
        """Write no hparams.yaml: a run has its config.yaml."""

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Flush, but stay open: Dashboard writes final metrics after training."""
        if has_writer(self):
            self.experiment.flush()


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
