"""What is written while a disk is full; tests/contract/test_faults.py has whole runs."""

import csv
import resource
from contextlib import contextmanager

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from unet3d.training.loggers import ResumableCSVLogger, ResumableTensorBoardLogger, close_logger

MISSING = "some metrics were not logged; training continues"


@contextmanager
def full_disk(size):
    """Let no file grow beyond a size; writing more is an OSError, after what still fits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_an_event_file_holds_complete_records_only(tmp_path, capsys):
    logger = ResumableTensorBoardLogger(tmp_path, name="", version="")
    with full_disk(600):
        for step in range(50):
            logger.log_metrics({"loss": 1.0}, step)
        logger.save()
    logger.log_metrics({"loss": 1.0}, 50)
    close_logger(logger, finished=True)
    (path,) = tmp_path.iterdir()
    steps = [event.step for event in EventFileLoader(str(path)).Load() if event.summary.value]
    assert steps == [*range(len(steps) - 1), 50]
    assert 2 < len(steps) < 50
    assert capsys.readouterr().err.count(MISSING) == 1


@pytest.mark.parametrize("size", [5, 100])
def test_a_table_goes_on_when_the_disk_has_space_again(tmp_path, capsys, size):
    logger = ResumableCSVLogger(tmp_path)
    with full_disk(size):
        for step in range(50):
            logger.log_metrics({"loss": 0.5}, step)
            logger.save()
        logger.log_metrics({"dice": 0.5}, 49)
        logger.save()
    logger.log_metrics({"loss": 0.5}, 50)
    logger.save()
    with (tmp_path / "csv" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    fitting = len(rows) - 2
    assert [row["step"] for row in rows] == [*map(str, range(fitting)), "49", "50"]
    assert rows[-2] == {"step": "49", "loss": "0.5", "dice": "0.5"}
    assert fitting == 0 if size == 5 else 2 < fitting < 49
    assert capsys.readouterr().err.count(MISSING) == 1
