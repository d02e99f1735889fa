"""The next batch is made ready on a GPU while it works on this one."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from unet3d.data.loading.loaders import TrainLoader


class Prefetch(Callback):
    """Fetches ahead when all of a step has been queued, before a logger waits for its figures."""

    def __init__(self, feed: TrainLoader):
        self.feed = feed

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.feed.fetch()
