"""What the ranks of a run share."""

import subprocess
import sys

SHARE = """
import sys, torch
from unet3d.training.distributed import share_buffers
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
