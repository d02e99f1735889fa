import pytest
import torch
from monai.data.utils import compute_importance_map, dense_patch_slices
from monai.inferers.utils import sliding_window_inference

from unet3d.inference.accumulate import list_flips, run_windows
from unet3d.inference.window_order import (
    WindowSchedule,
    compute_window_starts,
    make_gaussian_importance,
)

CPU = torch.device("cpu")
ORDERS = [(0, 1, 2), (2, 0, 1), (1, 2, 0)]


def assemble(schedule, image, networks, flips=((),)):
    """Return the logits of all tiles, and how often each voxel was in one."""
    logits, count = None, torch.zeros(schedule.size)
    a, b, _ = schedule.order

    def on_tile(tile, tile_logits):
        nonlocal logits
        if logits is None:
            logits = torch.full((len(tile_logits), *schedule.size), torch.nan)
        region = [slice(None)] * 3
        region[a], region[b] = slice(*tile.rows), slice(*tile.columns)
        logits[(slice(None), *region)] = tile_logits
        count[tuple(region)] += 1

    run_windows(image, schedule, networks, on_tile, flips=flips, device=CPU, sum_device=CPU)
    return logits, count


@pytest.mark.parametrize("patch", [(8, 8, 8), (16, 5, 3)])
def test_the_importance_map_equals_monais(patch):
    expected = compute_importance_map(patch, mode="gaussian")
    torch.testing.assert_close(torch.from_numpy(make_gaussian_importance(patch)), expected)


@pytest.mark.parametrize("overlap", [0, 0.25, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("size", [10, 11, 29, 40])
def test_windows_start_where_monais_do(size, overlap):
    step = 10 if size == 10 else max(1, int(10 * (1 - overlap)))
    expected = [w[0].start for w in dense_patch_slices([size], [10], [step])]
    assert compute_window_starts(size, 10, overlap) == expected


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize(("size", "overlap"), [((20, 17, 9), 0.5), ((5, 30, 7), 0.3)])
@torch.no_grad()
def test_tiles_hold_the_logits_of_monais_sliding_window(size, overlap, batch_size, order):
    image, network = torch.randn(2, *size), torch.nn.Conv3d(2, 3, 3, padding=1)
    patch = (8, 10, 8)
    schedule = WindowSchedule(
        size=size, patch=patch, overlap=overlap, order=order, batch_size=batch_size
    )
    logits, count = assemble(schedule, image, [network])
    expected = sliding_window_inference(
        image[None], patch, 1, network, overlap=overlap, mode="gaussian"
    )
    torch.testing.assert_close(logits, expected[0])
    assert (count == 1).all()


@torch.no_grad()
def test_networks_and_flips_are_averaged():
    image, patch = torch.randn(1, 12, 20, 9), (8, 8, 8)
    networks = [torch.nn.Conv3d(1, 2, 3, padding=1) for _ in range(2)]
    flips = list_flips([0, 2])

    def mean(x):
        logits = [n(x.flip(dims)).flip(dims) for n in networks for dims in ([], [2], [4], [2, 4])]
        return torch.stack(logits).mean(0)

    schedule = WindowSchedule(size=(12, 20, 9), patch=patch, overlap=0.5)
    logits, _ = assemble(schedule, image, networks, flips)
    expected = sliding_window_inference(image[None], patch, 1, mean, overlap=0.5, mode="gaussian")
    torch.testing.assert_close(logits, expected[0])


def test_half_precision_logits_are_summed_in_float32():
    image = torch.rand(1, 30, 8, 8) * 1000
    schedule = WindowSchedule(size=(30, 8, 8), patch=(8, 8, 8), overlap=0.9)
    logits, _ = assemble(schedule, image, [lambda x: x.bfloat16()])
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, image.bfloat16().float(), rtol=1e-6, atol=0)


def test_only_the_requested_columns_are_computed():
    schedule = WindowSchedule(size=(16, 40, 8), patch=(8, 8, 8), overlap=0.5, columns=(15, 24))
    image = torch.randn(1, 16, 40, 8)
    logits, count = assemble(schedule, image, [lambda x: x])
    assert count[:, 15:24].eq(1).all()
    assert count.sum() == 16 * 9 * 8
    torch.testing.assert_close(logits[:, :, 15:24], image[:, :, 15:24])
    full = WindowSchedule(size=(16, 40, 8), patch=(8, 8, 8), overlap=0.5)
    assert len(schedule.windows) < len(full.windows)
    assert schedule.max_active_voxels < full.max_active_voxels


def test_about_half_a_window_of_rows_is_active():
    schedule = WindowSchedule(size=(384, 384, 256), patch=(128, 128, 128), overlap=0.5)
    assert schedule.max_active_voxels == 64 * (384 + 128) * 256
