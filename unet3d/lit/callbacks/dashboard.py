"""What loggers show besides the curves of training: config, choices, memory, final metrics."""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import numpy as np
import yaml
from lightning.pytorch.callbacks import Callback

from unet3d.lit.loggers.run_logger import RunFacts, RunLogger, list_run_loggers
from unet3d.memory.estimate import MemoryEstimate
from unet3d.memory.plots import plot_layers, plot_timeline
from unet3d.units import MIB

FINAL_METRICS = ("dice", "hd95_mm", "peak_mib", "step_seconds")
"""Metrics by which runs are compared."""


class Dashboard(Callback):
    """Log the config and the estimated memory at the start, and the final metrics at the end.

    `choices` are the hyperparameters in which this run differs from its neighbors.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        choices: Mapping[str, Any],
        title: str,
        estimate: MemoryEstimate | None = None,
    ):
        self.config, self.choices = config, choices
        self.title, self.estimate = title, estimate
        self.loggers: list[RunLogger] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.loggers, step = list_run_loggers(trainer), trainer.global_step
        facts = RunFacts(
            config=yaml.safe_dump(self.config, sort_keys=False),
            choices=self.choices,
            final_metrics=FINAL_METRICS,
            device=pl_module.device.type,
        )
        for logger in self.loggers:
            logger.start(facts, step)
        if self.estimate is not None and self.loggers:
            for name, draw in (("timeline", plot_timeline), ("layers", plot_layers)):
                image = figure_to_array(draw(self.estimate, self.title))
                for logger in self.loggers:
                    logger.log_image(f"memory/{name}", image, step)
        self._log_kinds(step)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._log_kinds(trainer.global_step - 1)

    def _log_kinds(self, step: int) -> None:
        """Repeat the estimated bytes by kind, which are constant: a line needs two points."""
        kinds = {} if self.estimate is None else self.estimate.kinds
        metrics = {
            f"memory/estimated_kind_mib/{kind.replace(' ', '_')}": nbytes / MIB
            for kind, nbytes in kinds.items()
        }
        for logger in self.loggers if metrics else ():
            logger.log_metrics(metrics, step)

    def finish(self, metrics: Mapping[str, float], step: int, *, finished: bool) -> None:
        """Log the final metrics and close the loggers."""
        final = {f"final/{name}": metrics[name] for name in FINAL_METRICS if name in metrics}
        for logger in self.loggers:
            if final:
                logger.log_metrics(final, step)
            logger.close(finished=finished)
        self.loggers = []


def figure_to_array(figure: Any) -> np.ndarray:
    """Return a matplotlib figure as an RGB array (H, W, 3), drawn in memory."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]
