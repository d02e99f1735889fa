"""Set the bias of heads; freeze, average, and convert weights to half precision."""

import warnings
from collections.abc import Sequence
from types import MethodType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from unet3d.errors import UsageError

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
        others = max(1, len(fractions) - 1)  # which have half of the voxels at most
        fractions = np.full(len(fractions), min(DEFAULT_FOREGROUND_FRACTION, 0.5 / others))
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
    """Set the bias of every head.

    With a bias of 0 a new network gives every class the same probability. Where nearly all voxels
    are background, the first steps push the logits of all other classes down through the weights of
    the head, and a class that is low in every feature may never recover. A bias at the log prior
    starts where that push would end and leaves the weights alone.
    """
    with torch.no_grad():
        for head in heads:
            assert isinstance(head.bias, Tensor)
            head.bias.copy_(torch.tensor(bias))


def find_head_names(model: nn.Module, image: Tensor, outputs: int) -> list[str]:
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
        with warnings.catch_warnings(action="ignore"):  # blocks that say what these hooks change
            output = model(image)
    finally:
        for handle in handles:
            handle.remove()
    tensors = [output] if isinstance(output, Tensor) else list(output)
    direct = [name for name, y in results if any(y is tensor for tensor in tensors)]
    return direct or [name for name, _ in results[-1:]]


def freeze_parts(network: nn.Module, names: Sequence[str]) -> None:
    """Stop the weights of submodules from learning, and the statistics of their batch norms."""
    modules = dict(network.named_modules())
    for name in names:
        if name not in modules or not name:
            parts = ", ".join(part for part in modules if part.count(".") < 1 and part)
            raise UsageError(f"freeze: the network has no part {name!r}; it has {parts}")
        modules[name].requires_grad_(False)
        for module in modules[name].modules():
            if isinstance(module, _BatchNorm):
                module.eval()
                module.train = MethodType(_stay_in_eval_mode, module)
    if not any(p.requires_grad for p in network.parameters()):
        raise UsageError("freeze: nothing is left to train")


def _stay_in_eval_mode(self: nn.Module, mode: bool = True) -> nn.Module:
    """Replace nn.Module.train."""
    return nn.Module.train(self, False)


def count_parameters(network: nn.Module) -> int:
    """Return the number of trainable parameters."""
    return sum(p.numel() for p in network.parameters() if p.requires_grad)


def cast_to_half(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert all parameters and buffers in place, except those of batch and instance norms."""
    for part in module.modules():
        if isinstance(part, _NormBase):
            continue
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                cast = parameter.detach().to(dtype)
                part._parameters[name] = nn.Parameter(cast, parameter.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                part._buffers[name] = buffer.to(dtype)
    return module


class WeightAverage:
    """The exponential moving average of a network's parameters and floating-point buffers.

    It is in float32 or wider. Each update moves it by `1 - decay` of the way to the current
    weights. After n updates the decay is at most (1 + n) / (10 + n), so that the first weights of a
    run are soon forgotten.
    """

    def __init__(self, network: nn.Module, decay: float):
        self.decay, self.updates = decay, 0
        self.tensors: dict[str, Tensor] = {
            name: tensor
            for name, tensor in network.state_dict(keep_vars=True).items()
            if tensor.is_floating_point()
        }
        self.values = {
            name: tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
            for name, tensor in self.tensors.items()
        }
        self.trained: dict[str, Tensor] | None = None  # while the network has the average

    @torch.no_grad()
    def update(self) -> None:
        """Take the current weights into the average."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        averages, weights = list(self.values.values()), list(self.tensors.values())
        if all(a.dtype == w.dtype for a, w in zip(averages, weights, strict=True)):
            torch._foreach_lerp_(averages, weights, weight=1 - decay)
            return
        for average, weight in zip(averages, weights, strict=True):
            average.lerp_(weight.to(average.dtype), 1 - decay)

    def apply(self) -> None:
        """Give the network the average, without copying it unless the network is in half."""
        self.trained = self.get_trained()
        for name, tensor in self.tensors.items():
            tensor.data = self.values[name].to(tensor.dtype)

    def restore(self) -> None:
        """Give the network its trained weights back."""
        trained, self.trained = self.get_trained(), None
        for name, tensor in self.tensors.items():
            tensor.data = trained[name]

    def get_trained(self) -> dict[str, Tensor]:
        """Return the trained weights, whichever the network has at the moment."""
        if self.trained is not None:
            return self.trained
        return {name: tensor.detach() for name, tensor in self.tensors.items()}
