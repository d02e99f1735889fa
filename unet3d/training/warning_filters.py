"""Filters for Lightning's tips and for warnings about what is intended here."""

import logging
import warnings


def silence_lightning() -> None:
    """Silence all messages of Lightning except warnings that a user can act on."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for message in (
        r".*does not have many workers.*",  # data.num_workers sets their number
        r".*isinstance\(treespec, LeafSpec\).*",  # caused by Lightning itself, with torch >= 2.13
        r".*The number of training batches .* is smaller than the logging interval.*",
        r".*have no `val_dataloader`.*",  # fold=none
        r".*exists and is not empty.*",  # a resumed run continues in its folder
        r".*`IterableDataset` has `__len__` defined.*",
        r".*GPU available but not used.*",  # trainer.accelerator=cpu asks for it
        r".*The `srun` command is available on your system but is not used.*",  # see trainer.launch
        r".*call of `lr_scheduler.step\(\)` before `optimizer.step\(\)`.*",  # a skipped first step
        r".*It is recommended to use `self.log\(.*sync_dist=True.*",  # all ranks are combined
    ):
        warnings.filterwarnings("ignore", message)
