"""An exponential moving average of a network's weights."""

import torch
from torch import Tensor, nn


class WeightAverage:
    """The average of a network's parameters and floating-point buffers, in float32 or wider.

    Each update moves it by `1 - decay` of the way to the current weights. After n updates the decay
    is at most (1 + n) / (10 + n), so that the first weights of a run are soon forgotten.
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
