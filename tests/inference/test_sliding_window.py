"""Logits and labels of windows equal those of MONAI's sliding window, in less memory."""

from functools import partial

import numpy as np
import pytest
import torch
from monai.inferers.utils import sliding_window_inference
from torch import nn
from torch.nn.functional import interpolate

from tests.contract.helpers.allocated import AllocatedBytes
from unet3d.errors import RunError
from unet3d.inference.heads import MAX_LOGITS, split_heads
from unet3d.inference.label_writer import Output, argmax_labels, label_regions
from unet3d.inference.memory_plan import Budget, VolumeToSegment, list_plans
from unet3d.inference.sliding_window import (
    BackgroundDetector,
    SlidingWindow,
    WindowRunner,
    list_flips,
    segment,
)
from unet3d.inference.window_grid import WindowGrid
from unet3d.model.unet import UNet3D

CPU = torch.device("cpu")
PATCH = (8, 10, 8)
SIZE = (20, 17, 9)


@pytest.mark.parametrize("overlapping", [False, True])
def test_windows_without_a_bright_voxel_in_any_channel_are_background(overlapping):
    image, labels = torch.full((2, *SIZE), 3.0), np.ones(SIZE, np.uint8)
    background = BackgroundDetector(image, 0.0, outputs=3, overlapping=overlapping)
    decide = partial(label_regions, labels=[1, 2, 3]) if overlapping else argmax_labels
    runner = WindowRunner(networks=[], device=CPU, background=background)
    segment(image, runner, list_all_plans(*SAME, 3)[0], [Output(decide, labels)])
    assert not labels.any()
    image[1, 2, 2, 2] = 4
    assert not background.is_background(image[:, :8])
    image[:, 12:] = 100
    background = BackgroundDetector(image, 0.0, outputs=3, overlapping=overlapping)
    assert background.is_background(image[:, :2] + 1e-5)  # interpolation rounds


@torch.no_grad()
def test_validation_labels_volumes_as_monai_does_and_never_holds_all_logits():
    image, network = torch.randn(2, 1, 40, 20, 9), nn.Conv3d(1, 30, 3, padding=1)
    window = SlidingWindow([8, 8, 8], batch_size=3)
    with AllocatedBytes() as allocated:
        labels = window(image, network)
    logits = sliding_window_inference(image, (8, 8, 8), 1, network, overlap=0.5, mode="gaussian")
    assert labels.equal(logits.argmax(1).to(torch.uint8))
    assert allocated.peak < 0.5 * logits[0].nbytes


SAME = (SIZE, SIZE)
UP = (SIZE, (33, 40, 23))
DOWN = ((20, 31, 19), (11, 13, 7))
MIXED = ((20, 17, 19), (20, 40, 7))
SMALL = ((5, 6, 7), (9, 6, 3))


def list_all_plans(shape, box, classes, batch_size=1):
    volume = VolumeToSegment(
        window_grid=WindowGrid(size=shape, patch=PATCH, overlap=0.5, batch_size=batch_size),
        box=box,
        channels=2,
        classes=classes,
        window_bytes=0,
        held_bytes=0,
    )
    budget = Budget(ram_bytes=2**40)
    return [*list_plans(volume, budget, split=False), *list_plans(volume, budget, split=True)]


def resample_at_once(image, networks, flips, box):
    """Return the full logits (K, D, H, W), resampled at once."""
    total = torch.zeros(())
    for network in networks:
        for axes in flips:
            dims = [axis + 2 for axis in axes]
            total = total + sliding_window_inference(
                image[None],
                PATCH,
                1,
                lambda x, n=network, d=dims: n(x.flip(d)).flip(d),
                overlap=0.5,
                mode="gaussian",
            )
    return interpolate(total / (len(networks) * len(flips)), box, mode="trilinear")[0]


@torch.no_grad()
def check_plans(
    shape, box, *, networks=1, classes=6, decide=argmax_labels, flips=((),), batch_size=1, step=1
):
    """Compare the labels of every `step`-th plan with those of the full logits."""
    image = torch.randn(2, *shape)
    members = [nn.Conv3d(2, classes, 3, padding=1) for _ in range(networks)]
    expected = decide(resample_at_once(image, members, flips, box)).numpy()
    runner = WindowRunner(networks=members, device=CPU, flips=flips)
    for plan in list_all_plans(shape, box, classes, batch_size)[::step]:
        labels = np.zeros(box[::-1], np.uint8).T[::-1]  # files have other orders and directions
        segment(image, runner, plan, [Output(decide, labels)])
        np.testing.assert_array_equal(labels, expected)
    assert len(np.unique(expected)) > 1


