"""Train on two halves of a data set, each with one structure annotated, and on full labels.

    unet3d download task=Task04_Hippocampus
    python -m scripts.bench.partial_labels data/Task04_Hippocampus

Of the training cases of fold 0, one half keeps the label of the anterior part of the hippocampus,
the other half that of the posterior part; the validation cases keep both. `partial` trains with
data.annotated, `background` takes what is missing for background, `full` has all labels. All train
for the same number of steps and are evaluated on the full labels of the same cases. The result is
benchmarks/cpu-partial-labels.json; finished runs are not repeated.
"""

import json
import os
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np

from scripts.bench.results import ROOT, make_parser, train, write_results
from unet3d.data.layouts.decathlon import Decathlon
from unet3d.data.layouts.splits import split_cases


def write_halves(task: Path, folder: Path) -> dict[str, list[str]]:
    """Write the data set with labels removed; return the classes that each training case has."""
    layout = Decathlon(root=str(task))
    classes = layout.describe().classes[1:]
    training, _ = split_cases(layout.list_cases(), 0)
    kept = {case.name: n % len(classes) + 1 for n, case in enumerate(training)}
    (folder / "labelsTr").mkdir(parents=True, exist_ok=True)
    for case in layout.list_cases():
        target = folder / "labelsTr" / case.label.name
        if not target.exists():
            image: Any = nib.load(case.label)
            labels = np.asarray(image.dataobj)
            if case.name in kept:
                labels = np.where(labels == kept[case.name], labels, 0)
            nib.save(nib.Nifti1Image(labels.astype(np.uint8), image.affine), target)
    images = folder / "imagesTr"
    if not images.exists():
        images.symlink_to((task / "imagesTr").absolute())
    (folder / "dataset.json").write_text((task / "dataset.json").read_text())
    return {name: [classes[label - 1]] for name, label in kept.items()}


def main() -> None:
    output = "cpu-partial-labels.json"
    parser = make_parser("scripts.bench.partial_labels", __doc__, output=output)
    parser.add_argument("task", type=Path, help="folder of Task04_Hippocampus")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    folder, task = ROOT / "outputs" / "partial-labels", options.task.absolute()
    halves = folder / "halves"
    annotated = write_halves(task, halves)
    (halves / "annotated.json").write_text(json.dumps(annotated))
    dice = {}
    for kind in ("full", "partial", "background"):
        words = ["experiment=hippocampus_cpu", f"data.root={task if kind == 'full' else halves}"]
        words += ["precision=32", "trainer.max_time=null", f"trainer.max_steps={options.steps}"]
        words += [f"data.annotated={halves / 'annotated.json'}"] if kind == "partial" else []
        report = train(words, folder / f"{kind}-{options.steps}", options.threads)
        scores = report["evaluation"]["per_class"]
        dice[kind] = {name: values["dice"]["mean"] for name, values in scores.items()}
    means = {kind: sum(scores.values()) / len(scores) for kind, scores in dice.items()}
    report = {
        "command": f"python -m scripts.bench.partial_labels data/{options.task.name}",
        "steps": options.steps,
        "dice": dice,
        "mean": means,
        "ratio": {kind: mean / means["full"] for kind, mean in means.items()},
    }
    write_results(options.output, report)


if __name__ == "__main__":
    main()
