"""Show an evaluation: a CSV file, a table, box plots, its worst cases and its page."""

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from unet3d.data.formats.volumes import is_volume, list_files_by_name, read_label_pair, read_volume
from unet3d.data.preprocessing.channels import find_orientation, get_spacing, reorient
from unet3d.errors import UsageError, summarize_error
from unet3d.files import atomic_write, read_json, write_text
from unet3d.metric.scores import mask_ignored
from unet3d.report.figures import make_figure, to_svg
from unet3d.report.page import MAX_BYTES, embed_pictures, format_mean, format_score, render_page
from unet3d.report.slices import get_class_colors
from unet3d.report.volumes import (
    CaseVolumes,
    LabelLayer,
    draw_case,
    embed_viewer,
    find_label_box,
    make_class_map,
    to_bytes,
)
from unet3d.text import MANY_CLASSES, escape_mathtext, pluralize, select_worst

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Cases = Mapping[str, Mapping[str, Mapping[str, float]]]
"""case -> class -> score -> value."""

MAX_VALUES = 8000  # scores in the table of cases: the page must stay below 5 MB
SCORE_LABELS = {"dice": "Dice", "iou": "IoU", "hd95_mm": "HD95 mm", "surface_dice": "surface Dice"}

ERRORS = (  # in colors that no class has
    {"name": "missed", "color": "#3333ff"},
    {"name": "added", "color": "#00ffff"},
    {"name": "another class", "color": "#ffffff"},
)


def average_dice(scores: Mapping[str, Mapping[str, float]]) -> float:
    """Return a case's mean Dice over the classes that it has; NaN if it has none."""
    values = [entry["dice"] for entry in scores.values() if not math.isnan(entry["dice"])]
    return sum(values) / len(values) if values else math.nan


def write_csv(cases: Cases, path: Path) -> None:
    """Write one row per case and class; NaN becomes an empty cell."""
    rows = [(case, *entry) for case, classes in cases.items() for entry in classes.items()]
    with atomic_write(path) as draft, draft.open("w", -1, "utf-8", "backslashreplace", "") as file:
        writer = csv.writer(file)
        writer.writerow(["case", "class", *rows[0][2]])
        for *names, scores in rows:
            writer.writerow([*names, *("" if math.isnan(v) else v for v in scores.values())])


