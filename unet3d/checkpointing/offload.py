"""Offload what autograd saves for backward to host memory."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from unet3d.errors import UsageError
from unet3d.module_hooks import get_forward
from unet3d.text import MIB
from unet3d.types import HasRetention


class OffloadActivations:
    """Run a network as plain modules, and offload every tensor that autograd saves.

    Tensors smaller than `min_mib` stay on the GPU: copying them would take longer than the work.
    """

    def __init__(self, min_mib: float = 1):
        if not min_mib >= 0:
            raise UsageError(f"checkpointing.min_mib must be 0 or more, got {min_mib!r}")
        self.min_bytes = min_mib * MIB

    def apply(self, model: nn.Module) -> None:
        """Switch fused blocks off and wrap the network's forward; names do not change."""
        if isinstance(model, HasRetention):
            model.retention = None
        model.forward = partial(offload_saved, get_forward(model), model, self.min_bytes)


def check_version(x: Tensor, version: int) -> None:
    """Refuse a tensor that backward needs and that has been changed in place, as torch does."""
    if x._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an "
            f"inplace operation: a tensor of shape {list(x.shape)}"
        )


def offload_saved(
    forward: Any, model: nn.Module, min_bytes: float, *inputs: Any, **options: Any
) -> Any:
    """Run `forward` and keep what it saves for backward in host memory."""
    if not torch.is_grad_enabled():
        return forward(model, *inputs, **options)
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}

    def pack(x: Tensor) -> Any:
        if x.nbytes < min_bytes or x.untyped_storage()._cdata in parameters:
            return x, x._version
        pinned = x.is_cuda or isinstance(x, FakeTensor)
        host = torch.empty_like(x, device="cpu", pin_memory=pinned)
        return host.copy_(x), x.device

    def unpack(saved: Any) -> Tensor:
        x, place = saved
        if isinstance(place, torch.device):
            return x.to(place)
        check_version(x, place)  # torch checks only what no hook has packed
        return x

    with saved_tensors_hooks(pack, unpack):
        return forward(model, *inputs, **options)
