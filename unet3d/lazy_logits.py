"""Logits that a loss reads tile by tile: those of many classes are never in memory as a whole."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node


class Rows(NamedTuple):
    """Rows [start, stop) along an axis of a map (B, C, D, H, W)."""

    axis: int
    start: int
    stop: int

    def of(self, labels: Tensor) -> Tensor:
        """Return these rows of labels (B, D, H, W)."""
        return labels.narrow(self.axis - 1, self.start, self.stop - self.start)


Tile = tuple[Rows, Tensor]
TileGradient = Callable[[Rows, Tensor], Tensor]
"""Return the gradient of some rows of logits, given these."""


@dataclass(eq=False)
class LazyLogits:
    """Logits that are computed when they are read, and once more in backward.

    `edge` is their place in autograd's graph, a tensor of one element. Whoever differentiates them
    calls `add_gradient` in backward, and passes no gradient to `edge`.
    """

    edge: Tensor
    shape: torch.Size
    tiles: Callable[[], Iterator[Tile]]
    add_gradient: Callable[[TileGradient], Any]

    @property
    def device(self) -> torch.device:
        return self.edge.device

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"lazy logits have no {name}: they are not computed as a whole; call the network "
            "without lazy_logits=True"
        )

    @classmethod
    def __torch_function__(cls, func: Any, *_: Any) -> Any:
        raise TypeError(
            f"lazy logits are no argument of {getattr(func, '__name__', func)}: they are not "
            "computed as a whole; call the network without lazy_logits=True"
        )

    def __eq__(self, other: object) -> Any:
        return self.__torch_function__(torch.eq)

    __hash__ = object.__hash__

    def map(
        self,
        function: Callable[[Rows, Tensor], Tensor],
        gradient: Callable[[Rows, Tensor, Tensor], Tensor],
    ) -> "LazyLogits":
        """Return what a function makes of each tile.

        `gradient` returns that of a tile, given the tile and the gradient of the function's result.
        """

        def iter_tiles() -> Iterator[Tile]:
            return ((rows, function(rows, x)) for rows, x in self.tiles())

        def add_gradient(compute: TileGradient) -> None:
            self.add_gradient(lambda rows, x: gradient(rows, x, compute(rows, function(rows, x))))

        return LazyLogits(self.edge, self.shape, iter_tiles, add_gradient)

    @torch.no_grad()
    def are_finite(self) -> bool:
        """Return whether all logits are finite."""
        return all(bool(x.isfinite().all()) for _, x in self.tiles())


# DistributedDataParallel and FSDP attach backward to the tensors in outputs: those of a pytree, or
# of a dataclass.
register_pytree_node(
    LazyLogits,
    lambda logits: ([logits.edge], (logits.shape, logits.tiles, logits.add_gradient)),
    lambda leaves, others: LazyLogits(*leaves, *others),
)


def run_network(model: Any, loss: Any, image: Tensor) -> Any:
    """Return the outputs of a network for its loss: LazyLogits where both support them."""
    if getattr(model, "has_lazy_logits", False) and getattr(loss, "reads_lazy_logits", False):
        return model(image, lazy_logits=True)
    return model(image)
