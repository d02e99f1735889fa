import pytest
import torch
from monai.data.utils import compute_importance_map, dense_patch_slices
from monai.inferers.utils import sliding_window_inference

from unet3d.inference.accumulate import list_flips, make_gaussian_importance, run_windows
from unet3d.inference.window_order import WindowSchedule, compute_window_starts

CPU = torch.device("cpu")
ORDERS = [(0, 1, 2), (2, 0, 1), (1, 2, 0)]


def put_together(walk, image, networks, mirrored=((),)):
    """The logits of all bars, and how often each voxel was given."""
    logits, count = None, torch.zeros(walk.size)
    a, b, _ = walk.order

    def take(bar, finished):
        nonlocal logits
        if logits is None:
            logits = torch.full((len(finished), *walk.size), torch.nan)
        place = [slice(None)] * 3
        place[a], place[b] = slice(*bar.rows), slice(*bar.columns)
        logits[(slice(None), *place)] = finished
        count[tuple(place)] += 1

    run_windows(image, walk, networks, take, mirrored=mirrored, device=CPU, keep=CPU)
    return logits, count


@pytest.mark.parametrize("patch", [(8, 8, 8), (16, 5, 3)])
def test_windows_weigh_as_much_as_monais(patch):
    theirs = compute_importance_map(patch, mode="gaussian")
    torch.testing.assert_close(make_gaussian_importance(patch), theirs)


@pytest.mark.parametrize("overlap", [0, 0.25, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("size", [10, 11, 29, 40])
def test_windows_begin_where_monais_do(size, overlap):
    step = 10 if size == 10 else max(1, int(10 * (1 - overlap)))
    theirs = [w[0].start for w in dense_patch_slices([size], [10], [step])]
    assert compute_window_starts(size, 10, overlap) == theirs


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize(("size", "overlap"), [((20, 17, 9), 0.5), ((5, 30, 7), 0.3)])
@torch.no_grad()
def test_bars_hold_the_logits_of_monais_sliding_window(size, overlap, batch_size, order):
    image, network = torch.randn(2, *size), torch.nn.Conv3d(2, 3, 3, padding=1)
    patch = (8, 10, 8)
    walk = WindowSchedule(
        size=size, patch=patch, overlap=overlap, order=order, batch_size=batch_size
    )
    logits, count = put_together(walk, image, [network])
    theirs = sliding_window_inference(
        image[None], patch, 1, network, overlap=overlap, mode="gaussian"
    )
    torch.testing.assert_close(logits, theirs[0])
    assert (count == 1).all()


@torch.no_grad()
def test_an_ensemble_and_its_mirrorings_give_their_mean():
    image, patch = torch.randn(1, 12, 20, 9), (8, 8, 8)
    networks = [torch.nn.Conv3d(1, 2, 3, padding=1) for _ in range(2)]
    mirrored = list_flips([0, 2])

    def mean(x):
        every = [n(x.flip(dims)).flip(dims) for n in networks for dims in ([], [2], [4], [2, 4])]
        return torch.stack(every).mean(0)

    walk = WindowSchedule(size=(12, 20, 9), patch=patch, overlap=0.5)
    logits, _ = put_together(walk, image, networks, mirrored)
    theirs = sliding_window_inference(image[None], patch, 1, mean, overlap=0.5, mode="gaussian")
    torch.testing.assert_close(logits, theirs[0])


def test_half_precision_logits_are_summed_in_full():
    image = torch.rand(1, 30, 8, 8) * 1000
    walk = WindowSchedule(size=(30, 8, 8), patch=(8, 8, 8), overlap=0.9)
    logits, _ = put_together(walk, image, [lambda x: x.bfloat16()])
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, image.bfloat16().float(), rtol=1e-6, atol=0)


def test_only_the_wanted_columns_are_open_and_given():
    walk = WindowSchedule(size=(16, 40, 8), patch=(8, 8, 8), overlap=0.5, columns=(15, 24))
    image = torch.randn(1, 16, 40, 8)
    logits, count = put_together(walk, image, [lambda x: x])
    assert count[:, 15:24].eq(1).all()
    assert count.sum() == 16 * 9 * 8
    torch.testing.assert_close(logits[:, :, 15:24], image[:, :, 15:24])
    whole = WindowSchedule(size=(16, 40, 8), patch=(8, 8, 8), overlap=0.5)
    assert len(walk.windows) < len(whole.windows)
    assert walk.open_voxels < whole.open_voxels


def test_about_half_a_window_of_rows_is_open():
    walk = WindowSchedule(size=(384, 384, 256), patch=(128, 128, 128), overlap=0.5)
    assert walk.open_voxels == 64 * (384 + 128) * 256
