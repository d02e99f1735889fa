"""Compare runs given by synthetic reports."""

import json

import pytest

from tests.report.helpers.reports import make_report
from unet3d.report.comparison import (
    comparison_to_dict,
    describe_folds,
    find_pareto_optimal,
    find_runs,
    make_comparison_rows,
    plot_runs,
)


@pytest.fixture
def write_reports(tmp_path):
    def write(**reports):
        for name, content in reports.items():
            (tmp_path / name).mkdir(parents=True)
            (tmp_path / name / "report.json").write_text(json.dumps(content))
        return tmp_path

    return write


def test_runs_show_the_settings_that_differ_and_the_best_run_comes_first(write_reports):
    other = make_report(0.9, 100, 1.0, pool="median", seed=1) | {"warnings": ["x", "y"]}
    root = write_reports(a=make_report(0.7, 200, 1.0, seed=0), b=other)
    runs, problems = find_runs([root])
    assert not problems
    assert [run.folder.name for run in runs] == ["b", "a"]
    assert runs[0].differs == {"pool": "median", "seed": "1"}  # its _target_ is not compared
    header, best, worse = make_comparison_rows(runs)
    assert header[1:7] == ("pool", "seed", "cases", "Dice [95 %]", "a", "HD95 mm")
    assert best[4] == "0.9000 [0.8000, 1.0000]"
    assert best[6:10] == ("1.50", "100", "1.000", "1,234")
    assert (best[-1], worse[-1]) == ("Pareto-optimal, 2 warnings", "")


def test_a_key_that_differs_between_runs_of_one_option_is_shown(write_reports):
    reports = {
        f"{option}{rate}": make_report(0.7, 200, 1.0, optimizer={"_target_": option, "lr": rate})
        for option in ("sgd", "adamw")
        for rate in (0.01, 0.0001)
    }
    for name, report in reports.items():
        report["choices"]["optimizer"] = name.rstrip("0123456789.e-")
    runs, _ = find_runs([write_reports(**reports)])
    assert {tuple(run.differs) for run in runs} == {("optimizer", "optimizer.lr")}


def test_earlier_names_of_options_and_keys_are_no_difference(write_reports):
    tversky = {"_target_": "unet3d.loss.overlap.TverskyLoss"}
    earlier = make_report(0.7, 200, 1.0, loss={**tversky, "batch": True})
    now = make_report(0.9, 100, 1.0, loss={**tversky, "batch_dice": True})
    earlier["choices"]["model"], now["choices"]["model"] = "naive_small", "plain_small"
    runs, _ = find_runs([write_reports(a=earlier, b=now)])
    assert [run.differs for run in runs] == [{}, {}]


def test_of_many_classes_those_that_a_run_does_worst_are_shown(write_reports):
    reports = {name: make_report(0.9, 100, 1.0) for name in "ab"}
    for name, report in reports.items():
        score = dict(report["evaluation"]["mean"])
        dice = {f"c{n}": 1 - n / 100 for n in range(30)} | {"c1" if name == "a" else "c2": 0.0}
        report["evaluation"]["per_class"] = {
            n: score | {"dice": {"mean": d if n != "c3" else None}} for n, d in dice.items()
        }
    rows = make_comparison_rows(find_runs([write_reports(**reports)])[0])
    assert rows[0][3:8] == ("c1", "c2", "c29", "c28", "c27")
    assert {len(row) for row in rows} == {14}


def test_a_run_without_evaluation_shows_its_last_validation(write_reports):
    root = write_reports(a=make_report(0.7, 100, 1.0, evaluated=False, finished=False))
    (run,), _ = find_runs([root / "a"])
    row = make_comparison_rows([run])[1]
    assert (run.label, row[2:5], row[-1]) == ("a", ("0.7000", "0.7000", "2.00"), "stopped")


def test_a_run_is_pareto_optimal_unless_another_is_as_good_in_all_and_better_in_one(write_reports):
    costs = {"best": (0.9, 200), "small": (0.8, 100), "worse": (0.8, 150), "same": (0.9, 200)}
    root = write_reports(**{name: make_report(*cost, 2.0) for name, cost in costs.items()})
    runs, _ = find_runs([root])
    optimal = zip(runs, find_pareto_optimal(runs), strict=True)
    assert {run.folder.name for run, best in optimal if best} == {"best", "small", "same"}


