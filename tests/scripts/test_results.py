"""Results of benchmarks: their summaries, and the tables of a GPU that has been measured."""

import json
import shutil

import pytest

from scripts.bench.quality_results import summarize
from scripts.docs import tables
from scripts.docs.update_tables import fill


@pytest.mark.parametrize("name", ["cpu-quality", "cpu-screen-quality"])
def test_summaries_of_dice_follow_from_the_recorded_runs(name):
    for variants in tables.read_result(name).values():
        for entry in variants.values():
            summary = summarize(entry["rows"])
            assert summary.keys() == entry["summary"].keys()
            assert summary["dice"] == pytest.approx(entry["summary"]["dice"])


def test_a_part_that_is_measured_on_a_gpu_appears_in_its_tables(tmp_path, monkeypatch):
    for file in tables.BENCHMARKS.glob("*.json"):
        shutil.copy(file, tmp_path)
    monkeypatch.setattr(tables, "BENCHMARKS", tmp_path)
    path = tmp_path / "nvidia-h100-80gb-hbm3.json"
    content = json.loads(path.read_text())
    run = {"dice": {"mean": 0.8912}, "steps": 900, "median_step_seconds": 0.02}
    pool = {"median": {"both_ratio": 0.25}}
    step = {"measured": {"allocated": 2**29}, "step_seconds": 0.05}
    content["parts"] |= {
        "hippocampus": {"rows": {"fold 0": run | {"goal": 0.88, "seconds_to_goal": 61.0}}},
        "pool": {"rows": {"2x64x320x150x26 float32": {"rows": pool}}},
        "tuned": {"rows": {"nnU-Net PlainConvUNet, compiled": step}},
    }
    path.write_text(json.dumps(content))
    names = ("gpu_hippocampus", "pooling", "peers", "unmeasured")
    text = fill("\n".join(f"<!-- {name} -->\nstale\n<!-- end -->" for name in names))
    assert "stale" not in text
    for found in (
        "a Dice of 0.88 reached after 61 s, 0.8912 at the end of 900 steps of 0.020 s.",
        "| `median` | 0.28x / 0.22x | 0.79x / 1.24x | 1 | 41 / 21 | 0.25x / not measured yet |",
        "| nnU-Net PlainConvUNet, at its best | 512 MiB | 50 ms, compiled |",
        "**Not yet measured on a GPU:** residual encoders.",
    ):
        assert found in text
