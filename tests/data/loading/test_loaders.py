import pytest
import torch

from unet3d.data.augmentation.pipeline import Augment
from unet3d.data.loading.datasets import EpochSampler, TrainingPatches
from unet3d.data.loading.loaders import TrainLoader, build_loaders, collate
from unet3d.errors import UsageError

AUGMENT = Augment(rotation_p=0.7, scale_p=0.5, flip_p=0.5, brightness_p=0.5, noise_p=0.5)
CPU = torch.device("cpu")


def feed(volumes, *, num_workers=0, later=False, augment=AUGMENT, device=CPU):
    patches = TrainingPatches(volumes, patch_size=[6, 7, 8], augment=augment, seed=0, later=later)
    order = EpochSampler(5, batch_size=2, foreground_fraction=0.5, seed=0)
    return TrainLoader(patches, order, batch_size=2, num_workers=num_workers, device=device)


def epochs(loader, *wanted):
    batches = []
    for epoch in wanted:
        loader.sampler.set_epoch(epoch)
        batches += list(loader)
    return batches


def alike(some, others):
    assert len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        assert one["case"] == other["case"]
        assert one["image"].equal(other["image"])
        assert one["label"].equal(other["label"])


def test_a_batch_has_what_a_step_needs_and_says_what_it_took(volumes):
    (batch, *rest) = epochs(feed(volumes), 0)
    assert len(rest) == 2
    assert set(batch) == {"image", "label", "case", "seconds", "wait"}
    assert batch["image"].shape == (2, 2, 6, 7, 8)
    assert batch["label"].shape == (2, 6, 7, 8)
    assert set(batch["seconds"]) == {"reading", "augmenting", "collating"}
    assert batch["wait"].seconds() >= sum(batch["seconds"].values())


def test_batches_are_the_same_with_workers_or_without_and_in_every_epoch_again(volumes):
    alone, helped = feed(volumes), feed(volumes, num_workers=2)
    first = epochs(alone, 0, 1)
    alike(first, epochs(helped, 0, 1))  # the workers live on
    alike(first[3:], epochs(helped, 1))
    assert not first[0]["image"].equal(first[3]["image"])


def test_augmenting_later_from_sources_of_their_own_sizes_gives_the_same(volumes):
    alike(epochs(feed(volumes), 0, 1), epochs(feed(volumes, later=True), 0, 1))


def test_sources_are_laid_end_to_end(volumes):
    later = feed(volumes, later=True).patches
    samples = [later[(0, n, False)] for n in range(3)]
    batch = collate(samples)
    assert len({sample["label"].shape for sample in samples}) > 1
    assert batch["image"].equal(torch.cat([sample["image"].flatten() for sample in samples]))
    assert batch["sizes"] == [tuple(sample["label"].shape) for sample in samples]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_epoch_may_be_told_after_an_iterator_was_made(volumes, num_workers):
    """As Lightning does when it resumes."""
    loader = feed(volumes, num_workers=num_workers)
    iterator = iter(loader)
    loader.sampler.set_epoch(4)
    alike(list(iterator), epochs(feed(volumes), 4))


def test_what_was_fetched_ahead_comes_next_and_nothing_is_lost(volumes):
    expected = epochs(feed(volumes), 0)
    loader, got = feed(volumes), []
    for batch in loader:
        got.append(batch)
        loader.fetch()  # as the last thing of a step, of the last one too
    alike(got, expected)
    assert len(loader) == 3


def test_an_iteration_that_was_left_early_leaves_nothing_for_the_next(volumes):
    loader = feed(volumes, num_workers=1)
    for _ in loader:
        loader.fetch()
        break
    alike(epochs(loader, 1), epochs(feed(volumes), 1))


@pytest.mark.parametrize(
    "bad",
    [
        {"batch_size": 0},
        {"num_workers": -1},
        {"patches_per_case": 0},
        {"patch_size": [8, 8]},
        {"patch_size": [8, 0, 8]},
        {"foreground_fraction": 2.0},
    ],
)
def test_a_loader_that_cannot_be_is_refused(volumes, bad):
    settings = {
        "patch_size": [8, 8, 8],
        "batch_size": 2,
        "patches_per_case": 1,
        "foreground_fraction": 0.5,
        "augment": AUGMENT,
        "num_workers": 0,
        "device": CPU,
        "seed": 0,
    }
    with pytest.raises(UsageError, match=r"data\b"):
        build_loaders(volumes, [], **{**settings, **bad})


@pytest.mark.gpu
@pytest.mark.parametrize("num_workers", [0, 2])
def test_on_a_gpu_batches_are_those_of_a_cpu_however_long_the_gpu_works(volumes, num_workers):
    """A step of some milliseconds reads its batch while the next one is copied."""
    augment = Augment(flip_p=0.5, brightness_p=0.5)
    expected = epochs(feed(volumes, augment=augment), 0, 1)
    loader = feed(
        volumes, num_workers=num_workers, later=True, augment=augment, device=torch.device("cuda")
    )
    got = []
    for epoch in (0, 1):
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            torch.cuda._sleep(10_000_000)
            got.append((batch["image"].clone(), batch["label"].clone()))
            wait = batch["wait"]
            del batch
            loader.fetch()
            assert 0 <= wait.seconds() < 10
    for (image, label), other in zip(got, expected, strict=True):
        assert image.cpu().allclose(other["image"], atol=1e-6)
        assert label.cpu().equal(other["label"])
