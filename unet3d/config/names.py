"""Other names of options and keys: earlier ones, which keep working, and Lightning's.

Earlier names work for one release, on the command line, in config files and in saved configs.
"""

import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

from hydra.core.config_store import ConfigStore

HABITS = {
    "strategy": "trainer=ddp uses all GPUs of this machine, trainer=slurm those of a job",
    "devices": "trainer.devices= says how many, and trainer.accelerator=cuda:1 which one",
    "gpus": "trainer.devices= says how many, and trainer.accelerator=cuda:1 which one",
    "fast_dev_run": "trainer.max_steps=2 runs two steps, and validates",
    "ckpt_path": "resume= continues a run, and init_from= starts from weights",
}
"""Keys of Lightning's Trainer, and what to write instead."""

WIDTHS = [
    f"model.{name}"
    for name in ("init_filters", "feature_size", "filters", "channels", "features", "encoder")
]
"""What networks without model.width call their channels."""

EARLIER_OPTIONS = {
    "experiment": {"forum_small": "example_small", "forum_large": "example_large"},
    "model": {"naive_small": "plain_small", "naive_large": "plain_large"},
}
"""The earlier names of options, by group."""

EARLIER_KEYS = {"batch": "batch_dice", "weight": "class_weights"}
"""The earlier names of keys of `loss`, for the classes of EARLIER_LOSSES: others may have them."""

EARLIER_LOSSES = ("unet3d.loss.", "torch.nn.CrossEntropyLoss")

PLAIN_UNET = "unet3d.model.plain_unet.PlainUNet3D"

EARLIER_VALUES = {
    ("model", "_target_", "unet3d.model.naive_unet.NaiveUNet3D"): PLAIN_UNET,
    ("optimizer", "fused", None): True,
}
"""Values of keys that are written differently now, without a line about it."""

for _group, _options in EARLIER_OPTIONS.items():
    for _earlier, _option in _options.items():
        ConfigStore.instance().store(
            group=_group,
            name=_earlier,
            node={"defaults": [_option, "_self_"]},
            package="_global_" if _group == "experiment" else None,
        )


@cache
def announce(earlier: str, name: str) -> None:
    """Print the present name of an option or a key, once in a process."""
    print(f"{earlier} is now called {name}", file=sys.stderr)


def rename_option(group: str, option: str) -> str:
    """Return the present name of an option; announce it."""
    name = EARLIER_OPTIONS.get(group, {}).get(option, option)
    if name != option:
        announce(f"{group}={option}", f"{group}={name}")
    return name


def rename_keys(config: Any, *, announces: bool) -> None:
    """Give the keys and values of a config, plain or composed, their present names in place."""
    loss = config.get("loss") or {}
    for earlier, key in EARLIER_KEYS.items():
        if earlier in loss and str(loss.get("_target_")).startswith(EARLIER_LOSSES):
            loss[key] = loss.pop(earlier)
            if announces:
                announce(f"loss.{earlier}", f"loss.{key}")
    for (group, key, earlier), value in EARLIER_VALUES.items():
        node = config.get(group) or {}
        if key in node and node[key] == earlier:
            node[key] = value


def rename_saved_keys(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved config with its keys and values under their present names."""
    config = {k: dict(v) if isinstance(v, Mapping) else v for k, v in saved.items()}
    rename_keys(config, announces=False)
    _switch_off_ignored(config.get("model") or {})
    return config


def _switch_off_ignored(model: dict[str, Any]) -> None:
    """Switch off options that did nothing in the network, and are refused now."""
    if "stochastic_depth" in model and model.get("residual_blocks", True) is None:
        model["stochastic_depth"] = 0.0
    channels = model.get("channels")
    levels = len(channels) if isinstance(channels, list | tuple) else model.get("depth")
    if model.get("_target_") == "unet3d.model.unet.UNet3D" and levels in (2, 3):
        model["deep_supervision"] = False
