"""Write the page of an evaluation, with its worst cases."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.data.formats.labels import read_label_pair
from unet3d.data.preprocessing.resampling import find_orientation, get_spacing, reorient
from unet3d.errors import UsageError, summarize_error
from unet3d.machine import summarize_machine
from unet3d.metric.scores import mask_ignored
from unet3d.report.case_figure import make_class_map
from unet3d.report.evaluation import format_score
from unet3d.report.evaluation_page import describe_evaluation
from unet3d.report.page import MAX_BYTES, embed_pictures, render_page, write_html
from unet3d.report.slices import get_hex_colors
from unet3d.report.volumes import CaseVolumes, Layer, crop, embed_viewer, to_bytes
from unet3d.text import pluralize
from unet3d.workflows.evaluation.results import load_case_image, make_legend

NAME = "report.html"

ERRORS = (  # in colors that no class has
    {"name": "missed", "color": "#3333ff", "note": "in the reference only"},
    {"name": "added", "color": "#00ffff", "note": "predicted only"},
    {"name": "another class", "color": "#ffffff", "note": ""},
)


def try_write_evaluation_page(
    folder: Path, command: str, warn: Callable[[str], None]
) -> list[Path]:
    """Write the page and return it; what prevents that is a line, since the scores are written."""
    try:
        return [write_evaluation_page(folder, command)]
    except Exception as error:
        warn(f"{folder / NAME} was not written: {summarize_error(error)}")
        return []


def write_evaluation_page(folder: Path, command: str) -> Path:
    """Write the page of the evaluation.json in a folder."""
    result = read_result(folder / "evaluation.json")
    content = describe_evaluation(
        result,
        title=Path(str(result["predictions"])).name or "predictions",
        subtitle=f"{pluralize(len(result['cases']), 'case')} of {result['predictions']}, "
        f"references {result['references']}",
        command=command,
        machine=summarize_machine(),
    )
    content |= embed_worst_cases("evaluation.html", content, result, folder)
    return write_html(render_page("evaluation.html", **content), folder / NAME)


def embed_worst_cases(
    template: str, content: Mapping[str, Any], result: Mapping[str, Any] | None, folder: Path
) -> dict[str, Any]:
    """Return pictures and a viewer of the worst cases, as many as fit beside a page's content.

    `folder` holds the evaluation.
    """
    worst = [] if result is None else result["worst"]
    pictures = embed_pictures(folder / entry["picture"] for entry in worst)
    if result is None or not worst:
        return {"viewer": None, "pictures": pictures}
    page = render_page(template, **content, viewer=None, pictures=pictures)
    budget = MAX_BYTES - len(page.encode(errors="replace"))
    viewer = embed_viewer(map(crop, iter_worst_cases(result)), len(worst), budget)
    return {"viewer": viewer, "pictures": pictures}


def read_result(path: Path) -> dict[str, Any]:
    """Read evaluation.json; scores that are null become NaN again."""

    def restore(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: restore(inner) for key, inner in value.items()}
        return math.nan if value is None else value

    result = json.loads(path.read_text("utf-8"))
    return result | {key: restore(result[key]) for key in ("cases", "mean", "per_class")}


def iter_worst_cases(result: Mapping[str, Any]) -> Iterator[CaseVolumes]:
    """Read the worst cases, one at a time."""
    classes, colors = result["classes"], get_hex_colors(result["classes"])
    for entry in result["worst"]:
        name, files = entry["case"], entry["files"]
        (predicted, _), (reference, affine) = read_label_pair(
            Path(files["prediction"]), Path(files["reference"])
        )
        labels = mask_ignored(predicted, reference, result["ignore_labels"])
        axes, flips = find_orientation(affine, "RAS")
        prediction, reference = (
            make_class_map(reorient(volume, axes, flips), classes).astype(np.uint8)
            for volume in labels
        )
        image = np.full(reference.shape, 24, np.uint8)  # dark gray where there is none
        if files["image"] is not None:
            try:
                image = load_case_image(name, Path(files["image"]), labels[1].shape)
                image = to_bytes(reorient(image, axes, flips))
            except UsageError:  # the command has said so when it drew the figures
                pass
        wrong = reference != prediction
        errors = wrong * np.select([prediction == 0, reference == 0], [1, 2], 3)
        notes = make_legend(result["cases"][name])
        legend = [{"name": c, "color": colors[c], "note": notes.get(c, "")} for c in classes]
        yield CaseVolumes(
            name=name,
            title=f"{name}: {format_score(entry['dice'], 3)}",
            image=image,
            layers={
                "reference": Layer(labels=reference, classes=legend),
                "prediction": Layer(labels=prediction, classes=legend),
                "errors": Layer(labels=errors.astype(np.uint8), classes=ERRORS),
            },
            spacing_mm=get_spacing(affine, axes),
        )
