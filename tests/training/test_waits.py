"""A steady step reads one number from the device and copies none to it: each makes the host wait.

On a CPU nothing waits, so a dispatch mode tells numbers that the host has made from results of the
step, and counts the results that are read.
"""

import weakref
from collections import Counter

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unet3d.commands.train import build_training

aten = torch.ops.aten


class HostReads(TorchDispatchMode):
    """Count reads of values that the device has computed, and numbers that are copied to it."""

    def __init__(self):
        super().__init__()
        self.on_host = weakref.WeakSet()  # storages
        self.reads: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)]
        is_host = all(x.untyped_storage() in self.on_host for x in tensors)
        if func is aten._local_scalar_dense.default and not is_host:
            self.reads.append("read")
        out = func(*args, **(kwargs or {}))
        if func is aten.lift_fresh.default or (tensors and is_host):  # torch.tensor(number), views
            self.mark(out)
        return out

    def mark(self, values):
        for x in tree_leaves(values):
            if isinstance(x, Tensor):
                self.on_host.add(x.untyped_storage())


class CountReads(pl.Callback):
    """Count reads per step, from the end of one step to the end of the next."""

    def __init__(self, mode: HostReads):
        self.mode, self.counts = mode, []

    def on_train_batch_end(self, *_):
        self.counts.append(Counter(self.mode.reads))
        self.mode.reads.clear()


@pytest.mark.parametrize(
    "options", [(), ("optimizer=sgd", "trainer.gradient_clip_val=null")], ids=str
)
def test_a_steady_step_reads_one_number_and_copies_none(composed, tmp_path, monkeypatch, options):
    steps = ("trainer.max_steps=6", "data.patches_per_case=8", "fold=none", "model=unet_tiny")
    run = build_training(composed(*steps, *options), tmp_path)
    mode = HostReads()
    counted = CountReads(mode)
    run.trainer.callbacks.append(counted)
    original = torch.tensor

    def count_copies(*args, device=None, **kwargs):
        if device is not None:
            mode.reads.append("copy")
        return original(*args, **kwargs)

    def count_list(x):  # is not dispatched
        mode.reads.append("read")
        return to_list(x)

    to_list = Tensor.tolist
    monkeypatch.setattr(torch, "tensor", count_copies)
    monkeypatch.setattr(Tensor, "tolist", count_list)
    with mode:
        run.trainer.fit(run.module, run.data.train_loader)
    assert counted.counts[2:] == [Counter(read=1)] * 4
