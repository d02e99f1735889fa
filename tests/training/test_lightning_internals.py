"""The contract with Lightning and TensorBoard: each private name is there, and called as expected.

A failing test's id is the name that changed: read its new version, and adapt the file that uses it.
"""

import inspect
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import lightning
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from lightning.pytorch.plugins.precision import HalfPrecision

from unet3d.training import lightning_internals

CALLED = {
    "trainer.fit_loop._should_accumulate": [],
    "trainer.fit_loop.epoch_loop._should_check_val_epoch": [],
    "trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor": [],
    "trainer._signal_connector.register_signal_handlers": [],
    "checkpoint._monitor_candidates": ["trainer"],
    "checkpoint._save_checkpoint": ["trainer", "filepath"],
    "checkpoint._save_topk_checkpoint": ["trainer", "monitor_candidates"],
    "checkpoint._should_save_on_exception": ["trainer"],
}
"""Methods that are called or replaced, with their parameters."""

READ = {
    "trainer._checkpoint_connector._loaded_checkpoint": dict,
    "trainer._signal_connector.received_sigterm": bool,
    "trainer.fit_loop.epoch_loop._batches_that_stepped": int,
    "precision._desired_input_dtype": torch.dtype,
    "checkpoint._last_global_step_saved": int,
    "checkpoint._train_time_interval": timedelta,
    "logger._experiment": object,
    "logger._kwargs": dict,
    "wandb._wandb_init": dict,
    "writer.file_writer.event_writer._file_name": str,
    "writer.file_writer.event_writer._async_writer._writer._writer.write": Callable,
}
"""Attributes that are read or set, with their types."""


@pytest.fixture
def owners(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    yield {
        "trainer": Trainer(accelerator="cpu", logger=False, enable_checkpointing=False),
        "checkpoint": ModelCheckpoint(train_time_interval=timedelta(seconds=1)),
        "precision": HalfPrecision("bf16-true"),
        "logger": logger,
        "wandb": WandbLogger(),
        "writer": logger.experiment,
    }
    logger.experiment.close()


def find(owners, path):
    """Return what a dotted path names, or fail with the first name that is missing."""
    owner, *names = path.split(".")
    value = owners[owner]
    for name in names:
        assert hasattr(value, name), f"{type(value).__name__} has no {name}"
        value = getattr(value, name)
    return value


@pytest.mark.parametrize("path", CALLED)
def test_a_private_method_has_the_parameters_that_are_passed(owners, path):
    assert list(inspect.signature(find(owners, path)).parameters) == CALLED[path]


@pytest.mark.parametrize("path", READ)
def test_a_private_attribute_has_its_type(owners, path):
    assert isinstance(find(owners, path), READ[path])


def test_every_private_name_in_lightning_internals_is_in_the_contract():
    source = Path(lightning_internals.__file__).read_text()
    listed = {name for path in (*CALLED, *READ) for name in path.split(".")}
    assert set(re.findall(r"\.(_[a-z]\w*)", source)) <= listed


def test_lightnings_minor_version_is_the_one_that_was_read():
    version, _ = lightning.__version__.rsplit(".", 1)
    assert f"lightning {version}." in lightning_internals.__doc__
