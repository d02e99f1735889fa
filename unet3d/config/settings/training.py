"""Settings of a training run."""

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from omegaconf import MISSING, DictConfig, OmegaConf

from unet3d.config.compose import (
    ComposedConfig,
    Composition,
    compose_config,
    get_config_dir,
    to_plain,
)
from unet3d.config.instantiate import Factory, read_factory
from unet3d.config.settings.data import DataSettings, parse_data
from unet3d.config.settings.network import NetworkSettings, parse_network
from unet3d.config.values import (
    DEVICE_KIND,
    DURATION,
    PRECISION,
    Kind,
    integer,
    mapping_of,
    number,
    read,
    read_settings,
    word_or,
)
from unet3d.errors import UsageError

DEFAULT_MAX_EPOCHS = 20
"""The limit of a run whose config sets none of trainer.max_steps, max_epochs and max_time."""

TRAINER_KEYS = ("timeout_seconds", "launch", "cuda_graph")
"""Keys of the group `trainer` that Lightning's Trainer does not have."""

INPUT_KEYS = ("init_from", "data.root", "data.cache", "data.splits")
"""Keys of the files and folders that a run reads."""

RESERVED_KEYS = {
    *("strategy", "num_nodes", "plugins", "logger", "callbacks", "default_root_dir"),
    *("enable_checkpointing", "enable_model_summary", "use_distributed_sampler", "precision"),
    "overfit_batches",
}
"""Arguments of Lightning's Trainer that we set, and one that would replace our data loaders."""


FOLD = Kind(  # the dataset says how many there are
    "an int >= 0 or none",
    lambda value: value in (None, "none") or integer(">= 0").accepts(value),
    lambda value: None if value == "none" else value,
)
FACTORS = mapping_of(
    number("above 0"), "parts of the network with a factor above 0, as in {encoder:0.1}"
)


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """Limits, devices and processes of a run."""

    factory: Factory  # Lightning's Trainer with the arguments that have no field here
    accelerator: Annotated[str, word_or("gpu", DEVICE_KIND, "cuda")]  # gpu is Lightning's name
    devices: Annotated[int | Literal["auto"], integer(">= 1")]  # processes on this machine
    launch: Literal["local", "torchrun", "slurm"]  # who starts the processes
    timeout_seconds: Annotated[float, number("above 0")]
    sync_batchnorm: bool
    max_steps: Annotated[int | None, integer(">= 1")]
    max_epochs: Annotated[int | None, integer(">= 1")]
    max_seconds: Annotated[float | None, DURATION, "max_time"]
    check_val_every_n_epoch: Annotated[int | None, integer(">= 1")]
    accumulate_grad_batches: Annotated[int, integer(">= 1")]
    gradient_clip_val: Annotated[float | None, number("above 0")]
    cuda_graph: bool | Literal["auto"]
    show_progress_bar: Annotated[bool | Literal["auto"], "enable_progress_bar"]

    @property
    def several_processes(self) -> bool:
        """Return whether a run has several processes; with one per GPU, assume several GPUs."""
        return self.launch != "local" or self.devices != 1


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSettings:
    """The sliding window over whole volumes."""

    overlap: Annotated[float, number(">= 0", "below 1")]
    batch_size: Annotated[int, integer(">= 1")]  # windows at a time


@dataclass(frozen=True, kw_only=True)
class FinalEvaluationSettings:
    """The evaluation of the best checkpoint when training ends."""

    enabled: bool
    tolerance_mm: Annotated[float, number(">= 0")]
    draw_worst: Annotated[int, integer(">= 0")]


