"""`python train.py`: the default run, what it writes, its help, and sweeps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import nibabel
import numpy as np
import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.contract.conftest import ROOT, Ended, call, working_folder

pytestmark = pytest.mark.slow


def run_python(*words: object, folder: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def default_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which `python train.py` has trained with its defaults but for limits."""
    folder = tmp_path_factory.mktemp("default")
    limits = ["trainer.max_steps=1", "data.layout.num_cases=5"]
    ended = run_python(ROOT / "train.py", *limits, folder=folder)
    assert ended.returncode == 0, ended.stderr
    return folder


@pytest.fixture(scope="module")
def default_run(default_folder: Path) -> Path:
    (run,) = default_folder.glob("outputs/*/*")
    return run


def test_the_default_run_needs_no_data_and_writes_a_report(default_run):
    report = json.loads((default_run / "report.json").read_text())
    assert (report["finished"], report["steps"]) == (True, 1)
    assert report["parameters"] == 88_860
    assert {"val/dice", "val/dice/ball", "val/iou"} <= report["metrics"].keys()
    assert {"first_step", "validation"} <= report["memory"].keys()
    assert report["speed"]["median_step_seconds"] > 0
    assert report["config"]["data"]["patch_size"] == [32, 32, 32]
    assert {"torch", "unet3d"} <= report["versions"].keys()
    assert report["evaluation"]["mean"]["dice"]["mean"] >= 0
    assert "<html" in (default_run / "report.html").read_text()


def test_the_default_run_keeps_its_checkpoints_its_config_and_its_validation(default_run):
    checkpoints = {path.name for path in (default_run / "checkpoints").iterdir()}
    assert checkpoints == {"best.ckpt", "last.ckpt"}
    assert yaml.safe_load((default_run / "config.yaml").read_text())["model"]["width"] == 8
    scores = json.loads((default_run / "evaluation" / "evaluation.json").read_text())
    labels = {path.name.partition(".")[0] for path in (default_run / "validation").iterdir()}
    assert labels == scores["cases"].keys()
    assert len(labels) == 1


def test_the_default_run_logs_to_tensorboard(default_run):
    log = EventAccumulator(str(default_run / "tensorboard"))
    log.Reload()
    tags = log.Tags()
    assert {"train/loss", "train/lr", "val/dice", "val/dice/ball"} <= {*tags["scalars"]}
    assert tags["images"]


def test_the_second_command_segments_the_volumes_of_the_default_run(default_folder, default_run):
    (scans,) = default_folder.glob("data/synthetic/**/imagesTr")
    with working_folder(default_folder):
        ended = call("predict", f"checkpoint={default_run}", f"input={scans}", "output=labels")
    assert ended.code == 0, ended.err
    for scan in scans.iterdir():
        image, labels = nibabel.load(scan), nibabel.load(default_folder / "labels" / scan.name)
        assert labels.shape == image.shape
        np.testing.assert_array_equal(labels.affine, image.affine)
        assert {*np.unique(labels.dataobj)} <= {0, 1, 2, 3}


def test_network_pooling_and_precision_are_chosen_by_name(unet3d, small, tmp_path):
    words = ["model=unet_small", "pool=median", "precision=16"]
    ended = unet3d("train", *words, *small, "hydra.run.dir=run")
    assert ended.code == 0, ended.err
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["parameters"] == 14_496_452
    assert report["config"]["pool"]["_target_"].endswith(".MedianPool3d")
    assert report["precision"]["requested"] == "16"
    assert report["precision"]["used"] in ("bf16", "32")
    assert f"precision {report['precision']['used']}" in ended.out


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory, small: list[str]) -> tuple[Path, Ended]:
    """Return the folder of two runs that differ by their seed, and a third that fails."""
    folder = tmp_path_factory.mktemp("sweep")
    with working_folder(folder):
        words = ["-m", "seed=0,1,-1", "hydra.sweep.dir=sweep"]
        return folder / "sweep", call("train", *small, *words)


def test_a_sweep_trains_all_it_can_and_ends_with_exit_code_1_if_a_run_fails(sweep):
    folder, ended = sweep
    assert ended.code == 1
    reports = [json.loads((folder / name / "report.json").read_text()) for name in "01"]
    assert [report["config"]["seed"] for report in reports] == [0, 1]
    assert not (folder / "2" / "report.json").exists()
    assert "seed" in ended.err


def test_a_sweep_ends_with_a_comparison_of_its_runs(sweep):
    folder, ended = sweep
    summary = ended.out[ended.out.rindex("sweep: ") :]
    assert "2 of 3" in summary
    assert str(folder / "1") in summary
    assert "seed" in summary
    assert (folder / "comparison.html").exists()


def test_runs_are_compared_by_what_differs_and_what_they_reached(sweep, unet3d, tmp_path):
    words = ["format=json", "output=runs.json", "report=runs.html", "figure=runs.png"]
    assert unet3d("compare", sweep[0], *words).code == 0
    runs = json.loads((tmp_path / "runs.json").read_text())
    assert sorted(run["differs"]["seed"] for run in runs) == ["0", "1"]
    assert all({"dice", "hd95_mm", "peak_mib", "step_seconds"} <= run.keys() for run in runs)
    assert any(run["pareto_optimal"] for run in runs)
    assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")
    assert "<html" in (tmp_path / "runs.html").read_text()


COMMANDS = sorted(path.stem for path in (ROOT / "conf").glob("*.yaml"))
GROUPS = sorted(path.name for path in (ROOT / "conf").iterdir() if path.is_dir())


def test_help_lists_every_command_and_exit_codes(unet3d):
    ended = unet3d("--help")
    assert ended.code == 0
    listed = {line.split()[0] for line in ended.out.splitlines() if line.startswith("  ")}
    assert {*COMMANDS} <= listed
    assert "exit codes" in ended.out


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_lists_its_keys(unet3d, command):
    ended = unet3d(command, "--help")
    assert ended.code == 0
    own = yaml.safe_load((ROOT / "conf" / f"{command}.yaml").read_text()).keys()
    own -= {"defaults", "hydra", *GROUPS}
    listed = {line.strip().partition("=")[0].partition(".")[0] for line in ended.out.splitlines()}
    assert own <= listed


def test_the_help_of_train_lists_every_option_and_the_keys_of_the_chosen_ones(unet3d):
    ended = unet3d("train", "model=unet_small", "pool=approx_median", "--help")
    options = (ROOT / "conf").glob("*/[!_]*.yaml")
    words = {*ended.out.split()}
    assert {f"{path.parent.name}={path.stem}" for path in options} <= words
    assert {"model.width=64", "pool.tau=0.1", "optimizer.lr=0.003"} <= words


def test_the_composed_config_is_printed_as_yaml(unet3d):
    ended = unet3d("train", "pool=median", "data.batch_size=3", "--cfg", "job")
    assert ended.code == 0
    config = yaml.safe_load(ended.out)
    assert config["data"]["batch_size"] == 3
    assert config["pool"]["_target_"].endswith(".MedianPool3d")


def test_the_version_is_that_of_the_package(unet3d):
    ended = unet3d("--version")
    assert ended.code == 0
    assert f'__version__ = "{ended.out.strip()}"' in (ROOT / "unet3d/__init__.py").read_text()


def test_help_and_mistakes_do_not_wait_for_torch(tmp_path):
    words = ["-X", "importtime", "-m", "unet3d", "train", "modle=unet_tiny"]
    ended = run_python(*words, folder=tmp_path)
    assert ended.returncode == 2
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert "unet3d" in imported
    assert not {"torch", "lightning", "monai", "matplotlib"} & imported
