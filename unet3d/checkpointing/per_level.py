"""What the lean blocks of a network keep, and what they redo: a rung for each price."""

from collections.abc import Sequence

from torch import nn

from unet3d.errors import UsageError
from unet3d.types import DECODER_WORDS, ENCODER_WORDS, HasRetentionPolicy, RetentionPolicy


class PerLevelPolicy:
    """A word for each level's encoder and decoder, from full size down; the last for the others.

    `anywhere` says that a network without lean blocks may be left as it is.
    """

    def __init__(self, encoders: Sequence[str], decoders: Sequence[str], anywhere: bool = False):
        for name, words, known in (
            ("encoders", encoders, ENCODER_WORDS),
            ("decoders", decoders, DECODER_WORDS),
        ):
            if isinstance(words, str) or not words or not set(words) <= set(known):
                raise UsageError(
                    f"checkpointing.{name} must be a list of {', '.join(known)}, got {words!r}"
                )
        self.keep = RetentionPolicy(tuple(encoders), tuple(decoders))
        self.anywhere = anywhere

    def apply(self, model: nn.Module) -> None:
        """Tell the network; parameters, buffers and their names stay."""
        if isinstance(model, HasRetentionPolicy):
            model.keep = self.keep
        elif not self.anywhere:
            raise UsageError(
                f"{type(model).__name__} has no lean blocks: use checkpointing=blocks or none"
            )
