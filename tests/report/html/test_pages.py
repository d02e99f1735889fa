"""Pages of results: what they show, and that names in them stay text."""

import math

import pytest

from tests.helpers.browser import needs_browser, open_page
from tests.report.helpers.reports import make_report
from tests.report.html.test_elements import Reader
from unet3d.errors import RunError
from unet3d.report.html.comparison_page import render_comparison
from unet3d.report.html.evaluation_page import render_evaluation
from unet3d.report.html.page import MAX_BYTES, write_html
from unet3d.report.html.run_page import StepTimeline, render_run
from unet3d.report.run_comparison import RunSummary
from unet3d.units import MIB

ATTACK = "<script>alert(1)</script>"
MACHINE = {"system": f"Linux {ATTACK}", "processor": "CPU"}


def make_scores(dice):
    present = {"iou": dice, "hd95_mm": 1.0, "surface_dice": dice, "reference_ml": 1.0}
    return {"dice": dice, **present, "prediction_ml": 1.0}


def make_result(name="liver"):
    """An evaluation of two cases; the second class is absent from both."""
    interval = {"low": 0.6, "high": 0.9, "cases": 2}
    nothing = {"mean": math.nan, "low": math.nan, "high": math.nan, "cases": 0}
    mean = {
        score: {"mean": 0.75, **interval} for score in ("dice", "iou", "hd95_mm", "surface_dice")
    }
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
    return render_evaluation(
        result,
        title="predictions",
        subtitle="two cases",
        command=f"unet3d evaluate {ATTACK}",
        machine=MACHINE,
        viewer=None,
    )


def make_run(name="liver", **changes):
    result = make_result(name)
    report = make_report(0.75, 100, 0.5)
    report |= {"folder": "run", "device": "cpu", "versions": {"torch": "2.13"}}
    report["speed"] |= {"p95_step_seconds": 1.0, "median_data_wait_fraction": 0.1}
    report["memory"]["steady_step"]["phases"] = {"forward": {"resident": 90 * MIB}}
    report["config"]["note"] = ATTACK
    report["evaluation"] |= {"mean": result["mean"]}
    report["evaluation"]["per_class"] = result["per_class"]
    return report | changes


TIMELINE = StepTimeline(
    kinds={"parameters": [MIB, MIB, MIB], "saved activations": [0, 200 * MIB, 0]},
    colors={"parameters": "#111111", "saved activations": "#222222"},
    phases=[("forward", 0, 1), ("backward", 1, 2)],
    is_cuda=True,
)


def render_report(report, result, **changes):
    options = {
        "title": "run",
        "curves": {"train/loss": [[1, 2.0], [2, 1.0]], "val/dice": [[2, 0.5]]},
        "timeline": TIMELINE,
        "command": "unet3d train",
        "machine": MACHINE,
        "viewer": None,
    }
    return render_run(report, result=result, **{**options, **changes})


def check(page):
    """A page has no script but data, asks for nothing, and shows ATTACK as text."""
    read = Reader(page)
    scripts = [a.get("type") for name, a in read.elements if name == "script"]
    assert scripts == [s for s in scripts if s in ("application/json", "text/plain")]
    assert not [a for _, a in read.elements if "src" in a or "href" in a]
    assert "alert(1)" in "".join(read.texts)
    assert "default-src 'none'" in page
    return "".join(read.texts)


def test_an_evaluation_shows_scores_by_class_and_case_with_intervals():
    text = check(render_result(make_result(f"class {ATTACK}")))
    assert f"class {ATTACK}" in text
    assert "0.7500 [0.6000, 0.9000]" in text
    assert "95%: 0.6000 to 0.9000" in text
    assert f"broken: {ATTACK} has another shape" in text
    table = text[text.index("Cases, lowest Dice first") :]
    assert table.index("0.6000") < table.index("0.9000")


def test_the_largest_evaluation_fits_into_5_mb():
    """With as many classes as a page may draw, and thousands of cases."""
    result = make_result()
    names = [f"class {n}" for n in range(60)]
    result |= {
        "classes": {name: (n,) for n, name in enumerate(names, start=1)},
        "per_class": dict.fromkeys(names, result["per_class"]["liver"]),
        "cases": {f"case {n}": dict.fromkeys(names, make_scores(0.5)) for n in range(3000)},
    }
    page = render_result(result)
    assert len(page.encode()) < MAX_BYTES
    assert "2,867 more cases are in evaluation.csv." in page


