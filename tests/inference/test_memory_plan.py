from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.contract.helpers.allocated import AllocatedBytes
from unet3d.inference.label_writer import Output, argmax_labels
from unet3d.inference.memory_plan import Budget, VolumeToSegment, choose_plan, list_plans
from unet3d.inference.sliding_window import WindowRunner, list_flips, segment
from unet3d.inference.window_grid import WindowGrid
from unet3d.text import GIB

CPU = torch.device("cpu")


def measure_peak_bytes(action: Callable[[], object], *tensors: torch.Tensor) -> int:
    """Return the peak of the bytes that the action allocates beside these tensors."""
    with AllocatedBytes(tensors) as allocated:
        before = allocated.current
        action()
    return allocated.peak - before


def make_volume(shape=(40, 48, 30), box=(40, 48, 30), *, classes=20, side=16, batch_size=1, **held):
    """Describe a volume with no memory of windows and none that is held, unless it is given."""
    return VolumeToSegment(
        window_grid=WindowGrid(size=shape, patch=(side,) * 3, overlap=0.5, batch_size=batch_size),
        box=box,
        channels=1,
        classes=classes,
        **{"window_bytes": 0, "held_bytes": 0, **held},
    )


@pytest.mark.parametrize(("batch_size", "mirror", "slabs"), [(1, [], 1), (3, [0, 1], 3)])
@pytest.mark.parametrize("box", [(40, 48, 30), (60, 70, 45), (20, 30, 11)])
def test_estimated_memory_is_a_tight_upper_bound(box, batch_size, mirror, slabs):
    network = torch.nn.Conv3d(1, 20, 1).requires_grad_(False)
    batch = torch.zeros(batch_size, 1, 16, 16, 16)
    window = measure_peak_bytes(lambda: network(batch.flip([])), batch) + batch.nbytes
    volume = make_volume(box=box, batch_size=batch_size, window_bytes=window)
    plan = choose_plan(volume, Budget(ram_bytes=2**40))
    if slabs > 1:
        plan = choose_plan(volume, Budget(ram_bytes=int(0.7 * plan.ram_bytes)))
        assert len(plan.slabs) > 1
    outputs = [Output(argmax_labels, np.zeros(box, np.uint8))]
    image = torch.randn(1, 40, 48, 30)
    runner = WindowRunner(networks=[network], device=CPU, flips=list_flips(mirror))
    measured = measure_peak_bytes(lambda: segment(image, runner, plan, outputs), image)
    assert 0.75 * plan.ram_bytes < measured <= plan.ram_bytes


def test_sums_move_to_ram_before_the_volume_is_split_into_slabs():
    volume = make_volume(window_bytes=1000, held_bytes=500)
    on_gpu = choose_plan(volume, Budget(ram_bytes=2**40, gpu_bytes=2**40))
    assert not on_gpu.sums_in_ram
    assert on_gpu.ram_bytes == 500
    in_ram = choose_plan(volume, Budget(ram_bytes=2**40, gpu_bytes=on_gpu.gpu_bytes - 1))
    assert in_ram.sums_in_ram
    assert in_ram.gpu_bytes == 1000
    assert len(on_gpu.slabs) == len(in_ram.slabs) == 1
    split = choose_plan(volume, Budget(ram_bytes=in_ram.ram_bytes - 1, gpu_bytes=1000))
    assert len(split.slabs) > 1


def test_each_process_has_a_slab_where_there_are_enough_windows():
    volume, budget = make_volume(), Budget(ram_bytes=2**40)
    assert len(choose_plan(volume, budget, 3).slabs) == 3
    most = max(len(plan.slabs) for plan in list_plans(volume, budget, split=True))
    assert len(choose_plan(volume, budget, most + 1).slabs) == most
    assert not choose_plan(volume, Budget(ram_bytes=1000), 3).fits(Budget(ram_bytes=1000))


def test_the_smallest_plan_is_returned_if_none_fits():
    smallest = choose_plan(make_volume(), Budget(ram_bytes=1000))
    assert not smallest.fits(Budget(ram_bytes=1000))
    assert choose_plan(make_volume(), Budget(ram_bytes=smallest.ram_bytes)) == smallest


def test_a_hundred_classes_at_384x384x256_fit_into_six_gib():
    shape = (384, 384, 256)
    held = {"window_bytes": GIB, "held_bytes": 5 * 384 * 384 * 256}  # with a small network
    volume = make_volume(shape, shape, classes=100, side=128, **held)
    assert choose_plan(volume, Budget(ram_bytes=2**40)).ram_bytes < 5 * GIB
    assert choose_plan(volume, Budget(ram_bytes=3 * GIB)).fits(Budget(ram_bytes=3 * GIB))
