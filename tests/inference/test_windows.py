"""Logits and labels of windows equal those of MONAI's sliding window, in less memory."""

import numpy as np
import pytest
import torch
from monai.data.utils import dense_patch_slices
from monai.inferers.utils import sliding_window_inference
from torch import nn

from tests.contract.helpers.allocated import AllocatedBytes
from unet3d.inference.accumulate import BackgroundTest, run_windows
from unet3d.inference.postprocess import keep_largest_component
from unet3d.inference.sliding_window import SlidingWindow
from unet3d.inference.window_order import WindowSchedule, compute_window_starts
from unet3d.inference.write_labels import argmax_labels, label_regions

CPU = torch.device("cpu")


def assemble(schedule, image, networks, background=None):
    """Return the logits of all tiles, how often each voxel was in one, and the skipped windows."""
    logits, count, done = None, torch.zeros(schedule.size), []

    def on_tile(tile, tile_logits):
        nonlocal logits
        if logits is None:
            logits = torch.full((len(tile_logits), *schedule.size), torch.nan)
        box = schedule.get_tile_box(tile.rows, tile.columns)
        region = tuple(slice(*span) for span in box)
        logits[(slice(None), *region)] = tile_logits
        count[region] += 1

    num_skipped = run_windows(
        *(image, schedule, networks, on_tile),
        device=CPU,
        sum_device=CPU,
        background=background,
        on_windows=done.append,
    )
    assert sum(done) == len(schedule.windows)
    return logits, count, num_skipped


