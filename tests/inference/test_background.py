"""Windows of background are not computed, and every brighter voxel keeps its logits."""

import pytest
import torch
from torch import nn

from unet3d.inference.accumulate import run_windows
from unet3d.inference.background import make_background_test
from unet3d.inference.window_order import WindowSchedule
from unet3d.inference.write_labels import RegionsToLabels, argmax_labels

CPU = torch.device("cpu")
PATCH = (8, 10, 8)


def make_image(channels=1):
    """Return dark voxels with a bright part at one end."""
    image = torch.full((channels, 40, 30, 24), -1.0)
    image[:, 25:38, 3:20, 2:15] = torch.rand(channels, 13, 17, 13) + 1
    return image


def run(image, background, networks, batch_size=1, patch=PATCH):
    """Return the logits, the number of skipped windows and that of all."""
    d, h, w = image.shape[1:]
    schedule = WindowSchedule(size=(d, h, w), patch=patch, overlap=0.5, batch_size=batch_size)
    logits, done = torch.full((3, d, h, w), torch.nan), []

    def on_tile(tile, part):
        box = schedule.get_tile_box(tile.rows, tile.columns)
        logits[(slice(None), *(slice(*span) for span in box))] = part

    num_skipped = run_windows(
        *(image, schedule, networks, on_tile),
        device=CPU,
        sum_device=CPU,
        background=background,
        on_windows=done.append,
    )
    assert sum(done) == len(schedule.windows)
    return logits, num_skipped, len(schedule.windows)


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("batch_size", [1, 4])
@torch.inference_mode()
def test_voxels_above_the_level_keep_their_logits(channels, batch_size):
    image = make_image(channels)
    image[1:] = -1  # bright in one channel only
    background = make_background_test(image, 0.1, outputs=3, overlapping=False)
    calls, network = [], nn.Conv3d(channels, 3, 3, padding=1)

    def count(x):
        calls.append(len(x))
        return network(x)

    expected, _, total = run(image, None, [network], batch_size)
    logits, num_skipped, _ = run(image, background, [count], batch_size)
    assert 0 < num_skipped < total
    assert sum(calls) == total - num_skipped
    bright = image[0] > 0
    assert bright.any()
    torch.testing.assert_close(logits[:, bright], expected[:, bright], rtol=0, atol=1e-6)
    assert argmax_labels(logits)[:8].eq(0).all()  # no computed window covers it
    assert torch.isfinite(logits).all()


@torch.inference_mode()
def test_an_image_without_foreground_is_background():
    image = torch.full((1, 20, 17, 9), 3.0)
    for overlapping, decide in ((False, argmax_labels), (True, RegionsToLabels([1, 2, 3]))):
        background = make_background_test(image, 0.0, outputs=3, overlapping=overlapping)
        logits, num_skipped, total = run(image, background, [])
        assert num_skipped == total
        assert decide(logits).eq(0).all()
