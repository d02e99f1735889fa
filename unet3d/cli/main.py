"""`unet3d VERB [overrides]`: find the verb. What is heavy waits until its config is known."""

import atexit
import gc
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from unet3d import __version__

COMMANDS = {
    "download": "fetch a task of the Medical Segmentation Decathlon",
    "check": "every fault of a data set, before it is trained on",
    "plan": "what to train on a data set within a budget, as an experiment to edit",
    "train": "train a network",
    "predict": "segment scans with a checkpoint: checkpoint=... input=... output=...",
    "export": "a checkpoint's network as ONNX or torch.export, compared with it on scans",
    "evaluate": "how well predictions agree with references: Dice, distances, volumes, pictures",
    "compare": "runs side by side: Dice, memory, seconds, and what differs in their configs",
    "memory": "what a training step costs, layer by layer, before it runs",
    "suggest": "what fits a card: batch, patch, precision, checkpointing",
    "doctor": "this machine: GPUs, driver, torch, memory, disk, and what of it limits a run",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb and return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["--version"]:
        print(__version__)
        return 0
    if not words or words[0] in ("-h", "--help", "help"):
        print(format_help())
        return 0
    verb, *rest = words
    if verb not in COMMANDS:
        near = get_close_matches(verb, COMMANDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        print(
            f"unet3d: no verb {verb!r}{hint} The verbs are {', '.join(COMMANDS)}.", file=sys.stderr
        )
        return 2
    if {"-h", "--help"} & set(rest):
        from unet3d.cli.help import print_help

        return print_help(verb, COMMANDS[verb], rest)
    from unet3d.cli.app import run_app  # it brings Hydra
    from unet3d.cli.missing_keys import check_missing_keys

    def begin(request: Any, folder: Path) -> int:
        check_missing_keys(request)  # before the command's module brings torch
        return import_command(verb).main(request, folder)

    def swept(folder: Path) -> None:
        import_command("compare").swept(folder)

    return run_app(verb, begin, bare_words_as_runs(rest) if verb == "compare" else rest, swept)


def import_command(verb: str) -> ModuleType:
    """Imports make no garbage: it is not looked for among what they make, neither now nor later.

    A run starts a second and a half sooner, and data workers share these pages for longer.
    """
    name = f"unet3d.cli.{verb}"
    if name not in sys.modules:
        gc.disable()
        try:
            import_module(name)
        finally:
            gc.enable()
        gc.freeze()
        atexit.register(gc.unfreeze)  # or Triton's functions are told to be leaked
    return sys.modules[name]


def bare_words_as_runs(words: Sequence[str]) -> list[str]:
    """Words without a key are runs.

    >>> bare_words_as_runs(["a", "b c", "format=json"])
    ['format=json', "runs=['a','b c']"]
    """
    named = [w for w in words if w[:1] != "-" and ("=" not in w or Path(w).exists())]
    if not named:
        return list(words)
    quoted = ["'" + name.replace("'", "\\'") + "'" for name in named]
    return [*(w for w in words if w not in named), f"runs=[{','.join(quoted)}]"]


def format_help() -> str:
    """What `unet3d --help` says."""
    verbs = "\n".join(f"  {verb:10} {what}" for verb, what in COMMANDS.items())
    return (
        "unet3d: multiclass 3D U-Nets on volumes, for people whose GPU memory runs out\n\n"
        f"usage: unet3d VERB [key=value ...]\n\n{verbs}\n\n"
        "unet3d VERB --help lists every option and key; unet3d --version\n"
        "exit codes: 0 done, 1 some cases failed or faults found, 2 misuse, 3 out of memory,\n"
        "4 a fault at run time, 130 or 143 stopped"
    )


if __name__ == "__main__":
    sys.exit(main())
