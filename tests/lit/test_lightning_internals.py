"""The contract with Lightning and TensorBoard: each private name is there, and called as expected.

A failing test's id is the name that changed: read its new version, and adapt
unet3d/lit/lightning_internals.py.
"""

import ast
import inspect
from pathlib import Path

import lightning
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.precision import HalfPrecision

from unet3d.lit import lightning_internals
from unet3d.lit.warning_filters import silence_lightning

LIT = Path(lightning_internals.__file__).parent

CALLED = {
    "trainer._checkpoint_connector.dump_checkpoint": ["weights_only"],
    "trainer.fit_loop._should_accumulate": [],
    "trainer.fit_loop.epoch_loop._should_check_val_epoch": [],
    "trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor": [],
    "trainer._signal_connector.register_signal_handlers": [],
    "writer._get_file_writer": [],
}
"""Methods that are called or replaced, with their parameters."""

READ = {
    "trainer._checkpoint_connector._loaded_checkpoint": dict,
    "trainer._signal_connector.received_sigterm": bool,
    "trainer.fit_loop.epoch_loop._batches_that_stepped": int,
    "precision._desired_input_dtype": torch.dtype,
    "logger._kwargs": dict,
    "writer.file_writer.event_writer._file_name": str,
}
"""Attributes that are read or set, with their types."""

WRAPPED = [
    "logger._experiment",
    "writer.file_writer.event_writer._async_writer",
    "writer.file_writer.event_writer._async_writer._writer._writer",
]
"""Attributes whose types are lightning_internals, too."""


@pytest.fixture
def owners(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    yield {
        "trainer": Trainer(accelerator="cpu", logger=False, enable_checkpointing=False),
        "precision": HalfPrecision("bf16-true"),
        "logger": logger,
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


def test_an_event_file_is_written_through_the_three_methods_that_ours_has(owners):
    file = find(owners, "writer.file_writer.event_writer._async_writer._writer._writer")
    assert all(callable(getattr(file, name)) for name in ("write", "flush", "close"))


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


def private_names(path):
    """Return the underscore attributes in a file, without torch's and those it defines itself.

    os._exit is documented.
    """
    nodes = list(ast.walk(ast.parse(path.read_text())))
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    own |= {
        node.attr
        for node in attributes
        if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    return {
        node.attr
        for node in attributes
        if node.attr.startswith("_")
        and not node.attr.startswith("__")
        and ast.unparse(node).split(".")[0] not in ("torch", "dist", "os")
    } - own


def test_every_private_name_in_lightning_internals_is_in_the_contract():
    listed = {name for path in (*CALLED, *READ, *WRAPPED) for name in path.split(".")}
    assert private_names(LIT / "lightning_internals.py") <= listed


@pytest.mark.parametrize(
    "path", sorted(LIT.rglob("*.py")), ids=lambda path: str(path.relative_to(LIT))
)
def test_private_names_stand_in_lightning_internals_alone(path):
    if path.name != "lightning_internals.py":
        assert private_names(path) == set()


def test_lightnings_minor_version_is_the_one_that_was_read():
    assert (
        f"lightning {'.'.join(lightning.__version__.split('.')[:2])}."
        in lightning_internals.__doc__
    )
