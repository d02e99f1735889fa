import math
from dataclasses import asdict, dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.ndimage import gaussian_filter

from unet3d.data.augmentation import transforms
from unet3d.data.augmentation.pipeline import Augment
from unet3d.data.augmentation.transforms import (
    SpatialTransform,
    apply_transform,
    make_affine_matrix,
    make_elastic_field,
)
from unet3d.errors import UsageError

ALL = {name: 1.0 for name in asdict(Augment()) if name.endswith("_p")}
FULL = Augment(**{**ALL, "elastic_voxels": (1.0, 2.0), "elastic_spacing": 5})


def make_contexts(augment, seeds, patch, channels=1):
    """Make one context per seed; the same seed gives the same context."""
    images, labels = [], []
    for seed in seeds:
        size = augment.sample_transform(seed, patch).compute_context_size(patch)
        generator = torch.Generator().manual_seed(seed)
        images.append(torch.randn(channels, *size, generator=generator))
        labels.append(torch.randint(0, 4, size, generator=generator).to(torch.uint8))
    return images, labels


def test_without_augmentation_a_patch_is_exactly_the_center_crop():
    image, label = torch.randn(2, 2, 8, 10, 6), torch.randint(0, 9, (2, 8, 10, 6)).byte()
    out, labels = Augment()(image, label, [3, 4], (4, 6, 6))
    assert out.equal(image[:, :, 2:6, 2:8])
    assert labels.equal(label[:, 2:6, 2:8])
    out.zero_()
    assert image.count_nonzero() == image.numel()  # a copy


def test_a_sample_does_not_depend_on_its_batch():
    patch = (9, 8, 7)
    images, labels = make_contexts(FULL, [1, 2, 3], patch, channels=2)
    batch = FULL(images, labels, [1, 2, 3], patch)
    reversed_batch = FULL(images[::-1], labels[::-1], [3, 2, 1], patch)
    for n in range(3):
        single = FULL(images[n : n + 1], labels[n : n + 1], [n + 1], patch)
        for samples, reversed_samples, sample in zip(batch, reversed_batch, single, strict=True):
            assert samples[n].equal(sample[0])
            assert reversed_samples[2 - n].equal(sample[0])


def test_one_probability_does_not_affect_other_changes():
    context = [torch.randn(1, 9, 9, 9)], [torch.zeros(9, 9, 9).byte()]
    bright = Augment(brightness_p=1.0)(*context, [8], (9, 9, 9))[0]
    flipped = Augment(brightness_p=1.0, flip_p=1.0)(*context, [8], (9, 9, 9))[0]
    assert flipped.flip(2, 3, 4).equal(bright)


def test_flips_affect_image_and_label_along_the_chosen_axes_only():
    image = torch.randn(1, 1, 4, 5, 6)
    label = image[:, 0].abs().mul(50).byte()
    out, labels = Augment(flip_p=1.0, flip_axes=[0, 2])(image, label, [1], (4, 5, 6))
    assert out.equal(image.flip(2, 4))
    assert labels.equal(label.flip(1, 3))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_rotation_by_90_degrees_matches_rot90(axis):
    image, label = torch.randn(2, 7, 7, 7), torch.randint(0, 9, (7, 7, 7)).byte()
    angles = [math.pi / 2 if n == axis else 0.0 for n in range(3)]
    transform = SpatialTransform(matrix=make_affine_matrix(angles, 1.0, (7, 7, 7)))
    rotated, labels = apply_transform(image, label, transform, (7, 7, 7))
    plane = [n for n in range(3) if n != axis]
    assert rotated.allclose(torch.rot90(image, -1, [n + 1 for n in plane]), atol=1e-5)
    assert labels.equal(torch.rot90(label, -1, plane))