@dataclass(frozen=True, kw_only=True)
class MemoryCheckSettings:
    """The memory estimate before the run."""

    estimate: bool
    if_too_large: Literal["warn", "error", "ignore"]
    snapshot: bool


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Everything that a training run is configured with."""

    composition: Composition
    resolved: Mapping[str, Any]  # the config as plain values, for records
    data: DataSettings
    network: NetworkSettings
    augmentation: Factory
    checkpointing: Factory
    loss: Factory
    optimizer: Factory
    scheduler: Factory
    trainer: TrainerSettings
    metrics: Mapping[str, Factory]  # by name
    callbacks: Mapping[str, Factory]
    loggers: Annotated[Mapping[str, Factory], "logger"]
    precision: Annotated[str, PRECISION]
    compile: bool
    tf32: bool
    fold: Annotated[int | None, FOLD]  # None: train on every case
    seed: Annotated[int, integer(">= 0", f"below {2**32}")]
    resume: str | None
    init_from: Path | None
    freeze: tuple[str, ...]  # names of submodules
    head_warmup: Annotated[float, number(">= 0", "below 1")]  # fraction that only the heads learn
    lr_factors: Annotated[Mapping[str, float], word_or(None, FACTORS, {})]  # of submodules, by name
    ema_decay: Annotated[float | None, number("above 0", "below 1")]  # None: no average
    save_every_seconds: Annotated[float, number(">= 0")]
    max_skipped_steps: Annotated[int, integer(">= 0")]
    inference: SlidingWindowSettings
    validate_hd95: Annotated[bool, "validation.hd95"]
    evaluation: FinalEvaluationSettings
    memory: MemoryCheckSettings

    @property
    def strategy(self) -> str:
        """Return the option of the group `checkpointing`."""
        return self.composition.choices.get("checkpointing", "fused")

    def list_inputs(self) -> dict[str, Path | None]:
        """Return the files and folders that a run reads, by key; None where none is given."""
        data = self.data
        paths = (self.init_from, data.root, data.cache, data.splits)
        return dict(zip(INPUT_KEYS, paths, strict=True))

    def with_overrides(self, *overrides: str) -> "TrainingSettings":
        """Return the settings as if these overrides had been typed after the user's own."""
        kept = drop_keys_of_other_options(self.composition.overrides, overrides)
        return parse_training(compose_config([*kept, *overrides], self.composition.command))

    def with_strategy(self, name: str, **changes: Any) -> "TrainingSettings":
        """Return the settings with another option of the group `checkpointing`, changed."""
        factory = load_strategy(name).bind(**changes)
        choices = {**self.composition.choices, "checkpointing": name}
        return replace(
            self,
            checkpointing=factory,
            resolved={**self.resolved, "checkpointing": dict(factory.arguments)},
            composition=replace(self.composition, choices=choices),
        )

    def with_dataset(self, **fields: Any) -> "TrainingSettings":
        """Return the settings with what the dataset says of `data`, also in the loss."""
        data = replace(self.data, **fields)
        values = {
            "in_channels": data.in_channels,
            "num_classes": data.num_classes,
            "regions": data.regions and {name: list(own) for name, own in data.regions.items()},
            "region_labels": data.region_labels and list(data.region_labels),
            "ignore_label": list(data.ignore_labels or ()) or None,
        }
        loss = self.loss.bind_references({f"data.{key}": value for key, value in values.items()})
        own = {"data": {**self.resolved["data"], **values}, "loss": dict(loss.arguments)}
        return replace(self, data=data, loss=loss, resolved={**self.resolved, **own})

    def with_batch_size(self, batch_size: int) -> "TrainingSettings":
        """Return the settings with another batch size."""
        data = {**self.resolved["data"], "batch_size": batch_size}
        return replace(
            self,
            data=replace(self.data, batch_size=batch_size),
            resolved={**self.resolved, "data": data},
        )


def drop_keys_of_other_options(overrides: Sequence[str], new: Sequence[str]) -> list[str]:
    """Return the overrides without keys that an option which `new` selects does not have.

    >>> drop_keys_of_other_options(["checkpointing.tile_mib=16", "seed=1"], ["checkpointing=none"])
    ['seed=1']
    """
    kept = list(overrides)
    for group, _, option in (override.partition("=") for override in new):
        file = get_config_dir() / group / f"{option}.yaml"
        keys = to_plain(OmegaConf.load(file)) if file.is_file() else {"defaults": None}
        if "defaults" not in keys:  # it has all of its keys itself
            known = tuple(f"{group}.{key}" for key in keys)
            others = re.compile(rf"[+~]*{group}\.")
            kept = [o for o in kept if not others.match(o) or o.lstrip("+~").startswith(known)]
    return kept


def load_strategy(name: str) -> Factory:
    """Return what builds an option of the group `checkpointing`."""
    node = OmegaConf.load(get_config_dir() / "checkpointing" / f"{name}.yaml")
    return Factory("checkpointing", to_plain(node))


def parse_training(composed: ComposedConfig) -> TrainingSettings:
    """Check and parse the config of a training run."""
    config, composition = composed.config, composed.composition
    settings = read_settings(
        TrainingSettings,
        config,
        composition=composition,
        resolved=_resolve(config),
        data=parse_data(config),
        network=parse_network(config, composition),
        trainer=_parse_trainer(config),
    )
    if settings.freeze and settings.trainer.sync_batchnorm:
        raise UsageError("freeze= and trainer.sync_batchnorm=true cannot be combined")
    if settings.resume not in (None, "auto") and settings.init_from is not None:
        raise UsageError(
            "use either resume= (continue a run) or init_from= (start a new run from its weights), "
            "not both"
        )
    return settings


def _resolve(config: DictConfig) -> dict[str, Any]:
    """Return the config as plain values; the dataset's layout only if data.root is given."""
    if OmegaConf.is_missing(config.data, "root"):
        config = deepcopy(config)
        config.data.layout = MISSING
    precision = PRECISION.parse(read(config, "precision"), "precision")
    values = {str(key): value for key, value in to_plain(config).items()}
    return {**values, "precision": int(precision) if precision.isdecimal() else precision}


def _parse_trainer(config: DictConfig) -> TrainerSettings:
    factory = read_factory(config, "trainer")
    arguments = {k: v for k, v in factory.arguments.items() if k not in TRAINER_KEYS}
    for key in sorted(RESERVED_KEYS & arguments.keys()):
        raise UsageError(f"trainer.{key} cannot be set: unet3d sets what it controls itself")
    factory = replace(factory, arguments=arguments)
    trainer = read_settings(TrainerSettings, config, "trainer.", factory=factory)
    if ":" in trainer.accelerator and trainer.several_processes:
        raise UsageError(
            f"trainer.accelerator={trainer.accelerator} is one GPU: for several processes, use "
            "trainer.accelerator=cuda"
        )
    if trainer.max_steps is trainer.max_epochs is trainer.max_seconds is None:
        return replace(trainer, max_epochs=DEFAULT_MAX_EPOCHS)
    return trainer
