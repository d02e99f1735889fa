import numpy as np
import pytest

from tests.data.loading.test_datasets import noise, write_case
from unet3d.data.augmentation.pipeline import Augment
from unet3d.data.loading.class_fractions import compute_class_fractions
from unet3d.data.loading.datasets import EpochSampler, TrainingPatches
from unet3d.data.preprocessing.cache import preprocess_all
from unet3d.data.preprocessing.pipeline import Preprocessing


def patches_of(tmp_path, label, patch_size=(6, 6, 6), **settings):
    case = write_case(tmp_path, noise(*label.shape), label)
    volumes = preprocess_all([case], Preprocessing(num_classes=3, **settings), tmp_path / "cache")
    return TrainingPatches(volumes, patch_size=patch_size, augment=Augment(), seed=0)


def corner(size=12):
    label = np.zeros((size, size, size), np.int16)
    label[:2, :2, :2] = 1
    return label


def shares(patches, foreground_fraction, samples=200):
    return compute_class_fractions(
        patches, num_classes=3, samples=samples, foreground_fraction=foreground_fraction
    )


def test_shares_are_those_of_the_labels_that_the_training_is_given(tmp_path):
    patches = patches_of(tmp_path, corner())
    order = EpochSampler(50, batch_size=1, foreground_fraction=0.5, seed=0)
    given = np.concatenate([patches[place]["label"].numpy().ravel() for place in order])
    assert shares(patches, 0.5, samples=50) == pytest.approx(
        np.bincount(given, minlength=3) / len(given)
    )


def test_patches_around_the_foreground_raise_its_share(tmp_path):
    patches = patches_of(tmp_path, corner())
    rare, often = (shares(patches, share)[1] for share in (0.0, 1.0))
    assert often == pytest.approx(8 / 216)
    assert rare < often / 5


def test_voxels_to_ignore_are_not_counted(tmp_path):
    label = corner()
    label[:, :, 6:] = -1
    found = shares(patches_of(tmp_path, label, (12, 12, 12), ignore_label=-1), 0.0)
    assert found.tolist() == pytest.approx([1 - 8 / 864, 8 / 864, 0])


def test_what_a_patch_has_outside_of_a_small_volume_is_background(tmp_path):
    found = shares(patches_of(tmp_path, np.ones((4, 4, 4), np.int16), (8, 8, 8)), 0.0)
    assert found.tolist() == pytest.approx([7 / 8, 1 / 8, 0])


def test_without_a_labeled_voxel_nothing_is_known(tmp_path):
    label = np.full((6, 6, 6), -1, np.int16)
    assert np.isnan(shares(patches_of(tmp_path, label, ignore_label=-1), 0.0)).all()
