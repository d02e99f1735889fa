"""A recorder of operations, which on a CPU stands for CUDA graphs."""

from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from unet3d.cuda_graphs import CapturedGraph
from unet3d.peak_memory import MemoryRecord
from unet3d.text import MIB

PEAK = MemoryRecord(allocated=7 * MIB)


class OperationList(TorchDispatchMode):
    """List operations with their tensors; views need no replay, their memory stays."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        out = func(*args, **kwargs)
        inputs = {x.untyped_storage()._cdata for x in tensors((args, kwargs))}
        is_view = all(x.untyped_storage()._cdata in inputs for x in tensors(out))
        if func._schema.is_mutable or not is_view:
            keep = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, (args, kwargs))
            self.operations.append((func, *keep, out))
        return out

    def replay(self):
        with torch.no_grad():
            for func, args, kwargs, out in self.operations:
                for x, value in zip(tensors(out), tensors(func(*args, **kwargs)), strict=True):
                    if x.untyped_storage()._cdata != value.untyped_storage()._cdata:
                        x.copy_(value)


class OperationRecorder:
    """Record what an operation reads and writes; unlike CUDA graphs, recording also runs it."""

    def __init__(self):
        self.buffers: list[Tensor] = []
        self.borrowed = 0

    def record(self, work):
        before = [buffer.clone() for buffer in self.buffers]
        operations = OperationList()
        with operations:
            result = work()
        for buffer, value in zip(self.buffers, before, strict=True):
            buffer.data.copy_(value)  # autograd must not notice
        return CapturedGraph(result, operations.replay, PEAK)

    @contextmanager
    def use_memory(self):
        self.borrowed += 1
        yield


def tensors(values):
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]
