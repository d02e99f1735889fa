"""Runs on cases of which each annotates some of the classes."""

import json
import shutil

import nibabel as nib
import numpy as np
import pytest
import torch

from unet3d.__main__ import main
from unet3d.commands.train import build_training
from unet3d.errors import UsageError
from unet3d.types import IGNORE_LABEL

ANNOTATED = {"case_*[024]": ["ball"], "case_*[13]": ["tube"]}
FIRST, SECOND = IGNORE_LABEL - 1, IGNORE_LABEL - 2


@pytest.fixture
def partial(decathlon_folder, tmp_path):
    """Return the overrides of a data set whose cases have one class each, and its folder."""
    folder = tmp_path / "partial"
    shutil.copytree(decathlon_folder, folder, symlinks=True)
    for n, file in enumerate(sorted((folder / "labelsTr").glob("*.nii.gz"))):
        image = nib.load(file)
        labels = np.asarray(image.dataobj)
        kept = np.where(labels == 1 + n % 2, labels, 0).astype(np.uint8)
        nib.save(nib.Nifti1Image(kept, image.affine), file)
    (folder / "annotated.json").write_text(json.dumps(ANNOTATED))
    words = ["data=decathlon", f"data.root={folder}", "data.patch_size=[16,16,16]"]
    words += ["data.batch_size=2", "data.num_workers=0", f"data.cache={tmp_path / 'cache'}"]
    words += [f"data.annotated={folder / 'annotated.json'}", "memory.estimate=true"]
    return [*words, "trainer.max_steps=4", "trainer.accelerator=cpu"], folder


@pytest.fixture
def build(composed, partial, tmp_path):
    return lambda *words: build_training(composed(*partial[0], *words, base=[]), tmp_path / "run")


def test_what_a_case_does_not_annotate_has_a_label_of_its_own(build):
    run = build()
    assert run.module.unannotated_classes == {FIRST: (2,), SECOND: (1,)}
    seen = {}
    for batch in run.data.train_loader:
        for case, label in zip(batch["case"], batch["label"], strict=True):
            seen[case] = set(label.unique().tolist())
    for case, labels in seen.items():
        is_first = int(case[-1]) % 2 == 0
        assert labels - {0} <= ({1, FIRST} if is_first else {2, SECOND})
        assert (FIRST if is_first else SECOND) in labels


@pytest.mark.parametrize("has_background", [True, False])
def test_a_validation_scores_the_classes_that_a_case_annotates(build, has_background):
    run = build("fold=0")
    (batch,) = run.data.val_loader
    if not has_background:  # scribbles within the class alone
        batch["label"][batch["label"] > 2] = IGNORE_LABEL
    case = batch["case"][0]
    known, unknown = (1, 2) if int(case[-1]) % 2 == 0 else (2, 1)
    label = batch["label"].clone()
    perfect = torch.where(label == known, known, unknown)  # predicted where nobody looked
    if not has_background:
        perfect[tuple((label == known).nonzero()[0])] = unknown
    run.module.step.sliding_window = lambda image, model, observe: perfect
    run.module.eval()
    prediction = run.module.validation_step(batch, 0)
    assert prediction is perfect
    scores = run.module.metric.compute()
    names = run.data.dataset.classes
    assert (scores[f"dice/{names[known]}"] == 1) == has_background
    assert np.isnan(scores[f"dice/{names[unknown]}"])
    shown = set(batch["label"].unique().tolist())  # in pictures
    assert shown <= ({0, known} if has_background else {known, IGNORE_LABEL})
    distances = run.module.case_scores.compute()
    assert distances.pop("loss") > 0
    assert distances.keys() == {"hd95_mm", f"hd95_mm/{names[known]}"}
    assert (max(distances.values()) == 0) == has_background


def test_a_wrong_list_of_classes_is_named(build):
    with pytest.raises(UsageError, match="must list classes of ball, tube, got 'bal'"):
        build("data.annotated={*:[bal]}")
    with pytest.raises(UsageError, match="has voxels of tube, which data"):
        build("data.annotated={*:[ball]}")


def test_an_empty_file_of_patterns_is_refused(build, tmp_path):
    (tmp_path / "empty.json").write_text("{}")
    with pytest.raises(UsageError, match="has no patterns of case names"):
        build(f"data.annotated={tmp_path / 'empty.json'}")


def test_check_finds_labels_that_are_not_listed_and_names_that_do_not_exist(partial, capsys):
    words, folder = partial
    assert main(["check", *words[:2], words[6]]) == 0
    wrong = {"case_*[01234]": ["ball"], "other_*": ["tube"], "case_*0": ["tube"]}
    (folder / "annotated.json").write_text(json.dumps(wrong))
    assert main(["check", *words[:2], words[6]]) == 1
    out = capsys.readouterr().out
    assert "data.annotated names other_*, and no case has such a name" in out
    assert "data.annotated names case_*0, whose cases have an earlier one" in out
    assert "has voxels of tube, which data.annotated does not list for it" in out
