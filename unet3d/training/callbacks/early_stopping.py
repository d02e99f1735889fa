"""Stop a run whose validation no longer improves."""

from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer, callbacks

from unet3d.errors import UsageError


class EarlyStopping(callbacks.EarlyStopping):
    """Stop after `patience` validations in a row that are not better by more than `min_delta`.

    Lightning's callback takes its patience from the checkpoint, so that a resumed run could not
    change it.
    """

    def __init__(
        self,
        *,
        monitor: str = "val/dice",
        mode: Literal["max", "min"] = "max",
        patience: int = 10,
        min_delta: float = 0.0,
    ):
        if patience < 1:
            raise UsageError(f"patience must be >= 1, got {patience}")
        super().__init__(
            monitor,
            mode=mode,
            patience=patience,
            min_delta=min_delta,
            check_finite=False,  # a class that no case of the validation set has is NaN
            check_on_train_epoch_end=False,
        )

    @property
    def state_key(self) -> str:
        """Return the name of its state in a checkpoint: each metric has its own."""
        return f"EarlyStopping[{self.monitor}]"

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if self.wait_count >= self.patience and not trainer.sanity_checking:
            pl_module.print(
                f"stopping early: {self.monitor} was not better than {float(self.best_score):.4g} "
                f"in {self.wait_count} validations"
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "patience": self.patience})
