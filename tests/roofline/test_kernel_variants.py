"""How many variants of our Triton kernels a first step compiles: about half a second each."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from scripts.bench.step import build_cuda_step, list_forum_networks
from unet3d.custom_ops import CustomOp
from unet3d.loss import dice_terms
from unet3d.loss.kernels import cuda as loss_cuda
from unet3d.memory.cudnn import follow_cudnn
from unet3d.memory.estimate import simulate_cuda_step
from unet3d.model.fused.kernels import cuda as fused_cuda
from unet3d.model.fused.kernels import dispatch as fused_dispatch
from unet3d.model.fused.ops import norm_ops, statistics_ops, upsample_ops
from unet3d.pool import max as max_pool
from unet3d.pool import select_backward
from unet3d.pool.kernels import cuda as pool_cuda
from unet3d.pool.kernels import dispatch as pool_dispatch
from unet3d.workflows.memory.training_step import SilentListener

OPERATORS = {
    operator.op._qualname: operator
    for module in (
        *(norm_ops, statistics_ops, upsample_ops),
        *(dice_terms, max_pool, select_backward),
    )
    for operator in vars(module).values()
    if isinstance(operator, CustomOp)
}


class RunBodies(TorchDispatchMode):
    """Run the CUDA code of our operators on fake tensors, besides the operators themselves."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:
            return func(*args)
        try:
            out = follow_cudnn(func, args, func(*args, **(kwargs or {})))
        except torch._subclasses.fake_tensor.DataDependentOutputException:
            return 0  # an optimizer's step
        if func._schema.name in OPERATORS:
            OPERATORS[func._schema.name].body(*args)
        return out


def specialize(kernel: Any, name: str, value: Any) -> Any:
    """Return what Triton compiles a kernel for: dtypes, alignment, and the values of some ints."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.storage_offset() * value.element_size() % 16 == 0
    if isinstance(value, float) or name in (kernel.do_not_specialize or ()):
        return type(value).__name__
    return value if value == 1 else value % 16 == 0


@pytest.mark.parametrize(("strategy", "most"), [("fused", 20), ("lean", 24)])
def test_a_first_step_compiles_few_variants_of_each_kernel(strategy, most, monkeypatch):
    variants: Counter[str] = Counter()
    seen = set()

    def record(kernel, device, grid, *arguments, **constants):
        values = dict(zip((p.name for p in kernel.params), arguments, strict=False)) | constants
        key = [kernel.fn.__name__]
        for parameter in kernel.params:
            value = values[parameter.name]
            constant = parameter.is_constexpr
            key.append(value if constant else specialize(kernel, parameter.name, value))
        if tuple(key) not in seen:
            seen.add(tuple(key))
            variants[key[0]] += 1

    for module in (fused_cuda, pool_cuda, loss_cuda):
        monkeypatch.setattr(module, "launch", record)
    monkeypatch.setattr(fused_dispatch, "select_kernels", lambda *_: fused_cuda)
    monkeypatch.setattr(pool_dispatch, "select_kernels", lambda _: pool_cuda)
    with FakeTensorMode(), simulate_cuda_step(), RunBodies():
        network = list_forum_networks("small")[strategy]
        build_cuda_step(network, [320, 150, 26], 2, "16").train(SilentListener())
    assert {"normalize_kernel", "sum_terms_kernel", "tiled_kernel"} <= set(variants)
    assert sum(variants.values()) <= most, variants
