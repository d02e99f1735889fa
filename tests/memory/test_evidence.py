"""The model of the caching allocator against recordings of real GPUs."""

import pytest

from tests.memory.helpers.recordings import (
    SNAPSHOTS,
    PlacedAllocator,
    read_recording,
    replay_snapshot,
)


def test_every_recording_is_there():
    assert len(SNAPSHOTS) == 13


@pytest.mark.parametrize("path", SNAPSHOTS, ids=lambda path: path.name.partition(".")[0])
def test_every_block_is_where_the_gpu_had_it(path):
    recording = read_recording(path)
    found = replay_snapshot(recording)
    assert found.blocks > 30
    assert not found.misplaced
    assert found.reserved == recording["reserved_after"]


def test_another_rule_of_splitting_puts_blocks_elsewhere(monkeypatch):
    monkeypatch.setattr("unet3d.memory.allocator.SMALL", 2**19)
    recording = read_recording(SNAPSHOTS[9])
    assert replay_snapshot(recording).misplaced


def test_a_rest_is_inferred_only_before_the_recording():
    allocator = PlacedAllocator()
    allocator.add_segment(0, 40 * 2**20, False, [[0, 4 * 2**20]])
    start = 4 * 2**20
    assert not allocator.reveal_rest(start + 2**19, known={0})
    assert allocator.reveal_rest(start + 2**19, known=set())
