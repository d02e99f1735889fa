import nibabel
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unet3d.data.augmentation.pipeline import Augment
from unet3d.data.case import Case
from unet3d.data.loading.datasets import (
    EpochSampler,
    TrainingPatches,
    ValidationVolumes,
    crop_padded,
)
from unet3d.data.preprocessing.cache import preprocess_all
from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.errors import UsageError
from unet3d.types import IGNORE_LABEL


def write_case(folder, image, label, name="case", affine=None):
    files = []
    for kind, array in (("image", image), ("label", label)):
        path = folder / f"{name}_{kind}.nii.gz"
        nibabel.save(nibabel.Nifti1Image(array, np.eye(4) if affine is None else affine), path)
        files.append(path)
    return Case(name=name, images=(files[0],), label=files[1])


def noise(*size):
    return np.random.default_rng(0).normal(5, 2, size).astype(np.float32)


def one_volume(tmp_path, size=(12, 10, 8), **settings):
    label = np.zeros(size, np.uint8)
    label[2:4, 2:4, 2:4] = 1
    case = write_case(tmp_path, noise(*size), label)
    return preprocess_all([case], Preprocessing(num_classes=2, **settings), tmp_path / "cache")[0]


def test_a_prepared_image_has_mean_0_and_deviation_1(tmp_path):
    image = one_volume(tmp_path).image
    assert image.shape == (1, 12, 10, 8)
    assert image.mean() == pytest.approx(0, abs=1e-5)
    assert image.std() == pytest.approx(1, abs=1e-5)


def test_volumes_are_turned_to_one_orientation_and_spacing(tmp_path):
    flipped = np.diag([-1.0, 1, 2, 1])
    label = np.zeros((6, 6, 6), np.uint8)
    label[0] = 1
    case = write_case(tmp_path, noise(6, 6, 6), label, affine=flipped)
    settings = Preprocessing(num_classes=2, spacing_mm=(1.0, 1.0, 1.0))
    volume = preprocess_all([case], settings, tmp_path / "cache")[0]
    assert volume.label.shape == volume.image.shape[1:] == (6, 6, 12)
    assert volume.label[-1].all()
    assert not volume.label[:-1].any()


def test_a_case_is_prepared_once_until_its_file_or_the_settings_change(tmp_path):
    first = one_volume(tmp_path)
    made = (first.folder / "image.npy").stat().st_mtime_ns
    case = Case(
        name="case",
        images=(tmp_path / "case_image.nii.gz",),
        label=tmp_path / "case_label.nii.gz",
    )
    again = preprocess_all([case], Preprocessing(num_classes=2), tmp_path / "cache")[0]
    assert (again.folder / "image.npy").stat().st_mtime_ns == made
    other = preprocess_all([case], Preprocessing(num_classes=3), tmp_path / "cache")[0]
    assert other.folder != first.folder
    changed = write_case(tmp_path, noise(12, 10, 8) * 2, np.zeros((12, 10, 8), np.uint8))
    assert preprocess_all([changed], Preprocessing(num_classes=2), tmp_path / "cache")[0] != first


def test_labels_to_ignore_are_told_apart_from_classes(tmp_path):
    label = np.zeros((8, 8, 8), np.int16)
    label[0] = -1
    case = write_case(tmp_path, noise(8, 8, 8), label)
    settings = Preprocessing(num_classes=2, ignore_label=-1)
    volume = preprocess_all([case], settings, tmp_path / "cache")[0]
    assert (volume.label[0] == IGNORE_LABEL).all()
    assert not volume.label[1:].any()
    assert len(volume.foreground_points) == 0
    assert volume.classes == set()


@pytest.mark.parametrize(
    ("label", "said"),
    [
        (np.full((8, 8, 8), 2, np.int16), r"labels must be 0\.\.1, it holds 2"),
        (np.full((8, 8, 8), -2, np.int16), "it holds -2"),
        (np.full((8, 8, 8), 0.5, np.float32), "it holds 0.5"),
        (np.zeros((8, 8, 4), np.int16), r"has shape \[8, 8, 4\] and its image \[8, 8, 8\]"),
        (np.zeros((8, 8, 8, 2), np.int16), "one label per voxel"),
        (np.zeros((8, 8), np.int16), "must be a 3D volume"),
    ],
)
def test_a_faulty_label_is_named_with_its_file(tmp_path, label, said):
    case = write_case(tmp_path, noise(8, 8, 8), label)
    with pytest.raises(UsageError, match=said) as caught:
        preprocess_all([case], Preprocessing(num_classes=2), tmp_path / "cache")
    assert "case_label.nii.gz" in str(caught.value)


