"""Prefetch the next batch while the GPU works on the current one."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback


class Prefetch(Callback):
    """Fetch the next batch once a step is queued on the GPU, which is then in backward."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        loader: Any = trainer.train_dataloader
        loader.prefetch()
