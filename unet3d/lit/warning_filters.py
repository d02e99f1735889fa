"""Lightning's advertisements and warnings about what is meant to be so, left out."""

import logging
import warnings


def silence_lightning() -> None:
    """Leave Lightning's warnings that a user can act on, and nothing else."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for message in (
        r".*does not have many workers.*",  # data.num_workers says how many
        r".*isinstance\(treespec, LeafSpec\).*",  # Lightning's own, with torch >= 2.13
        r".*The number of training batches .* is smaller than the logging interval.*",
        r".*have no `val_dataloader`.*",  # fold=none
        r".*exists and is not empty.*",  # a resumed run goes on in its folder
        r".*`IterableDataset` has `__len__` defined.*",
        r".*GPU available but not used.*",  # trainer.accelerator=cpu said so
        r".*The `srun` command is available on your system but is not used.*",  # as trainer= says
        r".*resuming from a checkpoint that ended before the epoch ended.*",  # Position sees to it
        r".*It is recommended to use `self.log\(.*sync_dist=True.*",  # they are of all ranks
    ):
        warnings.filterwarnings("ignore", message)
