"""Only cases that neither trained nor chose a checkpoint are called held out."""

import shutil

import pytest

import unet3d as api
from unet3d.__main__ import main
from unet3d.checkpoint_file import load_checkpoint, save_checkpoint
from unet3d.errors import UsageError
from unet3d.evaluation.options import group_cases_by_use


@pytest.mark.slow
def test_cases_are_held_out_unless_a_checkpoint_has_seen_them(small, tmp_path, capsys):
    data, labels = f"data.root={tmp_path / 'data'}", tmp_path / "labels"
    run = api.train([*small, data, "logger=none"], folder=tmp_path / "run").folder
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
    assert group_cases_by_use([run, last], ["new"])["held out"] == ["new"]
    content = load_checkpoint(last, mmap=False)
    fixed = content["callbacks"]["ResumeState"]["fixed_settings"]
    fixed["cases"]["training"] = {"new": ""}
    save_checkpoint(content, last)
    assert group_cases_by_use([last, run], ["new"])["training"] == ["new"]
    del fixed["cases"]
    save_checkpoint(content, last)
    with pytest.raises(UsageError, match=r"does not list the cases .* leave out checkpoint="):
        group_cases_by_use([last], ["new"])
