"""Composed configs with other values, without composing each of them: that takes most of a test."""

from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

from omegaconf import OmegaConf

from unet3d.config.compose import ComposedConfig, compose_config

REQUIRED = {
    "predict": ("checkpoint=a.ckpt", "input=scans", "output=labels"),
    "evaluate": ("predictions=p", "references=r", "output=scores"),
    "export": ("checkpoint=a.ckpt", "output=a.onnx"),
    "plan": ("budget_gib=8",),
    "suggest": ("budget_gib=8",),
}
"""Overrides for the keys that a command cannot do without."""


@cache
def compose_required(command: str) -> ComposedConfig:
    """Compose a command's config with nothing but what must be given; do not change the result."""
    return compose_config(REQUIRED.get(command, ()), command)


SHRUNK = {
    "unet_small": ["model.width=4"],
    "unet_large": ["model.width=4"],
    "unet_cicek2016": ["model.width=4"],
    "unet_nnunet": ["model.width=4", "model.depth=4"],
    "unet_resenc": ["model.width=4", "model.depth=4", "model.residual_blocks=[1,2]"],
    "plain_small": ["model.encoder=[4,8,8]", "model.decoder=[8,4]"],
    "plain_large": ["model.encoder=[4,8,8]", "model.decoder=[8,4]"],
    "dynunet": ["model.filters=[4,8,8]"],
    "segresnet": ["model.norm=[group,{num_groups:4}]", "model.init_filters=4"],
    "segresnet_ds": ["model.init_filters=4", "model.blocks_down=[1,1,2]", "model.dsdepth=2"],
    "attention_unet": ["model.channels=[4,8,8]"],
    "unetr": ["model.feature_size=4", "model.hidden_size=24", "model.mlp_dim=24"],
    "swin_unetr": [
        *("model.feature_size=12", "model.depths=[2,1,1,1]", "model.window_size=4"),
        *("model.norm_name=batch", "data.patch_size=[32,32,32]"),
    ],
    "basic_unet": ["model.features=[4,4,8,8,8,4]", "data.patch_size=[32,32,32]"],
    **{
        f"mednext{variant}": ["model.init_filters=4", "data.patch_size=[32,32,32]"]
        for variant in ("", "_s", "_b", "_m", "_l")
    },
}
"""Overrides by network that keep its shape and make it narrow enough for a test."""


def with_values(command: str, values: dict[str, Any]) -> ComposedConfig:
    """Return a command's config with other values, as a config file may hold them."""
    composed = compose_required(command)
    config = deepcopy(composed.config)
    for key, value in values.items():
        OmegaConf.update(config, key, value, merge=False, force_add=True)
    return replace(composed, config=config)
