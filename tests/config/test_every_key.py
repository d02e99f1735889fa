"""Every key of every command refuses values that no option takes, before anything is done.

The keys are those of the files in conf/, so that a new one cannot be forgotten.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from tests.config.helpers.configs import REQUIRED
from unet3d.cli.main import COMMANDS
from unet3d.config.argument_types import match_argument_types
from unet3d.config.compose import compose_config, get_config_dir, list_config_groups
from unet3d.config.constructors import CONFIGURED
from unet3d.config.instantiate import Factory
from unet3d.config.validate import check_kind, iter_keys, iter_leaves
from unet3d.config.values import check_size, read
from unet3d.errors import UsageError

BAD: dict[str, Any] = {
    **{"{}": {}, "[]": [], "[{}]": [{}]},
    **{"true": True, "2^63": 2**63, "NUL": "a\0b"},
}

TAKES = {
    "{}": {"lr_factors", "loss.regions", "loss.weight"},
    "[]": {
        *("freeze", "allow_targets", "labels", "tta", "ignore_label", "data.ignore_label"),
        "keep_largest_component",
    },
    "[{}]": {
        *("loss.weight", "optimizer.lr", "optimizer.betas", "optimizer.weight_decay"),
        *("model.norm", "model.norm_name", "model.dropout", "model.upsample_mode"),
        *("model.blocks_down", "model.blocks_up", "loss.w_type"),
    },
    "true": {
        *("trainer.cuda_graph", "trainer.enable_progress_bar", "tta"),
        *("optimizer.fused", "loss.weight"),
    },
}
"""Keys that take one of these values, or whose classes judge them when they are built."""

UNTYPED = {"pool.skip_pool"}
"""Arguments that are classes."""

SETTINGS = {
    **{"train": "training.parse_training", "evaluate": "evaluation.parse_evaluation"},
    **{"plan": "planning.parse_planning", "predict": "inference.parse_inference"},
    "suggest": "memory.parse_suggest",
}
"""What parses the settings of a command, where it does not have its name."""

Judge = Callable[[str, Any], None]


def list_accepted(keys: dict[str, Any], judge: Judge) -> Iterator[str]:
    """Yield keys with values that are accepted, or refused without naming the key."""
    for key, default in keys.items():
        for name, value in BAD.items():
            is_kind = type(value) is type(default) and isinstance(value, bool | dict)
            if is_kind or key in TAKES.get(name, ()):
                continue
            try:
                node = OmegaConf.create({"value": value}).value
                check_kind(key, node, OmegaConf.create({"value": default}).value)
                for leaf in iter_leaves(node):
                    check_size(key, leaf)
                judge(key, value)
            except UsageError as error:
                if key.rpartition(".")[2] not in str(error) or "\n" in str(error):
                    yield f"{key}={name}: {error}"
            else:
                yield f"{key}={name}"


@pytest.fixture(scope="module")
def train_keys() -> set[str]:
    return set(iter_keys(compose_config([], "train").config))


@pytest.mark.parametrize("command", COMMANDS)
def test_no_key_of_a_command_takes_what_no_option_takes(command, train_keys):
    required = ("image=a.nii.gz",) if command == "view" else REQUIRED.get(command, ())
    composed = compose_config(required, command)
    module, _, name = SETTINGS.get(command, f"{command}.parse_{command}").partition(".")
    parse = getattr(import_module(f"unet3d.config.settings.{module}"), name)

    def judge(key: str, value: Any) -> None:
        config = deepcopy(composed.config)
        OmegaConf.update(config, key, value, merge=False, force_add=True)
        settings = parse(replace(composed, config=config))
        if key.startswith("trainer."):
            factory = settings.trainer.factory
            match_argument_types(factory.target, {key.partition(".")[2]: value}, "trainer")

    owners = [key.removesuffix("_target_") for key in train_keys if key.endswith("._target_")]
    ours = [key for key in iter_keys(composed.config) if not key.startswith("space.")]
    if command != "train":
        ours = [key for key in ours if key not in train_keys]
    assert ours
    # The next test judges arguments of classes, but for the trainer, which has keys of its own.
    arguments = tuple(owner for owner in owners if owner != "trainer.")
    keys = [key for key in ours if not key.startswith(arguments) and key != "trainer._target_"]
    defaults = {key: read(composed.config, key) for key in keys}
    found = list(list_accepted(defaults, judge))
    assert not found, found


def iter_nodes(config: Any, key: str) -> Iterator[tuple[str, DictConfig]]:
    """Yield the nodes of a file that have a `_target_`, with their keys."""
    if isinstance(config, DictConfig):
        if "_target_" in config:
            yield key, config
        for name in config:
            yield from iter_nodes(config._get_node(name), f"{key}.{name}")


@pytest.mark.parametrize("group", sorted({*list_config_groups()} - {"experiment", "trainer"}))
def test_no_argument_of_a_class_takes_what_no_option_takes(group):
    found: list[str] = []
    for file in sorted((get_config_dir() / group).glob("*.yaml")):
        for owner, node in iter_nodes(OmegaConf.load(file), group):
            if node._get_node("_target_") == "auto":
                continue
            plain: Any = OmegaConf.to_container(node, resolve=False)
            factory = Factory(owner, plain, allowed=CONFIGURED)

            def judge(key: str, value: Any, factory: Factory = factory) -> None:
                name = key.rpartition(".")[2]
                target = factory.bind(**{name: value}).target  # judges another _target_
                if value == []:
                    raise UsageError(name)  # the class judges how long a list is
                match_argument_types(target, {name: value}, factory.key)

            defaults = {
                f"{owner}.{name}": None if str(value).startswith("${") else value
                for name, value in plain.items()
            }
            keys = {key: value for key, value in defaults.items() if key not in UNTYPED}
            found += list_accepted(keys, judge)
    assert not found, found
