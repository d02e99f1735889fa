"""A steady step reads one number from the device and copies none to it: each makes the host wait.

On a CPU nothing waits, so reads and copies are counted. Numbers that the host logs do not count:
they stay on the CPU, in float64.
"""

from collections import Counter

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from unet3d.commands.train import build_training


class CountReads(pl.Callback, TorchDispatchMode):
    """Count reads and copies per step, from the end of one step to the end of the next."""

    def __init__(self):
        super().__init__()
        self.seen: list[str] = []
        self.counts: list[Counter[str]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype != torch.float64:
            self.seen.append("read")
        return func(*args, **(kwargs or {}))

    def on_train_batch_end(self, *_):
        self.counts.append(Counter(self.seen))
        self.seen.clear()


@pytest.mark.parametrize(
    "options", [(), ("optimizer=sgd", "trainer.gradient_clip_val=null")], ids=str
)
def test_a_steady_step_reads_one_number_and_copies_none(composed, tmp_path, monkeypatch, options):
    steps = ("trainer.max_steps=6", "data.patches_per_case=8", "fold=none", "model=unet_tiny")
    run = build_training(composed(*steps, *options), tmp_path)
    counted = CountReads()
    run.trainer.callbacks.append(counted)
    make_tensor, make_list = torch.tensor, Tensor.tolist

    def count_copy(*args, device=None, **kwargs):
        if device is not None:
            counted.seen.append("copy")
        return make_tensor(*args, **kwargs)

    def count_list(x):  # is not dispatched
        counted.seen.append("read")
        return make_list(x)

    monkeypatch.setattr(torch, "tensor", count_copy)
    monkeypatch.setattr(Tensor, "tolist", count_list)
    with counted:
        run.trainer.fit(run.module, run.data.train_loader)
    assert counted.counts[2:] == [Counter(read=1)] * 4
