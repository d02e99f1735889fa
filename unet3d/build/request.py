"""A composed config, and how to get one; imports nothing that takes long."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, open_dict


@dataclass(frozen=True)
class Request:
    """A composed config and how the user arrived at it."""

    config: DictConfig
    choices: Mapping[str, str]  # the chosen option of each group
    overrides: Sequence[str] = ()  # as typed
    verb: str = "train"  # whose config it is
    sweeping: bool = False  # one of several

    def sets(self, key: str) -> bool:
        """Whether the command line sets this key or anything below it."""
        keys = [o.lstrip("+~").split("=")[0].split("@")[0] for o in self.overrides]
        return any(k == key or k.startswith(key + ".") for k in keys)


def conf_folder() -> Path:
    """Where the configs lie: in the package if it is installed, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    return next(p for p in (package / "conf", package.parent / "conf") if p.is_dir())


def groups() -> list[str]:
    """The folders of the configs: what a user chooses options of."""
    return [p.name for p in conf_folder().iterdir() if p.is_dir()]


def composed(words: Sequence[str], verb: str) -> Request:
    """A verb's config with overrides, within a running Hydra or without one."""
    if GlobalHydra.instance().is_initialized():
        return request_of(words, verb)
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        return request_of(words, verb)


def request_of(words: Sequence[str], verb: str) -> Request:
    """Compose within Hydra as it was initialized."""
    cfg = compose(verb, overrides=list(words), return_hydra_config=True)
    choices = dict(cfg.hydra.runtime.choices)
    with open_dict(cfg):
        del cfg["hydra"]
    return Request(cfg, choices, words, verb)