def test_an_image_that_cannot_be_read_is_named(tmp_path):
    case = write_case(tmp_path, noise(8, 8, 8), np.zeros((8, 8, 8), np.int16))
    whole = case.images[0].read_bytes()
    case.images[0].write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match=r"case_image.nii.gz cannot be read"):
        preprocess_all([case], Preprocessing(num_classes=2), tmp_path / "cache")
    case.images[0].unlink()
    with pytest.raises(UsageError, match=r"case_image.nii.gz is missing"):
        preprocess_all([case], Preprocessing(num_classes=2), tmp_path / "cache")


def test_nan_in_an_image_is_refused(tmp_path):
    image = noise(8, 8, 8)
    image[0, 0, 0] = np.nan
    case = write_case(tmp_path, image, np.zeros((8, 8, 8), np.int16))
    with pytest.raises(UsageError, match="NaN"):
        preprocess_all([case], Preprocessing(num_classes=2), tmp_path / "cache")


@pytest.mark.parametrize(
    "bad",
    [
        {"num_classes": 1},
        {"normalize": ("max",)},
        {"crop": "some"},
        {"orientation": "RAX"},
        {"ignore_label": 1},
        {"spacing_mm": (1.0, 0.0, 1.0)},
    ],
)
def test_settings_that_make_no_sense_are_refused(bad):
    with pytest.raises(UsageError, match=r"data\."):
        Preprocessing(**{"num_classes": 2, **bad})


NONE = Augment()
MOVING = Augment(rotation_p=0.7, scale_p=0.5, flip_p=0.5, brightness_p=0.5)


def patches(*volumes, **choices):
    settings = {"patch_size": [8, 8, 8], "augment": NONE, "seed": 0}
    return TrainingPatches(volumes, **{**settings, **choices})


def test_a_patch_depends_on_seed_epoch_and_number_alone(tmp_path):
    volume = one_volume(tmp_path)
    one, other = patches(volume, augment=MOVING), patches(volume, augment=MOVING)
    other[(3, 4, False)]  # what was drawn before does not matter
    image = one[(0, 1, False)]["image"]
    assert image.equal(other[(0, 1, False)]["image"])
    assert not image.equal(one[(1, 1, False)]["image"])
    assert not image.equal(patches(volume, augment=MOVING, seed=1)[(0, 1, False)]["image"])


@pytest.mark.parametrize("augment", [NONE, Augment(rotation_p=1.0)])
def test_a_foreground_patch_holds_foreground(tmp_path, augment):
    volume = one_volume(tmp_path, size=(40, 40, 40))
    always = patches(volume, augment=augment)
    assert all(always[(0, n, True)]["label"].any() for n in range(20))
    assert not all(always[(0, n, False)]["label"].any() for n in range(20))


def test_every_class_is_as_often_in_the_centre_however_small_it_is(tmp_path):
    label = np.zeros((30, 30, 30), np.uint8)
    label[:10] = 1
    label[25, 25, 25] = 2
    case = write_case(tmp_path, noise(30, 30, 30), label)
    volume = preprocess_all([case], Preprocessing(num_classes=3), tmp_path / "cache")[0]
    centred = patches(volume, patch_size=[3, 3, 3])
    small = [(centred[(0, n, True)]["label"] == 2).any() for n in range(60)]
    assert 15 < sum(small) < 45


def test_a_volume_without_foreground_gives_patches_all_the_same(tmp_path):
    case = write_case(tmp_path, noise(9, 9, 9), np.zeros((9, 9, 9), np.uint8))
    volume = preprocess_all([case], Preprocessing(num_classes=2), tmp_path / "cache")[0]
    assert patches(volume)[(0, 0, True)]["image"].shape == (1, 8, 8, 8)


def test_a_patch_larger_than_the_volume_is_padded_on_both_sides(tmp_path):
    volume = one_volume(tmp_path)
    sample = patches(volume, patch_size=[16, 10, 8])[(0, 0, False)]
    assert sample["image"].shape == (1, 16, 10, 8)
    assert sample["image"][0, 2:14].equal(torch.from_numpy(np.array(volume.image[0])))
    assert sample["image"][:, :2].abs().max() == sample["image"][:, 14:].abs().max() == 0


def test_what_lies_outside_is_zero():
    assert crop_padded(np.ones((2, 2, 2)), [-1, 0, 1], [2, 2, 2])[..., 0].tolist() == [
        [0, 0],
        [1, 1],
    ]