@pytest.mark.parametrize("overlap", [0, 0.25, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("size", [10, 11, 29, 40])
def test_windows_start_where_monais_do(size, overlap):
    step = 10 if size == 10 else max(1, int(10 * (1 - overlap)))
    expected = [w[0].start for w in dense_patch_slices([size], [10], [step])]
    assert compute_window_starts(size, 10, overlap) == expected


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize(("size", "overlap"), [((20, 17, 9), 0.5), ((5, 30, 7), 0.3)])
@torch.no_grad()
def test_tiles_hold_the_logits_of_monais_sliding_window(size, overlap, batch_size, order):
    image, network = torch.randn(2, *size), nn.Conv3d(2, 3, 3, padding=1)
    patch = (8, 10, 8)
    schedule = WindowSchedule(
        size=size, patch=patch, overlap=overlap, order=order, batch_size=batch_size
    )
    logits, count, _ = assemble(schedule, image, [network])
    expected = sliding_window_inference(
        image[None], patch, 1, network, overlap=overlap, mode="gaussian"
    )
    torch.testing.assert_close(logits, expected[0])
    assert (count == 1).all()


def test_half_precision_logits_are_summed_in_float32():
    image = torch.rand(1, 30, 8, 8) * 1000
    schedule = WindowSchedule(size=(30, 8, 8), patch=(8, 8, 8), overlap=0.9)
    logits, *_ = assemble(schedule, image, [lambda x: x.bfloat16()])
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, image.bfloat16().float(), rtol=1e-6, atol=0)


def test_only_the_requested_columns_are_computed():
    schedule = WindowSchedule(size=(16, 40, 8), patch=(8, 8, 8), overlap=0.5, columns=(15, 24))
    image = torch.randn(1, 16, 40, 8)
    logits, count, _ = assemble(schedule, image, [lambda x: x])
    assert count[:, 15:24].eq(1).all()
    assert count.sum() == 16 * 9 * 8
    torch.testing.assert_close(logits[:, :, 15:24], image[:, :, 15:24])
    full = WindowSchedule(size=(16, 40, 8), patch=(8, 8, 8), overlap=0.5)
    assert len(schedule.windows) < len(full.windows)
    assert schedule.max_active_voxels < full.max_active_voxels


def test_about_half_a_window_of_rows_is_active():
    schedule = WindowSchedule(size=(384, 384, 256), patch=(128, 128, 128), overlap=0.5)
    assert schedule.max_active_voxels == 64 * (384 + 128) * 256


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("batch_size", [1, 4])
@torch.inference_mode()
def test_without_background_voxels_above_the_level_keep_their_logits(channels, batch_size):
    image = torch.full((channels, 40, 30, 24), -1.0)
    image[0, 25:38, 3:20, 2:15] = torch.rand(13, 17, 13) + 1  # bright in one channel only
    background = BackgroundTest(image, 0.1, outputs=3, overlapping=False)
    schedule = WindowSchedule(
        size=(40, 30, 24), patch=(8, 10, 8), overlap=0.5, batch_size=batch_size
    )
    calls, network = [], nn.Conv3d(channels, 3, 3, padding=1)

    def count(x):
        calls.append(len(x))
        return network(x)

    expected, *_ = assemble(schedule, image, [network])
    logits, _, num_skipped = assemble(schedule, image, [count], background)
    assert 0 < num_skipped < len(schedule.windows)
    assert sum(calls) == len(schedule.windows) - num_skipped
    bright = image[0] > 0
    torch.testing.assert_close(logits[:, bright], expected[:, bright], rtol=0, atol=1e-6)
    assert argmax_labels(logits)[:8].eq(0).all()  # no computed window covers it
    assert torch.isfinite(logits).all()


@torch.inference_mode()
def test_an_image_without_foreground_is_background():
    image = torch.full((1, 20, 17, 9), 3.0)
    schedule = WindowSchedule(size=(20, 17, 9), patch=(8, 10, 8), overlap=0.5)
    for overlapping in (False, True):
        background = BackgroundTest(image, 0.0, outputs=3, overlapping=overlapping)
        logits, _, num_skipped = assemble(schedule, image, [], background)
        assert num_skipped == len(schedule.windows)
        labels = label_regions(logits, [1, 2, 3]) if overlapping else argmax_labels(logits)
        assert labels.eq(0).all()


@pytest.mark.parametrize("size", [(20, 17, 9), (5, 6, 7), (9, 30, 12)])
@torch.no_grad()
def test_labels_equal_those_of_monais_sliding_window(size):
    image, network = torch.randn(2, 1, *size), nn.Conv3d(1, 3, 3, padding=1)
    labels = SlidingWindow([8, 8, 8], batch_size=3)(image, network)
    logits = sliding_window_inference(image, (8, 8, 8), 1, network, overlap=0.5, mode="gaussian")
    assert labels.dtype == torch.uint8
    assert labels.equal(logits.argmax(1).to(torch.uint8))


@torch.no_grad()
def test_the_logits_of_the_whole_volume_are_never_allocated():
    image, network = torch.randn(1, 1, 96, 32, 32), nn.Conv3d(1, 30, 1)
    with AllocatedBytes() as allocated:
        SlidingWindow([16, 16, 16])(image, network)
    assert allocated.peak < 0.4 * 4 * 30 * image.numel()


def test_a_later_region_overwrites_an_earlier_one():
    logits = torch.tensor([[1.0, 1.0, -1.0, 0.0], [-1.0, 1.0, 1.0, 0.0]])[..., None]
    assert label_regions(logits, [5, 7]).flatten().tolist() == [5, 7, 7, 0]


def test_of_equal_logits_the_first_class_is_the_label():
    logits = torch.tensor([[1.0, 0.0, 2.0], [1.0, 3.0, 1.0], [0.0, 3.0, 2.0]])[..., None]
    assert argmax_labels(logits).flatten().tolist() == [0, 1, 0]


def test_components_that_touch_at_a_corner_are_one_and_other_classes_stay():
    labels = np.zeros((5, 5, 5), np.uint8)
    labels[0, 0, 0] = labels[1, 1, 1] = labels[3, 3, 3] = 1
    labels[2, 2, 2] = labels[0, 3, 0] = 2
    keep_largest_component(labels, [1, 3])
    assert labels[0, 0, 0] == labels[1, 1, 1] == 1
    assert labels[3, 3, 3] == 0
    assert (labels == 2).sum() == 2
