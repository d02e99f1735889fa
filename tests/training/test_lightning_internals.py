"""The contract with Lightning and TensorBoard: each private name is there, and called as expected.

A failing test's id is the name that changed: read its new version, and adapt the file that uses it.
"""

import ast
import inspect
from datetime import timedelta
from pathlib import Path

import lightning
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from lightning.pytorch.plugins.precision import HalfPrecision

from unet3d.training import lightning_internals
from unet3d.training.warning_filters import silence_lightning

LIT = Path(lightning_internals.__file__).parent

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
    "logger._kwargs": dict,
    "wandb._wandb_init": dict,
    "writer.file_writer.event_writer._file_name": str,
}
"""Attributes that are read or set, with their types."""

WRAPPED = [
    "logger._experiment",
    "writer.file_writer.event_writer._async_writer",
    "writer.file_writer.event_writer._async_writer._writer._writer.write",
]
"""Attributes whose types are private, too."""


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


@pytest.mark.parametrize("path", WRAPPED)
def test_a_private_object_is_there(owners, path):
    assert find(owners, path) is not None


def test_the_fit_loops_state_has_every_key_that_a_resume_sets():
    class Module(LightningModule):
        def training_step(self, batch, batch_idx):
            return self.layer(batch).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    silence_lightning()
    module = Module()
    module.layer = torch.nn.Linear(1, 1)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(torch.ones(1, 1)))
    ours = lightning_internals.build_fit_loop_state(
        epoch=1,
        batch=0,
        batches_per_epoch=1,
        optimizer_steps=1,
        logger_step=1,
        validation_pending=False,
    )
    assert missing_keys(ours, trainer.fit_loop.state_dict()) == []


def missing_keys(ours, theirs, prefix=""):
    """Return the keys that `theirs` does not have, or whose values differ in type."""
    missing = []
    for key, value in ours.items():
        name = f"{prefix}{key}"
        if key not in theirs or type(theirs[key]) is not type(value):
            missing.append(name)
        elif isinstance(value, dict):
            missing += missing_keys(value, theirs[key], f"{name}/")
    return missing


def find_private_names(path):
    """Return pairs of an object and an underscore attribute of it that a file does not define.

    Those of torch are left out, and os._exit, which is documented.
    """
    nodes = list(ast.walk(ast.parse(path.read_text())))
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef)} | {
        node.attr
        for node in attributes
        if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    return {
        (ast.unparse(node.value), node.attr)
        for node in attributes
        if node.attr.startswith("_")
        and not node.attr.startswith("__")
        and ast.unparse(node).split(".")[0] not in ("torch", "dist", "os")
        and node.attr not in own
    }


@pytest.mark.parametrize(
    "path", sorted(LIT.rglob("*.py")), ids=lambda path: str(path.relative_to(LIT))
)
def test_private_names_are_in_the_contract_and_in_lightning_internals_or_a_subclass(path):
    names = find_private_names(path)
    listed = {name for path in (*CALLED, *READ, *WRAPPED) for name in path.split(".")}
    assert {name for _, name in names} <= listed
    if path.name != "lightning_internals.py":
        assert {owner for owner, _ in names} <= {"self"}


def test_lightnings_minor_version_is_the_one_that_was_read():
    assert (
        f"lightning {'.'.join(lightning.__version__.split('.')[:2])}."
        in lightning_internals.__doc__
    )
