import copy

import pytest
import torch

from unet3d.errors import UsageError
from unet3d.lit.resume import extract_weights
from unet3d.workflows.inference.ensemble import load_ensemble
from unet3d.workflows.training.build import build_training


@pytest.fixture
def checkpoint(composed, tmp_path):
    """Change a checkpoint's content; return the file."""
    task = build_training(composed("model.width=2", "model.depth=2"), tmp_path).task
    content = {"unet3d": task.card, "state_dict": task.state_dict()}

    def changed(*keys, value):
        changed = copy.deepcopy(content)
        place = changed
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value
        torch.save(changed, tmp_path / "x.ckpt")
        return tmp_path / "x.ckpt"

    return changed


def test_a_card_as_it_was_written_is_taken(checkpoint):
    assert load_ensemble([checkpoint("more", value=1)]).classes == (
        "background",
        "ball",
        "tube",
        "box",
    )


def test_a_card_of_an_earlier_version_knows_nothing_of_its_training_cases(checkpoint):
    assert load_ensemble([checkpoint("unet3d", "training", value=None)]).training == ()


CARDS = [
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
    (["config", "precision"], 7),
    (["config", "model", "depth"], 10**6),
    (["config", "model", "width"], "wide"),
    (["config", "model", "width"], 3),
    (["config", "model", "channels"], [10**8, 10**8]),
    (["config", "model", "channels"], [1] * 10**5),
    (["classes"], ["a", "b", "b", "c"]),
    (["classes"], ["a"]),
    (["channels"], []),
    (["largest_component"], ["liver"]),
    (["preparation"], {}),
    (["preparation", "num_classes"], 3),
    (["preparation", "normalize"], ["ct"]),
    (["preparation", "orientation"], 5),
    (["training"], {"cases": 3}),
    (["training", "spacing_mm"], [[1, 2, 3]]),
    (["training", "offsets"], [["0", "1", "2"]]),
    (["training", "swaps"], [[0, 9, 1.0]]),
    (["training", "means"], [[float("nan")] * 7]),
]


@pytest.mark.parametrize(("keys", "value"), CARDS)
def test_a_card_that_lacks_or_contradicts_something_is_refused_with_its_file(
    checkpoint, keys, value
):
    with pytest.raises(UsageError, match=r"x\.ckpt"):
        load_ensemble([checkpoint("unet3d", *keys, value=value)])


@pytest.mark.parametrize(
    "weight", [torch.tensor([1.0, float("nan")]), torch.zeros(2, dtype=torch.complex64), "x", 5]
)
def test_weights_that_are_no_finite_numbers_are_refused(tmp_path, weight):
    with pytest.raises(UsageError, match=r"x\.ckpt"):
        extract_weights(tmp_path / "x.ckpt", {"state_dict": {"a": torch.ones(2), "b": weight}})
