"""Build every class that a config may name under an audit hook, and print what each one does.

Run as a module, in a process of its own: an audit hook cannot be removed.
"""

import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import torch
from hydra.utils import get_object

from unet3d.config.constructors import CONFIGURED, TRAINER

WEIGHT = torch.nn.Parameter(torch.zeros(4, 4))
ARGUMENTS: dict[str, Any] = {
    **dict.fromkeys(("in_channels", "in_features", "num_features", "num_channels"), 4),
    **dict.fromkeys(("out_channels", "out_features", "num_classes", "num_cases"), 4),
    **dict.fromkeys(("kernel_size", "output_size", "num_groups", "normalized_shape"), 2),
    **dict.fromkeys(("padding", "upscale_factor", "downscale_factor", "T_0", "T_max"), 2),
    **dict.fromkeys(("base_lr", "max_lr", "gamma", "threshold", "value", "noise", "bias"), 0.5),
    **dict.fromkeys(("size", "img_size", "spacing_mm"), (16, 16, 16)),
    **dict.fromkeys(("save_dir", "folder", "root", "images", "labels", "project"), "out"),
    **dict.fromkeys(("experiment", "monitor"), "name"),
    **{key: ["store_all"] for key in ("encoders", "decoders")},
    **{"spatial_dims": 3, "dim": 1, "unflattened_size": (2, 2), "seed": 0, "step_size": 1},
    **{"channels": (4, 8), "strides": (2,), "params": [WEIGHT], "orientation": "RAS"},
    **{"class_names": ("a", "b"), "milestones": [1], "scheduling": {1: 2}},
    **{"pool": torch.nn.MaxPool3d, "skip_pool": torch.nn.AvgPool3d},
    "dist_matrix": torch.ones(2, 2),
    "optimizer": torch.optim.SGD([WEIGHT], 0.1, momentum=0.9),
}
"""By name; these only where they must be given."""

OWN: dict[str, dict[str, Any]] = {
    "DynUNet": {"kernel_size": [3] * 3, "strides": [1, 2, 2], "upsample_kernel_size": [2, 2]},
    "NaiveUNet3D": {"encoder": [8, 8], "decoder": [8]},
    "BestCheckpoint": {"folder": Path("out")},
    "UNETR": {"hidden_size": 12, "mlp_dim": 8, "num_heads": 2},
    "NACLLoss": {"classes": 3, "dim": 3},
    "OffloadActivations": {"encoders": ["store_last"], "decoders": ["store_all"]},
    "Pairs": {"images": "i/*.nii.gz", "labels": "l/*.nii.gz", "channels": None, "classes": None},
    "OneCycleLR": {"total_steps": 3},
    "Trainer": {"logger": False, "enable_checkpointing": False, "accelerator": "cpu"},
}
"""By class."""

FORBIDDEN = (
    *("socket.", "subprocess.", "os.exec", "os.posix_spawn", "os.fork", "os.system", "os.putenv"),
    *("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"),
    *("os.chmod", "os.chown", "os.utime", "shutil.", "tempfile.", "ctypes.dlopen", "urllib."),
    *("ftplib.", "http.", "pty.", "signal.", "webbrowser.", "winreg.", "sqlite3.", "exec"),
)
"""Beginnings of the names of audit events, besides `open` for writing."""


def main(more: Sequence[str]) -> None:
    """Print a line for each class that acts, or cannot be built; the last line counts all."""
    classes = {
        f"{package}.{name}": get_object(f"{package}.{name}")
        for package, names in {**CONFIGURED, **TRAINER}.items()
        for name in sorted(names)
    } | {name: get_object(name) for name in more}
    import_module("wandb")  # makes temporary folders
    events: list[str] = []
    armed = False

    def record(event: str, arguments: tuple[Any, ...]) -> None:
        if not armed:
            return
        if event == "open":
            flags = arguments[2] if isinstance(arguments[2], int) else 0
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                events.append(f"writes {arguments[0]}")
        elif event.startswith(FORBIDDEN) and event != "exec":
            events.append(f"{event} {arguments}")
        elif event == "import" and arguments[0].partition(".")[0] not in sys.modules:
            events.append(f"imports {arguments[0]}")

    sys.addaudithook(record)
    for imports in ("may import", "has imported"):  # what is imported on first use
        for name, target in classes.items():
            events.clear()
            needed = [
                parameter.name
                for parameter in signature(target).parameters.values()
                if parameter.default is Parameter.empty
                and parameter.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
            ]
            given = {key: ARGUMENTS[key] for key in needed if key in ARGUMENTS}
            armed = True
            try:
                target(**given | OWN.get(name.rpartition(".")[2], {}))
            except Exception as error:
                events.append(f"cannot be built: {type(error).__name__}: {error}")
            armed = False
            acts = [e for e in events if imports == "has imported" or not e.startswith("imports")]
            if acts:
                print(name, *acts[:3], sep=" | ")
    print(len(classes))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1:])
