"""The rank of this process among those of its run, and the launcher that started them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from unet3d.errors import UsageError

TORCHRUN_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""What Lightning's TorchElasticEnvironment reads, too; `unet3d train` sets them for its ranks."""

SLURM_NAMES = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE")
"""What Lightning's SLURMEnvironment reads, too."""


@dataclass(frozen=True)
class ProcessRank:
    """The global and local rank of a process, and the number of processes."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1


def detect_launcher(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the launcher that started this process as one of several; None if there is none."""
    if "TORCHELASTIC_RUN_ID" in environ and int(environ.get("WORLD_SIZE", 1)) > 1:
        return "torchrun"
    if "SLURM_PROCID" in environ and int(environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        return "slurm"
    return None


def read_process_rank(launch: str, environ: Mapping[str, str] = os.environ) -> ProcessRank:
    """Read this process's rank from the environment; without a launcher it is the only process."""
    detected = detect_launcher(environ)
    if detected not in (None, launch):
        raise UsageError(
            f"{detected} started {environ.get('WORLD_SIZE') or environ['SLURM_STEP_NUM_TASKS']} "
            f"processes, which would each train alone: add trainer={detected}"
        )
    needed = {"slurm": "SLURM_STEP_NUM_TASKS", "torchrun": "RANK"}  # a job script has the others
    if launch in needed and needed[launch] not in environ:
        program = "srun" if launch == "slurm" else "torchrun"
        raise UsageError(
            f"trainer={launch} needs processes started by {program}, one per GPU: "
            f"{program} unet3d train trainer={launch} output=..."
        )
    names = SLURM_NAMES if launch == "slurm" else TORCHRUN_NAMES
    if names[0] not in environ:
        return ProcessRank()
    return ProcessRank(*(int(environ.get(name, 1)) for name in names))
