"""Run a block of the network as one autograd node that computes its own backward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from unet3d.model.fused.layers import ParameterGradients
from unet3d.model.fused.tiling import MapLayout


class FusedBlock:
    """A part of the network; subclasses have its forward and backward.

    `forward` returns the edges of output maps, and tensors; `backward` the gradients of the input
    maps, then those of the parameters.
    """

    output: Any  # a LazyActivation, or a StoredFeatureMap

    def __init__(self, modules: Sequence[nn.Module], device: torch.device):
        self.device, self.gradients = device, ParameterGradients(modules)

    @property
    def layout(self) -> MapLayout:
        """Return the layout of the output."""
        return self.output.layout

    def edge(self) -> Tensor:
        """Return a tensor of one element for autograd's graph."""
        return torch.empty(1, dtype=self.layout.dtype, device=self.device)

    def placeholder(self, channels: int) -> Tensor:
        """Return a tensor for autograd's graph: the shape of a map, the memory of one element."""
        return self.edge().expand(self.layout.batch, channels, *self.layout.size)

    def run(self, *edges: Tensor) -> list[Tensor]:
        """Return the block's outputs, given the edges of its input maps."""
        return list(_Node.apply(self, *edges, *self.gradients.parameters))


class _Node(Function):
    @staticmethod
    def forward(ctx: Any, block: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.block = block
        # So that torch refuses those that are changed in place: all but the maps of other blocks,
        # which only blocks have, and placeholders, which have no strides.
        own = (x for x in inputs if type(x.grad_fn).__name__ != "_NodeBackward")
        ctx.save_for_backward(*(x for x in own if any(x.stride())))
        with torch.autocast(block.device.type, enabled=False):
            return block.forward(needs_grad=any(ctx.needs_input_grad))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "fused blocks have no second derivative: remove create_graph=True, or build the "
                "network with fused=False (checkpointing=none)"
            )
        block, ctx.block = ctx.block, None
        if block is None:
            raise RuntimeError(
                "fused blocks free their activations in the first backward and cannot run a second "
                "one (retain_graph=True, or torch's jacobian): build the network with fused=False "
                "(checkpointing=none)"
            )
        _ = ctx.saved_tensors  # checks their versions
        with torch.autocast(block.device.type, enabled=False):
            return None, *block.backward(list(gradients), ctx.needs_input_grad[1:])
