"""Tables of the documents from Dice of validation cases and of the GPU report."""

import json
import shutil
from pathlib import Path

import pytest

from scripts.docs import update_tables as tables

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_the_table_has_a_row_for_every_job_and_network(run_quality, tmp_path):
    run_quality("--jobs", "hard", "--variants", "ours", "--variant", "wide", "model.width=16")
    run_quality("--jobs", "default", "--variants", "ours", "--seeds", "1")
    lines = tables.quality(tmp_path).splitlines()
    assert [line.split(" | ")[:3] for line in lines[2:]] == [
        ["| `data=synthetic_hard`", "unet3d (default)", "0.7500 ± 0.0500"],
        ["| `data=synthetic_hard`", "wide", "0.7500 ± 0.0500"],
        ["| default run", "unet3d (default)", "0.7500"],
    ]
    assert "| 0.7000 (small 0.5000) | 3 | 1000 | 0.25 | 1 MiB |" in lines[2]


def test_the_hippocampus_table_has_folds_and_poolings(run_quality, tmp_path):
    run_quality("folds", "trainer.max_steps=4", "--folds", "0", "1")
    run_quality("pools", "--seeds", "0", "1")
    lines = tables.hippocampus(tmp_path).splitlines()
    assert lines[2].startswith("| folds 0, 1 | 0.8000 / 0.7000 | 0.7000 ± 0.0000 | 4 | 0.25 |")
    assert lines[3].startswith("| `pool=max`, 2 runs | 0.8000 / 0.7000 | 0.7250 ± 0.0354 | 1 |")


def test_figures_of_a_gpu_come_from_its_file(rehearsed, tmp_path):
    for file in (ROOT / "benchmarks").glob("[!n]*-*.json"):  # all but those of NVIDIA GPUs
        shutil.copy(file, tmp_path)
    text = "a\n" + "\n".join(f"<!-- {name} -->\nstale\n<!-- end -->" for name in tables.TABLES)
    before = tables.filled(text, tmp_path)
    assert "stale" not in before
    content = json.loads((rehearsed / "rehearsal.json").read_text())
    parts = content["parts"]
    pools = {name: {"both_ratio": 0.25} for name in tables.POOLS}
    parts["pool"] = {"rows": {"2x64x320x150x26 float32": {"rows": pools}}}
    parts["batch"] = {"rows": {"small, fused": {"largest": 6, "predicted": 7}}}
    parts["environment"] = {"rows": {"machine": {"device": "GPU 1", "torch": "2.11.0"}}}
    run = {"dice": {"mean": 0.8912}, "steps": 900, "median_step_seconds": 0.02}
    parts["hippocampus"] = {"rows": {"fold 0": run | {"goal": 0.88, "seconds_to_goal": 61.0}}}
    (tmp_path / "gpu-1.json").write_text(json.dumps(content))
    after = tables.filled(text, tmp_path)
    for sentence in (
        "Measured on one GPU 1 (torch 2.11.0; `make gpu`).",
        "| `median` | 0.28x / 0.22x | 0.79x / 1.24x | 1 | 41 / 21 | 0.25x / not measured yet |",
        "| 6 (7) |",
        "a Dice of 0.88 reached after 61 s, 0.8912 at the end of 900 steps of 0.020 s.",
        "over 1 configurations, allocated memory is off by",
    ):
        assert sentence in after
        assert sentence not in before
    lines = tables.gpu_step(tmp_path).splitlines()
    row = next(line for line in lines if line.startswith("| plain modules |"))
    assert row.count(tables.OPEN) == 3  # the batch, and the large network


@pytest.mark.parametrize(
    ("recorded", "shown"),
    [
        (("none", "lean"), ["`fused`", "`lean`"]),
        (("none", "fused", "lean"), ["`none`", "`fused`", "`lean`"]),
    ],
)
def test_none_is_fused_only_in_results_from_before_the_renaming(recorded, shown, tmp_path):
    sizes = dict.fromkeys(("peak_allocated_bytes", "peak_reserved_bytes"), 2**20)
    rows = [{"value": f"checkpointing={name}", **sizes} for name in recorded]
    fit = [{"overrides": ["checkpointing=none"], "extra_compute": 0.0, **sizes}]
    (tmp_path / "predicted-big.json").write_text(json.dumps({"study": rows, "fit": fit}))
    assert [line.split()[1] for line in tables.big(tmp_path).splitlines()[2:]] == shown
    assert f"`checkpointing={shown[0].strip('`')}`" in tables.big_fit(tmp_path)
