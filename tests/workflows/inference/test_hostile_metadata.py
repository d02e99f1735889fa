"""What a checkpoint says of its network is refused in one line, or a network is built of it."""

import random
import time

import pytest
import torch

from tests.lit.helpers.hostile_checkpoints import VALUES, change, iter_paths
from unet3d.checkpoint_file import save_checkpoint
from unet3d.cli.train import build_training
from unet3d.errors import UsageError
from unet3d.workflows.inference.ensemble import load_ensemble


@pytest.fixture
def saved(composed, tmp_path):
    """Return what is read of a checkpoint to predict with it."""
    run = build_training(composed("model.width=4", "model.depth=2"), tmp_path / "run")
    return {"state_dict": run.module.state_dict(), "unet3d": run.module.metadata}


@pytest.fixture
def load(tmp_path):
    def save_and_load(content):
        save_checkpoint(content, tmp_path / "x.ckpt")
        return load_ensemble([tmp_path / "x.ckpt"])

    return save_and_load


def test_changed_metadata_is_refused_or_builds_a_network(saved, load):
    cases = [(path, value) for path in iter_paths(saved["unet3d"]) for value in VALUES]
    refusals = []
    for path, value in random.Random(0).sample(cases, 150):
        try:
            assert load(change(saved, ("unet3d", *path), value)).networks
        except UsageError as error:
            refusals.append(str(error))
    assert len(refusals) > 30
    assert not [line for line in refusals if "\n" in line]


@pytest.mark.parametrize("key", ["convs_per_level", "depth"])
def test_a_network_of_a_million_layers_is_not_built(saved, load, key):
    start = time.monotonic()
    with pytest.raises(UsageError, match=r"x\.ckpt"):
        load(change(saved, ("unet3d", "config", "model", key), 10**6))
    assert time.monotonic() - start < 10


def test_intensities_are_one_for_each_channel(saved, load):
    changed = change(saved, ("unet3d", "preprocessing", "normalize"), ["ct"])
    changed = change(changed, ("unet3d", "preprocessing", "intensities"), 5)
    with pytest.raises(UsageError, match="preprocessing"):
        load(changed)


@pytest.mark.parametrize(
    "weight", [torch.zeros(4, dtype=torch.int64), torch.zeros(4).to(torch.float8_e5m2), None]
)
def test_weights_of_another_kind_are_refused(saved, load, weight):
    name = next(name for name in saved["state_dict"] if name.endswith("bias"))
    with pytest.raises(UsageError, match=r"x\.ckpt"):
        load(change(saved, ("state_dict", name), weight))


def test_a_network_that_drops_large_layers_is_not_built(saved, load):
    large = {"_target_": "torch.nn.Linear", "in_features": 50_000, "out_features": 50_000}
    layers = [
        {"_target_": "torch.nn.Identity", "_args_": [large]},
        {"_target_": "torch.nn.Conv3d", "in_channels": 1, "out_channels": 3, "kernel_size": 1},
    ]
    model = {"_target_": "torch.nn.Sequential", "_args_": layers}
    weights = {"model.1.weight": torch.zeros(3, 1, 1, 1, 1), "model.1.bias": torch.zeros(3)}
    changed = change(saved, ("unet3d", "config", "model"), model)
    with pytest.raises(UsageError, match="far more parameters than the file has weights"):
        load({**changed, "state_dict": weights})
