"""The page of a run: headline, curves, memory, scores, config, and how it was made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from unet3d.report.curves import Points
from unet3d.report.html.charts import Series, draw_areas, draw_curves, round_range
from unet3d.report.html.elements import Html, fold, make_table, tag
from unet3d.report.html.evaluation_page import (
    format_interval,
    format_score,
    get_hex_colors,
    make_origin_section,
    make_score_sections,
    make_warnings,
)
from unet3d.report.html.page import Section, make_cards, make_empty, render_page
from unet3d.report.html.viewer import Viewer
from unet3d.report.run_report import (
    describe_selection,
    format_report_table,
    select_headline_metrics,
)
from unet3d.units import GIB, MIB

MAX_CONFIG = 300_000
"""Characters of a config."""


@dataclass(frozen=True, kw_only=True)
class StepTimeline:
    """The estimated bytes of a training step over its allocations, by kind."""

    kinds: Mapping[str, Sequence[float]]  # bytes after each event
    colors: Mapping[str, str]
    phases: Sequence[tuple[str, int, int]]  # name, and its first and last event
    is_cuda: bool


def render_run(
    report: Mapping[str, Any],
    *,
    title: str,
    curves: Mapping[str, Points],
    timeline: StepTimeline | None,
    result: Mapping[str, Any] | None,
    command: str,
    machine: Mapping[str, str],
    viewer: Viewer | None,
) -> str:
    """Return the page of a run; `result` is the content of its evaluation.json."""
    config = yaml.safe_dump(report["config"], sort_keys=False)[:MAX_CONFIG]
    warnings = report.get("warnings", [])
    notice = [Section(title="Warnings", content=[make_warnings(warnings)])] if warnings else []
    sections = [
        Section(title="Results", content=make_headline(report, result)),
        *notice,
        Section(title="Training", content=make_curves(curves, result)),
        Section(title="Memory of a step", content=make_memory(report["memory"], timeline)),
        *([] if result is None else make_score_sections(result, viewer)),
        make_origin_section(
            command, machine, report["versions"], fold("Config", tag("pre", config))
        ),
    ]
    return render_page(
        kind="Training run",
        title=title,
        subtitle=describe_state(report),
        sections=sections,
        viewer=viewer,
    )


def describe_state(report: Mapping[str, Any]) -> str:
    """Say in one line what ran, and whether it finished."""
    state = "finished" if report.get("finished") else "stopped"
    choices = report.get("choices", {})
    chosen = [f"{k}={choices[k]}" for k in ("data", "model", "checkpointing") if k in choices]
    words = [f"{state} after {report['steps']:,} steps", *chosen, f"on {report['device']}"]
    return ", ".join(words) + (f": {report['error']}" if report.get("error") else "")


def make_headline(report: Mapping[str, Any], result: Mapping[str, Any] | None) -> list[object]:
    """Return the metrics by which runs are compared."""
    metrics = select_headline_metrics(report)
    mean = {} if result is None else result["mean"]
    remark = "of the last validation"
    if result is not None:
        remark = describe_selection(report["evaluation"])
    peak, seconds = metrics.get("peak_mib"), metrics.get("step_seconds")
    kind = "allocated" if "allocated" in find_step(report["memory"]) else "of the process"
    waiting = report.get("speed", {}).get("median_data_wait_fraction")
    cards = [
        (
            "Dice",
            format_score(metrics.get("dice")),
            "; ".join(filter(None, [remark, format_interval(mean, "dice", 4)])),
        ),
        (
            "HD95 (mm)",
            format_score(metrics.get("hd95_mm"), 2),
            "; ".join(filter(None, [remark, format_interval(mean, "hd95_mm", 2)])),
        ),
        ("Peak memory", "-" if peak is None else format_mib(peak), kind),
        (
            "Step time",
            "-" if seconds is None else f"{seconds:.3f} s",
            "" if waiting is None else f"{100 * waiting:.1f}% waiting for data",
        ),
        ("Parameters", f"{report['parameters']:,}", "trained"),
    ]
    return [make_cards(cards), fold("All numbers", tag("pre", format_report_table(report)))]


def find_step(memory: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what was measured in a step."""
    return memory.get("steady_step") or memory.get("first_step") or {}


def format_mib(mib: float) -> str:
    """Return MiB, or GiB from ten of them on.

    >>> format_mib(2083.4), format_mib(20480)
    ('2,083 MiB', '20.0 GiB')
    """
    return f"{mib:,.0f} MiB" if mib < 10 * GIB / MIB else f"{mib * MIB / GIB:.1f} GiB"


