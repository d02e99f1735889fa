"""The bench of held-out quality: what it trains, what it leaves alone, what it makes of it."""

import json
import sys
from pathlib import Path

import pytest

from unet3d.config.compose import compose_config

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import bench_quality as bench  # noqa: E402
import quality_results as results  # noqa: E402
import readme_tables as tables  # noqa: E402

TRAIN = """
import json, sys
from pathlib import Path
words = dict(word.lstrip("+~").partition("=")[::2] for word in sys.argv[1:])
print("training", file=open(words["hydra.run.dir"] + ".calls", "a"))
if words.get("precision") == "7":
    sys.exit("unet3d: precision must be 32, 16 or bf16, got 7")
dice = {"small": 0.5 + 0.1 * int(words.get("seed", 0)), "large": 0.9}
mean = sum(dice.values()) / 2
folder = Path(words["hydra.run.dir"])
(folder / "evaluation").mkdir(parents=True)
of_cases = {f"case_{n}": {name: {"dice": d + 0.01 * n} for name, d in dice.items()} for n in (0, 1)}
(folder / "evaluation" / "evaluation.json").write_text(json.dumps({"cases": of_cases}))
(folder / "report.json").write_text(json.dumps({
    "finished": True, "steps": int(words.get("trainer.max_steps", 1)), "parameters": 7,
    "metrics": {"val/dice": mean, "val/dice/Anterior": 0.8, "val/dice/Posterior": 0.7},
    "evaluation": {
        "mean": {"dice": {"mean": mean}},
        "per_class": {name: {"dice": {"mean": d}} for name, d in dice.items()},
    },
    "memory": {"steady_step": {"resident": 2**30}, "predicted": {"allocated": 2**20}},
    "speed": {"median_step_seconds": 0.25}, "config": {"model": {}},
    "precision": {}, "device": "cpu", "versions": {},
}))
"""


@pytest.fixture
def ask(tmp_path, monkeypatch, capsys):
    """Run the bench where train.py ends at once: (exit code, what is said, the result file)."""
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.setattr(bench, "ROOT", tmp_path)

    def command(*words, file="cpu-quality.json"):
        places = ["--runs", str(tmp_path / "runs"), "--output", str(tmp_path)]
        code = bench.main([*words, *places])
        path = tmp_path / file
        return code, capsys.readouterr().out, json.loads(path.read_text()) if path.exists() else {}

    return command


def calls(folder):
    """How often each run was started."""
    return sorted(len(p.read_text().splitlines()) for p in folder.rglob("*.calls"))


def test_runs_that_are_done_are_kept_and_all_of_them_are_in_the_file(ask, tmp_path):
    ask("--jobs", "hard", "--variants", "ours", "--seeds", "0")
    _, _, found = ask("--jobs", "hard", "default", "--variants", "ours", "--seeds", "0", "1")
    assert calls(tmp_path / "runs") == [1, 1, 1, 1]
    rows = found["hard"]["ours"]["rows"]
    assert list(rows) == ["fold 0, seed 0", "fold 0, seed 1"]
    row = rows["fold 0, seed 1"]
    assert row["dice"] == pytest.approx({"mean": 0.75, "small": 0.6, "large": 0.9})
    assert row["cases"]["case_1"]["small"] == pytest.approx(0.61)
    assert row["steps"] == 1000
    assert row["seconds"] > 0
    assert list(found["default"]["ours"]["rows"]) == list(rows)


def test_data_and_variants_of_ones_own_have_a_name(ask):
    _, said, found = ask(
        *("--data", "spleen", "data=decathlon", "data.root=x", "--seeds", "2", "--folds", "1", "3"),
        *("--variant", "wide", "model.width=16", "--steps", "5"),
    )
    assert list(found) == ["spleen"]
    assert list(found["spleen"]) == ["wide"]
    assert list(found["spleen"]["wide"]["rows"]) == ["fold 1, seed 2", "fold 3, seed 2"]
    asked = ["data=decathlon", "data.root=x", "trainer.max_steps=5", "model.width=16"]
    assert found["spleen"]["wide"]["overrides"] == asked
    assert " ".join(asked) in said


def test_runs_of_other_settings_are_not_mixed(ask):
    ask("--jobs", "hard", "--variants", "ours", "--steps", "5")
    _, _, found = ask("--jobs", "hard", "--variants", "ours", "--steps", "6", "--seeds", "1")
    assert [row["steps"] for row in found["hard"]["ours"]["rows"].values()] == [6]


def test_a_run_that_fails_is_named_and_the_others_are_done(ask):
    code, said, found = ask(
        *("--jobs", "hard", "--variants", "ours", "--variant", "bad", "precision=7", "--seeds", "0")
    )
    assert code == 1
    assert (
        "hard, bad, fold 0, seed 0: exit code 1: unet3d: precision must be 32, 16 or bf16, got 7"
        in said
    )
    assert list(found["hard"]) == ["ours"]