def test_a_patch_is_turned_with_what_lies_around_it_and_not_with_black_corners(tmp_path):
    label = np.zeros((40, 40, 40), np.uint8)
    label[20, 20, 20] = 1
    case = write_case(tmp_path, np.abs(noise(40, 40, 40)) + 1, label)
    settings = Preprocessing(num_classes=2, normalize=("none",))
    volume = preprocess_all([case], settings, tmp_path / "cache")[0]
    turned = patches(volume, augment=Augment(rotation_p=1.0, scale_p=1.0, scale=[0.8, 0.8]))
    assert all(turned[(0, n, True)]["image"].min() > 0.9 for n in range(12))


def test_a_source_is_no_larger_than_the_volume_can_fill(tmp_path):
    later = patches(one_volume(tmp_path), augment=Augment(rotation_p=1.0), later=True)
    sizes = [later[(0, n, False)]["label"].shape for n in range(8)]
    assert max(d for d, _, _ in sizes) > 8  # of a volume with 12 x 10 x 8 voxels
    assert max(h for _, h, _ in sizes) <= 12
    assert {w for _, _, w in sizes} == {8}


def test_samples_say_what_they_took_and_bear_a_key_if_they_are_augmented_later(tmp_path):
    volume = one_volume(tmp_path)
    now, later = patches(volume)[(0, 0, False)], patches(volume, later=True)[(0, 0, False)]
    assert set(now) == {"image", "label", "case", "seconds"}
    assert set(now["seconds"]) == {"reading", "augmenting"}
    assert set(later) == {*now, "key"}
    assert set(later["seconds"]) == {"reading"}
    assert type(now["image"]) is torch.Tensor
    assert (now["image"].dtype, now["label"].dtype) == (torch.float32, torch.uint8)


def order_of(samples, batch_size=4, share=0.5, seed=0):
    return EpochSampler(samples, batch_size=batch_size, foreground_fraction=share, seed=seed)


def test_an_epoch_has_whole_batches_and_every_case():
    order = order_of(5)
    first = list(order)
    assert len(first) == len(order) == 8
    assert {n for _, n, _ in first} == set(range(8))
    order.set_epoch(1)
    assert [n for _, n, _ in order] != [n for _, n, _ in first]
    assert {epoch for epoch, _, _ in order} == {1}


@given(
    samples=st.integers(1, 30),
    batch_size=st.integers(1, 9),
    share=st.floats(0, 1),
)
@settings(deadline=None)
def test_every_batch_has_its_share_of_foreground_and_the_run_has_it(samples, batch_size, share):
    order = order_of(samples, batch_size, share)
    centred = []
    for epoch in range(3):
        order.set_epoch(epoch)
        centred += [foreground for _, _, foreground in order]
    for n in range(0, len(centred), batch_size):
        assert abs(sum(centred[n : n + batch_size]) - batch_size * share) < 1
    assert abs(sum(centred) - len(centred) * share) < 1


def places_of(samples, *, rank=0, ranks=1, batch_size=2, epoch=3, skip=0):
    order = EpochSampler(
        samples, batch_size=batch_size, foreground_fraction=1 / 3, seed=5, rank=rank, ranks=ranks
    )
    order.set_epoch(epoch)
    order.skip(skip)
    return list(order)


def test_ranks_share_each_batch_of_the_run():
    together = places_of(11, batch_size=4)
    first, second = (places_of(11, rank=rank, ranks=2) for rank in (0, 1))
    taken = [first[0:2], second[0:2], first[2:4], second[2:4], first[4:6], second[4:6]]
    assert [place for part in taken for place in part] == together


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_epoch_may_begin_at_any_of_its_batches(ranks):
    whole = places_of(11, rank=ranks - 1, ranks=ranks)
    assert places_of(11, rank=ranks - 1, ranks=ranks, skip=2) == whole[4:]


def test_an_epoch_is_left_out_once():
    order = EpochSampler(6, batch_size=2, foreground_fraction=0, seed=0)
    order.skip(1)
    assert [len(list(order)), len(list(order))] == [4, 6]


def test_each_whole_volume_is_on_one_rank_and_stand_ins_make_them_even(volumes):
    parts = [ValidationVolumes(volumes, rank=rank, ranks=2) for rank in (0, 1)]
    assert len({len(part) for part in parts}) == 1
    names = [part[n]["case"] for part in parts for n in range(len(part))]
    assert sorted(filter(None, names)) == sorted(volume.name for volume in volumes)
