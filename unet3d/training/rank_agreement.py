"""What the ranks of a run agree on in every step, in one collective: clocks, signals, what is due.

Each rank has a clock and signals of its own, but all have one learning rate, save together, and end
together.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class RankAgreement:
    """Share values that each rank knows alone: all see the maximum, until the next step.

    The collective is queued on the device, so that the host waits for it together with the loss.
    """

    def __init__(self, world_size: int = 1):
        self.world_size = world_size
        self.questions: list[Callable[[], float]] = []
        self.maxima: Sequence[float] = ()  # the answers; none of a single process

    def share(self, ask: Callable[[], float]) -> Callable[[], float]:
        """Return what all ranks agreed on instead of `ask`; a single process answers itself.

        All ranks must share the same values in the same order.
        """
        number = len(self.questions)
        self.questions.append(ask)
        return lambda: self.maxima[number] if self.maxima else ask()

    def exchange(self, flag: Tensor) -> list[Tensor]:
        """Queue the collective; return the maxima of a flag on the device and of all answers."""
        if self.world_size == 1:
            return []
        local = [0.0, *(float(ask()) for ask in self.questions)]
        shared = torch.tensor(local, pin_memory=flag.is_cuda).to(flag.device, non_blocking=True)
        shared[0] = flag
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return list(shared.unbind())

    def accept(self, maxima: Sequence[float]) -> bool:
        """Take over what the host has read of `exchange`; return the flag."""
        flag, *self.maxima = maxima
        return bool(flag)
