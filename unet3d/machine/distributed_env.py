"""The rank of this process, from the environment that its launcher has set."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from unet3d.errors import UsageError

LAUNCHES = ("local", "torchrun", "slurm")
"""Values of trainer.launch: unet3d starts the processes itself on this machine; torchrun; srun."""

LAUNCHER = "UNET3D_LAUNCHER"
"""Environment variable with the process id of the unet3d process that started and watches this."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The global and local rank of a process, and the number of processes."""

    rank: int = 0
    local: int = 0
    world: int = 1
    per_node: int = 1
    # The process id of the unet3d process that started and watches this one.
    launcher: int | None = None

    @property
    def nodes(self) -> int:
        """Return the number of machines."""
        return self.world // self.per_node


def detect_launcher(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the launcher that started this process as one of several; None if there is none."""
    if "TORCHELASTIC_RUN_ID" in environ and int(environ.get("WORLD_SIZE", 1)) > 1:
        return "torchrun"
    if "SLURM_PROCID" in environ and int(environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        return "slurm"
    return None


def read_ranks(launch: str, environ: Mapping[str, str] = os.environ) -> Ranks:
    """Read the ranks from the environment; without a launcher this is the only process."""
    if launch not in LAUNCHES:
        raise UsageError(f"trainer.launch must be one of {', '.join(LAUNCHES)}, got {launch!r}")
    detected = detect_launcher(environ)
    if detected not in (None, launch):
        raise UsageError(
            f"{detected} started {environ.get('WORLD_SIZE') or environ['SLURM_STEP_NUM_TASKS']} "
            f"processes, which would each train alone: add trainer={detected}"
        )
    if launch == "slurm":
        if "SLURM_STEP_NUM_TASKS" not in environ:  # the other variables exist in a job script, too
            raise UsageError("trainer=slurm needs processes that srun starts: see scripts/slurm.sh")
        tasks = environ["SLURM_STEP_TASKS_PER_NODE"]  # 2, 4(x3) or, uneven, 2(x3),1
        return _build_ranks(
            rank=int(environ["SLURM_PROCID"]),
            local=int(environ["SLURM_LOCALID"]),
            world=int(environ["SLURM_STEP_NUM_TASKS"]),
            per_node=int(tasks.split("(")[0]) if "," not in tasks else 0,
            reported=tasks,
        )
    if "RANK" in environ and "LOCAL_RANK" in environ:
        return _build_ranks(
            rank=int(environ["RANK"]),
            local=int(environ["LOCAL_RANK"]),
            world=int(environ["WORLD_SIZE"]),
            per_node=int(environ["LOCAL_WORLD_SIZE"]),
            reported=environ["LOCAL_WORLD_SIZE"],
            launcher=int(environ[LAUNCHER]) if LAUNCHER in environ else None,
        )
    if launch == "torchrun":
        raise UsageError(
            "trainer=torchrun needs processes that torchrun starts: see docs/how-to/multi-gpu.md"
        )
    return Ranks()


def _build_ranks(
    *, rank: int, local: int, world: int, per_node: int, reported: str, launcher: int | None = None
) -> Ranks:
    if per_node == 0 or world % per_node:
        raise UsageError(
            f"every machine must run the same number of processes, got {world} as {reported}"
        )
    return Ranks(rank=rank, local=local, world=world, per_node=per_node, launcher=launcher)


def resolve_rendezvous(launch: str, environ: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Return the host and the port at which rank 0 serves the rendezvous.

    torchrun's own store is not used: after a restart it still holds the addresses of dead processes
    (https://github.com/pytorch/pytorch/issues/167288).
    """
    if launch == "slurm":
        nodes = environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"]
        hostnames = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True
        )
        host = hostnames.stdout.split()[0]
        number = int(environ["SLURM_JOB_ID"]) * 16 + int(environ.get("SLURM_STEP_ID", 0)) % 16
    else:
        host, number = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        if launch == "local":
            return host, number
    return host, 20000 + number % 12000  # below the range of ephemeral ports
