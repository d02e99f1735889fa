"""Transforms of nnU-Net run where their samples are."""

import copy

import numpy as np
import pytest
import torch

from unet3d.nnunet.device_augmentation import DeviceAugmenter, MoveToDevice, make_certain

trainer = pytest.importorskip("nnunetv2.training.nnUNetTrainer.nnUNetTrainer")
context_loader = pytest.importorskip("unet3d.nnunet.context_loader")

PATCH, CONTEXT = (16, 20, 24), (24, 28, 32)


def make_transforms(**options):
    angle = (-0.5, 0.5)
    scales = [[1.0] * 3, [0.5] * 3]
    make = trainer.nnUNetTrainer.get_training_transforms
    return make(PATCH, angle, scales, (0, 1, 2), False, use_mask_for_norm=[True, False], **options)


def make_batch():
    data = torch.randn(2, 2, *CONTEXT)
    target = torch.randint(-1, 4, (2, 1, *CONTEXT)).short()
    return {"data": data, "target": target, "keys": ["a", "b"]}


def test_what_an_operation_mixes_is_moved_and_nothing_is_lost():
    there = torch.ones(3, device="meta")
    with MoveToDevice():
        assert (torch.ones(3) + there).device.type == "meta"
        assert torch.stack([torch.ones(3), there]).device.type == "meta"
        assert (torch.ones(3) + torch.tensor(2.0)).tolist() == [3, 3, 3]
        for change in (torch.Tensor.add_, lambda a, b: a.__setitem__(slice(None), b)):
            with pytest.raises(RuntimeError, match="would change a tensor on the CPU"):
                change(torch.ones(3), there)


@pytest.mark.parametrize("options", [{}, {"regions": [(1, 2, 3), (2,)], "ignore_label": 3}])
def test_batches_have_the_patch_size_and_targets_of_every_level(options):
    loader = iter([make_batch() for _ in range(3)])
    augmenter = DeviceAugmenter(loader, make_transforms(**options), torch.device("cpu"))
    augmenter.prepare()
    batch = next(augmenter)
    channels = 3 if options else 1
    assert batch["data"].shape == (2, 2, *PATCH)
    assert [t.shape for t in batch["target"]] == [
        (2, channels, *PATCH),
        (2, channels, *(n // 2 for n in PATCH)),
    ]
    assert next(augmenter)["keys"] == ["a", "b"]
    with pytest.raises(StopIteration):
        next(augmenter)


def test_a_transform_that_cannot_run_raises_before_the_first_batch():
    transforms = make_transforms()

    def refuse(data, **parameters):
        raise TypeError("can't convert to numpy")

    transforms.transforms[1].transform.apply = refuse  # noise, in a tenth of the samples
    with pytest.raises(TypeError):
        DeviceAugmenter(iter([make_batch()]), transforms, torch.device("cpu"))


def test_every_change_is_made_certain():
    transforms = make_transforms()
    make_certain(transforms)
    sample = make_batch()
    image, label = sample["data"][0], sample["target"][0]
    results = [transforms(image=image.clone(), segmentation=label.clone()) for _ in range(2)]
    assert not torch.equal(results[0]["image"], results[1]["image"])
    assert transforms.transforms[0].p_rotation == transforms.transforms[1].apply_probability == 1


def test_less_is_read_around_a_patch_where_its_rotation_and_scale_need_less():
    context = 34, 37, 42
    spatial = context_loader.find_spatial(make_transforms())
    spatial.p_rotation = spatial.p_scaling = 0.5
    image, label = torch.randn(1, *context), torch.randint(-1, 4, (1, *context)).short()
    voxels = set()
    for seed in range(40):
        unread = context_loader.count_unread(spatial, context, seed)
        box = tuple(slice(m, n - m) for n, m in zip(context, unread, strict=True))
        results = []
        for region in ((), (slice(None), *box)):
            with context_loader.use_seed(seed):
                sample = {"image": image[region].clone(), "segmentation": label[region].clone()}
                results.append(spatial(**sample))
        torch.testing.assert_close(results[1]["image"], results[0]["image"], rtol=0, atol=1e-4)
        differs = results[1]["segmentation"] != results[0]["segmentation"]
        assert differs.sum() <= 2  # of 7,680: those halfway between two labels, to a rounding
        voxels.add(image[:, *box].numel())
    assert min(voxels) < 1.2 * 16 * 20 * 24
    assert max(voxels) > 2 * 16 * 20 * 24


def test_whole_contexts_are_read_for_transforms_that_deform_or_move_the_center():
    for name, value in {"p_elastic_deform": 0.2, "random_crop": True}.items():
        transforms = make_transforms()
        setattr(transforms.transforms[0], name, value)
        assert context_loader.find_spatial(transforms) is None


@pytest.mark.gpu
def test_a_gpu_computes_what_the_cpu_does():
    transforms = make_transforms()
    make_certain(transforms)
    del transforms.transforms[1]  # noise is drawn on the device
    results = []
    for name in ("cpu", "cuda"):
        torch.manual_seed(0)
        batches = [make_batch(), make_batch()]
        own = copy.deepcopy(transforms)
        augmenter = DeviceAugmenter(iter(batches), own, torch.device(name))
        torch.manual_seed(1)
        np.random.seed(1)
        results.append(next(augmenter))
    ours, theirs = results
    torch.testing.assert_close(theirs["data"].cpu(), ours["data"], rtol=1e-3, atol=1e-3)
    for a, b in zip(theirs["target"], ours["target"], strict=True):
        assert (a.cpu() == b).float().mean() > 0.999
