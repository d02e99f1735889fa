"""Sum features instead of logits where these are more: a head's mean is that of its mean input."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from unet3d.data.formats.volume_format import iter_boxes

Network = Callable[[Tensor], Tensor]
"""(B, C, D, H, W) -> logits, or features, (B, K, D, H, W)."""

MAX_LOGITS = 2**22
"""Most logits that are computed from features at once: 16 MiB."""


class SummedHead:
    """Computes the mean logits of networks from the mean features of each, side by side.

    `background` are the logits of voxels without features, which the last channel marks with 1.
    """

    def __init__(
        self,
        heads: Sequence[nn.Conv3d],
        device: torch.device,
        background: Sequence[float] | None = None,
    ):
        ends = [0, *accumulate(head.in_channels for head in heads)]
        self.channels = [slice(*span) for span in pairwise(ends)]
        self.outputs, self.inputs = heads[0].out_channels, ends[-1]
        weight = torch.cat([head.weight.detach().flatten(1) for head in heads], 1)
        bias = sum(0 if h.bias is None else h.bias.detach().float() / len(heads) for h in heads)
        self.weight = weight.to(device, torch.float32)
        self.bias = torch.as_tensor(bias, device=device).float().expand(self.outputs)
        if background is not None:
            beyond = self.bias.new_tensor(background) - self.bias
            self.weight = torch.cat([self.weight, beyond[:, None]], 1)

    def __call__(self, features: Tensor) -> Tensor:
        """(C, ...) -> logits (K, ...)."""
        with torch.autocast(features.device.type, enabled=False):
            logits = torch.addmm(self.bias[:, None], self.weight, features.flatten(1))
        return logits.unflatten(1, features.shape[1:])


def split_heads(networks: Sequence[Any]) -> tuple[list[Any], list[nn.Conv3d]]:
    """Return networks without their heads, and these, if their inputs are fewer than the classes.

    Otherwise, and if a network does not come apart, return the networks and no heads.
    """
    pairs = [network.split_head() for network in networks if hasattr(network, "split_head")]
    heads = [head for _, head in pairs if head is not None]
    if not heads or len(heads) < len(networks):
        return list(networks), []
    if heads[0].out_channels <= sum(head.in_channels for head in heads):
        return list(networks), []
    return [features for features, _ in pairs], heads


def iter_logits(
    values: Tensor, head: SummedHead | None
) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
    """Yield parts of a box and their logits (K, ...), given the features or logits (C, ...) of it.

    Features are made logits by parts, and logits are one.
    """
    if head is None:
        yield tuple(slice(0, size) for size in values.shape[1:]), values
        return
    shape = values.shape[1:]
    for part in iter_boxes(shape, [1] * len(shape), MAX_LOGITS // head.outputs):
        yield part, head(values[(slice(None), *part)])
