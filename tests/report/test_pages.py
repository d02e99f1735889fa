"""Results of runs and evaluations: files, tables and pages, in which names stay text."""

import base64
import json
import math
import re
from html import unescape

import pytest

from tests.report.helpers.reports import make_report
from unet3d.report.comparison import RunSummary, render_comparison
from unet3d.report.evaluation import describe_evaluation, make_score_rows
from unet3d.report.page import MAX_BYTES, embed_pictures, render_page
from unet3d.report.run_report import (
    describe_estimate,
    describe_run,
    describe_scores,
    make_dice_rows,
    write_report,
)
from unet3d.text import MIB

ATTACK = "<script>alert(1)</script>"
MACHINE = {"system": f"Linux {ATTACK}", "processor": "CPU"}


def test_a_class_may_be_called_mean():
    scores = [
        {n: {"mean": dice} for n in ("dice", "hd95_mm", "surface_dice")} for dice in (0.25, 0.5)
    ]
    evaluation = {"best_of": 3, "mean": scores[0], "per_class": {"mean": scores[1]}}
    rows = make_dice_rows({"evaluation": evaluation})
    assert [value[:6] for _, value in rows] == ["0.2500", "0.5000"]
    assert ["best of 3" in value for _, value in rows] == [True, False]
    rows = make_dice_rows({"metrics": {"val/dice": 0.25, "val/dice/mean": 0.5}})
    assert rows == [("Dice, mean", "0.2500"), ("Dice, mean", "0.5000")]


def make_scores(dice):
    present = {"iou": dice, "hd95_mm": 1.0, "surface_dice": dice, "reference_ml": 1.0}
    return {"dice": dice, **present, "prediction_ml": 1.0}


def make_result(name="liver"):
    """An evaluation of two cases; the second class is absent from both."""
    interval = {"mean": 0.75, "low": 0.6, "high": 0.9, "cases": 2}
    nothing = {"mean": math.nan, "low": math.nan, "high": math.nan, "cases": 0}
    mean = dict.fromkeys(("dice", "iou", "hd95_mm", "surface_dice"), interval)
    absent = dict.fromkeys(make_scores(1.0), math.nan)
    return {
        "predictions": f"out/{ATTACK}",
        "references": "labelsTr",
        "roles": None,
        "classes": {name: (1,), "tumor": (2,)},
        "mean": mean,
        "per_class": {
            name: {**mean, "absent_from_one": 0},
            "tumor": {**dict.fromkeys(mean, nothing), "absent_from_one": 0},
        },
        "worst": [{"case": f"case {ATTACK}", "dice": 0.6}],
        "cases": {
            "better": {name: make_scores(0.9), "tumor": absent},
            f"case {ATTACK}": {name: make_scores(0.6), "tumor": absent},
        },
        "errors": {"broken": f"{ATTACK} has another shape"},
        "versions": {"torch": "2.13"},
    }


def render_result(result):
    content = describe_evaluation(result, command=f"unet3d evaluate {ATTACK}", machine=MACHINE)
    return render_page("evaluation.html", **content, viewer=None, pictures={})


def make_run(**changes):
    result = make_result()
    report = make_report(0.75, 100, 0.5)
    report |= {"folder": "run", "device": "cpu", "versions": {"torch": "2.13"}}
    report["speed"] |= {"p95_step_seconds": 1.0, "median_data_wait_fraction": 0.1}
    report["memory"]["steady_step"]["phases"] = {"forward": {"resident": 90 * MIB}}
    report["config"]["note"] = ATTACK
    report["evaluation"] |= {key: result[key] for key in ("mean", "per_class")}
    return report | changes


def render_report(report, result, **changes):
    options = {
        "title": "run",
        "curves": {"train/loss": [[1, 2.0], [2, 1.0]], "val/dice": [[2, 0.5]]},
        "timeline": "<svg></svg>",
        "kinds_at_peak": {"parameters": MIB, "saved activations": 199 * MIB},
        "command": "unet3d train",
        "machine": MACHINE,
    }
    content = describe_run(report, result=result, **{**options, **changes})
    return render_page("run.html", **content, viewer=None, pictures={})


def check(page):
    """A page without a viewer has no script, asks for nothing, and shows ATTACK as text."""
    assert not re.search(r"<(script|link|iframe)|\s(src|href)=(?!.data:)", page)
    assert "default-src 'none'" in page
    text = unescape(re.sub("<[^>]*>", "", page))
    assert "alert(1)" in text
    return text


def test_an_evaluation_shows_scores_by_class_and_case_with_intervals():
    result = make_result(f"class {ATTACK}")
    text = check(render_result(result))
    assert "95%: 0.6000 to 0.9000" in text
    assert f"broken: {ATTACK} has another shape" in text
    table = text[text.index("Cases, lowest Dice first") :]
    assert table.index("0.6000") < table.index("0.9000")
    rows = [
        (f"class {ATTACK}", "0.7500 [0.6000, 0.9000]", "0.7500", "0.75", "0.7500", "2", "0"),
        ("tumor", "-", "-", "-", "-", "0", "0"),
        ("mean", "0.7500 [0.6000, 0.9000]", "0.7500", "0.75", "0.7500", "", ""),
    ]
    assert make_score_rows(result)[1:] == rows
    assert all(cell in text for row in rows for cell in row)


