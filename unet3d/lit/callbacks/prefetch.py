"""Prefetch the next batch while the GPU works on the current one."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from unet3d.data.loading.loaders import TrainLoader


class Prefetch(Callback):
    """Fetch the next batch once a step is queued on the GPU, which is then in backward."""

    def __init__(self, train_loader: TrainLoader):
        self.train_loader = train_loader

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.train_loader.prefetch()
