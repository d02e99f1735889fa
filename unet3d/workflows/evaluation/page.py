"""Write the page of an evaluation, and hand its worst cases to the viewer."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from unet3d.data.formats.labels import read_label_pair
from unet3d.data.preprocessing.resampling import find_orientation, get_spacing, reorient
from unet3d.errors import UsageError, summarize_error
from unet3d.machine.system import summarize_machine
from unet3d.metric.scores import mask_ignored
from unet3d.report.case_figure import make_class_map
from unet3d.report.html.evaluation_page import format_score, get_hex_colors, render_evaluation
from unet3d.report.html.page import MAX_BYTES, write_html
from unet3d.report.html.viewer import Viewer, embed_viewer
from unet3d.report.html.volumes import CaseVolumes
from unet3d.text import pluralize
from unet3d.workflows.evaluation.results import load_case_image, make_legend

NAME = "report.html"


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
    result, machine = read_result(folder / "evaluation.json"), summarize_machine()

    def render(viewer: Viewer | None) -> str:
        return render_evaluation(
            result,
            title=Path(str(result["predictions"])).name or "predictions",
            subtitle=f"{pluralize(len(result['cases']), 'case')} of {result['predictions']}, "
            f"references {result['references']}",
            command=command,
            machine=machine,
            viewer=viewer,
        )

    return write_page(folder / NAME, render, result)


def write_page(
    path: Path, render: Callable[[Viewer | None], str], result: Mapping[str, Any] | None
) -> Path:
    """Write what `render` makes of a viewer of the worst cases, as many as fit."""
    page = render(None)
    if result is not None and result["worst"]:
        cases, count = iter_worst_cases(result), len(result["worst"])
        page = render(embed_viewer(cases, count, MAX_BYTES - len(page.encode())))
    return write_html(page, path)


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
    classes = result["classes"]
    for entry in result["worst"]:
        name, files = entry["case"], entry["files"]
        (prediction, _), (reference, affine) = read_label_pair(
            Path(files["prediction"]), Path(files["reference"])
        )
        prediction, reference = mask_ignored(prediction, reference, result["ignore_labels"])
        image = None
        if files["image"] is not None:
            try:
                image = load_case_image(name, Path(files["image"]), reference.shape)
            except UsageError:  # the command has said so when it drew the figures
                image = None
        axes, flips = find_orientation(affine, "RAS")
        layers = {"reference": reference, "prediction": prediction}
        d, h, w = get_spacing(affine, axes)
        yield CaseVolumes(
            name=name,
            title=f"{name}: {format_score(entry['dice'], 3)}",
            image=None if image is None else reorient(image, axes, flips),
            layers={
                key: make_class_map(reorient(labels, axes, flips), classes).astype("uint8")
                for key, labels in layers.items()
            },
            spacing_mm=(float(d), float(h), float(w)),
            classes=get_hex_colors(classes),
            notes=make_legend(result["cases"][name]),
        )
