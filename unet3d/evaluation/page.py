"""Draw the worst cases of an evaluation, and write its page."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unet3d.data.formats.volumes import is_volume, list_files_by_name, read_label_pair, read_volume
from unet3d.data.preprocessing.channels import find_orientation, get_spacing, reorient
from unet3d.errors import UsageError, summarize_error
from unet3d.files import atomic_write, write_text
from unet3d.machine import summarize_machine
from unet3d.metric.scores import mask_ignored
from unet3d.report.evaluation import describe_evaluation
from unet3d.report.page import MAX_BYTES, embed_pictures, render_page
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

NAME = "report.html"

ERRORS = (  # in colors that no class has
    {"name": "missed", "color": "#3333ff", "note": "in the reference only"},
    {"name": "added", "color": "#00ffff", "note": "predicted only"},
    {"name": "another class", "color": "#ffffff", "note": ""},
)

MAX_NOTES = 12  # classes of a case whose scores are in its legend


def try_write_evaluation_page(
    folder: Path, command: str, warn: Callable[[str], None]
) -> list[Path]:
    """Write the page of the evaluation.json in a folder, and return it; a failure is a line."""
    try:
        result = read_result(folder / "evaluation.json")
        content = describe_evaluation(result, command=command, machine=summarize_machine())
        content |= embed_worst_cases("evaluation.html", content, result, folder)
        write_text(folder / NAME, render_page("evaluation.html", **content))
    except Exception as error:
        warn(f"{folder / NAME} was not written: {summarize_error(error)}")
        return []
    return [folder / NAME]


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

    result = json.loads(path.read_text("utf-8"))
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
        (predicted, _), (reference, affine) = read_label_pair(
            Path(files["prediction"]), Path(files["reference"])
        )
        labels = mask_ignored(predicted, reference, result["ignore_labels"])
        axes, flips = find_orientation(affine, "RAS")
        prediction, reference = (
            make_class_map(reorient(volume, axes, flips), classes) for volume in labels
        )
        image = np.full(reference.shape, 24, np.uint8)  # dark gray where there is none
        if files["image"] is not None:
            try:
                image = load_case_image(name, Path(files["image"]), labels[1].shape)
                image = to_bytes(reorient(image, axes, flips))
            except UsageError as reason:
                warn(f"{name} is drawn without its image: {reason}")
        wrong = reference != prediction
        errors = wrong * np.select([prediction == 0, reference == 0], [1, 2], 3)
        notes = make_notes(result["cases"][name])
        legend = [{"name": c, "color": colors[c], "note": notes.get(c, "")} for c in classes]
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


def make_notes(case: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    """Return what the legend of a case says of its classes, the worst ones."""
    notes = {}
    present = [item for item in case.items() if not math.isnan(item[1]["dice"])]
    for name, scores in sorted(present, key=lambda item: item[1]["dice"])[:MAX_NOTES]:
        notes[name] = f"Dice {scores['dice']:.4f}, HD95 {scores['hd95_mm']:.2f} mm"
        if not scores["reference_ml"] or not scores["prediction_ml"]:
            notes[name] = "not predicted" if scores["reference_ml"] else "not in the reference"
    return notes


def load_case_image(name: str, images: Path, shape: Sequence[int]) -> np.ndarray:
    """Return the first channel of a case's image."""
    if images.is_dir() and not is_volume(images):
        files = list_files_by_name(images)
        candidates = files.get(name) or files.get(f"{name}_0000")
        if not candidates:
            raise UsageError(f"{images} has no volume named {name} or {name}_0000")
        images = candidates[0]
    image = read_volume(images)[0][0]
    if image.shape != tuple(shape):
        raise UsageError(f"{images} has shape {list(image.shape)}, its labels {list(shape)}")
    return image
