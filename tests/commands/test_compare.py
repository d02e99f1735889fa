import json

import pytest

from tests.report.helpers.reports import make_report
from unet3d.__main__ import main


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Two runs whose folders have odd names."""
    monkeypatch.chdir(tmp_path)
    for name, content in {
        "it's (1), a=b": make_report(0.7, 100, 1.0),
        "other": make_report(0.9, 50, 1.0, pool="median"),
    }.items():
        folder = tmp_path / "outputs" / name
        folder.mkdir(parents=True)
        (folder / "report.json").write_text(json.dumps(content))
    return tmp_path


def write_run(folder, dice, *, volumes=None, groups=None, **config):
    """Write a run whose cases have these Dice, and reference labels of these volumes (1 ml)."""
    folder.mkdir(parents=True)
    report = make_report(sum(dice.values()) / len(dice), 100, 1.0, **config)
    (folder / "report.json").write_text(json.dumps(report))
    volumes = dict.fromkeys(dice, 1.0) | (volumes or {})
    cases = {n: {"a": {"dice": value, "reference_ml": volumes[n]}} for n, value in dice.items()}
    (folder / "evaluation").mkdir()
    (folder / "evaluation" / "evaluation.json").write_text(
        json.dumps({"cases": cases, "groups": groups})
    )


def test_runs_are_compared_in_pairs_of_the_same_cases(tmp_path, capsys):
    write_run(tmp_path / "best", {"one": 0.9, "two": 0.5, "three": 0.7})
    write_run(tmp_path / "worse", {"three": 0.66, "one": 0.88, "two": 0.49})
    assert main(["compare", str(tmp_path), f"output={tmp_path / 'table'}"]) == 0
    table = (tmp_path / "table").read_text()
    assert "against best [95 %]" in table
    assert "-0.0233 [-0.0400, -0.0100]" in table  # the means differ by far less than cases do
    assert main(["compare", str(tmp_path), "format=json"]) == 0
    best, worse = json.loads(capsys.readouterr().out)
    assert best["against_best"] is None
    assert worse["against_best"] == pytest.approx({"mean": -0.07 / 3, "low": -0.04, "high": -0.01})


def test_scans_of_a_patient_are_resampled_together(tmp_path, capsys):
    groups = {"one": "p1", "two": "p2", "three": "p2"}
    write_run(tmp_path / "best", {"one": 0.9, "two": 0.5, "three": 0.7}, groups=groups)
    write_run(tmp_path / "worse", {"one": 0.88, "two": 0.49, "three": 0.66}, groups=groups)
    assert main(["compare", str(tmp_path), "format=json"]) == 0
    _, worse = json.loads(capsys.readouterr().out)
    expected = {"mean": -0.07 / 3, "low": -0.025, "high": -0.02}  # only p2 to only p1
    assert worse["against_best"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("fold", "root", "why"),
    [
        (0, "scans", "other: cases one, two"),
        (1, "scans", "other: fold=1, cases one, two"),
        (0, "more/scans", "other: data.layout.root=more/scans, cases one, two"),
    ],
)
def test_runs_of_different_cases_are_not_ranked_together(tmp_path, capsys, fold, root, why):
    write_run(
        tmp_path / "run", {"one": 0.9, "two": 0.5}, fold=0, data={"layout": {"root": "scans"}}
    )
    other = {"fold": fold, "data": {"layout": {"root": root}}}
    write_run(tmp_path / "other", {"one": 0.1, "two": 0.1}, volumes={"one": 2.0}, **other)
    assert main(["compare", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "not ranked together" in shown
    assert why in shown
    assert "Pareto-optimal" not in shown
    assert "against best" not in shown


def test_the_same_cases_at_another_place_are_ranked_together(tmp_path, capsys):
    for name, value in {"laptop": 0.5, "cluster": 0.6}.items():
        write_run(tmp_path / name, {"one": value}, data={"layout": {"root": f"/{name}/scans"}})
    assert main(["compare", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "Pareto-optimal" in shown
    assert "not ranked" not in shown


def test_runs_are_named_by_folder_parent_or_pattern_and_empty_folders_are_skipped(runs, capsys):
    assert main(["compare", "outputs/it's (1), a=b", "outputs/other"]) == 0
    by_name = capsys.readouterr().out
    assert main(["compare", "outputs"]) == 0
    assert main(["compare", "outputs/*"]) == 0
    assert capsys.readouterr().out == by_name * 2
    assert "0.9000 [0.8000, 1.0000]" in by_name
    assert "Pareto-optimal" in by_name
    (runs / "empty").mkdir()
    assert main(["compare", "outputs", "empty"]) == 1
    shown = capsys.readouterr()
    assert "empty: no report.json" in shown.err
    assert "outputs/other" in shown.out
