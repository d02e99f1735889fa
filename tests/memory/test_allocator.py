from unet3d.memory.allocator import CachingAllocator, replay
from unet3d.units import MIB


def test_small_requests_share_a_segment_of_2_mib():
    allocator = CachingAllocator()
    allocator.allocate(0, 100)
    allocator.allocate(1, MIB)
    assert (allocator.allocated, allocator.reserved) == (512 + MIB, 2 * MIB)


def test_medium_requests_share_20_mib_and_large_ones_have_their_own_segment():
    allocator = CachingAllocator()
    allocator.allocate(0, 3 * MIB)
    assert allocator.reserved == 20 * MIB
    allocator.allocate(1, 30 * MIB + 1)
    assert allocator.reserved == 52 * MIB


def test_freed_neighbors_merge_and_are_reused():
    allocator = CachingAllocator()
    for key in range(3):
        allocator.allocate(key, 5 * MIB)
    for key in range(3):
        allocator.free(key)
    allocator.allocate(3, 20 * MIB)
    assert allocator.reserved == 20 * MIB
    assert allocator.peak_allocated == 20 * MIB


def test_fragments_stay_reserved():
    allocator = CachingAllocator()
    for key in range(4):
        allocator.allocate(key, 5 * MIB)
    allocator.free(0)
    allocator.free(2)
    allocator.allocate(4, 9 * MIB)  # no hole of 5 MiB is large enough
    assert (allocator.allocated, allocator.reserved) == (19 * MIB, 40 * MIB)


def test_a_remainder_too_small_to_split_counts_as_allocated():
    allocator = CachingAllocator()
    allocator.allocate(0, 12 * MIB)
    allocator.free(0)
    allocator.allocate(1, 11 * MIB + 512 * 1024)
    assert allocator.allocated == 12 * MIB


def test_empty_allocations_take_no_memory():
    result = replay([1, -1], [0])
    assert (result.allocated, result.reserved, result.block_sizes) == ([0, 0], [0, 0], [0])


def test_a_replay_returns_the_sizes_of_blocks_with_their_rests():
    result = replay([1, -1, 2], [12 * MIB, 11 * MIB + 512 * 1024])
    assert result.block_sizes == [12 * MIB, 12 * MIB]
    assert result.allocated == [12 * MIB, 0, 12 * MIB]
