"""Count the bytes of all tensors that are alive while real code runs."""

import weakref
from collections.abc import Iterable
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AllocatedBytes(TorchDispatchMode):
    """Follow storages from the operation that makes them until the last tensor on them is gone."""

    def __init__(self, tensors: Iterable[torch.Tensor] = ()):
        super().__init__()
        self.current = self.peak = 0
        self._live: set[int] = set()
        for tensor in tensors:
            self._count(tensor)

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key not in self._live:
            self._live.add(key)
            self.current += nbytes
            self.peak = max(self.peak, self.current)
            weakref.finalize(storage, self._free, key, nbytes)

    def _free(self, key: int, nbytes: int) -> None:
        self._live.discard(key)
        self.current -= nbytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._count(value)
        return result


class StepPeaks(Callback):
    """Write the largest size of all tensors in any optimizer step but the first to a file."""

    def __init__(self, file: str):
        self.file = Path(file)
        self.peaks: list[int] = []  # of batches

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.allocated = AllocatedBytes([*pl_module.parameters(), *pl_module.buffers()])
        self.allocated.__enter__()

    def on_train_batch_start(self, *_: object) -> None:
        self.allocated.peak = self.allocated.current

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        self.peaks.append(self.allocated.peak)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.allocated.__exit__(None, None, None)
        batches = trainer.accumulate_grad_batches
        self.file.write_text(str(max(self.peaks[batches:])))
