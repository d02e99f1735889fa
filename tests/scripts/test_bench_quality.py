"""Dice of validation cases: what is trained, what is kept, and how runs are summarized."""

import json
from pathlib import Path

import pytest

from scripts.bench import quality
from scripts.bench.quality_results import summarize
from unet3d.config.compose import compose_config
from unet3d.config.settings.training import parse_training

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def count_starts(folder):
    """Return how often each run was started."""
    return sorted(len(p.read_text().splitlines()) for p in folder.rglob("*.calls"))


def test_finished_runs_are_not_repeated_and_all_are_in_the_result_file(run_quality, tmp_path):
    run_quality("--jobs", "hard", "--variants", "ours", "--seeds", "0")
    _, _, result = run_quality(
        *("--jobs", "hard", "default", "--variants", "ours", "--seeds", "0", "1")
    )
    assert count_starts(tmp_path / "runs") == [1, 1, 1, 1]
    rows = result["hard"]["ours"]["rows"]
    assert list(rows) == ["fold 0, seed 0", "fold 0, seed 1"]
    row = rows["fold 0, seed 1"]
    assert row["dice"] == pytest.approx({"mean": 0.75, "small": 0.6, "large": 0.9})
    assert row["cases"]["case_1"]["small"] == pytest.approx(0.61)
    assert row["steps"] == 1000
    assert row["seconds"] > 0
    assert list(result["default"]["ours"]["rows"]) == list(rows)


def test_users_can_add_jobs_and_variants(run_quality):
    _, output, result = run_quality(
        *("--data", "spleen", "data=decathlon", "data.root=x", "--seeds", "2", "--folds", "1", "3"),
        *("--variant", "wide", "model.width=16", "--steps", "5"),
    )
    assert list(result) == ["spleen"]
    assert list(result["spleen"]) == ["wide"]
    assert list(result["spleen"]["wide"]["rows"]) == ["fold 1, seed 2", "fold 3, seed 2"]
    overrides = ["data=decathlon", "data.root=x", "trainer.max_steps=5", "model.width=16"]
    assert result["spleen"]["wide"]["overrides"] == overrides
    assert " ".join(overrides) in output


def test_runs_with_other_settings_are_replaced(run_quality):
    run_quality("--jobs", "hard", "--variants", "ours", "--steps", "5")
    _, _, result = run_quality(
        *("--jobs", "hard", "--variants", "ours", "--steps", "6", "--seeds", "1")
    )
    assert [row["steps"] for row in result["hard"]["ours"]["rows"].values()] == [6]


def test_a_failed_run_is_reported_and_the_others_are_trained(run_quality):
    code, output, result = run_quality(
        *("--jobs", "hard", "--variants", "ours", "--variant", "bad", "precision=7", "--seeds", "0")
    )
    assert code == 1
    message = "exit code 1: unet3d: precision must be 32, 16 or bf16, got 7"
    assert f"hard, bad, fold 0, seed 0: {message}" in output
    assert list(result["hard"]) == ["ours"]


def test_a_run_that_another_process_trains_is_skipped(run_quality, tmp_path):
    words = ("--jobs", "hard", "--variants", "ours", "--seeds", "0")
    run_quality(*words)
    (report,) = (tmp_path / "runs").rglob("report.json")
    report.unlink()
    with quality.lock_run(report.parent):
        code, output, _ = run_quality(*words)
    assert code == 0
    assert "another process trains them:\n  hard, ours, fold 0, seed 0" in output
    assert count_starts(tmp_path / "runs") == [1]