def test_a_page_that_is_too_large_is_not_written(tmp_path):
    with pytest.raises(RunError, match="more than 5,000,000"):
        write_html("é" * (MAX_BYTES // 2 + 1), tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []


def test_one_case_has_no_interval():
    result = make_result()
    for score in result["per_class"]["liver"].values():
        if isinstance(score, dict):
            score |= {"low": math.nan, "high": math.nan}
    page = render_result(result)
    assert "nan" not in page
    assert 'class="interval"' not in page
    assert 'class="interval"' in render_result(make_result())


def test_an_evaluation_without_a_scored_case_says_so():
    result = make_result() | {"per_class": {}, "mean": {}, "cases": {}, "worst": []}
    assert "No case could be scored." in check(render_result(result))


def test_a_run_shows_headline_curves_memory_and_config():
    text = check(render_report(make_run(), make_result()))
    for part in (
        "0.7500",
        "100 MiB",
        "0.500 s",
        "training loss",
        "peak 201",
        "forward",
        "note:",
        "saved activations 200.0 MiB (100%)",
    ):
        assert part in text


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_without_results_has_a_page(finished):
    """It was interrupted before its first step, or has neither validation nor estimate."""
    report = make_run(finished=finished, metrics={}, memory={}, speed={}, evaluation=None)
    text = check(render_report(report, None, curves={}, timeline=None))
    assert "No step was recorded." in text
    assert "the memory of the step was not estimated" in text
    assert ("stopped after 10 steps" in text) is not finished


def test_measured_peaks_of_a_gpu_are_drawn_over_the_estimate():
    memory = {"steady_step": {"allocated": 210 * MIB, "phases": {"forward": {"allocated": MIB}}}}
    assert "forward: 1 MiB measured" in render_report(make_run(memory=memory), None)


def test_a_comparison_shows_runs_curves_and_what_was_not_read(tmp_path):
    runs = [
        RunSummary(folder=tmp_path / name, report=make_run(), differs={"pool": ATTACK})
        for name in ("a", "b")
    ]
    page = render_comparison(
        runs,
        curves=[{"val/dice": [(1, 0.2), (2, 0.4)]}, {}],
        problems=[f"{ATTACK}: no report.json"],
        command="unet3d compare a b",
    )
    text = check(page)
    assert f"pool={ATTACK}" in text
    assert "mean Dice of validations" in text
    assert f"{ATTACK}: no report.json" in text
    assert page.count("<polyline") == 2 + 1  # a front for memory and for time, and one curve


@pytest.mark.parametrize(("data", "fronts"), [(("x", "x"), 2), (("x", "y"), 4)])
def test_runs_of_each_data_set_have_fronts_of_memory_and_of_time(tmp_path, data, fronts):
    runs = [RunSummary(folder=tmp_path, report=make_run(), data=name) for name in data]
    page = render_comparison(runs, curves=[{}, {}], problems=[], command="unet3d compare a b")
    assert page.count('class="front"') == fronts
    assert ("Pareto-optimal" in page) is (fronts == 2)


@needs_browser
@pytest.mark.slow
def test_long_numbers_of_an_axis_leave_room_for_its_name(tmp_path):
    runs = [
        RunSummary(folder=tmp_path, report=make_report(dice, mib, 1.0, evaluated=False))
        for dice, mib in ((0.8823, 150_000), (0.8829, 1_234_567))
    ]
    curves = [{"train/loss": [(1, 1234567.0), (2, 0.5)]}, {}]
    page = render_comparison(runs, curves=curves, problems=[], command="unet3d compare a b")
    write_html(page, tmp_path / "page.html")
    with open_page((tmp_path / "page.html").as_uri(), ready="svg") as (page, _, _):
        boxes = page.evaluate("""
            [...document.querySelectorAll("figure > svg")].map((chart) => {
              const name = chart.querySelector(".axis-label[transform]").getBoundingClientRect();
              const numbers = [...chart.querySelectorAll(".name")];
              const left = Math.min(...numbers.map((n) => n.getBoundingClientRect().left));
              return [chart.getBoundingClientRect().left, name.left, name.right, left];
            })""")
    assert len(boxes) == 3
    for chart, name, end_of_name, numbers in boxes:
        assert chart - 1 < name < end_of_name <= numbers