def test_scaling_magnifies_a_structure():
    ball = sum(torch.arange(-10.0, 11).view(-1, *[1] * n) ** 2 for n in range(3)) < 38
    transform = SpatialTransform(matrix=make_affine_matrix([0, 0, 0], 1.5, (21, 21, 21)))
    image, label = apply_transform(ball.float()[None], ball.byte(), transform, (21, 21, 21))
    assert float(label.sum() / ball.sum()) == pytest.approx(1.5**3, rel=0.05)
    assert float(image.sum() / ball.sum()) == pytest.approx(1.5**3, rel=0.05)


def test_a_thin_axis_is_not_rotated_scaled_or_deformed():
    patch = (32, 30, 6)
    augment = Augment(rotation_p=1.0, scale_p=1.0, elastic_p=1.0)
    image = torch.arange(6.0).expand(1, 80, 80, 6)
    for seed in range(5):
        assert augment.sample_transform(seed, patch).compute_context_size(patch)[2] == 6
        out, _ = augment([image], [torch.zeros(80, 80, 6).byte()], [seed], patch)
        assert out[0, 0].sub(torch.arange(6.0)).abs().max() < 1e-4


@given(seed=st.integers(0, 10**6), patch=st.tuples(*[st.integers(2, 14)] * 3))
@settings(max_examples=30)
def test_a_context_holds_every_sampled_voxel(seed, patch):
    """A context of ones gives a patch of ones: the zeros outside are never sampled."""
    augment = Augment(rotation_p=1.0, scale_p=1.0, elastic_p=seed % 2)
    size = augment.sample_transform(seed, patch).compute_context_size(patch)
    assert all(s >= p and (s - p) % 2 == 0 for s, p in zip(size, patch, strict=True))
    image, label = augment([torch.ones(1, *size)], [torch.ones(size).byte()], [seed], patch)
    assert image.min() > 1 - 1e-4
    assert label.all()


def test_an_elastic_field_is_smooth_bounded_and_does_not_fold():
    transform = SpatialTransform(matrix=np.eye(3), displacement=4.0, grid_spacing=10, seed=3)
    field = make_elastic_field(transform, (40, 30, 20), torch.device("cpu"))
    assert field.shape == (3, 40, 30, 20)
    assert 0.5 < field.abs().max() <= 4
    for axis in range(3):
        assert field.diff(dim=axis + 1).abs().max() < 1
        assert field.diff(n=2, dim=axis + 1).abs().max() < 0.2


@pytest.mark.parametrize(
    "name", ["noise", "brightness", "contrast", "gamma", "blur", "low_resolution"]
)
def test_an_intensity_change_keeps_the_labels_and_changes_channels_as_nnunet_does(name):
    augment = Augment(**{f"{name}_p": 1.0})
    image, label = torch.randn(1, 3, 6, 6, 6), torch.randint(0, 9, (1, 6, 6, 6)).byte()
    outputs, labels = zip(*(augment(image, label, [n], (6, 6, 6)) for n in range(80)), strict=True)
    assert all(found.equal(label) for found in labels)
    is_changed = (torch.cat(outputs) != image).flatten(2).any(2).double()
    share = 0.5 if name in ("blur", "low_resolution") else 1
    assert is_changed.mean().item() == pytest.approx(share, abs=0.1)
    gains = (outputs[0] / image).flatten(2).median(2).values[0]
    assert name != "brightness" or gains[0] != gains[1]  # each channel has its own strength


def test_background_of_0_stays_0_where_it_is_to_be_kept():
    image, label = torch.randn(1, 1, 6, 6, 6), torch.zeros(1, 6, 6, 6, dtype=torch.uint8)
    image[0, 0, :2] = 0
    changed, kept = (
        Augment(**{**ALL, "rotation_p": 0, "scale_p": 0, "elastic_p": 0, "flip_p": 0}, **options)
        for options in ({}, {"keep_zeros": True})
    )
    first, second = (augment(image, label, [0], (6, 6, 6))[0][0, 0] for augment in (changed, kept))
    assert first[:2].any()
    assert not second[:2].any()
    assert second[2:].equal(first[2:])


