"""What TensorBoard shows beside curves: the config as text, and hparams with the final figures."""

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import yaml
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger


class Dashboard(Callback):
    """Writes the config as the run starts, and hparams as it ends."""

    def __init__(self, config: dict[str, Any]):
        self.config = config

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        text = yaml.safe_dump(self.config, sort_keys=False)
        for logger in _tensorboards(trainer):
            logger.experiment.add_text("config", f"```yaml\n{text}```", trainer.global_step)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        figures = {
            f"final/{name}": float(value)
            for name, value in trainer.callback_metrics.items()
            if name == "val/dice" or name.startswith("memory/step_peak") or name == "train/loss"
        }
        for logger in _tensorboards(trainer):
            logger.log_hyperparams(dict(flat(self.config)), figures)


def flat(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys with plain values.

    >>> dict(flat({"model": {"depth": 3, "kernel": [1, 3, 3]}}))
    {'model.depth': 3, 'model.kernel': '[1, 3, 3]'}
    """
    for key, value in config.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            known = isinstance(value, str | int | float)
            yield f"{prefix}{key}", value if known else str(value)


def _tensorboards(trainer: pl.Trainer) -> list[TensorBoardLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
