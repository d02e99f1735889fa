"""Build and call every class that a config may name under an audit hook; print what each does.

Run as a module, in a process of its own: an audit hook cannot be removed.
"""

import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import torch
from hydra.utils import get_object

from unet3d import UNet3D
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
    "LocalResponseNorm": {"size": 2},
    "Upsample": {"scale_factor": 2},
    "Trainer": {"logger": False, "enable_checkpointing": False, "accelerator": "cpu"},
}
"""By class."""

VOLUME, LABELS = torch.rand(2, 4, 16, 16, 16), torch.zeros(2, 1, 16, 16, 16, dtype=torch.long)
BOXES = torch.tensor([[0.0, 0, 0, 1, 1, 1]])
INPUTS: tuple[tuple[torch.Tensor, ...], ...] = (
    (VOLUME,),
    (VOLUME, LABELS[:, 0]),
    (VOLUME, LABELS),
    (VOLUME[:, :3], LABELS[:, 0]),
    (VOLUME, VOLUME),
    *((VOLUME[:, :n],) for n in (1, 2, 3)),
    (VOLUME[:, :1], VOLUME[:, :1]),
    *((VOLUME[(slice(None), slice(None), *[0] * n)],) for n in (1, 2)),
    (VOLUME[..., 0], LABELS[:, 0, ..., 0]),
    *((torch.rand(2, n),) for n in (2, 4)),
    *((torch.rand(2, 4),) * n for n in (2, 3)),
    (torch.rand(2, 4), torch.zeros(2, 4, dtype=torch.long)),
    (torch.rand(2, 4), torch.zeros(2, dtype=torch.long)),
    (torch.rand(2, 4), torch.rand(2, 4), torch.ones(2)),
    (BOXES, BOXES),
    *((torch.rand(1, n, 64, 64, 64),) for n in (1, 2, 4)),
)
"""What modules are called with, until one of these fits."""

WITHOUT_FORWARD = ("ModuleList",)

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
    network = UNet3D(in_channels=1, num_classes=2)
    network(VOLUME[:, :1])  # compiles and loads our kernels
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
                built = target(**given | OWN.get(name.rpartition(".")[2], {}))
                if imports == "has imported" and isinstance(built, torch.nn.Module):
                    call(built)
                    events[:] = [e for e in events if not e.startswith("imports")]
            except Exception as error:
                events.append(f"cannot be built: {type(error).__name__}: {error}")
            armed = False
            acts = [e for e in events if imports == "has imported" or not e.startswith("imports")]
            if acts:
                print(name, *acts[:3], sep=" | ")
    print(len(classes))


def call(module: torch.nn.Module) -> None:
    """Call a module with the first input that it takes."""
    if type(module).__name__ in WITHOUT_FORWARD:
        return
    with torch.no_grad():
        for is_training in (True, False):
            module.train(is_training)
            for inputs in INPUTS:
                with suppress(TypeError, ValueError, RuntimeError, IndexError, AssertionError):
                    module(*inputs)
                    return
    raise ValueError("takes none of the inputs")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1:])