def make_curves(curves: Mapping[str, Points], result: Mapping[str, Any] | None) -> list[object]:
    """Return charts of the loss, the Dice of validations, HD95 and the learning rate."""
    known = {name: points for name, points in curves.items() if points}
    classes = [name.removeprefix("val/dice/") for name in known if name.startswith("val/dice/")]
    colors = dict.fromkeys(known, "var(--accent)")
    if result is not None:
        colors |= {f"val/dice/{n}": c for n, c in get_hex_colors(result["classes"]).items()}
    else:
        labels = {name: [n] for n, name in enumerate(classes, start=1)}
        colors |= {f"val/dice/{n}": c for n, c in get_hex_colors(labels).items()}
    dice = ["val/dice", *(f"val/dice/{n}" for n in classes)]
    values = [value for name in dice for _, value in known.get(name, ())]
    charts = [
        ("Loss", "training loss", ["train/loss"], None),
        ("Dice of validations", "Dice", dice, round_range(values) if values else None),
        ("HD95 of validations", "mm", ["val/hd95_mm"], None),
        ("Learning rate", "rate", ["train/lr"], None),
    ]
    drawn = []
    for heading, unit, names, y_range in charts:
        series = [
            Series(
                name=name.removeprefix("val/dice/").replace("val/dice", "mean"),
                points=known[name],
                color=colors[name],
            )
            for name in names
            if name in known
        ]
        if series:
            chart = draw_curves(series, x_label="step", y_label=unit, y_range=y_range)
            drawn.append(tag("div", tag("h3", heading), chart))
    if not drawn:
        return [make_empty("No step was recorded.")]
    return [tag("div", *drawn, class_="charts")]


def make_memory(memory: Mapping[str, Any], timeline: StepTimeline | None) -> list[object]:
    """Return the estimated timeline of a step, and what was estimated and measured."""
    measured = find_step(memory)
    phases = measured.get("phases", {})
    content: list[object] = []
    if timeline is None:
        content.append(make_empty("No timeline: the memory of the step was not estimated."))
    else:
        content += [
            draw_timeline(timeline, phases),
            tag("p", describe_peak(timeline), class_="note"),
        ]
    names = {"allocated": "allocated", "reserved": "reserved", "resident": "RAM of the process"}
    shown = [key for key in names if key in measured or key in memory.get("estimated", {})]
    rows: list[tuple[str, ...]] = [("", *(f"{names[key]}, MiB" for key in shown))]
    kinds = {
        "estimated peak of a step": memory.get("estimated"),
        "measured peak of a step": measured,
        **{f"measured in {phase}": record for phase, record in phases.items()},
        "measured peak of validation": memory.get("validation"),
    }
    for name, record in kinds.items():
        if record:
            cells = [f"{record[k] / MIB:,.0f}" if k in record else "-" for k in shown]
            rows.append((name, *cells))
    if shown and len(rows) > 1:
        content.append(make_table(rows))
    if "resident" in measured and "allocated" not in measured:
        note = "On a CPU the estimate is of tensors alone; the process also holds Python and torch."
        content.append(tag("p", note, class_="note"))
    return content


def describe_peak(timeline: StepTimeline) -> str:
    """Say what the bytes at the peak are, the most first."""
    totals = [sum(values) for values in zip(*timeline.kinds.values(), strict=True)]
    top = max(totals)
    held = {kind: values[totals.index(top)] for kind, values in timeline.kinds.items()}
    ordered = sorted(held.items(), key=lambda item: -item[1])
    kinds = [f"{k} {n / MIB:,.1f} MiB ({100 * n / top:.0f}%)" for k, n in ordered if n > top / 200]
    return f"At the estimated peak: {', '.join(kinds)}."


def draw_timeline(timeline: StepTimeline, measured: Mapping[str, Any]) -> Html:
    """Draw the kinds over a step, and the measured peak of each phase over its span."""
    layers = [
        Series(
            name=kind,
            points=[(n, nbytes / MIB) for n, nbytes in enumerate(values)],
            color=timeline.colors[kind],
        )
        for kind, values in timeline.kinds.items()
    ]
    levels = []
    for name, start, stop in timeline.phases if timeline.is_cuda else ():
        nbytes = measured.get(name, {}).get("allocated")
        if nbytes is not None:
            mib = nbytes / MIB
            levels.append((f"{name}: {mib:,.0f} MiB measured", start, stop, mib))
    return draw_areas(
        layers,
        x_label="allocations and frees of a training step, in order; dashed: measured peak"
        if levels
        else "allocations and frees of a training step, in order (estimated)",
        y_label="MiB allocated" if timeline.is_cuda else "MiB of tensors",
        spans=timeline.phases,
        levels=levels,
    )
