"""`unet3d VERB [overrides]`: find the verb. Nothing heavy is imported before a verb is known."""

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

from unet3d import __version__

VERBS = {
    "get_data": "fetch a task of the Medical Segmentation Decathlon",
    "check": "every fault of a data set, before it is trained on",
    "plan": "what to train on a data set within a budget, as an experiment to edit",
    "train": "train a network; `unet3d train --help` lists every option",
    "predict": "segment scans with a checkpoint: checkpoint=... input=... output=...",
    "export": "a checkpoint's network as ONNX or torch.export, compared with it on scans",
    "evaluate": "how well predictions agree with references: Dice, distances, volumes, pictures",
    "memory": "what a training step costs, layer by layer, before it runs",
    "fit": "what fits a card: batch, patch, precision, checkpointing",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb and return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["--version"]:
        print(__version__)
        return 0
    if not words or words[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    verb, *rest = words
    if verb not in VERBS:
        near = get_close_matches(verb, VERBS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        print(f"unet3d: no verb {verb!r}{hint} The verbs are {', '.join(VERBS)}.", file=sys.stderr)
        return 2
    return import_module(f"unet3d.commands.{verb}").main(rest)


def help_text() -> str:
    """What `unet3d --help` says."""
    verbs = "\n".join(f"  {verb:10} {what}" for verb, what in VERBS.items())
    return (
        "unet3d: multiclass 3D U-Nets on volumes, for people whose GPU memory runs out\n\n"
        f"usage: unet3d VERB [key=value ...]\n\n{verbs}\n\n"
        "exit codes: 0 done, 1 some cases failed or faults found, 2 misuse, 3 out of memory,\n"
        "4 a fault at run time, 130 or 143 stopped"
    )


if __name__ == "__main__":
    sys.exit(main())
