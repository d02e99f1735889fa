import json

import pytest
import yaml

from unet3d.__main__ import main
from unet3d.config.compose import compose_config
from unet3d.machine import CUDA_CONTEXT_BYTES
from unet3d.memory.fit import estimate_configured_step
from unet3d.text import GIB
from unet3d.training.config import parse_train_config

pytestmark = pytest.mark.slow

NETWORK = ["model=unet_tiny", "model.depth=2", "data.patch_size=[64,64,64]", "precision=16"]


@pytest.fixture
def suggest(tmp_path, monkeypatch, capsys):
    """Run `unet3d suggest` in an empty folder and return what it suggests."""
    monkeypatch.chdir(tmp_path)

    def command(*words):
        assert main(["suggest", *words, "format=json"]) == 0
        lines = capsys.readouterr().out.splitlines()
        return [suggestion["overrides"] for suggestion in json.loads(lines[-1])]

    return command


@pytest.mark.long
def test_a_plan_is_the_first_suggestion_for_the_same_data_budget_and_network(
    suggest, decathlon_folder, tmp_path
):
    words = [*NETWORK, "data=decathlon", f"data.root={decathlon_folder}"]
    fused = parse_train_config(compose_config([*words, "data.batch_size=2"], "train"))
    needed = estimate_configured_step(fused.step).run_peak.reserved + CUDA_CONTEXT_BYTES
    words += [f"budget_gib={(needed - 1) / GIB}"]  # fused fits a batch of one
    first, *_ = suggest(*words)
    assert first == ["checkpointing=skips", "data.batch_size=2"]
    assert main(["plan", *words, "measure_time=false"]) == 0
    plan = yaml.safe_load((tmp_path / "conf" / "experiment" / "planned.yaml").read_text())
    assert {"override /checkpointing": "skips"} in plan["defaults"]
    assert plan["data"]["batch_size"] == 2


def test_no_batch_is_larger_than_a_dataset_that_exists(suggest, decathlon_folder):
    """The folder has five cases of 16 x 16 x 16 voxels."""
    words = ["data.patch_size=[16,16,16]", "precision=16", "checkpointing=fused", "budget_gib=8"]
    data = ["data=decathlon", f"data.root={decathlon_folder}"]
    assert suggest(*words, *data) == [["data.batch_size=2"]]


def test_the_search_ends_where_even_the_smallest_step_does_not_fit(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [*NETWORK[:2], "data.patch_size=[16,16,16]"]
    assert main(["suggest", *words, "budget_gib=0.001"]) == 3
    tried, nothing = capsys.readouterr().err.splitlines()
    assert tried.startswith("1/12 ")
    assert nothing.startswith("nothing fits 0.001 GiB: ")
