"""The parts of the GPU report: where their rows are measured, and their time limits."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """Rows that are measured together, by the function of `module` with the part's name."""

    module: str  # of scripts.gpu
    about: str
    limit_seconds: int = 240
    min_seconds: int = 20  # no row starts with less time left


PARTS = {
    "environment": Part("kernels", "device and versions", 90),
    "tests": Part("runs", "tests marked gpu, and the tests of memory and checkpointing", 300, 100),
    "correct": Part(
        "kernels", "fused blocks against plain modules, pooling kernels against references"
    ),
    "pool": Part("kernels", "poolings against nn.MaxPool3d", 240, 30),
    "forum": Part("steps", "experiment=forum_small and forum_large: peak, estimate and seconds"),
    "predict": Part("steps", "estimated against measured peaks of 64 configurations", 400),
    "workspaces": Part("workspaces", "memory that cuDNN and cuBLAS take"),
    "peers": Part("steps", "networks of other projects with the same channels"),
    "tuned": Part("steps", "plain modules compiled, channels-last, with cudnn.benchmark", 480, 60),
    "residual": Part("steps", "residual encoders of nnU-Net and ours"),
    "batch": Part("steps", "largest batch of the forum networks that runs in 7000 MiB", 300),
    "tile_size": Part("steps", "time and peak by the size of a tile", 150),
    "profile": Part("steps", "the slowest kernels of a step", 150),
    "lightning": Part("runs", "peak and time of steps in runs with Lightning", 300, 60),
    "nccl": Part("runs", "two processes with NCCL, if there are two GPUs", 300, 120),
    "hippocampus": Part(
        "runs", "Dice over time, five minutes (needs data/Task04_Hippocampus)", 520, 400
    ),
    "pools": Part(
        "runs", "three poolings, 1500 steps each (needs data/Task04_Hippocampus)", 540, 150
    ),
}