def test_a_run_that_another_process_trains_is_left_to_it(ask, tmp_path, monkeypatch):
    words = ("--jobs", "hard", "--variants", "ours", "--seeds", "0")
    ask(*words)
    (report,) = (tmp_path / "runs").rglob("report.json")
    report.unlink()
    with bench.claim(report.parent):
        code, said, _ = ask(*words)
    assert code == 0
    assert "left to another process:\n  hard, ours, fold 0, seed 0" in said
    assert calls(tmp_path / "runs") == [1]


@pytest.mark.parametrize(
    ("peer", "job", "filters", "stride"),
    [
        ("dynunet", bench.JOBS["default"], [8, 16, 32], [2, 2, 2]),
        ("nnunet", bench.JOBS["hippocampus"], [16, 32, 64, 128], [2, 2, 2]),
        (
            "dynunet",
            ["model=unet_nnunet", "model.channels=[4,6]", "model.pool_kernel=[2,2,1]"],
            [4, 6],
            [2, 2, 1],
        ),
    ],
)
def test_peers_have_the_sizes_of_our_network(peer, job, filters, stride):
    config = compose_config(bench.match_ours(job, bench.VARIANTS[peer]), "train").config
    assert config.model.filters == filters
    assert config.model.strides == [[1, 1, 1]] + [stride] * (len(filters) - 1)
    assert config.model.kernel_size == [[3, 3, 3]] * len(filters)
    known = compose_config(["model=dynunet"], "train").config.model
    assert config.model.get("prior_bias") is (False if "prior_bias" in known else None)
    assert not {"depth", "width", "deep_supervision"} & set(config.model)


def row(mean, cases=(), **classes):
    """A run's row with these figures."""
    return {
        "dice": {"mean": mean, **classes},
        "cases": {f"case {n}": {"a": dice} for n, dice in enumerate(cases)},
        "steps": 5,
        "seconds": 9.0,
        "median_step_seconds": 0.5,
        "peak_bytes": {"resident": 3},
        "predicted_bytes": None,
    }


def test_a_summary_has_the_spread_and_the_worst():
    rows = {
        "seed 0": row(0.8, [0.7, 0.9], a=0.9, b=0.7),
        "seed 1": row(0.6, [0.5, 0.7], a=0.3, b=0.9),
        "seed 2": row(0.7, [0.6, 0.8], a=0.7, b=0.7),
    }
    found = results.summarize(rows)
    assert found["dice"] == pytest.approx(0.7)
    assert found["deviation"] == pytest.approx(0.1)
    assert (found["worst_run"], found["worst_dice"]) == ("seed 1", 0.6)
    assert (found["worst_class"], found["worst_class_dice"]) == ("a", 0.3)
    assert found["per_class"]["b"] == pytest.approx(23 / 30)
    low, high = found["interval_over_runs"]
    assert (low, high) == pytest.approx((0.7 - 0.2484, 0.7 + 0.2484), abs=1e-4)  # t: 4.303
    assert found["interval_over_cases"] == pytest.approx([0.6, 0.8])  # of two: one alone


def test_one_run_without_an_evaluation_has_no_spread():
    found = results.summarize({"seed 0": row(None, a=None)})
    assert found["worst_dice"] == 0
    assert found["worst_class"] is None
    assert [found[k] for k in ("deviation", "interval_over_runs", "interval_over_cases")] == (
        [None] * 3
    )


def test_the_table_has_a_row_for_every_job_and_network(ask, tmp_path):
    ask("--jobs", "hard", "--variants", "ours", "--variant", "wide", "model.width=16")
    ask("--jobs", "default", "--variants", "ours", "--seeds", "1")
    lines = tables.quality(tmp_path).splitlines()
    assert [line.split(" | ")[:3] for line in lines[2:]] == [
        ["| hard", "ours", "0.7500 ± 0.0500"],
        ["| hard", "wide", "0.7500 ± 0.0500"],
        ["| default", "ours", "0.7500"],
    ]
    assert "| 0.7000 (small 0.5000) | 3 | 1000 | 0.25 | 1 MiB |" in lines[2]


def test_folds_and_poolings_of_the_hippocampus_make_its_table(ask, tmp_path):
    ask("folds", "trainer.max_steps=4", "--folds", "0", "1")
    _, _, found = ask("pools", "--seeds", "0", "1", file="cpu-hippocampus.json")
    assert found["folds"]["overrides"] == ["experiment=hippocampus_cpu", "trainer.max_steps=4"]
    assert list(found["pools"]["rows"]) == ["max", "median", "approx_median"]
    lines = tables.hippocampus(tmp_path).splitlines()
    assert lines[2].startswith("| folds 0, 1 | 0.8000 / 0.7000 | 0.7000 ± 0.0000 | 4 | 0.25 |")
    assert lines[3].startswith("| `pool=max`, 2 runs | 0.8000 / 0.7000 | 0.7250 ± 0.0354 | 1 |")
