"""`unet3d COMMAND`, or `python -m unet3d COMMAND`: the list of commands, and what starts them.

Hydra, torch and the rest are imported when it is known what they are for.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from difflib import get_close_matches

from unet3d import __version__
from unet3d.errors import Interrupted
from unet3d.files import write_output
from unet3d.signals import SignalListener

COMMANDS = {
    "download": "download a task of the Medical Segmentation Decathlon",
    "cut": "cut annotated blocks out of a volume that is larger than memory, as cases",
    "check": "find every error in a dataset before training",
    "plan": "choose settings for a dataset and a memory budget, and write them as an experiment "
    "file to edit",
    "train": "train a network",
    "predict": "segment scans with a trained checkpoint",
    "export": "export a checkpoint to ONNX, torch.export, a folder of nnU-Net or a bundle, and "
    "verify it on scans",
    "evaluate": "score predictions against references: Dice, distances, volumes, figures",
    "compare": "compare runs: Dice, memory, step time, and how their configs differ",
    "view": "look at an image and its labels in a browser on this machine",
    "memory": "estimate the memory of a training step, layer by layer, before it runs",
    "suggest": "find the batch, patch, precision and checkpointing that fit a GPU",
    "search": "find hyperparameters: train, prune and compare trials with Optuna",
    "lr": "find a learning rate: train for a few steps with one that rises",
    "doctor": "inspect this machine: GPUs, driver, torch, memory, disk, and what limits a run",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code."""
    args = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with SignalListener().listening() if arguments is None else nullcontext():
            return handle_arguments(args)
    except Interrupted as stop:  # while a module is imported
        print(f"unet3d: interrupted by {stop}", file=sys.stderr)
        return stop.exit_code


def handle_arguments(args: Sequence[str]) -> int:
    """Answer --version, --help or an unknown command, or start a command; return the exit code."""
    command, *rest = args or ["--help"]
    if command == "--version":
        print(__version__)
        return 0
    if command in ("-h", "--help", "help"):
        write_output(format_help(), None)
        return 0
    if command == "-sc":  # Hydra's shell completion, which does not expect a command
        command, rest = "train", list(args)
        if rest[-1].startswith("query="):
            program, *typed = os.environ["COMP_LINE"].split(" ", 2)
            if len(typed) < 2:
                print(*COMMANDS)
                return 0
            command, os.environ["COMP_LINE"] = typed[0], f"{program} {typed[1]}"
    if command not in COMMANDS:
        near = get_close_matches(command, [*COMMANDS, "--help", "--version"], n=1)
        hint = f"; did you mean {near[0]}?" if near else "."
        print(
            f"unet3d: unknown command {command!r}{hint} Commands: {', '.join(COMMANDS)}.",
            file=sys.stderr,
        )
        return 2
    from unet3d import app  # imports Hydra

    if {"-h", "--help"} & set(rest):
        return app.print_help(command, COMMANDS[command], rest)
    return app.run_app(command, rest)


def format_help() -> str:
    """Return what `unet3d --help` prints."""
    commands = "\n".join(f"  {name:10} {about}" for name, about in COMMANDS.items())
    return (
        "unet3d: train 3D U-Nets within the GPU memory you have\n\n"
        f"usage: unet3d COMMAND [key=value ...]\n\n{commands}\n\n"
        "unet3d COMMAND --help lists its options and keys; unet3d --version prints the version\n"
        "exit codes: 0 success, 1 some cases failed or errors were found, 2 usage error,\n"
        "3 out of memory, 4 error at run time, 130 or 143 interrupted"
    )


if __name__ == "__main__":
    sys.exit(main())
