"""Compare an exported network's logits with those of the original network."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

TOLERANCE = 1e-3
"""Largest difference of two logits, relative to the largest logit, that counts as rounding.

Our networks' were 4e-6 on patches of noise, and 4e-4 where a 512th of a patch was not constant. On
a constant patch, 2e-2: instance norm divides it by almost 0.
"""


@dataclass(frozen=True, kw_only=True)
class Parity:
    """Differences of two networks' outputs on some patches."""

    max_difference: float  # of two logits
    max_logit: float  # absolute value
    agreement: float  # fraction of voxels with the same label

    @property
    def passed(self) -> bool:
        """Return whether the outputs are equal up to rounding; False for NaN."""
        return self.max_difference <= TOLERANCE * self.max_logit < torch.inf

    def __str__(self) -> str:
        percent = int(self.agreement * 1e6) / 1e4  # rounded down: 100 only if all voxels agree
        return (
            f"logits differ by at most {self.max_difference:.1e} (the largest is "
            f"{self.max_logit:.1f}), {percent:g}% of voxels get the same class"
        )


def compare_outputs(
    reference: Callable[[Tensor], Tensor],
    exported: Callable[[Tensor], Tensor],
    batches: Iterable[Tensor],
    decide: Callable[[Tensor], Tensor],
) -> Parity:
    """Run both networks on the same batches (B, C, D, H, W).

    `decide` turns logits (K, D, H, W) into labels.
    """
    voxels = equal = 0
    max_difference = max_logit = torch.zeros(())
    for batch in batches:
        expected, actual = reference(batch), exported(batch)
        if expected.shape != actual.shape:
            raise ValueError(f"logits are {tuple(actual.shape)}, not {tuple(expected.shape)}")
        # torch.maximum keeps NaN, max() does not
        max_difference = torch.maximum(max_difference, (expected - actual).abs().max())
        max_logit = torch.maximum(max_logit, expected.abs().max())
        for one, other in zip(expected, actual, strict=True):
            agreement = decide(one) == decide(other)
            equal, voxels = equal + int(agreement.sum()), voxels + agreement.numel()
    return Parity(
        max_difference=float(max_difference),
        max_logit=float(max_logit),
        agreement=equal / voxels,
    )
