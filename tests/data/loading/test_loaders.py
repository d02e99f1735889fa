import pytest
import torch
from monai.data import MetaTensor

from tests.data.helpers.loaders import AUGMENT, CPU, load_epochs, make_data, make_loader
from unet3d.data.augmentation.pipeline import Augment
from unet3d.data.loading.loaders import TrainLoader, build_validation_loader


def assert_equal(batches, others):
    assert len(batches) == len(others)
    for one, other in zip(batches, others, strict=True):
        assert one["case"] == other["case"]
        assert one["image"].equal(other["image"])
        assert one["label"].equal(other["label"])


def test_a_batch_has_tensors_and_the_time_that_it_was_waited_for(volumes):
    (batch, *rest) = load_epochs(make_loader(volumes), 0)
    assert len(rest) == 2
    assert batch["image"].shape == (2, 2, 6, 7, 8)
    assert batch["label"].shape == (2, 6, 7, 8)
    assert batch["wait"].get_seconds() > 0


def test_batches_are_the_same_with_and_without_workers_and_when_an_epoch_is_repeated(volumes):
    without_workers, with_workers = make_loader(volumes), make_loader(volumes, num_workers=2)
    expected = load_epochs(without_workers, 0, 1)
    assert_equal(load_epochs(with_workers, 0, 1), expected)  # the workers are persistent
    assert_equal(load_epochs(with_workers, 1), expected[3:])
    assert not expected[0]["image"].equal(expected[3]["image"])


@pytest.mark.slow
def test_batches_are_the_same_when_workers_are_spawned(volumes):
    """Windows and macOS do not fork: datasets, sampler and augmentation are pickled."""
    without_workers, with_workers = make_data(), make_data(num_workers=1)
    for build in (
        lambda data: TrainLoader(volumes, data, augment=AUGMENT, device=CPU, seed=0),
        lambda data: build_validation_loader(volumes, data, device=CPU),
    ):
        loader = build(with_workers)
        loader.multiprocessing_context = "spawn"
        assert_equal(list(loader), list(build(without_workers)))


def test_deferred_augmentation_gives_the_same_batches(volumes):
    deferred = make_loader(volumes, defer=True)
    assert_equal(load_epochs(deferred, 0, 1), load_epochs(make_loader(volumes), 0, 1))


class AugmentByMonai(Augment):
    """Return tensors of MONAI's own class, as its transforms do."""

    def __call__(self, *args):
        image, label = super().__call__(*args)
        return MetaTensor(image), MetaTensor(label)


@pytest.mark.parametrize("defer", [False, True])
def test_batches_of_monai_transforms_are_plain_tensors(volumes, defer):
    [batch, *_] = load_epochs(make_loader(volumes, augment=AugmentByMonai(), defer=defer), 0)
    assert type(batch["image"]) is type(batch["label"]) is torch.Tensor


def test_a_fetched_batch_comes_next_and_none_is_lost(volumes):
    expected = load_epochs(make_loader(volumes), 0)
    loader, batches = make_loader(volumes), []
    for batch in loader:
        batches.append(batch)
        loader.prefetch()  # at the end of every step, including the last
    assert_equal(batches, expected)
    assert len(loader) == 3


def test_a_stopped_iteration_leaves_no_batch_for_the_next(volumes):
    loader = make_loader(volumes, num_workers=1)
    for _ in loader:
        loader.prefetch()
        break
    assert_equal(load_epochs(loader, 1), load_epochs(make_loader(volumes), 1))


@pytest.mark.gpu
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_on_a_gpu_match_those_on_a_cpu_during_slow_steps(volumes, num_workers):
    """A step of some milliseconds reads its batch while the next batch is copied."""
    augment = Augment(flip_p=0.5, brightness_p=0.5)
    expected = load_epochs(make_loader(volumes, augment=augment), 0, 1)
    loader = make_loader(
        volumes, num_workers=num_workers, defer=True, augment=augment, device=torch.device("cuda")
    )
    batches = []
    for epoch in (0, 1):
        loader.load_state_dict({"epoch": epoch, "batch": 0})
        for batch in loader:
            torch.cuda._sleep(10_000_000)
            batches.append((batch["image"].clone(), batch["label"].clone()))
            wait = batch["wait"]
            del batch
            loader.prefetch()
            assert 0 <= wait.get_seconds() < 10
    for (image, label), other in zip(batches, expected, strict=True):
        assert image.cpu().allclose(other["image"], atol=1e-6)
        assert label.cpu().equal(other["label"])
