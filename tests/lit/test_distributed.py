"""What a process of several shows and notices while it trains."""

import os
import signal
import time

import torch.distributed as dist

from unet3d.lit.distributed import HeartbeatThread
from unet3d.machine.distributed_env import Ranks


def test_a_rank_whose_launcher_is_gone_asks_itself_to_leave():
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        HeartbeatThread(Ranks(launcher=os.getppid() + 1)).start()
        deadline = time.monotonic() + 10
        while not heard and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        dist.destroy_process_group()
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]


def test_a_store_that_does_not_answer_means_the_first_rank_and_is_not_asked_again():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        pulse = HeartbeatThread(Ranks(rank=1, world=2))
        pulse.store = None
        pulse.answered -= 60
        assert pulse.find_unresponsive() == "rank 0"
    finally:
        dist.destroy_process_group()
