import pytest
import torch

from unet3d.memory.peak import PeakMeter
from unet3d.memory.record import MemoryRecord
from unet3d.units import MIB

CPU = torch.device("cpu")


def test_the_peak_is_the_one_since_start_and_not_the_lifetimes():
    meter = PeakMeter()
    meter.start(CPU)
    large = torch.ones(200 * MIB // 4)
    with_large = meter.read(CPU).resident
    del large
    meter.start(CPU)
    without = meter.read(CPU).resident
    assert with_large - without > 150 * MIB


def test_a_peak_that_is_over_at_read_is_still_seen():
    meter = PeakMeter()
    meter.start(CPU)
    before = meter.read(CPU).resident
    torch.ones(200 * MIB // 4)
    assert meter.read(CPU).resident - before > 150 * MIB


def test_two_records_join_to_the_larger_figure_of_each_kind():
    a = MemoryRecord(allocated=3, reserved=10)
    b = MemoryRecord(allocated=5, process=1)
    assert a | b == MemoryRecord(allocated=5, reserved=10, process=1)
    assert (a | b).known() == {"allocated": 5, "reserved": 10, "process": 1}


@pytest.mark.gpu
def test_on_a_gpu_allocated_reserved_and_process_are_told_apart():
    gpu = torch.device("cuda", 0)
    meter = PeakMeter()
    meter.start(gpu)
    torch.ones(64 * MIB // 4, device=gpu)
    record = meter.read(gpu)
    assert 64 * MIB <= record.allocated <= record.reserved
    assert record.process is None or record.process > record.reserved
    meter.start(gpu)
    assert meter.read(gpu).allocated < 64 * MIB