def test_runs_that_differ_in_their_fold_alone_have_a_cross_validated_dice(write_reports):
    """One fold of two settings has no second one, and two seeds of a fold share their cases."""
    dice = {
        "a": (0, "max", 0, {"x": 0.5, "y": 0.7}),
        "b": (1, "max", 0, {"z": 0.9}),
        "c": (0, "median", 0, {"x": 0.1, "y": 0.1}),
        "d": (0, "median", 1, {"x": 0.1, "y": 0.1}),
    }
    reports = {
        name: make_report(0.5, 1, 1, pool=pool, fold=fold, seed=seed)
        for name, (fold, pool, seed, _) in dice.items()
    }
    reports["e"] = make_report(0.5, 1, 1, fold=1, seed=0, model={"depth": 9})
    dice["e"] = (1, "max", 0, {"w": 0.3})
    reports["f"] = make_report(0.5, 1, 1, fold=0, seed=0)
    reports["f"]["choices"]["model"] = "another"  # of which no other run has keys
    dice["f"] = (0, "max", 0, {"x": 0.3, "y": 0.3})
    root = write_reports(**reports)
    for name, (*_, cases) in dice.items():
        content = {"cases": {c: {"a": {"dice": d, "reference_ml": 1}} for c, d in cases.items()}}
        (root / name / "evaluation").mkdir()
        (root / name / "evaluation" / "evaluation.json").write_text(json.dumps(content))
    about = "model=unet_tiny, pool=max, model.depth=3, seed=0"
    line = f"cross-validated, folds 0, 1 of {about}: Dice 0.7000 [0.5000, 0.9000] over 3 cases"
    assert describe_folds(find_runs([root])[0]) == [line]


def test_folds_are_not_cross_validated_if_a_network_was_trained_on_their_cases(write_reports):
    reports = {
        name: make_report(0.5, 1, 1, fold=fold, init_from=f"{name}.ckpt")
        for fold, name in enumerate("ab")
    }
    reports["b"]["pretrained_on_validation"] = ["y"]
    reports["c"] = make_report(0.5, 1, 1, fold=1, init_from=None)
    root = write_reports(**reports)
    for name, case in zip("abc", "xyy", strict=True):
        content = {"cases": {case: {"a": {"dice": 0.5, "reference_ml": 1}}}}
        (root / name / "evaluation").mkdir()
        (root / name / "evaluation" / "evaluation.json").write_text(json.dumps(content))
    runs = find_runs([root])[0]
    assert {run.differs["init_from"] for run in runs} == {"a.ckpt", "b.ckpt", "null"}
    (line,) = describe_folds(runs)
    assert line.startswith("not cross-validated, folds 0, 1: Dice 0.5000")
    assert line.endswith(f"2 cases; init_from= of {root / 'b'} was trained on some of them")


def test_a_run_without_scores_comes_last_and_is_not_drawn(write_reports):
    empty = make_report(0, 0, 0, evaluated=False, finished=False) | {"metrics": {}, "speed": {}}
    runs, _ = find_runs([write_reports(a=empty, b=make_report(0.5, 1, 1))])
    assert [run.folder.name for run in runs] == ["b", "a"]
    assert make_comparison_rows(runs)[2][1:3] == ("-", "-")
    for axes in plot_runs(runs).axes:
        points = [line for line in axes.lines if line.get_marker() == "o"]
        assert [line.get_label() for line in points] == ["b"]
        intervals = [line.get_ydata() for line in axes.lines if line.get_alpha()]
        assert intervals == [pytest.approx((0.4, 0.6))]


def test_unreadable_reports_are_named_and_the_other_runs_are_shown(write_reports):
    root = write_reports(good=make_report(0.5, 1, 1), list=[], empty={})
    (root / "cut").mkdir()
    (root / "cut" / "report.json").write_text('{"finished": tr')
    (root / "nothing").mkdir()
    runs, problems = find_runs([root, root / "nothing"])
    assert [run.folder.name for run in runs] == ["good"]
    assert len(problems) == 4
    assert comparison_to_dict(runs)[0]["dice_interval"] == (0.4, 0.6)
