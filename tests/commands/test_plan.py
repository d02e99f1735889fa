import json
import shutil
from math import prod

import numpy as np
import pytest
import torch
import yaml

from tests.data.helpers.datasets import make_image, make_label, save_volume, write_nnunet
from unet3d.__main__ import main
from unet3d.config.keys import compose_api_config
from unet3d.machine import CUDA_CONTEXT_BYTES
from unet3d.memory.fit import estimate_configured_step
from unet3d.text import GIB, format_bytes
from unet3d.training.config import parse_train_config

pytestmark = pytest.mark.slow

SMALL = ["model.width=4", "model.convs_per_level=1", "measure_time=false"]


@pytest.fixture
def plan(decathlon_folder, tmp_path, monkeypatch):
    """Run `unet3d plan` on a small dataset in an empty folder; return the exit code."""
    monkeypatch.chdir(tmp_path)
    base = ["plan", "data=decathlon", f"data.root={decathlon_folder}", *SMALL]
    return lambda *words: main([*base, *words])


def experiment(folder):
    return yaml.safe_load((folder / "conf" / "experiment" / "planned.yaml").read_text())


def test_a_constant_nonzero_border_is_planned_as_background(tmp_path, monkeypatch, capsys):
    write_nnunet(tmp_path / "data", 3)
    for n, file in enumerate(sorted((tmp_path / "data" / "imagesTr").iterdir())):
        framed = np.full((20, 20, 20), -3.5 - n, np.float32)
        framed[2:18, 2:18, 2:18] = make_image(n)
        save_volume(file, framed)
    for n, file in enumerate(sorted((tmp_path / "data" / "labelsTr").iterdir())):
        save_volume(file, np.pad(make_label(n), 2))
    monkeypatch.chdir(tmp_path)
    words = ["data=nnunet", "data.root=data", "budget_gib=4", *SMALL]
    words += ["data.patch_size=[8,8,8]", "data.batch_size=2"]
    assert main(["plan", *words]) == 0
    assert "3 of 3 cases with a constant border (-8.5 to -3.5)" in capsys.readouterr().out
    planned = experiment(tmp_path)["data"]
    assert planned["background"] == "auto"
    assert planned["normalize"] == ["zscore_nonzero", "zscore_nonzero"]
    assert main(["plan", *words, "overwrite=true", "data.background=0"]) == 0
    assert experiment(tmp_path)["data"]["background"] == 0


def test_values_are_written_as_the_command_line_reads_them(plan, tmp_path):
    words = ["lr_factors={encoder:0.1,heads:2}", "data.label_values={no:0,on:1,tail:2}"]
    assert plan(*words, "budget_gib=4") == 0
    planned = experiment(tmp_path)
    assert planned["lr_factors"] == {"encoder": 0.1, "heads": 2}
    assert planned["data"]["label_values"] == {"no": 0, "on": 1, "tail": 2}


def test_axes_along_which_classes_are_ordered_are_not_flipped(tmp_path, monkeypatch, capsys):
    write_nnunet(tmp_path / "data", 20)
    for n, file in enumerate(sorted((tmp_path / "data" / "labelsTr").iterdir())):
        save_volume(file, make_label(n)[:, :: (-1) ** n])  # in no order along H
    monkeypatch.chdir(tmp_path)
    words = ["data=nnunet", "data.root=data", "budget_gib=4", *SMALL]
    words += ["data.patch_size=[8,8,8]", "data.batch_size=2", "overwrite=true"]
    assert main(["plan", *words]) == 0
    output = capsys.readouterr().out
    for axis in "xz":
        assert f"no flips along {axis}, where front comes before back" in output
    assert experiment(tmp_path)["augmentation"] == {"flip_axes": [1]}
    assert main(["plan", *words, "augmentation.flip_axes=[0]"]) == 0
    assert experiment(tmp_path)["augmentation"] == {"flip_axes": [0]}


def test_classes_that_differ_by_side_are_planned_without_flips_that_mix_them(
    decathlon_folder, tmp_path, monkeypatch, capsys
):
    described = json.loads((decathlon_folder / "dataset.json").read_text())
    numbers = sorted(described["labels"])
    shutil.copytree(decathlon_folder, tmp_path / "data")
    described["labels"] = dict(zip(numbers, ["background", "Left-Ball", "Right-Ball"], strict=True))
    (tmp_path / "data" / "dataset.json").write_text(json.dumps(described))
    monkeypatch.chdir(tmp_path)
    words = ["data=decathlon", "data.root=data", "data.orientation=SAR"]
    assert main(["check", *words]) == 0
    assert "augmentation.flip_axes=[0,1], as unet3d plan does" in capsys.readouterr().out
    assert main(["plan", *words, "budget_gib=4", *SMALL]) == 0
    reason = "no flips along z (left-right), which make Left-Ball look like Right-Ball"
    assert reason in capsys.readouterr().out
    assert experiment(tmp_path)["augmentation"] == {"flip_axes": [0, 1]}