@pytest.mark.parametrize(("shape", "box"), [SAME, UP, DOWN, MIXED, SMALL])
def test_every_axis_order_and_number_of_slabs_gives_the_same_labels(shape, box):
    check_plans(shape, box, step=2)


def test_ensembles_flips_batches_and_regions_give_the_same_labels():
    check_plans(*UP, step=7, networks=2, flips=list_flips([0, 2]), batch_size=5)
    check_plans(*UP, step=7, classes=3, decide=partial(label_regions, labels=[1, 2, 4]))


def make_members(classes, count=1):
    options = {"in_channels": 2, "num_classes": classes, "channels": [3, 4], "depth": 2}
    members = [UNet3D(**options).eval().requires_grad_(False) for _ in range(count)]
    for network in members:
        network.heads[0].weight *= 20  # the bias alone would decide
    return members


@torch.no_grad()
@pytest.mark.parametrize("level", [None, 0.9])
def test_summed_features_give_the_labels_and_probabilities_of_summed_logits(monkeypatch, level):
    monkeypatch.setattr("unet3d.inference.heads.MAX_LOGITS", 9 * 30)
    image, members = torch.randn(2, *SIZE), make_members(9, count=2)
    image[:, 8:] -= 9
    background = level and BackgroundDetector(image, level, outputs=9, overlapping=False)
    results = []
    for networks, heads in ((members, []), split_heads(members)):
        assert len(heads) in (0, 2)
        labels, scores = np.zeros(UP[1], np.uint8), np.zeros((9, *UP[1]), np.float32)
        runner = WindowRunner(
            networks=networks, device=CPU, flips=list_flips([1]), background=background, heads=heads
        )
        outputs = [Output(argmax_labels, labels), Output(partial(torch.softmax, dim=0), scores)]
        skipped = segment(image, runner, list_all_plans(*UP, 9)[-1], outputs)
        assert (skipped > 0) == (level is not None)
        results.append((labels, scores))
    (labels, scores), (own_labels, own_scores) = results
    np.testing.assert_allclose(own_scores, scores, rtol=0, atol=1e-5)
    assert (own_labels == labels).mean() > 0.999  # logits that are equal but for rounding
    assert len(np.unique(labels)) > 1


@torch.no_grad()
def test_a_thousand_classes_take_the_memory_of_few():
    image, peaks = torch.randn(1, 2, 48, 32, 32), []
    for classes in (3, 1000):
        [network] = make_members(classes)
        with AllocatedBytes() as allocated:
            SlidingWindow([16, 16, 16])(image, network)
        peaks.append(allocated.peak)
    assert peaks[1] < peaks[0] + 3 * 4 * MAX_LOGITS
    assert 1000 * image[0, 0].nbytes > 4 * peaks[1]


@torch.no_grad()
def test_a_network_whose_head_was_changed_sums_logits():
    [network] = make_members(9)
    network.heads[0].register_forward_hook(lambda module, inputs, output: output.flip(1))
    assert split_heads([network]) == ([network], [])
    [network] = make_members(9)
    network.register_forward_hook(lambda module, inputs, output: -output)
    assert split_heads([network]) == ([network], [])
    network = type("Negated", (UNet3D,), {"forward": lambda self, x: -UNet3D.forward(self, x)})
    own = network(in_channels=2, num_classes=9, channels=[3, 4], depth=2)
    assert split_heads([own]) == ([own], [])


def test_a_head_with_nan_is_an_error_though_its_features_are_not():
    networks, heads = split_heads(make_members(9))
    heads[0].weight[3, 0] = torch.nan
    runner = WindowRunner(networks=networks, device=CPU, heads=heads)
    outputs = [Output(argmax_labels, np.zeros(SIZE, np.uint8))]
    with pytest.raises(RunError, match="NaN"):
        segment(torch.randn(2, *SIZE), runner, list_all_plans(*SAME, 9)[0], outputs)


def test_nan_logits_are_an_error():
    outputs = [Output(argmax_labels, np.zeros(SIZE, np.uint8))]
    plan, runner = list_all_plans(*SAME, 2)[0], WindowRunner(networks=[lambda x: x / 0], device=CPU)
    with pytest.raises(RunError, match="NaN"):
        segment(torch.zeros(2, *SIZE), runner, plan, outputs)


def test_of_regions_the_last_and_of_equal_logits_the_first_is_the_label():
    logits = torch.tensor([[1.0, 1.0, -1.0, 0.0], [-1.0, 1.0, 1.0, 0.0]])[..., None]
    assert label_regions(logits, [5, 7]).flatten().tolist() == [5, 7, 7, 0]
    assert argmax_labels(logits).flatten().tolist() == [0, 0, 1, 0]