def make_score_rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a header, one row per class, and one for their mean if there are several."""
    _, *others = [k for k in {**SCORE_LABELS, **result["mean"]} if not k.endswith("_ml")]

    def format_means(means: Mapping[str, Mapping[str, float]]) -> list[str]:
        cells = [format_score(means[s]["mean"], 2 if s == "hd95_mm" else 4) for s in others]
        return [format_mean(means["dice"]), *cells]

    heads = [SCORE_LABELS.get(score, score) for score in others]
    rows = [("", "Dice [95 %]", *heads, "cases", "absent from one")]
    per_class = result["per_class"]
    for name in select_worst({name: means["dice"]["mean"] for name, means in per_class.items()}):
        means = per_class[name]
        counts = means["dice"]["cases"], means["absent_from_one"]
        rows.append((name, *format_means(means), *map(str, counts)))
    if len(per_class) > 1:
        of = f" of {len(per_class)} (the worst are above)" if len(per_class) > MANY_CLASSES else ""
        rows.append((f"mean{of}", *format_means(result["mean"]), "", ""))
    return rows


def describe_roles(roles: Mapping[str, Sequence[str]] | None) -> str:
    """Count the cases that were held out or seen in training; nothing if that is not known.

    >>> describe_roles({"training": [], "validation": [], "held out": ["a", "b"]})
    'held out'
    >>> describe_roles({"training": ["c"], "validation": [], "held out": ["a", "b"]})
    '1 training, 2 held out'
    """
    counts = {role: len(names) for role, names in (roles or {}).items() if names}
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{count} {role}" for role, count in counts.items())


def plot_scores(cases: Cases, classes: Mapping[str, Sequence[int]]) -> "Figure":
    """Draw box plots of Dice and HD95 per class (name -> labels), with every case as a dot.

    Of many classes, draw histograms of their means.
    """
    is_histogram = len(classes) > MANY_CLASSES
    figure = make_figure(11, 3 if is_histogram else 1.6 + 0.45 * len(classes))
    colors = get_class_colors(classes)
    jitter = np.random.default_rng(0)
    box = {"orientation": "horizontal", "widths": 0.6, "showfliers": False, "patch_artist": True}
    box["medianprops"] = {"color": "black"}
    labels = {"dice": "Dice", "hd95_mm": "HD95 (mm), cases with the class in both"}
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (score, label) in zip(panels, labels.items(), strict=True):
        means = []
        for row, name in enumerate(classes):
            scored = [case[name] for case in cases.values() if not math.isnan(case[name]["dice"])]
            if score == "hd95_mm":
                # Where one is empty, it is the image diagonal, which would squeeze the others.
                scored = [s for s in scored if s["reference_ml"] and s["prediction_ml"]]
            if not scored:
                continue
            values = np.array([s[score] for s in scored])
            means.append(np.nanmean(values))
            if is_histogram:
                continue
            fill = {"facecolor": (colors[name], 0.6)}
            axes.boxplot(values, positions=[row], boxprops=fill, **box)
            heights = row + jitter.uniform(-0.2, 0.2, len(values))
            # In a page thousands of dots are a picture, which is gray on light and dark.
            dots = {"s": 9, "color": "#667085", "linewidth": 0, "rasterized": True}
            axes.scatter(values, heights, alpha=0.6, zorder=3, **dots)
        axes.set_axisbelow(True)
        if is_histogram:
            span = (0, 1) if score == "dice" else None
            axes.hist(means, bins=20, range=span, color=next(iter(colors.values())))
            axes.set(xlabel=f"mean {label}", ylabel="classes")
            axes.grid(axis="y", alpha=0.3)
            continue
        axes.set_yticks(range(len(classes)), [escape_mathtext(name) for name in classes])
        axes.set(xlabel=label, ylim=(len(classes) - 0.5, -0.5))
        axes.grid(axis="x", alpha=0.3)
    figure.suptitle(pluralize(len(cases), "case"))
    return figure


def describe_evaluation(
    result: Mapping[str, Any], *, command: str, machine: Mapping[str, str]
) -> dict[str, Any]:
    """Return the content of evaluation.html; `result` is that of evaluation.json."""
    means = {score: values["mean"] for score, values in result["mean"].items()}
    cases = pluralize(len(result["cases"]), "case")
    return {
        "result": result,
        "title": Path(str(result["predictions"])).name or "predictions",
        "subtitle": f"{cases} of {result['predictions']}, references {result['references']}",
        "headline": [
            *make_score_cards(means, result["mean"], [describe_roles(result["roles"]), ""]),
            ("Surface Dice", format_score(means.get("surface_dice")), "within the tolerance"),
            ("Classes", str(len(result["classes"])), f"in {cases}"),
        ],
        "errors": [f"{name}: {reason}" for name, reason in result["errors"].items()],
        "scores": make_scores(result),
        "command": command,
        "machine": machine,
    }


def make_score_cards(
    values: Mapping[str, float], mean: Mapping[str, Any], notes: Sequence[str]
) -> list[tuple[str, str, str]]:
    """Return label, value and remark of Dice and HD95: a note, and the interval of the mean."""
    cards = []
    digits = {"dice": ("Dice", 4), "hd95_mm": ("HD95 (mm)", 2)}
    for (score, (label, places)), note in zip(digits.items(), notes, strict=True):
        low, high = (mean.get(score, {}).get(key, math.nan) for key in ("low", "high"))
        interval = f"95%: {format_score(low, places)} to {format_score(high, places)}"
        remarks = filter(None, [note, "" if math.isnan(low) else interval])
        cards.append((label, format_score(values.get(score), places), "; ".join(remarks)))
    return cards


def make_scores(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the content of scores.html; None if no case could be scored."""
    if not result["per_class"]:
        return None
    colors = get_class_colors(result["classes"])
    dice = {name: scores["dice"]["mean"] for name, scores in result["per_class"].items()}
    colors = {name: colors[name] for name in select_worst(dice)}
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "mean": average_dice(scores),
            "dice": [(scores[c]["dice"], color) for c, color in colors.items()],
        }
        for name, scores in result["cases"].items()
    ]
    rows.sort(key=lambda row: (math.isnan(row["mean"]), row["mean"]))
    shown = max(1, MAX_VALUES // len(colors))
    groups = len(set((result.get("groups") or {}).values()))
    resampled = f", resampled over {pluralize(groups, 'group')} of cases" if groups else ""
    return {
        "figure": to_svg(plot_scores(result["cases"], result["classes"])),
        "note": (
            "Of all classes, evaluation.csv has the scores. "
            if len(dice) > MANY_CLASSES
            else "A dot is a case, a box the middle half of them. "
        )
        + f"In brackets: the 95% bootstrap interval of the mean over cases{resampled}.",
        "by_class": make_score_rows(result),
        "colors": colors,
        "cases": rows[:shown],
        "left_out": max(0, len(rows) - shown),
    }


def try_write_evaluation_page(
    result: Mapping[str, Any], folder: Path, command: str, warn: Callable[[str], None]
) -> list[Path]:
    """Write the page of an evaluation to its folder, and return it; a failure is a line."""
    from unet3d.machine import summarize_machine  # torch takes a second

    page = folder / "report.html"
    try:
        content = describe_evaluation(result, command=command, machine=summarize_machine())
        content |= embed_worst_cases("evaluation.html", content, result, folder)
        write_text(page, render_page("evaluation.html", **content))
    except Exception as error:
        warn(f"{page} was not written: {summarize_error(error)}")
        return []
    return [page]


def embed_worst_cases(
    template: str, content: Mapping[str, Any], result: Mapping[str, Any] | None, folder: Path
) -> dict[str, Any]:
    """Return pictures and a viewer of the worst cases in an evaluation's folder that fit a page."""
    if result is None or not result["worst"]:
        return {"viewer": None, "pictures": {}}
    pictures = embed_pictures(folder / entry["picture"] for entry in result["worst"])
    page = render_page(template, **content, viewer=None, pictures=pictures)
    budget = MAX_BYTES - len(page.encode(errors="replace"))
    cases = (case.take(find_label_box(case)) for case in iter_worst_cases(result))
    return {"viewer": embed_viewer(cases, len(result["worst"]), budget), "pictures": pictures}


def read_result(path: Path) -> dict[str, Any]:
    """Read evaluation.json; scores that are null become NaN again."""

    def restore(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: restore(inner) for key, inner in value.items()}
        return math.nan if value is None else value

    result = read_json(path)
    return result | {key: restore(result[key]) for key in ("cases", "mean", "per_class")}


def draw_worst_cases(result: Mapping[str, Any], folder: Path, warn: Callable[[str], None]) -> None:
    """Write a picture of each of the worst cases, and remove those of an earlier evaluation."""
    for stale in folder.glob("worst/[0-9]*_*.png"):
        stale.unlink()
    for entry, case in zip(result["worst"], iter_worst_cases(result, warn), strict=True):
        picture = folder / entry["picture"]
        picture.parent.mkdir(exist_ok=True)
        with atomic_write(picture) as draft:
            draft.write_bytes(draw_case(case, find_label_box(case)))


def iter_worst_cases(
    result: Mapping[str, Any], warn: Callable[[str], None] = lambda line: None
) -> Iterator[CaseVolumes]:
    """Read the worst cases, one at a time."""
    classes, colors = result["classes"], get_class_colors(result["classes"])
    for entry in result["worst"]:
        name, files = entry["case"], entry["files"]
        pair = (Path(files[kind]) for kind in ("prediction", "reference"))
        (predicted, _), (reference, affine) = read_label_pair(*pair)
        labels = mask_ignored(predicted, reference, result["ignore_labels"])
        axes, flips = find_orientation(affine, "RAS")
        prediction, reference = (
            make_class_map(reorient(volume, axes, flips), classes) for volume in labels
        )
        image = np.full(reference.shape, 24, np.uint8)  # dark gray where there is none
        if files["image"] is not None:
            try:
                image = to_bytes(load_case_image(name, Path(files["image"]), reference.shape))
            except UsageError as reason:
                warn(f"{name} is drawn without its image: {reason}")
        wrong = reference != prediction
        errors = wrong * np.select([prediction == 0, reference == 0], [1, 2], 3)
        legend = [{"name": c, "color": color} for c, color in colors.items()]
        yield CaseVolumes(
            name=name,
            title=f"{name}: Dice {entry['dice']:.3f}",
            image=image,
            layers={
                "reference": LabelLayer(labels=reference, classes=legend),
                "prediction": LabelLayer(labels=prediction, classes=legend),
                "errors": LabelLayer(labels=errors.astype(np.uint8), classes=ERRORS),
            },
            spacing_mm=get_spacing(affine, axes),
        )


def load_case_image(name: str, images: Path, shape: Sequence[int]) -> np.ndarray:
    """Return the first channel of a case's image, in RAS, as its labels have this shape."""
    if images.is_dir() and not is_volume(images):
        files = list_files_by_name(images)
        candidates = files.get(name) or files.get(f"{name}_0000")
        if not candidates:
            raise UsageError(f"{images} has no volume named {name} or {name}_0000")
        images = candidates[0]
    channels, affine = read_volume(images)
    image = reorient(channels[0], *find_orientation(affine, "RAS"))
    if image.shape != tuple(shape):
        raise UsageError(f"{images} has shape {list(image.shape)}, its labels {list(shape)}")
    return image
