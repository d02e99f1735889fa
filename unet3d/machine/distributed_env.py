"""The rank of this process, from the environment that its launcher has set."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace

from unet3d.errors import UsageError

LAUNCHES = ("local", "torchrun", "slurm")
"""Values of trainer.launch: unet3d starts the processes itself on this machine; torchrun; srun."""

NUMBERS = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "JSM_NAMESPACE_RANK"),
)
"""Environment variables of launchers that we or Lightning read as numbers."""

LAUNCHER = "UNET3D_LAUNCHER"
"""Environment variable with the process id of the unet3d process that started and watches this."""


@dataclass(frozen=True, kw_only=True)
class ProcessRank:
    """The global and local rank of a process, and the number of processes."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    # The process id of the unet3d process that started and watches this one.
    launcher_pid: int | None = None
    has_own_gpu: bool = False  # whether the launcher lets this process see one GPU only

    @property
    def gpu_index(self) -> int:
        """Return the GPU of this process among those that it sees."""
        return 0 if self.has_own_gpu else self.local_rank

    @property
    def visible_devices(self) -> int:
        """Return the number of processes that share the devices that this one sees."""
        return 1 if self.has_own_gpu else self.local_world_size

    @property
    def num_nodes(self) -> int:
        """Return the number of machines, or of processes that each see one GPU."""
        return self.world_size // self.visible_devices

    def assign_gpu(self, num_gpus: int) -> "ProcessRank":
        """Return this process with its GPU among the visible ones.

        SLURM's --gpus-per-task shows each process one GPU, which then has the index 0.
        """
        if num_gpus == 1 and self.local_world_size > 1:
            return replace(self, has_own_gpu=True)
        if num_gpus < self.local_world_size:
            raise UsageError(
                f"{self.local_world_size} processes on this machine, but rank {self.rank} sees "
                f"{num_gpus} GPUs: start one process per GPU"
            )
        return self


def check_rank_variables(environ: Mapping[str, str] = os.environ) -> None:
    """Raise a UsageError if a variable of a launcher is not a number: imports would fail."""
    for name in NUMBERS:
        value = environ.get(name)
        if value is not None and not value.strip().isdecimal():
            raise UsageError(
                f"the environment variable {name} must be a number, got {value!r}: unset it, or "
                "let torchrun or srun set it"
            )


def detect_launcher(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the launcher that started this process as one of several; None if there is none."""
    if "TORCHELASTIC_RUN_ID" in environ and int(environ.get("WORLD_SIZE", 1)) > 1:
        return "torchrun"
    if "SLURM_PROCID" in environ and int(environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        return "slurm"
    return None


def read_process_rank(launch: str, environ: Mapping[str, str] = os.environ) -> ProcessRank:
    """Read this process's rank from the environment; without a launcher it is the only process."""
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
            raise UsageError(
                "trainer=slurm needs processes started by srun: in a job, run srun unet3d train "
                "trainer=slurm hydra.run.dir=..., with one task per GPU"
            )
        tasks = environ["SLURM_STEP_TASKS_PER_NODE"]  # 2, 4(x3) or, uneven, 2(x3),1
        return _build_process_rank(
            rank=int(environ["SLURM_PROCID"]),
            local_rank=int(environ["SLURM_LOCALID"]),
            world_size=int(environ["SLURM_STEP_NUM_TASKS"]),
            local_world_size=int(tasks.split("(")[0]) if "," not in tasks else 0,
            reported=tasks,
        )
    if "RANK" in environ and "LOCAL_RANK" in environ:
        return _build_process_rank(
            rank=int(environ["RANK"]),
            local_rank=int(environ["LOCAL_RANK"]),
            world_size=int(environ["WORLD_SIZE"]),
            local_world_size=int(environ["LOCAL_WORLD_SIZE"]),
            reported=environ["LOCAL_WORLD_SIZE"],
            launcher_pid=int(environ[LAUNCHER]) if LAUNCHER in environ else None,
        )
    if launch == "torchrun":
        raise UsageError(
            "trainer=torchrun needs processes started by torchrun: run torchrun --nproc-per-node=2 "
            "--no-python unet3d train trainer=torchrun hydra.run.dir=..., with one process per GPU"
        )
    return ProcessRank()


def _build_process_rank(
    *,
    rank: int,
    local_rank: int,
    world_size: int,
    local_world_size: int,
    reported: str,
    launcher_pid: int | None = None,
) -> ProcessRank:
    if local_world_size == 0 or world_size % local_world_size:
        raise UsageError(
            "every machine must run the same number of processes, but "
            f"{world_size} were started as {reported} per machine: set --ntasks-per-node"
        )
    return ProcessRank(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        launcher_pid=launcher_pid,
    )


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
