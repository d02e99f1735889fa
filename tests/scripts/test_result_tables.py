"""Tables of the documents from Dice of validation cases and of the GPU report."""

import json
import shutil
from pathlib import Path

import pytest

from scripts.bench.recorded_names import use_current_names
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


def write_gpu(folder, **parts):
    """Write a GPU report of these parts' rows."""
    content = {name: {"rows": rows} for name, rows in parts.items()}
    (folder / "gpu-1.json").write_text(json.dumps({"parts": {"environment": {}, **content}}))


def make_row(error, *, seconds=0.1):
    errors = {"allocated_error_percent": error, "reserved_error_percent": 10 * error}
    predicted = {"allocated": 2**30, "reserved": 2**30}
    return {"measured": predicted, "predicted": predicted, "step_seconds": seconds, **errors}


def test_the_error_of_the_estimate_is_of_all_rows_and_has_both_extremes(tmp_path):
    tests = {"gpu": {"passed": 4, "failed": 1, "failures": ["FAILED tests/a.py::test_b[c-d]"]}}
    predict = {f"checkpointing=fused {n}": make_row(0.0) for n in range(8)}
    peers = {"MONAI DynUNet": make_row(-2.0), "ours, fused": make_row(3.0)}
    write_gpu(tmp_path, predict=predict, peers=peers, tests=tests)
    lines = tables.gpu_error(tmp_path).splitlines()
    assert "| **allocated** | 10 | 0.0% | 3.0% | -2.0% | +3.0% | 0 |" in lines
    assert "| **reserved** | 10 | 0.0% | 30.0% | -20.0% | +30.0% | 2 |" in lines
    assert "| reserved, plain modules | 1 | 20.0% | 20.0% | -20.0% | -20.0% | 1 |" in lines
    assert lines[-1] == "Of the tests in the same run, 4 passed and 1 failed (`test_b`)."


@pytest.fixture
def timed_peers(tmp_path):
    """A folder with times of nnU-Net's network and ours on a CPU."""
    ratios = {"": 0.8, ", channels-last": 0.6, ", compiled": 0.7}
    times = {f"nnU-Net PlainConvUNet{way}": ratio for way, ratio in ratios.items()}
    rows = {
        name: {"time_ratio": ratio, "time_ratio_range": [ratio, ratio]}
        for name, ratio in {**times, "ours, fused": 0.5}.items()
    }
    estimated = {name: {"peak_allocated_mib": 7000} for name in ("ours, fused", *list(times)[:1])}
    content = {
        "predicted": {"peers": {"rows": estimated}},
        "times, 32": {"cases": {"96x64x32": {"rows": use_current_names(rows)}}},
    }
    (tmp_path / "cpu-step.json").write_text(json.dumps(content))
    return tmp_path


def test_a_network_that_its_project_compiles_is_marked_eager_until_it_is_measured(timed_peers):
    name = "nnU-Net PlainConvUNet"
    write_gpu(timed_peers, peers={name: make_row(0.0)})
    assert tables.peers(timed_peers).splitlines()[2:] == [
        "| unet3d, fused | not measured yet (7,000 MiB) | not measured yet | 0.50x |",
        f"| {name}, as shipped | 1,024 MiB (1,024 MiB), eager | 100 ms, eager | 0.80x |",
        f"| {name}, at its best | not measured yet | not measured yet | 0.60x, channels-last |",
    ]
    tuned = {f"{name}, compiled": {"measured": {"allocated": 2**29}, "step_seconds": 0.05}}
    write_gpu(timed_peers, peers={name: make_row(0.0)}, tuned=tuned)
    assert tables.peers(timed_peers).splitlines()[3:] == [
        f"| {name}, as shipped | 512 MiB | 50 ms | 0.80x |",
        f"| {name}, at its best | 512 MiB | 50 ms, compiled | 0.60x, channels-last |",
    ]


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
        "| **allocated** | 2 |",
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
