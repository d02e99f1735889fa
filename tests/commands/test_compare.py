import json

import numpy as np
import pytest

from tests.report.helpers.reports import make_report
from unet3d.__main__ import main
from unet3d.metric.bootstrap import compute_bootstrap_means


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


@pytest.mark.parametrize("patients", [None, ["p1", "p2", "p3", "p3"]])
def test_runs_are_compared_in_pairs_of_cases_and_patients(tmp_path, capsys, patients):
    best = {"one": 0.9, "two": 0.5, "three": 0.7, "four": 0.6}
    worse = {"four": 0.59, "three": 0.66, "one": 0.88, "two": 0.49}
    groups = patients and dict(zip(best, patients, strict=True))
    for name, dice in (("best", best), ("worse", worse)):
        write_run(tmp_path / name, dice, groups=groups)
    pairs = np.array([[worse[case] - best[case]] for case in best])
    expected = compute_bootstrap_means(pairs, patients)[1]
    assert expected["high"] - expected["low"] < 0.03  # cases differ by far more
    assert main(["compare", str(tmp_path), f"output={tmp_path / 'table'}"]) == 0
    table = (tmp_path / "table").read_text()
    assert "against best [95 %]" in table
    assert f"-0.0200 [{expected['low']:.4f}, {expected['high']:.4f}]" in table
    assert main(["compare", str(tmp_path), "format=json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first["against_best"] is None
    assert second["against_best"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("root", "volume", "why"),
    [
        ("a", 2.0, "other: cases one, two"),
        ("b", 2.0, "other: data.layout.root=b, cases one, two"),
        ("b", 1.0, None),  # the same cases at another place
    ],
)
def test_runs_of_different_cases_are_not_ranked_together(tmp_path, capsys, root, volume, why):
    dice = {"one": 0.1, "two": 0.1}
    write_run(tmp_path / "run", dice, data={"layout": {"root": "a"}})
    data = {"layout": {"root": root}}
    write_run(tmp_path / "other", dice, volumes={"one": volume}, data=data)
    assert main(["compare", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert ("not ranked together" in shown) == (why is not None)
    assert (why or "Pareto-optimal") in shown
    assert ("Pareto-optimal" in shown) == (why is None)


def test_runs_are_named_by_folder_parent_or_pattern_and_empty_folders_are_skipped(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    names = ["it's (1), a=b", "other"]
    for name, dice in zip(names, (0.7, 0.9), strict=True):
        write_run(tmp_path / "outputs" / name, {"one": dice})
    shown = []
    for words in ([f"outputs/{name}" for name in names], ["outputs"], ["outputs/*"]):
        assert main(["compare", *words]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] == shown[2]
    assert "0.9000 [0.8000, 1.0000]" in shown[0]
    (tmp_path / "empty").mkdir()
    assert main(["compare", "outputs", "empty"]) == 1
    captured = capsys.readouterr()
    assert "empty: no report.json" in captured.err
    assert "outputs/other" in captured.out
