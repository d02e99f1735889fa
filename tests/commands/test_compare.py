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


@pytest.mark.parametrize(
    ("groups", "low", "high"),
    [
        (None, -0.04, -0.01),
        ({"one": "p1", "two": "p2", "three": "p2"}, -0.025, -0.02),  # only p2 to only p1
    ],
)
def test_runs_are_compared_in_pairs_of_cases_and_patients(tmp_path, capsys, groups, low, high):
    write_run(tmp_path / "best", {"one": 0.9, "two": 0.5, "three": 0.7}, groups=groups)
    write_run(tmp_path / "worse", {"three": 0.66, "one": 0.88, "two": 0.49}, groups=groups)
    assert main(["compare", str(tmp_path), f"output={tmp_path / 'table'}"]) == 0
    table = (tmp_path / "table").read_text()
    assert "against best [95 %]" in table
    assert f"-0.0233 [{low:.4f}, {high:.4f}]" in table  # means differ by far less than cases do
    assert main(["compare", str(tmp_path), "format=json"]) == 0
    best, worse = json.loads(capsys.readouterr().out)
    assert best["against_best"] is None
    assert worse["against_best"] == pytest.approx({"mean": -0.07 / 3, "low": low, "high": high})


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, "other: cases one, two"),
        ({"data": {"layout": {"root": "b"}}}, "other: data.layout.root=b, cases one, two"),
    ],
)
def test_runs_of_different_cases_are_not_ranked_together(tmp_path, capsys, settings, why):
    common = {"fold": 0, "data": {"layout": {"root": "a"}}}
    dice = {"one": 0.1, "two": 0.1}
    write_run(tmp_path / "run", dice, **common)
    write_run(tmp_path / "other", dice, volumes={"one": 2.0}, **common | settings)
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
