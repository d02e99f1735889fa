"""`unet3d train`: train a network and report its results and its cost."""

from pathlib import Path

from unet3d.cli.launch import launch_ranks
from unet3d.config.compose import ComposedConfig
from unet3d.config.settings.training import parse_training
from unet3d.machine.distributed_env import read_process_rank
from unet3d.workflows.shared.run_folder import open_run_folder
from unet3d.workflows.training.fit import train_as_rank
from unet3d.workflows.training.preflight import count_local_processes


def main(composed: ComposedConfig, folder: Path) -> int:
    """Train in one process or several."""
    settings = parse_training(composed)
    trainer, composition = settings.trainer, settings.composition
    process = read_process_rank(trainer.launch)
    if process.world_size == 1 and trainer.launch == "local":
        processes = count_local_processes(trainer)
        if processes > 1:
            extra = ["memory.if_too_large=error"] if composition.sweeping else []
            with open_run_folder(
                folder,
                resume=settings.resume,
                composition=composition,
                log=print,
                inputs=settings.list_inputs(),
                hands_over=True,
            ) as own:
                return launch_ranks([*composition.overrides, *extra], own, processes)
    result = train_as_rank(settings, folder, process, log=print)
    return 1 if result.report.get("evaluation", {}).get("errors") else 0
