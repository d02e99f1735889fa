import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.data.helpers.cases import noise, preprocess, write_case
from unet3d.data.augmentation.pipeline import Augment
from unet3d.data.loading.datasets import (
    EpochSampler,
    TrainingPatches,
    ValidationVolumes,
    compute_class_fractions,
)
from unet3d.types import IGNORE_LABEL

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
    empty = preprocess(write_case(tmp_path, noise(9, 9, 9)), tmp_path)
    assert make_patches(empty, augment=augment)[(0, 0, True)]["image"].shape == (1, 8, 8, 8)
    assert not all(patches[(0, n, False)]["label"].any() for n in range(20))


def test_patches_are_centered_on_every_class_equally_often(tmp_path):
    label = np.zeros((30, 30, 30), np.uint8)
    label[:10] = 1
    label[25, 25, 25] = 2
    volume = preprocess(write_case(tmp_path, noise(30, 30, 30), label), tmp_path, num_classes=3)
    patches = make_patches(volume, patch_size=[3, 3, 3])
    has_small_class = [(patches[(0, n, True)]["label"] == 2).any() for n in range(60)]
    assert 15 < sum(has_small_class) < 45


@pytest.mark.parametrize(("balance_classes", "expected"), [(True, 18), (False, 3)])
def test_balanced_classes_get_equally_many_patches_however_few_cases_have_them(
    tmp_path, balance_classes, expected
):
    volumes = []
    for n in range(6):
        label = np.zeros((9, 9, 9), np.uint8)
        label[3, 3, 3] = 1
        label[5, 5, 5] = 2 * (n == 4)
        case = write_case(tmp_path, noise(9, 9, 9), label, name=f"case_{n}")
        volumes.append(preprocess(case, tmp_path, num_classes=3))
    patches = make_patches(*volumes, patch_size=[1, 1, 1], balance_classes=balance_classes)
    centers, cases = [], []
    for epoch in range(3):
        sampler = EpochSampler(24, batch_size=4, foreground_fraction=0.5, seed=0)
        sampler.epoch = epoch
        samples = [patches[index] for index in sampler if index[2]]
        centers += [int(sample["label"].item()) for sample in samples]
        cases += [sample["case"] for sample in samples if sample["label"] == 1]
    assert len(centers) == 36
    assert abs(centers.count(2) - expected) <= (0 if balance_classes else 3)
    if balance_classes:
        assert {cases.count(volume.name) for volume in volumes} == {3}


def test_no_patch_is_ignored_as_a_whole(tmp_path):
    label = np.full((30, 30, 30), 9, np.uint8)
    label[20:22, 20:22, 20:22] = 0
    label[20, 20, 20] = 1
    case = write_case(tmp_path, noise(30, 30, 30), label)
    volume = preprocess(case, tmp_path, ignore_labels=(9,))
    assert volume.classes == {1}
    assert (volume.label[:20] == IGNORE_LABEL).all()
    patches = make_patches(volume)
    labels = [patches[(0, n, n % 2 == 0)]["label"] for n in range(40)]
    assert all((label != IGNORE_LABEL).any() for label in labels)
    assert sum(label[4, 4, 4] == 1 for label in labels[0::2]) == 20
    assert 0 < sum(label[4, 4, 4] == 0 for label in labels[1::2]) <= 20


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


def test_each_validation_volume_is_on_one_rank_and_all_ranks_have_the_same_length(volumes):
    parts = [ValidationVolumes(volumes, rank=rank, world_size=2) for rank in (0, 1)]
    assert len({len(part) for part in parts}) == 1
    names = [part[n]["case"] for part in parts for n in range(len(part))]
    assert sorted(filter(None, names)) == sorted(volume.name for volume in volumes)


def test_class_fractions_are_those_of_the_labels_that_training_sees(tmp_path):
    label = np.zeros((12, 12, 12), np.int16)
    label[:2, :2, :2], label[:, :, 9:] = 1, -1
    case = write_case(tmp_path, noise(*label.shape), label)
    volume = preprocess(case, tmp_path, num_classes=3, ignore_labels=(-1,))
    patches, fraction = make_patches(volume, patch_size=[6, 6, 6]), {"foreground_fraction": 0.5}
    fractions = compute_class_fractions(patches, num_classes=3, samples=50, **fraction)
    sampler = EpochSampler(50, batch_size=1, seed=0, **fraction)
    labels = np.concatenate([patches[index]["label"].numpy().ravel() for index in sampler])
    labels = labels[labels != IGNORE_LABEL]
    assert fractions.tolist() == pytest.approx(np.bincount(labels, minlength=3) / len(labels))


def test_an_epoch_has_full_batches_and_every_case():
    sampler = EpochSampler(5, batch_size=4, foreground_fraction=0.5, seed=0)
    first = list(sampler)
    assert len(first) == len(sampler) == 8
    assert {n for _, n, _ in first} == set(range(8))
    sampler.epoch = 1
    assert [n for _, n, _ in sampler] != [n for _, n, _ in first]
    assert {epoch for epoch, _, _ in sampler} == {1}


@given(samples=st.integers(1, 30), batch_size=st.integers(1, 9), fraction=st.floats(0, 1))
def test_every_batch_and_the_whole_run_have_their_fraction_of_foreground(
    samples, batch_size, fraction
):
    sampler = EpochSampler(samples, batch_size=batch_size, foreground_fraction=fraction, seed=0)
    foreground = []
    for epoch in range(3):
        sampler.epoch = epoch
        foreground += [number > 0 for _, _, number in sampler]
    for n in range(0, len(foreground), batch_size):
        assert abs(sum(foreground[n : n + batch_size]) - batch_size * fraction) < 1
    assert abs(sum(foreground) - len(foreground) * fraction) < 1


def test_ranks_share_every_global_batch():
    options = {"foreground_fraction": 1 / 3, "seed": 5}
    one_rank = list(EpochSampler(11, batch_size=4, **options))
    first, second = (
        list(EpochSampler(11, batch_size=2, rank=rank, world_size=2, **options)) for rank in (0, 1)
    )
    parts = [first[0:2], second[0:2], first[2:4], second[2:4], first[4:6], second[4:6]]
    assert [index for part in parts for index in part] == one_rank
