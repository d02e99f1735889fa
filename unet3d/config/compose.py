"""A composed config, and how to get one; imports nothing that takes long."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, open_dict


@dataclass(frozen=True)
class ComposedConfig:
    """A composed config and how the user arrived at it."""

    config: DictConfig
    choices: Mapping[str, str]  # the chosen option of each group
    overrides: Sequence[str] = ()  # as typed
    verb: str = "train"  # whose config it is
    sweeping: bool = False  # one of several

    def is_overridden(self, key: str) -> bool:
        """Whether the command line sets this key or anything below it."""
        keys = [o.lstrip("+~").split("=")[0].split("@")[0] for o in self.overrides]
        return any(k == key or k.startswith(key + ".") for k in keys)


def get_config_dir() -> Path:
    """Where the configs lie: in the package if it is installed, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    return next(p for p in (package / "conf", package.parent / "conf") if p.is_dir())


def list_config_groups() -> list[str]:
    """The folders of the configs: what a user chooses options of."""
    return [p.name for p in get_config_dir().iterdir() if p.is_dir()]


def compose_config(words: Sequence[str], verb: str) -> ComposedConfig:
    """A verb's config with overrides, within a running Hydra or without one."""
    if GlobalHydra.instance().is_initialized():
        return compose_initialized(words, verb)
    with initialize_config_dir(str(get_config_dir()), version_base="1.3"):
        return compose_initialized(words, verb)


def compose_initialized(words: Sequence[str], verb: str) -> ComposedConfig:
    """Compose within Hydra as it was initialized."""
    cfg = compose(verb, overrides=list(words), return_hydra_config=True)
    choices = dict(cfg.hydra.runtime.choices)
    with open_dict(cfg):
        del cfg["hydra"]
    return ComposedConfig(cfg, choices, words, verb)
