"""Begin a network's last convolutions at the class shares of the data.

With a bias of 0 a new network gives every class the same probability. Where nearly all voxels are
background, the first steps then push the logits of all other classes down through the weights of
the head, and a class that lies low in every feature may never come back. A head whose bias holds
the log prior begins where that push would have ended, and leaves its weights alone.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

LEAST_SHARE = 1e-4
"""What is rarer begins as if it had this share: further down, a logit has hardly a gradient."""

USUAL_SHARE = 0.03
"""Of the foreground, where no labeled voxel has been seen."""


def softmax_bias(shares: npt.ArrayLike) -> list[float]:
    """Return the logits whose softmax is `shares`, the background's at 0.

    >>> [round(b, 2) for b in softmax_bias([0.9, 0.09, 0.01])]
    [0.0, -2.3, -4.5]
    """
    known = np.asarray(shares, float)
    if not np.isfinite(known).all():
        known = np.full(len(known), USUAL_SHARE)
        known[0] = 1 - known[1:].sum()
    logits = np.log(np.maximum(known, LEAST_SHARE))
    return (logits - logits[0]).tolist()


def sigmoid_bias(shares: npt.ArrayLike) -> list[float]:
    """Return the logits whose sigmoid is `shares`, each of a region.

    >>> [round(b, 2) for b in sigmoid_bias([0.5, 0.01])]
    [0.0, -4.6]
    """
    known = np.asarray(shares, float)
    known = np.where(np.isfinite(known), known, USUAL_SHARE)
    known = np.clip(known, LEAST_SHARE, 1 - LEAST_SHARE)
    return np.log(known / (1 - known)).tolist()


def set_bias(heads: Sequence[nn.Module], bias: Sequence[float]) -> None:
    """Write the same bias into every head."""
    with torch.no_grad():
        for head in heads:
            assert isinstance(head.bias, Tensor)
            head.bias.copy_(torch.tensor(bias))


def find_heads(model: nn.Module, image: Tensor, outputs: int) -> list[str]:
    """Return the names of the convolutions that give a network's output.

    These are the ones whose result is an output as it stands; where there is none (a network may
    resize or stack its outputs), the last one that has as many channels.
    """
    given: list[tuple[str, Tensor]] = []
    handles = [
        module.register_forward_hook(lambda _, __, result, name=name: given.append((name, result)))
        for name, module in model.named_modules()
        if is_head(module, outputs)
    ]
    try:
        found = model(image)
    finally:
        for handle in handles:
            handle.remove()
    final = [found] if isinstance(found, Tensor) else list(found)
    direct = [name for name, result in given if any(result is part for part in final)]
    return direct or [name for name, _ in given[-1:]]


def is_head(module: nn.Module, outputs: int) -> bool:
    """Whether it is a convolution with a bias and this number of outputs."""
    kinds = (nn.Conv3d, nn.ConvTranspose3d)
    return isinstance(module, kinds) and module.bias is not None and module.out_channels == outputs
