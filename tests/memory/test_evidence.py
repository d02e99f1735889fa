"""The model of the caching allocator against recordings of real GPUs."""

import gzip
import json
from itertools import accumulate
from pathlib import Path

import pytest

from tests.memory.helpers.address_replay import replay_addresses
from tests.memory.helpers.resnet import ResNetStep, read_step
from unet3d.memory.allocator import SMALL, round_block_size
from unet3d.memory.estimate import trace_step

EVIDENCE = Path(__file__).parent / "evidence"
SNAPSHOTS = sorted((EVIDENCE / "snapshots").glob("*.json.gz"))


def read_evidence(path):
    return json.loads(gzip.decompress(path.read_bytes()))


def test_every_recording_is_there():
    assert len(SNAPSHOTS) == 13


@pytest.mark.parametrize("path", SNAPSHOTS, ids=lambda path: path.name.partition(".")[0])
def test_every_block_is_where_the_gpu_had_it(path):
    recording = read_evidence(path)
    found = replay_addresses(recording["before"], recording["events"])
    assert found.blocks > 30
    assert not found.misplaced
    assert found.reserved == recording["reserved_after"]


@pytest.fixture(scope="module")
def recorded_step():
    return read_step(read_evidence(EVIDENCE / "hta_resnet50.json.gz"))


@pytest.fixture(scope="module")
def resnet():
    return trace_step(ResNetStep, cuda=True)


def test_a_step_of_resnet_50_allocates_and_frees_in_the_order_of_a_gpu(recorded_step, resnet):
    blocks = [(event > 0, resnet.trace.blocks[abs(event) - 1]) for event in resnet.trace.events]
    requests = [
        (is_allocated, block.nbytes)
        for is_allocated, block in blocks[slice(*resnet.steady_step)]
        if block.nbytes and block.kind != "workspaces"
    ]
    assert len(requests) == len(recorded_step.without_workspaces) == 1088
    for (is_allocated, nbytes), recorded in zip(
        requests, recorded_step.without_workspaces, strict=True
    ):
        assert is_allocated == (recorded > 0)
        assert 0 <= abs(recorded) - round_block_size(nbytes) <= SMALL  # a rest is not split off


def test_the_peak_of_a_step_of_resnet_50_is_that_of_a_gpu(recorded_step, resnet):
    without, peak = (
        max(accumulate(sizes, initial=recorded_step.start))
        for sizes in (recorded_step.without_workspaces, recorded_step.all)
    )
    assert resnet.without_workspaces == pytest.approx(without, rel=0.002)
    assert resnet.peak.allocated == pytest.approx(peak, rel=0.02)
