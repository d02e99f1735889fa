"""The log in CSV: one row per step, whole at any time."""

import csv
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from unet3d.lit.loggers.csv import CsvLogger
from unet3d.lit.loggers.run_logger import OtherLogger, RunLogger, list_run_loggers


def read(folder):
    with (folder / "csv" / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_step_has_one_row_however_often_it_is_written(tmp_path):
    logger = CsvLogger(tmp_path)
    logger.log_metrics({"loss": 1.0}, 0)
    logger.log_metrics({"loss": 0.5}, 1)
    logger.flush()
    assert [row["loss"] for row in read(tmp_path)] == ["1.0", "0.5"]
    logger.log_metrics({"dice": 0.25}, 1)
    logger.log_metrics({"loss": 0.1}, 2)
    logger.close(finished=True)
    assert read(tmp_path) == [
        {"step": "0", "loss": "1.0", "dice": ""},
        {"step": "1", "loss": "0.5", "dice": "0.25"},
        {"step": "2", "loss": "0.1", "dice": ""},
    ]


def test_a_resumed_run_replaces_the_rows_since_its_checkpoint(tmp_path):
    first = CsvLogger(tmp_path)
    for step in range(4):
        first.log_metrics({"loss": float(step)}, step)
    first.close(finished=True)
    second = CsvLogger(tmp_path)
    second.forget_after(2)
    assert [row["step"] for row in read(tmp_path)] == ["0", "1"]
    second.log_metrics({"dice": 0.5}, 1)
    second.log_metrics({"loss": 7.0}, 2)
    second.close(finished=True)
    assert [tuple(row.values()) for row in read(tmp_path)] == [
        ("0", "0.0", ""),
        ("1", "1.0", "0.5"),
        ("2", "7.0", ""),
    ]


def test_images_are_png_files_by_name_and_step(tmp_path):
    image = np.random.default_rng(0).integers(0, 255, (5, 6, 3), dtype=np.uint8)
    CsvLogger(tmp_path).log_image("cases/a", image, 3)
    with Image.open(tmp_path / "csv" / "images" / "cases" / "a" / "3.png") as picture:
        assert (np.asarray(picture) == image).all()


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, capsys):
    (tmp_path / "csv").write_text("a file")
    logger = CsvLogger(tmp_path)
    for step in range(3):
        logger.log_metrics({"loss": 1.0}, step)
    logger.close(finished=True)
    assert capsys.readouterr().err.count("some metrics were not logged") == 1


def test_several_loggers_get_the_same_and_one_of_lightnings_gets_curves(composed, tmp_path):
    from unet3d.cli.train import build_training

    words = ["logger=[tensorboard,csv]", "trainer.max_steps=2"]
    words += [
        "+logger.plain._target_=lightning.pytorch.loggers.CSVLogger",
        "+logger.plain.name=plain",
    ]
    run = build_training(composed(*words), tmp_path)
    run.trainer.fit(run.module, run.data)
    own, table, plain = list_run_loggers(run.trainer)
    assert isinstance(own, RunLogger)
    assert isinstance(table, CsvLogger)
    assert isinstance(plain, OtherLogger)
    run.callbacks.dashboard.finish({"dice": 0.5}, 2, finished=True)
    rows = read(tmp_path)
    assert [row["step"] for row in rows] == ["0", "1", "2"]
    assert rows[-1]["final/dice"] == "0.5"
    [other] = Path(tmp_path / "plain").glob("*/metrics.csv")
    assert "final/dice" in other.read_text()
    assert list((tmp_path / "csv" / "images" / "cases").iterdir())
    assert list((tmp_path / "tensorboard").iterdir())


def test_a_logger_of_the_users_takes_one_python_file_and_one_yaml(unet3d, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_loggers.py").write_text(MY_LOGGER)
    option = tmp_path / "conf" / "logger" / "lines.yaml"
    option.parent.mkdir(parents=True)
    option.write_text("lines:\n  _target_: my_loggers.Lines\n")
    assert unet3d("logger=[csv,lines]") == 0
    lines = (tmp_path / "run" / "lines.txt").read_text().splitlines()
    assert lines[0].startswith("hyperparameters {'model': 'unet_tiny'")
    assert any("train/loss" in line for line in lines)


MY_LOGGER = """
from pathlib import Path
from lightning.pytorch.loggers import Logger

class Lines(Logger):
    name, version = "lines", ""

    def __init__(self, save_dir):
        super().__init__()
        self.path = Path(save_dir) / "lines.txt"

    def log(self, line):
        with self.path.open("a") as file:
            print(line, file=file)

    def log_hyperparams(self, params):
        self.log(f"hyperparameters {params}")

    def log_metrics(self, metrics, step=None):
        self.log(f"{step} {sorted(metrics)}")
"""


@pytest.mark.parametrize("words", [["logger=none"], ["logger=[tensorboard,csv]"]])
def test_a_run_takes_any_number_of_loggers(unet3d, tmp_path, words):
    assert unet3d(*words) == 0
    assert (tmp_path / "run" / "tensorboard").exists() == (words != ["logger=none"])