def test_a_plan_is_estimated_to_fit_the_budget(plan, tmp_path):
    assert plan("budget_gib=0.611", "data.spacing_mm=[0.5,0.5,1]") == 0
    planned = compose_api_config("train", ["experiment=planned"])
    peak = estimate_configured_step(parse_train_config(planned).step).run_peak
    assert 0 < peak.reserved <= 0.611 * GIB - CUDA_CONTEXT_BYTES
    assert prod(experiment(tmp_path)["data"]["patch_size"]) < 32**3


def test_overrides_are_kept_in_a_plan_which_is_not_overwritten_unless_requested(
    plan, tmp_path, capsys
):
    words = ["budget_gib=1", "data.patch_size=[8,16,8]", "data.batch_size=3", "seed=7"]
    assert plan(*words) == 0
    assert plan(*words) == 2
    assert "conf/experiment/planned.yaml exists" in capsys.readouterr().err
    assert plan(*words, "overwrite=true", "pool=median") == 0
    written = experiment(tmp_path)
    assert {"override /pool": "median"} in written["defaults"]
    assert (written["data"]["patch_size"], written["data"]["batch_size"]) == ([8, 16, 8], 3)
    assert written["seed"] == 7


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["budget_gib=4", "data.patch_size=[7,7,11]"], 2, "leaves nothing to pool at [1,1,2] mm"),
        (["budget_gib=4", "data.spacing_mm=[5,5,9]"], 2, "too few to pool: set a finer"),
        (["budget_gib=0.586"], 3, "no patch down to"),
    ],
)
def test_an_impossible_plan_is_an_error_of_one_line(plan, capsys, words, code, message):
    assert plan(*words) == code
    assert message in capsys.readouterr().err


def test_a_preset_plans_nnunets_residual_encoder(plan, tmp_path):
    assert plan("preset=resenc_m") == 0
    written = experiment(tmp_path)
    assert {"override /model": "unet_resenc"} in written["defaults"]
    assert "preset" not in written


def test_a_network_without_depth_is_planned_without_levels(decathlon_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["data=decathlon", f"data.root={decathlon_folder}", "budget_gib=4", "model=dynunet"]
    assert main(["plan", *words, "model.filters=[4,8,8]"]) == 0
    assert experiment(tmp_path)["model"] == {"filters": [4, 8, 8]}


def test_a_plan_for_a_training_time_ends_the_run_after_it(plan, tmp_path, monkeypatch, capsys):
    words = ["data.patch_size=[8,8,8]", "overwrite=true"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert plan("max_time=00:00:01:00", "measure_time=true", *words) == 0
    shown = capsys.readouterr().out
    assert " steps fit 1 min 0 s" in shown
    on_cpu = ["experiment=planned", "trainer.accelerator=cpu", "format=json"]
    assert main(["memory", *on_cpu]) == 0
    peak = json.loads(capsys.readouterr().out)["peak_allocated_bytes"]
    assert f"a run is estimated to take {format_bytes(peak)} of " in shown
    written = experiment(tmp_path)
    assert written["trainer"]["max_time"] == "00:00:01:00"
    assert "max_steps" not in written["trainer"]
    assert written["data"]["batch_size"] == 2
    assert {"override /optimizer": "adamw"} in written["defaults"]
    assert plan("max_time=00:00:01:00", *words) == 2
    assert "remove measure_time=false" in capsys.readouterr().err
    assert plan("max_time=00:00:01:00", "steps=5", "measure_time=true", *words) == 2
    assert "use either steps= or max_time=" in capsys.readouterr().err


def test_a_run_with_many_steps_has_the_recipe_of_nnunet_unless_another_is_requested(plan, tmp_path):
    words = ["budget_gib=4", "data.patch_size=[8,8,8]", "data.batch_size=2", "overwrite=true"]
    assert plan(*words) == 0
    written = experiment(tmp_path)
    assert written["trainer"]["max_steps"] == 250_000
    assert {"override /optimizer": "sgd"} in written["defaults"]
    assert written["loss"] == {"batch_dice": True}  # a patch is an eighth of a case
    assert (written["data"]["foreground_fraction"], written["scheduler"]["warmup"]) == (0.5, 0)
    assert plan(*words, "optimizer=nadam", "loss.batch_dice=false") == 0
    written = experiment(tmp_path)
    assert {"override /optimizer": "nadam"} in written["defaults"]
    assert written["loss"] == {"batch_dice": False}
    for short in ("steps=2000", "recipe=short"):
        assert plan(*words, short) == 0
        assert {"override /optimizer": "adamw"} in experiment(tmp_path)["defaults"]
        assert "loss" not in experiment(tmp_path)


def test_cases_that_a_short_run_sees_often_are_rotated_and_scaled(plan, tmp_path, capsys):
    words = ["budget_gib=4", "data.patch_size=[8,8,8]", "data.batch_size=2", "overwrite=true"]
    for extra, planned, reason in (
        (["steps=100"], "light", " times: light augmentation alone"),
        (["steps=2000"], "light_spatial", " times: rotations and scales"),
        (["steps=2000", "augmentation=none"], "none", "recipe=short"),
    ):
        assert plan(*words, *extra) == 0
        assert {"override /augmentation": planned} in experiment(tmp_path)["defaults"]
        assert "augmentation" not in experiment(tmp_path)  # or a run could not choose another
        assert reason in capsys.readouterr().out
