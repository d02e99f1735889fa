"""Allocate what DistributedDataParallel allocates, so that a step of one process has its memory."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from unet3d.text import MIB

FIRST_BUCKET = MIB
BUCKET = 25 * MIB
"""Bytes from which a bucket is full: torch's defaults."""
BROADCAST = 250 * MIB
"""Bytes of weights that rank 0 sends at a time, from one tensor."""


class GradientBuckets:
    """The tensors in which gradients are reduced; gradients become views of them.

    They live as long as the process, whereas gradients of a single process are freed after a step.
    """

    def __init__(self, model: nn.Module):
        for tensors in fill_buckets([*model.parameters(), *model.buffers()], [BROADCAST]):
            torch.cat([tensor.detach().flatten() for tensor in tensors])  # freed at once
        trained = [p for p in model.parameters() if p.requires_grad]
        self.views: dict[Tensor, Tensor] = {}
        for parameters in fill_buckets(trained[::-1], [FIRST_BUCKET, BUCKET]):
            bucket = parameters[0].new_empty(sum(p.numel() for p in parameters))
            parts = bucket.split([p.numel() for p in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                self.views[parameter] = part.as_strided(
                    parameter.shape, parameter.stride(), part.storage_offset()
                )
                parameter.register_post_accumulate_grad_hook(self._move_gradient)
        self.reduces = True  # False for micro-batches that only accumulate

    def _move_gradient(self, parameter: Tensor) -> None:
        if self.reduces and parameter.grad is not None:
            parameter.grad = self.views[parameter].copy_(parameter.grad)


def fill_buckets(tensors: Iterable[Tensor], limits: Sequence[int]) -> Iterator[list[Tensor]]:
    """Group tensors of the same type in order; a group is full from a number of bytes on.

    The limits apply to the first groups, the last limit to all others.
    """
    open_buckets: dict[torch.dtype, list[Tensor]] = {}
    filled: dict[torch.dtype, int] = {}
    for tensor in tensors:
        bucket = open_buckets.setdefault(tensor.dtype, [])
        bucket.append(tensor)
        number = filled.get(tensor.dtype, 0)
        if sum(t.nbytes for t in bucket) >= limits[min(number, len(limits) - 1)]:
            yield open_buckets.pop(tensor.dtype)
            filled[tensor.dtype] = number + 1
    yield from open_buckets.values()
