"""What the processes of one run decide together."""

import lightning.pytorch as pl


def any_rank(trainer: pl.Trainer, flag: bool) -> bool:
    """Whether it is so on any rank; every rank must ask at the same point."""
    if trainer.world_size == 1:
        return flag
    return trainer.strategy.reduce_boolean_decision(flag, all=False)
