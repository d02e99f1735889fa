import os
from mmap import mmap
from types import SimpleNamespace

import pytest
import torch

from unet3d import peak_memory as peak
from unet3d.peak_memory import MemoryRecord, PeakMeter
from unet3d.text import MIB

CPU = torch.device("cpu")


def test_a_peak_is_that_of_freed_memory_too_until_it_is_reset():
    meter = PeakMeter()
    meter.start(CPU)
    with mmap(-1, 200 * MIB) as large:  # malloc might reuse what the process has already
        large[::4096] = bytes(200 * MIB // 4096)
    with_large = meter.read(CPU).resident
    meter.start(CPU)
    without = meter.read(CPU).resident
    assert with_large - without > 150 * MIB


@pytest.mark.parametrize("content", [None, "Name: python\n"])
def test_a_system_that_does_not_report_the_peak_has_none(tmp_path, monkeypatch, content):
    if content is not None:
        (tmp_path / "status").write_text(content)
    monkeypatch.setattr(peak, "STATUS", tmp_path / "status")
    record = PeakMeter().read(CPU)
    assert record.known() == {}
    assert record.headline is None


def test_merged_records_have_the_larger_figure_of_each_kind():
    a = MemoryRecord(allocated=3, reserved=10)
    b = MemoryRecord(allocated=5, process=1)
    assert a | b == MemoryRecord(allocated=5, reserved=10, process=1)
    assert (a | b).known() == {"allocated": 5, "reserved": 10, "process": 1}


def test_the_driver_is_asked_for_the_process_once_a_second(monkeypatch):
    queries, seconds = [], [0.0]
    monkeypatch.setattr(
        peak, "query_process_bytes", lambda device: queries.append(1) or len(queries)
    )
    monkeypatch.setattr(peak.time, "monotonic", lambda: seconds[0])
    for name in ("max_memory_allocated", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    meter, records = PeakMeter(), []
    for seconds[0] in (0.0, 0.4, 0.9, 1.0, 1.9):
        records.append(meter.read(torch.device("cuda", 0)).process)
    assert records == [1, 1, 1, 2, 2]


class NVMLError(Exception):
    pass


def get_handle(uuid):
    if uuid != "GPU-aaaa":
        raise NVMLError
    return uuid


PROCESSES = [(1, None), (os.getpid(), 2**30)]
BINDINGS = SimpleNamespace(
    NVMLError=NVMLError,
    nvmlInit=lambda: None,
    nvmlDeviceGetHandleByUUID=get_handle,
    nvmlDeviceGetComputeRunningProcesses=lambda handle: [
        SimpleNamespace(pid=pid, usedGpuMemory=nbytes) for pid, nbytes in PROCESSES
    ],
)


@pytest.mark.parametrize(
    ("bindings", "uuid", "nbytes"),
    [(BINDINGS, "aaaa", 2**30), (BINDINGS, "unknown", None), (None, "aaaa", None)],
)
def test_the_driver_knows_the_process_where_its_bindings_are_installed(
    bindings, uuid, nbytes, monkeypatch
):
    properties = SimpleNamespace(uuid=uuid)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(peak, "pynvml", bindings)
    assert peak.query_process_bytes(torch.device("cuda", 0)) == nbytes


def test_utilization_is_what_the_driver_samples_or_unknown(monkeypatch):
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 87)
    assert peak.get_utilization(torch.device("cuda", 0)) == 87
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 1 / 0)
    assert peak.get_utilization(torch.device("cuda", 0)) is None


@pytest.mark.gpu
def test_a_gpu_has_allocated_reserved_and_process_memory():
    gpu = torch.device("cuda", 0)
    before = torch.cuda.memory_allocated(gpu)  # of other tests
    meter = PeakMeter()
    meter.start(gpu)
    torch.ones(64 * MIB // 4, device=gpu)
    record = meter.read(gpu)
    assert before + 64 * MIB <= record.allocated <= record.reserved
    assert record.process is None or record.process > record.reserved
    meter.start(gpu)
    assert meter.read(gpu).allocated == before