def test_blur_matches_scipy_and_keeps_the_sum():
    point = torch.zeros(15, 15, 15)
    point[7, 7, 7] = 1
    image = torch.rand(9, 10, 11)
    assert float(transforms.blur(point, 1.0).sum()) == pytest.approx(1, abs=1e-6)
    expected = gaussian_filter(image.numpy(), 0.9, mode="nearest", truncate=3 / 0.9)
    assert np.abs(transforms.blur(image, 0.9).numpy() - expected).max() < 1e-5


def test_contrast_keeps_the_range_and_gamma_mean_and_std():
    image = torch.randn(8, 8, 8) * 2 + 5
    unit = (image - image.min()) / (image.max() - image.min())
    for factor in (0.8, 1.2):
        out = transforms.scale_contrast(image, factor)
        assert image.min() <= out.min() <= out.max() <= image.max()
        for change, curve in (
            (transforms.apply_gamma, unit**factor),
            (transforms.apply_inverted_gamma, -((1 - unit) ** factor)),
        ):
            expected = (curve - curve.mean()) / curve.std() * image.std() + image.mean()
            torch.testing.assert_close(change(image, factor), expected, rtol=0, atol=1e-4)


def test_half_is_as_likely_as_double():
    """Also of exponents: one above 1 makes the middle of a ramp darker."""
    scales, exponents = Augment(scale_p=1, scale=(0.25, 4)), Augment(gamma_p=1, gamma=(0.25, 4))
    ramp, label = torch.linspace(0, 1, 125).view(1, 1, 5, 5, 5), torch.zeros(1, 5, 5, 5).byte()
    larger = darker = 0
    for seed in range(200):
        larger += scales.sample_transform(seed, (5, 5, 5)).matrix[0, 0] < 1
        curved, _ = exponents(ramp, label, [seed], (5, 5, 5))
        darker += curved.median() < curved.mean()
    assert 80 < larger < 120
    assert 80 < darker < 120


def test_low_resolution_loses_detail_without_shifting_the_image():
    ramp = torch.arange(16.0).view(-1, 1, 1).expand(16, 16, 16)
    assert (transforms.simulate_low_resolution(ramp, 0.5) - ramp).abs().max() <= 0.5
    noisy = torch.randn(16, 16, 16)
    assert transforms.simulate_low_resolution(noisy, 0.5).std() < 0.8 * noisy.std()
    assert transforms.simulate_low_resolution(noisy, 1.0).allclose(noisy)


@pytest.mark.parametrize(
    ("invalid", "message"),
    [
        ({"noise_p": 2}, "noise_p must be a number >= 0 and <= 1, got 2"),
        ({"noise_std": [0.2, 0.1]}, "the lower first"),
        ({"scale": [0, 1]}, "scale must be two numbers within 0.1..10"),
        ({"flip_axes": [3]}, "flip_axes must be a list of axes"),
        ({"elastic_spacing": 14}, "so that the image is not folded"),
    ],
)
def test_an_invalid_setting_is_refused_in_one_line(invalid, message):
    with pytest.raises(UsageError, match=message) as error:
        Augment(**invalid)
    assert "\n" not in str(error.value)


@pytest.mark.gpu
def test_patches_on_a_gpu_match_those_on_a_cpu():
    augment = Augment(**{k: 1.0 for k in ALL if k not in ("noise_p", "elastic_p")})
    images, labels = make_contexts(augment, [1, 2], (20, 20, 20))
    on_cpu, _ = augment(images, labels, [1, 2], (20, 20, 20))
    moved = ([tensor.cuda() for tensor in tensors] for tensors in (images, labels))
    on_gpu, _ = augment(*moved, [1, 2], (20, 20, 20))
    assert on_gpu.cpu().allclose(on_cpu, atol=1e-3)


@dataclass(frozen=True, kw_only=True)
class WithNoise(Augment):
    noise: float = 0.1
    sides: list[int] | None = None


def test_fields_of_a_users_augmentation_are_checked_by_the_user():
    assert WithNoise(noise=2.0).noise == 2.0
    with pytest.raises(UsageError, match=r"augmentation\.flip_p"):
        WithNoise(flip_p=2.0)
