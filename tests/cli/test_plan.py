import json
import shutil
from math import prod

import numpy as np
import pytest
import yaml

from tests.data.helpers.datasets import make_image, make_label, save_volume, write_nnunet
from unet3d.cli.main import main
from unet3d.config.compose import compose_config, get_config_dir
from unet3d.config.settings.training import parse_training
from unet3d.units import CUDA_CONTEXT_BYTES, GIB
from unet3d.workflows.memory.estimate import estimate_memory

pytestmark = pytest.mark.slow

SMALL = ["model.width=4", "model.convs_per_level=1", "measure_time=false"]


@pytest.fixture
def plan(decathlon_folder, tmp_path, monkeypatch):
    """Run `unet3d plan` on a small dataset in an empty folder; return the exit code."""
    monkeypatch.chdir(tmp_path)

    def command(*words):
        words = ["data=decathlon", f"data.root={decathlon_folder}", *SMALL, *words]
        return main(["plan", *words])

    return command


def composed_from(own):
    from hydra import initialize_config_dir

    with initialize_config_dir(str(get_config_dir()), version_base="1.3"):
        return parse_training(
            compose_config(["experiment=planned", f"hydra.searchpath=[{own}]"], "train")
        )


def experiment(folder, name="planned"):
    return yaml.safe_load((folder / "conf" / "experiment" / f"{name}.yaml").read_text())


def test_a_plan_is_an_experiment_that_trains(plan, tmp_path, capsys):
    assert plan("budget_gib=1") == 0
    message = capsys.readouterr().out
    assert "a step is estimated to reserve" in message
    assert "16 x 16 x 16 voxels (sagittal x coronal x axial)" in message
    assert "batch size: 2, because 3 would exceed 5% of the dataset" in message
    assert "50,000 steps; an epoch has 25 patches per case; validation every epoch" in message
    written = experiment(tmp_path)
    assert written["data"]["patch_size"] == [16, 16, 16]
    assert written["data"]["spacing_mm"] == [1.0, 1.0, 2.0]
    assert (tmp_path / "conf" / "experiment" / "planned.png").stat().st_size > 10_000
    steps = ["trainer.max_epochs=null", "trainer.max_steps=1", "trainer.accelerator=cpu"]
    assert main(["train", "experiment=planned", "hydra.run.dir=run", *steps]) == 0
    config = json.loads((tmp_path / "run" / "report.json").read_text())["config"]
    assert config["data"]["batch_size"] == written["data"]["batch_size"]
    assert config["model"]["pool_kernel"] == written["model"]["pool_kernel"]


def test_one_estimate_suffices_if_the_first_patch_fits(plan, monkeypatch):
    made = []
    monkeypatch.setattr(
        "unet3d.workflows.memory.suggest.estimate_memory",
        lambda asked, **options: made.append(1) or estimate_memory(asked, **options),
    )
    assert plan("budget_gib=1", "seed=1") == 0
    assert len(made) == 1


def test_a_constant_nonzero_border_is_planned_as_background(tmp_path, monkeypatch, capsys):
    write_nnunet(tmp_path / "data", 3)
    for n, file in enumerate(sorted((tmp_path / "data" / "imagesTr").iterdir())):
        framed = np.full((16, 14, 12), -3.5 - n, np.float32)
        framed[3:15, 2:12, 2:10] = make_image(n)
        save_volume(file, framed)
    for n, file in enumerate(sorted((tmp_path / "data" / "labelsTr").iterdir())):
        save_volume(file, np.pad(make_label(n), ((3, 1), (2, 2), (2, 2))))
    monkeypatch.chdir(tmp_path)
    words = ["data=nnunet", "data.root=data", "budget_gib=4", *SMALL]
    words += ["data.patch_size=[8,8,8]", "data.batch_size=2"]
    assert main(["plan", *words]) == 0
    assert "volumes have a constant border (-8.5 to -3.5): the plan sets data.background=auto" in (
        capsys.readouterr().out
    )
    planned = experiment(tmp_path)["data"]
    assert planned["background"] == "auto"
    assert planned["normalize"] == ["zscore_nonzero", "zscore_nonzero"]
    assert main(["plan", *words, "overwrite=true", "data.background=0"]) == 0
    assert "constant border" not in capsys.readouterr().out
    assert experiment(tmp_path)["data"]["background"] == 0


