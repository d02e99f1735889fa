import pytest

from unet3d.memory.allocator import VARIABLES, CachingAllocator, parse_allocator_settings, replay
from unet3d.text import MIB


def allocate_in(settings, *sizes_mib):
    allocator = CachingAllocator(**parse_allocator_settings(settings))
    for key, mib in enumerate(sizes_mib):
        allocator.allocate(key, int(mib * MIB))
    return allocator


def test_small_requests_share_2_mib_medium_ones_20_and_large_ones_have_their_own_segment():
    small, larger = allocate_in("", 2**-13, 1), allocate_in("", 3, 30 + 2**-20)
    assert (small.allocated, small.reserved) == (512 + MIB, 2 * MIB)
    assert larger.reserved == (20 + 32) * MIB


def test_a_replay_returns_the_sizes_of_blocks_with_their_rests():
    result = replay([1, -1, 2, 3], [12 * MIB, 11 * MIB + 512 * 1024, 0])
    assert result.block_sizes == [12 * MIB, 12 * MIB, 0]
    assert result.allocated == [12 * MIB, 0, 12 * MIB, 12 * MIB]


def test_an_expandable_segment_grows_by_20_mib():
    allocator = allocate_in("expandable_segments:True", 3, 30, 5)
    assert (allocator.allocated, allocator.reserved) == (38 * MIB, 40 * MIB)
    allocator.allocate(3, 100)  # small requests have a segment of their own
    assert allocator.reserved == 42 * MIB


def test_the_end_of_an_expandable_segment_grows_by_what_is_missing():
    allocator = allocate_in("expandable_segments:True", 10, 25)
    allocator.free(1)
    allocator.allocate(2, 40 * MIB)  # 30 MiB at the end are free
    assert (allocator.allocated, allocator.reserved) == (50 * MIB, 60 * MIB)


def test_the_end_of_an_expandable_segment_is_used_last():
    allocator = allocate_in("expandable_segments:True", 30, 2, 4)
    allocator.free(0)
    allocator.allocate(3, 3 * MIB)  # the last 4 MiB would fit best
    assert allocator.used[3][0] == allocator.used[1][0] - 30 * MIB


def test_expandable_segments_split_off_every_rest():
    allocator = allocate_in("expandable_segments:True", 12, 12)
    allocator.free(0)
    assert allocator.allocate(2, int(11.5 * MIB)) == 11.5 * MIB


def test_graphs_allocate_from_a_pool_of_their_own_after_free_segments_are_released():
    sizes = [30 * MIB, 40 * MIB, 40 * MIB]
    events = [1, 2, -2, 3, -3, -1]
    result = replay(events, sizes, [range(3, 5)])
    assert [n // MIB for n in result.reserved] == [30, 70, 70, 70, 70, 70]
    assert [n // MIB for n in result.allocated] == [30, 70, 30, 70, 30, 0]
    without = replay([1, -1, 2], sizes, [range(2, 3)])
    assert without.reserved[-1] == 40 * MIB  # the segment of 30 MiB is released


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_replay_has_the_options_of_the_environment(variable, monkeypatch):
    events, sizes = [1, 2], [3 * MIB, 30 * MIB]
    assert replay(events, sizes).reserved[-1] == 50 * MIB
    monkeypatch.setenv(variable, "garbage_collection_threshold:0.8, expandable_segments:True")
    assert replay(events, sizes).reserved[-1] == 40 * MIB


def test_other_options_are_warned_of(caplog):
    parse_allocator_settings("max_split_size_mb:64,roundup_power2_divisions:[64:2,>:1]")
    assert "ignores max_split_size_mb:64" in caplog.text
    assert "ignores roundup_power2_divisions:[64:2,>:1]" in caplog.text
