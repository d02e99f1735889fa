import numpy as np
import pytest
import torch

from tests.data.helpers.cases import noise, preprocess, write_case
from unet3d.data.augmentation.pipeline import Augment
from unet3d.data.loading.datasets import (
    TrainingPatches,
    ValidationVolumes,
    compute_class_fractions,
)
from unet3d.data.loading.sampler import EpochSampler

NONE = Augment()
MOVING = Augment(rotation_p=0.7, scale_p=0.5, flip_p=0.5, brightness_p=0.5)


def make_volume(tmp_path, size=(12, 10, 8)):
    label = np.zeros(size, np.uint8)
    label[2:4, 2:4, 2:4] = 1
    return preprocess(write_case(tmp_path, noise(*size), label), tmp_path)


def make_patches(*volumes, **options):
    defaults = {"patch_size": [8, 8, 8], "augment": NONE, "seed": 0}
    return TrainingPatches(volumes, **{**defaults, **options})


def test_a_patch_depends_only_on_seed_epoch_and_index(tmp_path):
    volume = make_volume(tmp_path)
    one, other = (make_patches(volume, augment=MOVING) for _ in range(2))
    other[(3, 4, False)]  # an earlier sample must not matter
    image = one[(0, 1, False)]["image"]
    assert image.equal(other[(0, 1, False)]["image"])
    assert not image.equal(one[(1, 1, False)]["image"])
    assert not image.equal(make_patches(volume, augment=MOVING, seed=1)[(0, 1, False)]["image"])


@pytest.mark.parametrize("augment", [NONE, Augment(rotation_p=1.0)])
def test_a_foreground_patch_contains_foreground(tmp_path, augment):
    patches = make_patches(make_volume(tmp_path, size=(40, 40, 40)), augment=augment)
    assert all(patches[(0, n, True)]["label"].any() for n in range(20))
    assert not all(patches[(0, n, False)]["label"].any() for n in range(20))


def test_patches_are_centered_on_every_class_equally_often(tmp_path):
    label = np.zeros((30, 30, 30), np.uint8)
    label[:10] = 1
    label[25, 25, 25] = 2
    volume = preprocess(write_case(tmp_path, noise(30, 30, 30), label), tmp_path, num_classes=3)
    patches = make_patches(volume, patch_size=[3, 3, 3])
    has_small_class = [(patches[(0, n, True)]["label"] == 2).any() for n in range(60)]
    assert 15 < sum(has_small_class) < 45


def test_a_volume_without_foreground_still_gives_patches(tmp_path):
    volume = preprocess(write_case(tmp_path, noise(9, 9, 9)), tmp_path)
    assert make_patches(volume)[(0, 0, True)]["image"].shape == (1, 8, 8, 8)


def test_a_patch_larger_than_the_volume_is_padded_on_both_sides(tmp_path):
    volume = make_volume(tmp_path)
    sample = make_patches(volume, patch_size=[16, 10, 8])[(0, 0, False)]
    assert sample["image"].shape == (1, 16, 10, 8)
    assert sample["image"][0, 2:14].equal(torch.from_numpy(np.array(volume.image[0])))
    assert sample["image"][:, :2].abs().max() == sample["image"][:, 14:].abs().max() == 0


def test_a_rotated_patch_shows_its_surroundings_instead_of_black_corners(tmp_path):
    label = np.zeros((40, 40, 40), np.uint8)
    label[20, 20, 20] = 1
    case = write_case(tmp_path, np.abs(noise(40, 40, 40)) + 1, label)
    volume = preprocess(case, tmp_path, normalize=("none",))
    augment = Augment(rotation_p=1.0, scale_p=1.0, scale=[0.8, 0.8])
    patches = make_patches(volume, augment=augment)
    assert all(patches[(0, n, True)]["image"].min() > 0.9 for n in range(12))


def test_a_context_is_not_larger_than_the_volume_can_fill(tmp_path):
    options = {"augment": Augment(rotation_p=1.0), "defer_augmentation": True}
    patches = make_patches(make_volume(tmp_path), **options)
    sizes = [patches[(0, n, False)]["label"].shape for n in range(8)]
    assert max(d for d, _, _ in sizes) > 8  # the volume has 12 x 10 x 8 voxels
    assert max(h for _, h, _ in sizes) <= 12
    assert {w for _, _, w in sizes} == {8}


def test_each_validation_volume_is_on_one_rank_and_all_ranks_have_the_same_length(volumes):
    parts = [ValidationVolumes(volumes, rank=rank, world_size=2) for rank in (0, 1)]
    assert len({len(part) for part in parts}) == 1
    names = [part[n]["case"] for part in parts for n in range(len(part))]
    assert sorted(filter(None, names)) == sorted(volume.name for volume in volumes)


def measure_fractions(tmp_path, label, patch_size, *, samples=200, fraction=0.0):
    """Return training patches of a case, and the fractions of its classes in them."""
    case = write_case(tmp_path, noise(*label.shape), label)
    volume = preprocess(case, tmp_path, num_classes=3, ignore_labels=(-1,))
    patches = make_patches(volume, patch_size=patch_size)
    fractions = compute_class_fractions(
        patches, num_classes=3, samples=samples, foreground_fraction=fraction
    )
    return patches, fractions.tolist()


def test_class_fractions_are_those_of_the_labels_that_training_sees(tmp_path):
    label = np.zeros((12, 12, 12), np.int16)
    label[:2, :2, :2] = 1
    patches, fractions = measure_fractions(tmp_path, label, (6, 6, 6), samples=50, fraction=0.5)
    sampler = EpochSampler(50, batch_size=1, foreground_fraction=0.5, seed=0)
    labels = np.concatenate([patches[index]["label"].numpy().ravel() for index in sampler])
    assert fractions == pytest.approx(np.bincount(labels, minlength=3) / len(labels))
    label[:, :, 6:] = -1
    _, fractions = measure_fractions(tmp_path, label, (12, 12, 12))
    assert fractions == pytest.approx([1 - 8 / 864, 8 / 864, 0])
    _, fractions = measure_fractions(tmp_path, np.full((6, 6, 6), -1, np.int16), (6, 6, 6))
    assert np.isnan(fractions).all()  # no voxel is labeled
