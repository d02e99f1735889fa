"""Keep only the inputs of a network's blocks, and redo each block in backward."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from unet3d.errors import UsageError
from unet3d.types import HasBlocks, HasRetentionPolicy


class RecomputeBlocks:
    """Activation checkpointing of every block at the given levels (0 is full size), or of "all"."""

    def __init__(self, levels: str | Sequence[int] = "all"):
        if isinstance(levels, str) and levels != "all":
            raise UsageError(
                f"checkpointing.levels must be all or a list of levels, got {levels!r}"
            )
        self.levels = levels

    def apply(self, model: nn.Module) -> None:
        """Wrap the forward of the chosen blocks; parameters, buffers and their names stay."""
        if not isinstance(model, HasBlocks):
            raise UsageError(
                f"checkpointing=blocks needs a network that yields its blocks, and "
                f"{type(model).__name__} does not; use checkpointing=none"
            )
        if isinstance(model, HasRetentionPolicy):
            model.keep = None
        blocks = list(model.blocks())
        known = {level for level, _ in blocks}
        chosen = known if self.levels == "all" else set(self.levels)
        if not chosen <= known:
            raise UsageError(
                f"checkpointing.levels must be within 0..{max(known)}, got {sorted(chosen)}"
            )
        for level, module in blocks:
            if level in chosen:
                module.forward = partial(checkpoint_block, type(module).forward, module)


def checkpoint_block(forward: Any, module: nn.Module, *inputs: Any) -> Any:
    """Run `forward` and keep its inputs alone; backward runs it once more."""
    return checkpoint(
        forward,
        module,
        *inputs,
        use_reentrant=False,
        context_fn=lambda: (nullcontext(), preserve_buffers(module)),
    )


@contextmanager
def preserve_buffers(module: nn.Module) -> Generator[None]:
    """Let a second forward write to copies of the buffers.

    Without it BatchNorm's running statistics would be updated twice per step (pytorch#96136).
    """
    kept = [(m, dict(m._buffers)) for m in module.modules()]
    for m, buffers in kept:
        for name, buffer in buffers.items():
            m._buffers[name] = None if buffer is None else buffer.clone()
    try:
        yield
    finally:
        for m, buffers in kept:
            m._buffers.update(buffers)
