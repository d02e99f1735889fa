"""Offload what autograd saves for backward to host memory."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from unet3d.checkpointing.per_level import PerLevelStrategy
from unet3d.errors import UsageError
from unet3d.text import MIB
from unet3d.types import HasRetention


class OffloadActivations(PerLevelStrategy):
    """Set the retention of fused blocks; in other networks, offload every saved tensor.

    In other networks tensors smaller than `min_mib` stay on the GPU: copying them would take
    longer than the work.
    """

    def __init__(
        self,
        encoders: Sequence[str],
        decoders: Sequence[str],
        tile_mib: float | str = "auto",
        min_mib: float = 1,
        residual_encoders: Sequence[str] | None = None,
    ):
        if not min_mib >= 0:
            raise UsageError(f"checkpointing.min_mib must be 0 or more, got {min_mib!r}")
        super().__init__(encoders, decoders, tile_mib, residual_encoders=residual_encoders)
        self.min_bytes = min_mib * MIB

    def apply(self, model: nn.Module) -> None:
        """Wrap the network's forward, or set the retention of fused blocks; names do not change."""
        if isinstance(model, HasRetention):
            super().apply(model)
            return
        forward = model.forward

        def forward_with_offload(*inputs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*inputs)
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
                return forward(*inputs)

        model.forward = forward_with_offload
