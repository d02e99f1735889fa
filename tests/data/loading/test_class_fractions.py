import numpy as np
import pytest

from tests.data.helpers.cases import noise, preprocess, write_case
from unet3d.data.augmentation.pipeline import Augment
from unet3d.data.loading.class_fractions import compute_class_fractions
from unet3d.data.loading.datasets import TrainingPatches
from unet3d.data.loading.sampler import EpochSampler


def make_patches(tmp_path, label, patch_size=(6, 6, 6), **settings):
    case = write_case(tmp_path, noise(*label.shape), label)
    volume = preprocess(case, tmp_path, num_classes=3, **settings)
    return TrainingPatches([volume], patch_size=patch_size, augment=Augment(), seed=0)


def label_with_small_corner():
    label = np.zeros((12, 12, 12), np.int16)
    label[:2, :2, :2] = 1
    return label


def get_fractions(patches, foreground_fraction, samples=200):
    return compute_class_fractions(
        patches, num_classes=3, samples=samples, foreground_fraction=foreground_fraction
    )


def test_fractions_are_those_of_the_labels_that_training_sees(tmp_path):
    patches = make_patches(tmp_path, label_with_small_corner())
    sampler = EpochSampler(50, batch_size=1, foreground_fraction=0.5, seed=0)
    labels = np.concatenate([patches[index]["label"].numpy().ravel() for index in sampler])
    expected = np.bincount(labels, minlength=3) / len(labels)
    assert get_fractions(patches, 0.5, samples=50) == pytest.approx(expected)


def test_foreground_patches_raise_the_fraction_of_foreground(tmp_path):
    patches = make_patches(tmp_path, label_with_small_corner())
    random, foreground = (get_fractions(patches, fraction)[1] for fraction in (0.0, 1.0))
    assert foreground == pytest.approx(8 / 216)
    assert random < foreground / 5


def test_ignored_voxels_are_not_counted(tmp_path):
    label = label_with_small_corner()
    label[:, :, 6:] = -1
    fractions = get_fractions(make_patches(tmp_path, label, (12, 12, 12), ignore_labels=(-1,)), 0.0)
    assert fractions.tolist() == pytest.approx([1 - 8 / 864, 8 / 864, 0])


def test_fractions_are_nan_without_a_labeled_voxel(tmp_path):
    label = np.full((6, 6, 6), -1, np.int16)
    assert np.isnan(get_fractions(make_patches(tmp_path, label, ignore_labels=(-1,)), 0.0)).all()
