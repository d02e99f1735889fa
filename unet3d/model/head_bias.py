"""Initialize the bias of a network's output convolutions to the class frequencies of the data.

With a bias of 0 a new network gives every class the same probability. Where nearly all voxels are
background, the first steps push the logits of all other classes down through the weights of the
head, and a class that is low in every feature may never recover. A bias at the log prior starts
where that push would end and leaves the weights alone.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

MIN_FRACTION = 1e-4
"""Rarer classes start at this fraction of voxels: below it, a logit has almost no gradient."""

DEFAULT_FOREGROUND_FRACTION = 0.03
"""Assumed where there are no labeled voxels to count."""


def compute_softmax_bias(fractions: npt.ArrayLike) -> list[float]:
    """Return the logits whose softmax is `fractions`, with the background's logit at 0.

    >>> [round(b, 2) for b in compute_softmax_bias([0.9, 0.09, 0.01])]
    [0.0, -2.3, -4.5]
    """
    fractions = np.asarray(fractions, float)
    if not np.isfinite(fractions).all():
        fractions = np.full(len(fractions), DEFAULT_FOREGROUND_FRACTION)
        fractions[0] = 1 - fractions[1:].sum()
    logits = np.log(np.maximum(fractions, MIN_FRACTION))
    return (logits - logits[0]).tolist()


def compute_sigmoid_bias(fractions: npt.ArrayLike) -> list[float]:
    """Return the logits whose sigmoid is `fractions`, one per region.

    >>> [round(b, 2) for b in compute_sigmoid_bias([0.5, 0.01])]
    [0.0, -4.6]
    """
    fractions = np.asarray(fractions, float)
    fractions = np.where(np.isfinite(fractions), fractions, DEFAULT_FOREGROUND_FRACTION)
    fractions = np.clip(fractions, MIN_FRACTION, 1 - MIN_FRACTION)
    return np.log(fractions / (1 - fractions)).tolist()


def set_bias(heads: Sequence[nn.Module], bias: Sequence[float]) -> None:
    """Set the bias of every head."""
    with torch.no_grad():
        for head in heads:
            assert isinstance(head.bias, Tensor)
            head.bias.copy_(torch.tensor(bias))


def find_heads(model: nn.Module, image: Tensor, outputs: int) -> list[str]:
    """Return the names of a network's output convolutions, found by a forward pass.

    These are the convolutions with a bias whose result is itself an output. A network that resizes
    or stacks its outputs has none: then it is the last convolution with `outputs` channels.
    """
    results: list[tuple[str, Tensor]] = []
    handles = [
        module.register_forward_hook(lambda _, __, y, name=name: results.append((name, y)))
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv3d | nn.ConvTranspose3d)
        and module.bias is not None
        and module.out_channels == outputs
    ]
    try:
        output = model(image)
    finally:
        for handle in handles:
            handle.remove()
    tensors = [output] if isinstance(output, Tensor) else list(output)
    direct = [name for name, y in results if any(y is tensor for tensor in tensors)]
    return direct or [name for name, _ in results[-1:]]
