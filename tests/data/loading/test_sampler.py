import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unet3d.data.loading.sampler import EpochSampler


def make_sampler(samples, batch_size=4, fraction=0.5):
    return EpochSampler(samples, batch_size=batch_size, foreground_fraction=fraction, seed=0)


def test_an_epoch_has_full_batches_and_every_case():
    sampler = make_sampler(5)
    first = list(sampler)
    assert len(first) == len(sampler) == 8
    assert {n for _, n, _ in first} == set(range(8))
    sampler.start_at(1)
    assert [n for _, n, _ in sampler] != [n for _, n, _ in first]
    assert {epoch for epoch, _, _ in sampler} == {1}


@given(samples=st.integers(1, 30), batch_size=st.integers(1, 9), fraction=st.floats(0, 1))
@settings(deadline=None)
def test_every_batch_and_the_whole_run_have_their_fraction_of_foreground(
    samples, batch_size, fraction
):
    sampler = make_sampler(samples, batch_size, fraction)
    foreground = []
    for epoch in range(3):
        sampler.start_at(epoch)
        foreground += [is_foreground for _, _, is_foreground in sampler]
    for n in range(0, len(foreground), batch_size):
        assert abs(sum(foreground[n : n + batch_size]) - batch_size * fraction) < 1
    assert abs(sum(foreground) - len(foreground) * fraction) < 1


def sample_epoch(*, batch_size=2, skip=0, **ranks):
    sampler = EpochSampler(11, batch_size=batch_size, foreground_fraction=1 / 3, seed=5, **ranks)
    sampler.start_at(3, skip)
    return list(sampler)


def test_ranks_share_every_global_batch():
    one_rank = sample_epoch(batch_size=4)
    first, second = (sample_epoch(rank=rank, world_size=2) for rank in (0, 1))
    parts = [first[0:2], second[0:2], first[2:4], second[2:4], first[4:6], second[4:6]]
    assert [index for part in parts for index in part] == one_rank


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_epoch_can_start_at_any_of_its_batches(world_size):
    ranks = {"rank": world_size - 1, "world_size": world_size}
    assert sample_epoch(**ranks, skip=2) == sample_epoch(**ranks)[4:]
