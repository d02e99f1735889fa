"""How much of a run is done, by whichever limit comes first: steps, epochs or time."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, Timer


def timer_of(trainer: pl.Trainer) -> Timer | None:
    """Lightning's timer, there if trainer.max_time is set; its elapsed time is in checkpoints."""
    callbacks: list[Callback] = trainer.callbacks  # ty: ignore[missing-attribute]
    return next((c for c in callbacks if isinstance(c, Timer)), None)


def fraction_done(trainer: pl.Trainer) -> float:
    """From 0 to 1; 0 for a run without limits."""
    fractions = [0.0]
    if trainer.max_steps > 0:
        fractions.append(trainer.global_step / trainer.max_steps)
    if trainer.max_epochs is not None and trainer.max_epochs > 0:
        done = trainer.fit_loop.epoch_loop.batch_progress.current.completed
        fractions.append(
            (trainer.current_epoch + done / trainer.num_training_batches) / trainer.max_epochs
        )
    timer = timer_of(trainer)
    remaining = None if timer is None else timer.time_remaining()
    if timer is not None and remaining is not None:
        elapsed = timer.time_elapsed()
        fractions.append(elapsed / max(elapsed + remaining, 1e-9))
    return min(1.0, max(fractions))


class ValidateAtTheEnd(Callback):
    """Lets a run that ends within an epoch validate what it has reached."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        by_steps = 0 < trainer.max_steps <= trainer.global_step
        if by_steps or trainer.should_stop:
            trainer.should_stop = True
            trainer.check_val_every_n_epoch = 1
