"""Which of a run's processes this one is, told by whatever started it."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from unet3d.errors import UsageError

LAUNCHES = ("here", "torchrun", "slurm")
"""Who starts the processes: unet3d itself, on this machine; torchrun; srun."""

LAUNCHER = "UNET3D_LAUNCHER"
"""Where a process that unet3d starts here finds the id of the one that watches it."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """A process's number in the run and on its machine, and how many there are."""

    rank: int = 0
    local: int = 0
    world: int = 1
    per_node: int = 1
    launcher: int | None = None  # id of the process that started it and watches it, if unet3d's

    @property
    def nodes(self) -> int:
        """How many machines."""
        return self.world // self.per_node


def detect_launcher(environ: Mapping[str, str] = os.environ) -> str | None:
    """Who started this process as one of several, if anybody did."""
    if "TORCHELASTIC_RUN_ID" in environ and int(environ.get("WORLD_SIZE", 1)) > 1:
        return "torchrun"
    if "SLURM_PROCID" in environ and int(environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        return "slurm"
    return None


def read_ranks(launch: str, environ: Mapping[str, str] = os.environ) -> Ranks:
    """From the environment; of one process where nobody says otherwise."""
    if launch not in LAUNCHES:
        raise UsageError(f"trainer.launch must be one of {', '.join(LAUNCHES)}, got {launch!r}")
    starter = detect_launcher(environ)
    if starter not in (None, launch):
        raise UsageError(
            f"{starter} started {environ.get('WORLD_SIZE') or environ['SLURM_STEP_NUM_TASKS']} "
            f"processes, which would each train alone: add trainer={starter}"
        )
    if launch == "slurm":
        if "SLURM_STEP_NUM_TASKS" not in environ:  # a job script has all the others
            raise UsageError(
                "trainer=slurm is for processes that srun starts: see scripts/slurm.sh"
            )
        tasks = environ["SLURM_STEP_TASKS_PER_NODE"]  # 2, 4(x3) or, uneven, 2(x3),1
        return _even(
            rank=int(environ["SLURM_PROCID"]),
            local=int(environ["SLURM_LOCALID"]),
            world=int(environ["SLURM_STEP_NUM_TASKS"]),
            per_node=int(tasks.split("(")[0]) if "," not in tasks else 0,
            said=tasks,
        )
    if "RANK" in environ and "LOCAL_RANK" in environ:
        return _even(
            rank=int(environ["RANK"]),
            local=int(environ["LOCAL_RANK"]),
            world=int(environ["WORLD_SIZE"]),
            per_node=int(environ["LOCAL_WORLD_SIZE"]),
            said=environ["LOCAL_WORLD_SIZE"],
            launcher=int(environ[LAUNCHER]) if LAUNCHER in environ else None,
        )
    if launch == "torchrun":
        raise UsageError("trainer=torchrun is for processes that torchrun starts: see the README")
    return Ranks()


def _even(
    *, rank: int, local: int, world: int, per_node: int, said: str, launcher: int | None = None
) -> Ranks:
    if per_node == 0 or world % per_node:
        raise UsageError(
            f"every machine needs as many processes as the others, got {world} as {said}"
        )
    return Ranks(rank=rank, local=local, world=world, per_node=per_node, launcher=launcher)


def resolve_rendezvous(launch: str, environ: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Where the processes of a run meet: a machine and a port; the first rank opens it.

    torchrun's own port keeps what the processes before a restart said there: addresses of the dead
    (https://github.com/pytorch/pytorch/issues/167288).
    """
    if launch == "slurm":
        nodes = environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"]
        listed = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True
        )
        host = listed.stdout.split()[0]
        number = int(environ["SLURM_JOB_ID"]) * 16 + int(environ.get("SLURM_STEP_ID", 0)) % 16
    else:
        host, number = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        if launch == "local":
            return host, number
    return host, 20000 + number % 12000  # below those that systems give to whoever asks for any