def test_a_plan_is_estimated_to_fit_the_budget(plan, tmp_path):
    assert plan("budget_gib=0.611", "data.spacing_mm=[0.5,0.5,1]") == 0
    peak = estimate_memory(composed_from(tmp_path / "conf")).peak
    assert 0 < peak.reserved <= 0.611 * GIB - CUDA_CONTEXT_BYTES
    assert prod(experiment(tmp_path)["data"]["patch_size"]) < 32**3


def test_an_existing_plan_is_not_overwritten_unless_requested(plan, tmp_path, capsys):
    quick = ["budget_gib=1", "name=mine", "data.patch_size=[8,8,8]", "data.batch_size=2"]
    assert plan(*quick) == 0
    assert plan(*quick) == 2
    assert "conf/experiment/mine.yaml exists" in capsys.readouterr().err
    assert plan(*quick, "overwrite=true", "pool=median") == 0
    assert {"override /pool": "median"} in experiment(tmp_path, "mine")["defaults"]


def test_overrides_are_kept_in_the_plan(plan, tmp_path):
    assert plan("budget_gib=1", "data.patch_size=[8,16,8]", "data.batch_size=3", "seed=7") == 0
    written = experiment(tmp_path)
    assert (written["data"]["patch_size"], written["data"]["batch_size"]) == ([8, 16, 8], 3)
    assert written["seed"] == 7


def test_skipped_cases_are_named(decathlon_folder, tmp_path, monkeypatch, capsys):
    shutil.copytree(decathlon_folder, tmp_path / "data")
    (tmp_path / "data" / "labelsTr" / "case_001.nii.gz").unlink()
    monkeypatch.chdir(tmp_path)
    words = ["data=decathlon", "data.root=data", "budget_gib=4", *SMALL]
    words += ["data.patch_size=[8,8,8]", "data.batch_size=2"]
    assert main(["plan", *words, "data.invalid_cases=skip"]) == 0
    message = capsys.readouterr().out
    assert "skipped: case_001" in message
    assert "4 cases, sizes" in message
    assert main(["plan", *words, "overwrite=true"]) == 2


def test_a_network_without_depth_is_planned_without_levels(decathlon_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["data=decathlon", f"data.root={decathlon_folder}", "budget_gib=4", "model=dynunet"]
    assert main(["plan", *words, "model.filters=[4,8,8]"]) == 0
    assert experiment(tmp_path)["model"] == {"filters": [4, 8, 8]}


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["budget_gib=x"], 2, "budget_gib must be auto or a number above 0"),
        ([], 2, "budget_gib must be given"),
        (["budget_gib=4", "name=a/b"], 2, "name must be letters"),
        (["budget_gib=4", "data.spacing_mm=fine"], 2, "data.spacing_mm must be three numbers"),
        (["budget_gib=4", "data.spacing_mm=[1,1]"], 2, "data.spacing_mm must be three numbers"),
        (["budget_gib=4", "data.batch_size=0"], 2, "data.batch_size must be an int >= 1"),
        (["budget_gib=4", "data.patch_size=[0,8,8]"], 2, "data.patch_size must be three ints"),
        (["budget_gib=4", "data.patch_size=[8,8]"], 2, "data.patch_size must be three ints"),
        (["budget_gib=4", "data.patch_size=[7,7,11]"], 2, "leaves nothing to pool at [1,1,2] mm"),
        (["budget_gib=4", "data.spacing_mm=[5,5,9]"], 2, "too few to pool: set a finer"),
        (["budget_gib=0.1"], 3, "the CUDA context alone takes about 600 MiB"),
        (["budget_gib=0.586"], 3, "no patch down to"),
        (["budget_gib=4", "data.root=/no/such"], 2, "no dataset.json in /no/such"),
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
    steps = ["trainer.max_steps=1", "trainer.accelerator=cpu", "model.residual_blocks=[1]"]
    assert main(["train", "experiment=planned", "hydra.run.dir=run", *steps]) == 0
