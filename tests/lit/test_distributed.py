"""Heartbeats of distributed processes, and what they share."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from unet3d.lit.distributed import HeartbeatThread, run_on_rank_zero
from unet3d.machine.distributed_env import ProcessRank


def test_a_rank_whose_launcher_was_killed_terminates_itself():
    received = []
    previous = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        HeartbeatThread(ProcessRank(launcher_pid=os.getppid() + 1)).start()
        deadline = time.monotonic() + 10
        while not received and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        dist.destroy_process_group()
        signal.signal(signal.SIGTERM, previous)
    assert received == [signal.SIGTERM]


def test_a_store_that_does_not_answer_means_rank_0_and_is_not_queried_again():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        heartbeat = HeartbeatThread(ProcessRank(rank=1, world_size=2))
        heartbeat.store = None
        heartbeat.answered -= 60
        assert heartbeat.wait_for_unresponsive() == "rank 0"
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems allow text only")
def test_a_folder_whose_name_is_not_text_is_known_to_every_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for rank in range(2):
            process = ProcessRank(rank=rank, world_size=2)
            assert run_on_rank_zero(process, lambda: "runs/é\udcff") == "runs/é\udcff"
    finally:
        dist.destroy_process_group()


def test_ranks_whose_heartbeat_stopped_are_named():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        heartbeat = HeartbeatThread(ProcessRank(rank=0, world_size=4))
        assert heartbeat.find_unresponsive(5) == ""
        heartbeat.heard[2] -= 60
        assert heartbeat.find_unresponsive(5) == "rank 2"
        heartbeat.heard[3] -= 60
        assert heartbeat.find_unresponsive(5) == "ranks 2, 3"
        heartbeat.store.set("heartbeat/2", "1")
        heartbeat._listen()
        assert heartbeat.find_unresponsive(5) == "rank 3"
    finally:
        dist.destroy_process_group()


UNRESPONSIVE = """
import time
import torch.distributed as dist
from unet3d.lit.distributed import HeartbeatThread, UnresponsiveRankWatcher
from unet3d.machine.distributed_env import ProcessRank

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
heartbeat = HeartbeatThread(ProcessRank(rank=0, world_size=3))
heartbeat.heard[2] -= 60
UnresponsiveRankWatcher(heartbeat, 5).start()
time.sleep(60)  # as in a collective that never returns
"""


def test_a_process_that_waits_for_a_silent_rank_ends_and_names_it():
    command = [sys.executable, "-W", "ignore", "-c", UNRESPONSIVE]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == 4
    assert "unet3d: rank 2 stopped responding; rerun with resume=auto" in ended.stderr


SHARE = """
import sys, torch
from unet3d.lit.distributed import share_buffers
rank = int(sys.argv[1])
torch.distributed.init_process_group("gloo", f"file://{sys.argv[2]}", rank=rank, world_size=2)
norm = torch.nn.BatchNorm3d(2)
norm.running_mean.fill_(rank + 3.0)
norm.num_batches_tracked.fill_(rank + 5)
share_buffers(norm, 2)
assert norm.running_mean.tolist() == [3.0, 3.0] and norm.num_batches_tracked == 5
torch.distributed.destroy_process_group()
"""


def test_all_ranks_validate_with_the_statistics_of_rank_0(tmp_path):
    """Those of a checkpoint: or a resumed validation would be another one."""
    processes = [
        subprocess.Popen([sys.executable, "-c", SHARE, str(rank), str(tmp_path / "store")])
        for rank in range(2)
    ]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