@pytest.mark.parametrize(
    ("variant", "job", "filters", "stride"),
    [
        ("dynunet", quality.JOBS["default"], [8, 16, 32], [2, 2, 2]),
        ("nnunet", quality.JOBS["hippocampus"], [16, 32, 64, 128], [2, 2, 2]),
        (
            "dynunet",
            ["model=unet_nnunet", "model.channels=[4,6]", "model.pool_kernel=[2,2,1]"],
            [4, 6],
            [2, 2, 1],
        ),
    ],
)
def test_networks_of_other_projects_have_the_sizes_of_ours(variant, job, filters, stride):
    overrides = quality.match_network_size(job, quality.VARIANTS[variant])
    config = compose_config(overrides, "train").config
    assert config.model.filters == filters
    assert config.model.strides == [[1, 1, 1]] + [stride] * (len(filters) - 1)
    assert config.model.kernel_size == [[3, 3, 3]] * len(filters)
    dynunet = compose_config(["model=dynunet"], "train").config.model
    assert config.model.get("prior_bias") is (False if "prior_bias" in dynunet else None)
    assert not {"depth", "width", "deep_supervision"} & set(config.model)


def test_a_config_can_name_the_network_of_nnunet():
    from unet3d.workflows.shared.network import build_network

    overrides = quality.match_network_size(quality.JOBS["default"], quality.VARIANTS["nnunet"])
    network = build_network(
        parse_training(compose_config([*overrides, "data.num_classes=4"], "train"))
    )
    assert type(network).__name__ == "NnUNet"


def make_row(mean, cases=(), **classes):
    """Return a run's row with these scores."""
    return {
        "dice": {"mean": mean, **classes},
        "cases": {f"case {n}": {"a": dice} for n, dice in enumerate(cases)},
        "steps": 5,
        "seconds": 9.0,
        "median_step_seconds": 0.5,
        "peak_bytes": {"resident": 3},
        "predicted_bytes": None,
    }


def test_a_summary_has_the_spread_and_the_worst_run():
    rows = {
        "seed 0": make_row(0.8, [0.7, 0.9], a=0.9, b=0.7),
        "seed 1": make_row(0.6, [0.5, 0.7], a=0.3, b=0.9),
        "seed 2": make_row(0.7, [0.6, 0.8], a=0.7, b=0.7),
    }
    summary = summarize(rows)
    assert summary["dice"] == pytest.approx(0.7)
    assert summary["deviation"] == pytest.approx(0.1)
    assert (summary["worst_run"], summary["worst_dice"]) == ("seed 1", 0.6)
    assert (summary["worst_class"], summary["worst_class_dice"]) == ("a", 0.3)
    assert summary["per_class"]["b"] == pytest.approx(23 / 30)
    low, high = summary["interval_over_runs"]
    assert (low, high) == pytest.approx((0.7 - 0.2484, 0.7 + 0.2484), abs=1e-4)  # t: 4.303
    assert summary["interval_over_cases"] == pytest.approx([0.6, 0.8])  # means of single cases


def test_one_run_without_an_evaluation_has_no_spread():
    summary = summarize({"seed 0": make_row(None, a=None)})
    assert summary["worst_dice"] == 0
    assert summary["worst_class"] is None
    assert [summary[k] for k in ("deviation", "interval_over_runs", "interval_over_cases")] == (
        [None] * 3
    )


@pytest.mark.parametrize("name", ["cpu-quality", "cpu-screen-quality"])
def test_summaries_in_the_result_files_follow_from_their_rows(name):
    results = json.loads((BENCHMARKS / f"{name}.json").read_text())
    for variants in results.values():
        for entry in variants.values():
            summary = summarize(entry["rows"])
            assert summary.keys() == entry["summary"].keys()
            assert summary["dice"] == pytest.approx(entry["summary"]["dice"])


def test_the_hippocampus_is_trained_by_fold_and_by_pooling(run_quality):
    run_quality("folds", "trainer.max_steps=4", "--folds", "0", "1")
    _, _, result = run_quality("pools", "--seeds", "0", "1", file="cpu-hippocampus.json")
    assert result["folds"]["overrides"] == ["experiment=hippocampus_cpu", "trainer.max_steps=4"]
    assert list(result["pools"]["rows"]) == ["max", "median", "approx_median"]
