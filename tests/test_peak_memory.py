from mmap import mmap

import pytest
import torch

from unet3d import peak_memory as peak
from unet3d.peak_memory import MemoryRecord, PeakMeter, release_freed_memory
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


def test_what_earlier_work_has_freed_is_not_in_the_peak():
    meter = PeakMeter()
    blocks = [torch.ones(25_000) for _ in range(3000)]  # 300 MB, too small for pages of their own
    del blocks[::2], blocks
    release_freed_memory()
    meter.start(CPU)
    before = meter.read(CPU).resident
    blocks = [torch.ones(25_000) for _ in range(1500)]
    after = meter.read(CPU).resident
    assert before is None or after is None or after - before > 0.5 * len(blocks) * 100_000