def test_a_report_is_standard_json(tmp_path):
    write_report({"a": math.nan, "b": [math.inf, 1.0], "c": {1: "x"}}, tmp_path / "report.json")
    text = (tmp_path / "report.json").read_text()
    assert json.loads(text, parse_constant=str) == {"a": None, "b": [None, 1.0], "c": {"1": "x"}}


ESTIMATED = {"estimated": {"allocated": 300 * MIB}}
FIRST = {"first_step": {"allocated": 400 * MIB}}
STEADY = {"steady_step": {"allocated": 240 * MIB}}


@pytest.mark.parametrize(
    ("memory", "shown"),
    [
        ({}, None),
        (ESTIMATED | {"first_step": {"resident": MIB}}, "300 MiB of tensors"),
        (ESTIMATED | FIRST, "300 MiB allocated (-25.0% versus measured)"),
        (ESTIMATED | FIRST | STEADY, "300 MiB allocated (+25.0% versus measured)"),
    ],
)
def test_an_estimate_is_compared_with_a_steady_step_if_that_was_measured(memory, shown):
    assert describe_estimate({"memory": memory}) == shown


@pytest.mark.slow
def test_the_largest_evaluation_fits_into_5_mb():
    """With the classes of TotalSegmentator, and two thousand cases."""
    result = make_result()
    names = [f"class {n}" for n in range(104)]
    result |= {
        "classes": {name: (n,) for n, name in enumerate(names, start=1)},
        "per_class": dict.fromkeys(names, result["per_class"]["liver"]),
        "cases": {f"case {n}": dict.fromkeys(names, make_scores(0.5)) for n in range(2000)},
    }
    page = render_result(result)
    assert len(page.encode()) < MAX_BYTES
    assert "400 more cases are in evaluation.csv." in page


def test_the_worst_of_many_classes_are_described_and_absent_ones_come_last():
    scores = {f"class {n}": {"dice": {"mean": n / 30 if n else None}} for n in range(30)}
    shown = describe_scores({"evaluation": {"per_class": scores}}, "")["scores"]
    assert [name for name, *_ in shown] == [*(f"class {n}" for n in range(1, 6)), "mean"]


def test_an_evaluation_without_a_scored_case_says_so():
    result = make_result() | {"per_class": {}, "mean": {}, "cases": {}, "worst": []}
    assert "No case could be scored." in check(render_result(result))


def test_a_run_shows_headline_curves_memory_and_config():
    text = check(render_report(make_run(), make_result()))
    for part in ("0.7500", "100 MiB", "0.500 s", "loss over steps", "note:"):
        assert part in text
    assert "measured in forward" in text
    assert "saved activations 199.0 MiB (100%)" in text


def test_a_chart_names_the_values_under_the_pointer_and_the_best_step_without_a_script():
    curves = {"val/dice": [[2, 0.25], [4, 0.5]], f"val/dice/{ATTACK}": [[2, 0.1], [4, 0.2]]}
    page = render_report(make_run(best_step=4), None, curves=curves)
    check(page)
    titles = [unescape(title) for title in re.findall(r"<title>(step.*?)</title>", page, re.DOTALL)]
    values = ["step 2\nmean 0.25\n{0} 0.1", "step 4 (best)\nmean 0.5\n{0} 0.2"]
    assert titles == [text.format(ATTACK) for text in values]
    assert 'class="best"' in page
    assert 'style="stroke:var(--accent)"' in page  # the mean, on light and dark


def test_a_page_of_a_running_run_says_so_and_reloads_itself():
    report, shown = make_run(finished=False), ("case", "Y2FzZQ==")
    text = check(page := render_report(report, None, is_running=True, picture=shown))
    assert "running, 10 steps at" in text
    assert 'http-equiv="refresh"' in page
    assert 'src="data:image/png;base64,Y2FzZQ=="' in page
    assert 'http-equiv="refresh"' not in render_report(report, None)


def test_a_run_without_results_has_a_page():
    """It was interrupted before its first step."""
    report = make_run(finished=False, metrics={}, memory={}, speed={}, evaluation=None)
    text = check(render_report(report, None, curves={}, timeline=None, kinds_at_peak={}))
    assert "No curve has two points." in text
    assert "the memory of the step was not estimated" in text
    assert "stopped after 10 steps" in text


def test_a_comparison_shows_runs_curves_and_what_was_not_read(tmp_path):
    (tmp_path / "curves.json").write_text('{"curves": {"val/dice": [[1, 0.2], [2, 0.4]]}}')
    runs = [
        RunSummary(folder=folder, report=make_run(), differs={"pool": ATTACK})
        for folder in (tmp_path, tmp_path / "b")
    ]
    page = render_comparison(runs, [tmp_path], [f"{ATTACK}: no report.json"])
    text = check(page)
    assert f"pool={ATTACK}" in text
    assert "mean Dice of validations" in text
    assert f"{ATTACK}: no report.json" in text
    assert page.count("<svg") == 2  # the costs and one curve


def test_pictures_are_embedded_while_they_fit(tmp_path):
    files = [tmp_path / f"{n}.png" for n in range(3)]
    for file in files:
        file.write_bytes(b"x" * (MAX_BYTES // 10))
    pictures = embed_pictures(files)
    assert list(pictures) == ["0"]  # a quarter of a page, in base64
    assert base64.b64decode(pictures["0"]) == files[0].read_bytes()
