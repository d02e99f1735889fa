import numpy as np
import pytest
import torch

from tests.inference.helpers.allocated import allocated_at_most
from unet3d.inference.accumulate import list_flips
from unet3d.inference.memory_plan import Budget, InferenceProblem, choose_plan
from unet3d.inference.segment import segment
from unet3d.inference.write_labels import Output, argmax_labels
from unet3d.units import GIB

CPU = torch.device("cpu")


def job(shape=(40, 48, 30), box=(40, 48, 30), classes=20, batch_size=1, window_bytes=0, held=0):
    return InferenceProblem(
        shape=shape,
        box=box,
        channels=1,
        classes=classes,
        patch=(16, 16, 16),
        overlap=0.5,
        batch_size=batch_size,
        window_bytes=window_bytes,
        held=held,
    )


@pytest.mark.parametrize("strips", [1, 3])
@pytest.mark.parametrize("mirror", [[], [0, 1]])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("box", [(40, 48, 30), (60, 70, 45), (20, 30, 11)])
def test_a_forecast_bounds_what_is_taken_and_not_by_much(box, batch_size, mirror, strips):
    network = torch.nn.Conv3d(1, 20, 1).requires_grad_(False)
    batch = torch.zeros(batch_size, 1, 16, 16, 16)
    window = allocated_at_most(lambda: network(batch.flip([]))) + batch.nbytes
    asked = job(box=box, batch_size=batch_size, window_bytes=window)
    found = choose_plan(asked, Budget(ram=2**40))
    if strips > 1:
        found = choose_plan(asked, Budget(ram=int(0.7 * found.ram)))
        assert len(found.strips) > 1
    labels, image = np.zeros(box, np.uint8), torch.randn(1, 40, 48, 30)
    taken = allocated_at_most(
        lambda: segment(
            image,
            [network],
            found,
            [Output(argmax_labels, labels)],
            mirrored=list_flips(mirror),
            device=CPU,
        )
    )
    assert taken <= found.ram
    assert taken > 0.75 * found.ram


def test_sums_go_to_ram_before_the_volume_is_cut_into_strips():
    asked = job(window_bytes=1000, held=500)
    on_gpu = choose_plan(asked, Budget(ram=2**40, gpu=2**40))
    assert not on_gpu.sums_in_ram
    assert on_gpu.ram == 500
    in_ram = choose_plan(asked, Budget(ram=2**40, gpu=on_gpu.gpu - 1))
    assert in_ram.sums_in_ram
    assert in_ram.gpu == 1000
    assert len(on_gpu.strips) == len(in_ram.strips) == 1
    cut = choose_plan(asked, Budget(ram=in_ram.ram - 1, gpu=1000))
    assert len(cut.strips) > 1
    assert cut.extra > 0


def test_the_smallest_plan_is_given_where_none_fits():
    least = choose_plan(job(), Budget(ram=1000))
    assert not least.fits(Budget(ram=1000))
    assert choose_plan(job(), Budget(ram=least.ram)) == least


def test_a_hundred_classes_at_384x384x256_fit_into_six_gib():
    shape = (384, 384, 256)
    asked = InferenceProblem(
        shape=shape,
        box=shape,
        channels=1,
        classes=100,
        patch=(128, 128, 128),
        overlap=0.5,
        batch_size=1,
        window_bytes=GIB,  # logits, and a little network
        held=5 * 384 * 384 * 256,
    )
    assert choose_plan(asked, Budget(ram=2**40)).ram < 5 * GIB
    assert choose_plan(asked, Budget(ram=3 * GIB)).fits(Budget(ram=3 * GIB))
