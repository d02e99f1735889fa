"""The contract with Lightning and TensorBoard: each private name is there.

A failing test's id is the name that changed: read its new version, and adapt the file that uses it.
"""

import re
from pathlib import Path

import lightning
import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

from unet3d.training import lightning_internals

NAMES = """trainer.fit_loop._should_accumulate trainer.fit_loop.epoch_loop._should_check_val_epoch
trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor trainer._signal_connector.received_sigterm
trainer._signal_connector.register_signal_handlers trainer.fit_loop.epoch_loop._batches_that_stepped
trainer._checkpoint_connector._loaded_checkpoint
checkpoint._save_checkpoint logger._experiment logger._kwargs wandb._wandb_init
writer.file_writer.event_writer._file_name
writer.file_writer.event_writer._async_writer._writer._writer.write""".split()
"""What is called, read or replaced."""


@pytest.fixture
def owners(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    yield {
        "trainer": Trainer(accelerator="cpu", logger=False, enable_checkpointing=False),
        "checkpoint": ModelCheckpoint(),
        "logger": logger,
        "wandb": WandbLogger(),
        "writer": logger.experiment,
    }
    logger.experiment.close()


@pytest.mark.parametrize("path", NAMES)
def test_a_private_name_is_still_there(owners, path):
    owner, *names = path.split(".")
    value = owners[owner]
    for name in names:
        assert hasattr(value, name), f"{type(value).__name__} has no {name}"
        value = getattr(value, name)


def test_every_private_name_in_lightning_internals_is_in_the_list():
    source = Path(lightning_internals.__file__).read_text()
    listed = {name for path in NAMES for name in path.split(".")}
    assert set(re.findall(r"\.(_[a-z]\w*)", source)) <= listed


def test_lightnings_minor_version_is_the_one_that_was_read():
    version, _ = lightning.__version__.rsplit(".", 1)
    assert f"lightning {version}." in lightning_internals.__doc__
