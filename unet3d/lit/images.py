"""Pictures of the first validation cases, always the same ones."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger

from unet3d.report.slices import middle_slices
from unet3d.types import Sample


class CaseImages(Callback):
    """Shows middle slices of `cases` volumes with reference and prediction in TensorBoard."""

    def __init__(self, cases: int = 3):
        self.cases = cases

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Sample,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if batch_idx >= self.cases or trainer.sanity_checking or outputs is None:
            return
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                picture = middle_slices(batch["image"][0, 0], batch["label"][0], outputs[0])
                logger.experiment.add_image(
                    f"cases/{batch['case'][0]}", picture, trainer.global_step - 1
                )
