"""Reports of made-up runs, side by side."""

import json

import pytest

from unet3d.report.run_comparison import (
    comparison_to_dict,
    draw_runs,
    find_pareto_optimal,
    find_runs,
    make_comparison_rows,
)


def report(dice, mib, seconds, *, pool="max", finished=True, evaluated=True, **config):
    found = {
        "finished": finished,
        "steps": 10,
        "parameters": 1234,
        "choices": {"pool": pool, "model": "unet_tiny"},
        "config": {"pool": {"_target_": f"pool.{pool}"}, "model": {"depth": 3}, **config},
        "metrics": {"val/dice": dice, "val/dice/a": dice, "val/hd95_mm": 2.0},
        "memory": {"first_step": {"resident": 1}, "steady_step": {"resident": int(mib * 2**20)}},
        "speed": {"median_step_seconds": seconds},
    }
    if evaluated:
        score = {"mean": dice, "low": dice - 0.1, "high": dice + 0.1}
        scores = {"dice": score, "hd95_mm": {"mean": 1.5, "low": 1, "high": 2}}
        found["evaluation"] = {"mean": scores, "per_class": {"a": scores}}
    return found


@pytest.fixture
def folder(tmp_path):
    def write(**reports):
        for name, content in reports.items():
            (tmp_path / name).mkdir(parents=True)
            (tmp_path / name / "report.json").write_text(json.dumps(content))
        return tmp_path

    return write


def test_runs_are_told_apart_by_what_differs_and_the_best_comes_first(folder):
    where = folder(
        a=report(0.7, 100, 1.0, seed=0),
        b=report(0.9, 200, 1.0, pool="median", seed=1),
    )
    runs, faults = find_runs([where])
    assert not faults
    assert [run.folder.name for run in runs] == ["b", "a"]
    assert runs[0].differs == {"pool": "median", "seed": "1"}  # and no word of its _target_
    head, best, _ = make_comparison_rows(runs)
    assert head[1:6] == ("pool", "seed", "Dice [95 %]", "a", "HD95 mm")
    assert best[3] == "0.9000 [0.8000, 1.0000]"
    assert best[5:9] == ("1.50", "200", "1.000", "1,234")


def test_a_run_that_was_not_evaluated_shows_its_last_validation(folder):
    where = folder(a=report(0.7, 100, 1.0, evaluated=False, finished=False))
    (run,), _ = find_runs([where / "a"])
    assert run.label == "a"
    assert make_comparison_rows([run])[1][1:4] == ("0.7000", "0.7000", "2.00")
    assert make_comparison_rows([run])[1][-1] == "stopped"


def test_a_run_is_unbeaten_unless_another_is_as_good_in_all_and_better_in_one(folder):
    where = folder(
        best=report(0.9, 200, 2.0),
        small=report(0.8, 100, 2.0),
        worse=report(0.8, 150, 2.0),
        same=report(0.9, 200, 2.0),
    )
    runs, _ = find_runs([where])
    found = {
        run.folder.name: good for run, good in zip(runs, find_pareto_optimal(runs), strict=True)
    }
    assert found == {"best": True, "small": True, "worse": False, "same": True}


def test_a_run_with_warnings_is_marked_with_their_number(folder):
    runs, _ = find_runs(
        [folder(a=report(0.7, 1, 1) | {"warnings": ["x", "y"]}, b=report(0.6, 2, 2))]
    )
    assert [row[-1] for row in make_comparison_rows(runs)[1:]] == ["unbeaten, 2 warnings", ""]
    assert [run["warnings"] for run in comparison_to_dict(runs)] == [["x", "y"], []]


def test_a_run_that_has_reached_nothing_is_last_and_not_drawn(folder, tmp_path):
    nothing = report(0, 0, 0, evaluated=False, finished=False) | {"metrics": {}, "speed": {}}
    runs, _ = find_runs([folder(a=nothing, b=report(0.5, 1, 1))])
    assert [run.folder.name for run in runs] == ["b", "a"]
    assert make_comparison_rows(runs)[2][1:3] == ("-", "-")
    draw_runs(runs, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"


def test_what_is_no_report_is_named_and_the_others_are_shown(folder):
    where = folder(good=report(0.5, 1, 1), list=[], empty={})
    (where / "cut").mkdir()
    (where / "cut" / "report.json").write_text('{"finished": tr')
    (where / "nothing").mkdir()
    runs, faults = find_runs([where, where / "nothing"])
    assert [run.folder.name for run in runs] == ["good"]
    assert len(faults) == 4
    assert comparison_to_dict(runs)[0]["dice_interval"] == (0.4, 0.6)
