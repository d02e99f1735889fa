"""Scans are segmented while others are read and written, and processes share them."""

import os
from dataclasses import replace
from multiprocessing import get_context
from threading import current_thread, main_thread

import pytest
import torch

from tests.inference.conftest import build_predictor
from unet3d.errors import RunError, UsageError
from unet3d.files import make_temporary_path
from unet3d.inference import scans
from unet3d.inference.scans import run_in_processes, segment_scans
from unet3d.peak_memory import CLEAR_REFS, PeakMeter
from unet3d.text import GIB, MIB

CPU = torch.device("cpu")


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


def test_the_files_are_those_of_one_scan_after_the_other(predictor, write_scans, monkeypatch):
    tasks = write_scans(4)
    assert segment(predictor, tasks, prefetch=False)[1] == []
    expected = [task.labels.read_bytes() for task in tasks]
    for task in tasks:
        task.labels.unlink()
    readers = get_readers(predictor, monkeypatch)
    _, failed = segment(predictor, tasks)
    assert (failed, readers) == ([], [False, True, True, True])
    assert [task.labels.read_bytes() for task in tasks] == expected


def test_a_scan_that_cannot_be_read_or_whose_labels_cannot_be_written_fails_alone(
    predictor, write_scans
):
    tasks = write_scans(6)
    file = tasks[1].scan.files[0]
    file.write_bytes(file.read_bytes()[:2000])
    for which in (3, 5):  # one of them is the last
        tasks[which].labels.mkdir()
    _, failed = segment(predictor, tasks)
    assert [name for name, _ in failed] == ["1", "3", "5"]
    assert [task.labels.is_file() for task in tasks] == 3 * [True, False]


def test_what_a_kill_left_of_labels_is_removed_when_they_are_made(predictor, write_scans):
    (task,) = write_scans(1)
    make_temporary_path(task.labels).write_bytes(b"half")
    make_temporary_path(task.labels.with_suffix(".zarr")).mkdir()
    assert segment(predictor, [task])[1] == []
    left = {path.suffix for path in task.labels.parent.iterdir() if path.name[9:10] == "-"}
    assert left == {".zarr"}  # of others


def test_the_next_scan_is_not_read_where_the_ram_suffices_for_one(
    predictor, write_scans, monkeypatch
):
    tasks = write_scans(3)
    predictor.ram = 2**40
    needed = predictor.prepare(tasks[0]).max_ram + predictor.estimate_reading(tasks[1])
    for ram, expected in (
        (needed - 1, [False, False]),
        (needed, [True, False]),  # labels of the first scan are in memory, too
        (needed + MIB, [True, True]),
    ):
        predictor.ram, readers = ram, get_readers(predictor, monkeypatch)
        assert segment(predictor, tasks)[1] == []
        assert readers == [False, *expected]
        monkeypatch.undo()


@pytest.mark.slow
@pytest.mark.skipif(not os.access(CLEAR_REFS, os.W_OK), reason="the peak cannot be measured")
def test_the_peak_is_within_the_forecast_of_both_scans(ensemble, write_scans):
    predictor = build_predictor(replace(ensemble, patch_size=(32, 32, 32)), overlap=0.0)
    tasks = write_scans(3, shape=(128, 128, 128))
    predictor.ram = 2**40
    segment(predictor, tasks[:1])  # what the first case loads stays
    forecast = predictor.prepare(tasks[0]).max_ram + predictor.estimate_reading(tasks[1])
    meter = PeakMeter()
    meter.start(CPU)
    before = meter.read(CPU).resident
    assert segment(predictor, tasks)[1] == []
    assert meter.read(CPU).resident - before <= forecast


def describe_share(share, ram):
    return share, torch.get_num_threads(), ram


def die_or_refuse(share, ram):
    if share[0] == 0:
        os._exit(1)
    raise UsageError("cannot")


@pytest.fixture
def fork(monkeypatch):
    """Start processes that import nothing; the tests of predict start them as they are."""
    if not hasattr(os, "fork"):
        pytest.skip("this platform has no fork")
    monkeypatch.setattr(scans, "get_context", lambda method: get_context("fork"))


@pytest.mark.filterwarnings("ignore:.*fork")
def test_each_process_has_its_share_of_scans_cores_and_memory(monkeypatch, fork):
    monkeypatch.setattr(scans, "get_available_bytes", lambda device: 4 * GIB)
    torch.set_num_threads(4)
    results = run_in_processes(describe_share, 2, "cpu", ram=None)
    assert results == [((n, 2), 2, int(0.9 * 4 * GIB) // 2) for n in (0, 1)]


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_process_that_dies_is_an_error_that_says_how_to_go_on(fork):
    with pytest.raises(RunError, match="run the same command again for those that are left"):
        run_in_processes(die_or_refuse, 2, "cpu", ram=None)
