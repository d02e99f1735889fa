import copy

import pytest
import torch

from unet3d.cli.train import build_training
from unet3d.errors import UsageError
from unet3d.workflows.inference.ensemble import load_ensemble


@pytest.fixture(scope="module")
def contents():
    """What a checkpoint holds, built once."""
    return {}


@pytest.fixture
def write_checkpoint(composed, tmp_path, contents):
    """Write a checkpoint with another value for one key; return its path."""
    if not contents:
        module = build_training(composed("model.width=2", "model.depth=2"), tmp_path).module
        contents |= {"unet3d": module.metadata, "state_dict": module.state_dict()}

    def write(*keys, value):
        content = copy.deepcopy(contents)
        node = content
        for key in keys[:-1]:
            node = node[key]
        node[keys[-1]] = value
        torch.save(content, tmp_path / "x.ckpt")
        return tmp_path / "x.ckpt"

    return write


def test_metadata_as_it_was_written_is_accepted(write_checkpoint):
    ensemble = load_ensemble([write_checkpoint("unknown", value=1)])
    assert ensemble.classes == ("background", "ball", "tube", "box")
    assert len(ensemble.training_statistics) == 1


def test_metadata_without_the_training_cases_is_accepted(write_checkpoint):
    checkpoint = write_checkpoint("unet3d", "training_statistics", value=None)
    assert load_ensemble([checkpoint]).training_statistics == ()


INVALID = [
    (["config"], 5),
    (["config"], {}),
    (["config", "model"], None),
    (["config", "pool"], "max"),
    (["config", "data"], None),
    (["config", "data", "num_classes"], 10**9),
    (["config", "data", "in_channels"], True),
    (["config", "data", "patch_size"], [8, 8, 8.5]),
    (["config", "data", "patch_size"], "888"),
    (["config", "data", "regions"], {"a": [1]}),
    (["region_labels"], [1, "x"]),
    (["config", "precision"], 7),
    (["config", "model", "depth"], 10**6),
    (["config", "model", "width"], "wide"),
    (["config", "model", "width"], 3),
    (["config", "model", "channels"], [10**8, 10**8]),
    (["config", "model", "channels"], [1] * 10**4),
    (["regions"], {}),
    (["classes"], ["a", "b", "b", "c"]),
    (["classes"], ["a"]),
    (["channels"], []),
    (["keep_largest_component"], ["liver"]),
    (["mirroring_axes"], [3]),
    (["mirroring_axes"], "0"),
    (["preprocessing"], {}),
    (["preprocessing", "num_classes"], 3),
    (["preprocessing", "normalize"], ["ct"]),
    (["preprocessing", "orientation"], 5),
    (["training_statistics"], {"cases": 3}),
    (["training_statistics", "spacing_mm"], [[1, 2, 3]]),
    (["training_statistics", "intensity_offsets"], [["0", "1", "2"]]),
    (["training_statistics", "swap_thresholds"], [[0, 9, 1.0]]),
    (["training_statistics", "feature_means"], [[float("nan")] * 7]),
]


@pytest.mark.parametrize(("keys", "value"), INVALID)
def test_metadata_that_is_incomplete_or_contradicts_itself_is_refused_with_its_file(
    write_checkpoint, keys, value
):
    with pytest.raises(UsageError, match=r"x\.ckpt"):
        load_ensemble([write_checkpoint("unet3d", *keys, value=value)])
