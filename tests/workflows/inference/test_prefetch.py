"""Scans are read and labels are written while another is segmented, within the RAM of a case."""

import os
import time
from threading import Event, current_thread, main_thread

import nibabel
import numpy as np
import pytest
import torch
from torch import nn

from unet3d.data.layouts.scans import ScanFiles
from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.machine import Precision
from unet3d.memory.peak import CLEAR_REFS, PeakMeter
from unet3d.units import MIB
from unet3d.workflows.inference.ensemble import Ensemble
from unet3d.workflows.inference.predictor import Predictor, ScanTask
from unet3d.workflows.inference.prefetch import segment_scans

CPU = torch.device("cpu")


@pytest.fixture
def predictor():
    torch.manual_seed(0)
    ensemble = Ensemble(
        networks=(nn.Conv3d(1, 3, 3, padding=1).requires_grad_(False),),
        channels=("MR",),
        classes=("background", "a", "b"),
        regions=None,
        keep_largest_component=(),
        preprocessing=Preprocessing(num_classes=3),
        patch_size=(16, 16, 16),
        precision="32",
    )
    precision = Precision("32", "32")
    return Predictor(ensemble, device=CPU, precision=precision, overlap=0.5, batch_size=1)


def write_scans(folder, count, shape=(20, 18, 17)):
    """Write scans of noise; return the tasks of segmenting them."""
    folder.mkdir(exist_ok=True)
    tasks = []
    for n in range(count):
        voxels = np.random.default_rng(n).normal(0, 1, shape).astype(np.float32)
        file = folder / f"{n}.nii"
        nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), file)
        scan = ScanFiles(name=str(n), files=(file,))
        tasks.append(ScanTask(scan=scan, labels=folder / f"labels_{n}.nii", probabilities=None))
    return tasks


def segment(predictor, tasks, *, prefetch=True):
    """Segment all tasks; return the summaries of their memory, and those that failed."""
    summaries = []

    def compute(prepared):
        summaries.append(prepared.memory_summary)
        return predictor.compute(prepared)

    failures = segment_scans(predictor, tasks, prefetch=prefetch, compute=compute)
    return summaries, [(task.scan.name, str(error)) for task, error in failures]


def get_readers(predictor, monkeypatch):
    """Return a list that receives, for each scan that is read, whether a thread reads it."""
    readers, read = [], predictor.read

    def record(task, ram):
        readers.append(current_thread() is not main_thread())
        return read(task, ram)

    monkeypatch.setattr(predictor, "read", record)
    return readers


def test_the_files_are_those_of_one_scan_after_the_other(predictor, tmp_path, monkeypatch):
    tasks = write_scans(tmp_path / "scans", 4)
    assert segment(predictor, tasks, prefetch=False)[1] == []
    expected = [task.labels.read_bytes() for task in tasks]
    for task in tasks:
        task.labels.unlink()
    readers = get_readers(predictor, monkeypatch)
    summaries, failed = segment(predictor, tasks)
    assert (failed, readers) == ([], [False, True, True, True])
    assert [task.labels.read_bytes() for task in tasks] == expected
    assert [" to read the next" in summary for summary in summaries] == [True] * 3 + [False]


def test_a_scan_that_cannot_be_read_fails_alone(predictor, tmp_path):
    tasks = write_scans(tmp_path / "scans", 4)
    file = tasks[1].scan.files[0]
    file.write_bytes(file.read_bytes()[:2000])
    _, failed = segment(predictor, tasks)
    assert [name for name, _ in failed] == ["1"]
    assert [task.done for task in tasks] == [True, False, True, True]


@pytest.mark.parametrize("which", [1, 3])
def test_labels_that_cannot_be_written_are_reported_for_their_scan(predictor, tmp_path, which):
    tasks = write_scans(tmp_path / "scans", 4)
    tasks[which].labels.mkdir()
    _, failed = segment(predictor, tasks)
    assert [name for name, _ in failed] == [str(which)]
    assert all(task.labels.is_file() for task in tasks if task is not tasks[which])


def test_the_next_scan_is_not_read_where_the_ram_suffices_for_one(predictor, tmp_path, monkeypatch):
    tasks = write_scans(tmp_path / "scans", 3)
    predictor.ram = 2**40
    needed = predictor.prepare(tasks[0]).max_ram + predictor.estimate_reading(tasks[1])
    for ram, expected in ((needed - 1, False), (needed + MIB, True)):
        predictor.ram, readers = ram, get_readers(predictor, monkeypatch)
        assert segment(predictor, tasks)[1] == []
        assert readers == [False, expected, expected]
        monkeypatch.undo()


def test_an_interruption_does_not_wait_for_the_next_scan(predictor, tmp_path, monkeypatch):
    tasks, never = write_scans(tmp_path / "scans", 2), Event()
    read = predictor.read
    monkeypatch.setattr(
        predictor, "read", lambda task, ram: never.wait(60) if task is tasks[1] else read(task, ram)
    )

    def interrupt(prepared):
        raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        list(segment_scans(predictor, tasks, prefetch=True, compute=interrupt))
    assert time.monotonic() - start < 30
    never.set()


@pytest.mark.skipif(not os.access(CLEAR_REFS, os.W_OK), reason="the peak cannot be measured")
def test_the_peak_is_within_the_forecast_of_both_scans(predictor, tmp_path):
    tasks = write_scans(tmp_path / "scans", 3, shape=(128, 128, 128))
    predictor.ram = 2**40
    segment(predictor, tasks[:1])  # what the first case loads stays
    forecast = predictor.prepare(tasks[0]).max_ram + predictor.estimate_reading(tasks[1])
    meter = PeakMeter()
    meter.start(CPU)
    before = meter.read(CPU).resident
    assert segment(predictor, tasks)[1] == []
    assert meter.read(CPU).resident - before <= forecast
