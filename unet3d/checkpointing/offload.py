"""Offload what autograd saves for backward to host memory."""

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from unet3d.errors import UsageError
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
        forward = model.forward

        def forward_with_offload(*inputs: Any, **options: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*inputs, **options)
            parameters = {p.untyped_storage()._cdata for p in model.parameters()}

            def pack(x: Tensor) -> Any:
                if x.nbytes < self.min_bytes or x.untyped_storage()._cdata in parameters:
                    return x
                pinned = x.is_cuda or isinstance(x, FakeTensor)
                host = torch.empty_like(x, device="cpu", pin_memory=pinned)
                return x.device, host.copy_(x)

            def unpack(saved: Any) -> Tensor:
                return saved if isinstance(saved, Tensor) else saved[1].to(saved[0])

            with saved_tensors_hooks(pack, unpack):
                return forward(*inputs, **options)

        model.forward = forward_with_offload
