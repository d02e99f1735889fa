"""How equal an exported network's logits are to those of the network itself."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

Network = Callable[[Tensor], Tensor]
"""(B, C, D, H, W) -> logits (B, K, D, H, W)."""

TOLERANCE = 1e-3
"""The largest difference of two logits, as a share of the largest, that is taken for rounding.

Our networks' were 4e-6 on patches of noise, and 4e-4 where a 512th of a patch was not constant. On
a patch that is constant, 2e-2: instance norm divides it by almost nothing.
"""


@dataclass(frozen=True, kw_only=True)
class Parity:
    """What was found on some patches."""

    patches: int
    difference: float  # the largest, of two logits
    largest: float  # logit, without its sign
    same: float  # share of the voxels that get the same label

    @property
    def passed(self) -> bool:
        """Whether the difference is one of rounding; NaN is none."""
        return self.difference <= TOLERANCE * self.largest < torch.inf

    def __str__(self) -> str:
        share = int(self.same * 1e6) / 1e4  # 100 only if it is every voxel
        return (
            f"logits differ by at most {self.difference:.1e} (the largest is {self.largest:.1f}), "
            f"{share:g} % of voxels get the same class"
        )


def compare_outputs(
    own: Network, other: Network, batches: Iterable[Tensor], decide: Callable[[Tensor], Tensor]
) -> Parity:
    """Both on the same batches (B, C, D, H, W); `decide` makes labels of logits (K, D, H, W)."""
    patches = voxels = same = 0
    difference = largest = torch.zeros(())
    for batch in batches:
        expected, found = own(batch), other(batch)
        if expected.shape != found.shape:
            shapes = [tuple(t.shape) for t in (found, expected)]
            raise ValueError(f"logits are {shapes[0]} instead of {shapes[1]}")
        # torch.maximum keeps NaN, as max() would not
        difference = torch.maximum(difference, (expected - found).abs().max())
        largest = torch.maximum(largest, expected.abs().max())
        for one, another in zip(expected, found, strict=True):
            agreed = decide(one) == decide(another)
            same, voxels = same + int(agreed.sum()), voxels + agreed.numel()
        patches += len(batch)
    return Parity(
        patches=patches, difference=float(difference), largest=float(largest), same=same / voxels
    )
