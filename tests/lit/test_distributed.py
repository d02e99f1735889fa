"""Heartbeats of distributed processes."""

import os
import signal
import time

import torch.distributed as dist

from unet3d.lit.distributed import HeartbeatThread
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
        assert heartbeat.find_unresponsive() == "rank 0"
    finally:
        dist.destroy_process_group()
