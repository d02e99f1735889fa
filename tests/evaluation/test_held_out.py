"""Only cases that neither trained nor chose a checkpoint are called held out."""

import os
import random
import shutil

import pytest
import torch

import unet3d as api
from unet3d.__main__ import main
from unet3d.checkpoint_file import load_checkpoint, save_checkpoint
from unet3d.errors import UsageError
from unet3d.evaluation import options
from unet3d.evaluation.options import group_cases_by_use


@pytest.mark.slow
def test_cases_are_held_out_unless_a_checkpoint_has_seen_them(small, tmp_path, capsys):
    data, labels = f"data.root={tmp_path / 'data'}", tmp_path / "labels"
    torch.set_float32_matmul_precision("highest")
    train = api.train  # imports rich, which draws random names
    before = random.getstate(), torch.get_rng_state(), dict(os.environ)
    run = train([*small, data, "logger=none"], folder=tmp_path / "run").folder
    assert random.getstate() == before[0]  # a random search goes on
    assert torch.equal(torch.get_rng_state(), before[1])
    assert torch.get_float32_matmul_precision() == "highest"
    assert dict(os.environ) == before[2]
    shutil.copytree(next((tmp_path / "data").rglob("labelsTr")), labels)
    shutil.copy(min(labels.iterdir()), labels / "new.nii.gz")
    words = [f"predictions={labels}", f"references={labels}", f"output={tmp_path / 'scores'}"]
    assert main(["evaluate", *words, f"checkpoint={run}", "draw_worst=0"]) == 0
    shown = capsys.readouterr().out
    assert "in the run: 4 training, 1 validation, 1 held out\n" in shown
    assert shown.splitlines()[1].startswith("ball")  # the name of the class in the checkpoint
    page = (tmp_path / "scores" / "report.html").read_text()
    assert "4 training, 1 validation, 1 held out" in page
    last = run / "checkpoints" / "last.ckpt"
    assert group_cases_by_use([run, last], same(["new"]))["held out"] == ["new"]
    content = load_checkpoint(last, mmap=False)
    fixed = content["callbacks"]["ResumeState"]["fixed_settings"]
    fixed["cases"]["training"] = {"new": ""}
    save_checkpoint(content, last)
    assert group_cases_by_use([last, run], same(["new"]))["training"] == ["new"]
    del fixed["cases"]
    save_checkpoint(content, last)
    with pytest.raises(UsageError, match=r"does not list the cases .* leave out checkpoint="):
        group_cases_by_use([last], same(["new"]))


def same(names):
    """Return names that are those of the run."""
    return {name: name for name in names}


def test_a_case_of_a_run_has_the_use_of_this_run_and_another_scan_of_a_patient_is_not_held_out(
    tmp_path, monkeypatch
):
    cases = {
        "0": {"training": ["p1_t0"], "validation": ["p2_t0"]},
        "1": {"training": ["p2_t0"], "validation": ["p1_t0"]},
    }
    monkeypatch.setattr(options, "list_cases_of_run", lambda path: cases[path.name])
    runs = [tmp_path / name for name in cases]
    for run in runs:
        run.mkdir()
    names = ["p1_t0", "p2_t0"]
    folds = zip(names, runs[::-1], strict=True)
    files = {name: run / "validation" / f"{name}.nii" for name, run in folds}
    assert group_cases_by_use(runs, same(names))["training"] == names
    assert group_cases_by_use(runs, same(names), files)["validation"] == names
    later = ["p1_t1", "p3_t0"]
    assert group_cases_by_use(runs, same(later))["held out"] == later
    used = group_cases_by_use(runs, same(later), group_by=r"(.+)_t\d")
    assert (used["training"], used["held out"]) == (["p1_t1"], ["p3_t0"])
    assert group_cases_by_use(runs, same(later), group_by=r"scan(\d)")["held out"] == later
    other = [*later, "x"]  # whose name does not fit
    used = group_cases_by_use(runs, same(other), group_by=r"(.+)_t\d")
    assert (used["training"], used["held out"]) == (["p1_t1"], ["p3_t0", "x"])


def test_a_volume_has_the_use_of_its_blocks_whatever_its_labels_are_called(tmp_path, monkeypatch):
    cases = {"training": ["a_000", "b_001", "c"], "validation": ["a_001"]}
    monkeypatch.setattr(options, "list_cases_of_run", lambda path: cases)
    found = group_cases_by_use([tmp_path], same(["a", "b_0", "c", "a_002"]))
    assert found == {"training": ["a", "c"], "validation": [], "held out": ["b_0", "a_002"]}
    labels = {"manual": tmp_path / "predicted" / "a.ome.zarr"}
    assert group_cases_by_use([tmp_path], same(labels), labels)["training"] == ["manual"]


def test_cases_that_trained_the_network_of_init_from_are_not_held_out(tmp_path, monkeypatch):
    def describe(training, source):
        settings = {"cases": {"training": {training: ""}, "validation": {}}}
        config = {"init_from": None if source is None else str(source)}
        return {
            "callbacks": {"ResumeState": {"fixed_settings": settings}},
            "unet3d": {"config": config},
        }

    first, tuned = tmp_path / "first", tmp_path / "tuned"
    for folder in (first, tuned):
        folder.mkdir()
    for before in (tmp_path / "gone", tuned):  # or a folder that was replaced later
        contents = {first: describe("old", before), tuned: describe("new", first)}
        monkeypatch.setattr(options, "load_run", contents.__getitem__)
        used = group_cases_by_use([tuned], same(["old", "new", "other"]))
        assert used == {"training": ["old", "new"], "validation": [], "held out": ["other"]}
