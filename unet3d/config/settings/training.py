"""Settings of a training run."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from omegaconf import MISSING, DictConfig, OmegaConf

from unet3d.config.compose import ComposedConfig, Composition, compose_config, get_config_dir
from unet3d.config.instantiate import Factory, read_factories, read_factory
from unet3d.config.settings.data import DataSettings, parse_data
from unet3d.config.settings.network import NetworkSettings, parse_network
from unet3d.config.values import (
    is_number,
    read,
    read_bool,
    read_choice,
    read_device,
    read_devices,
    read_duration,
    read_float,
    read_int,
    read_names,
    read_optional_int,
    read_optional_path,
    read_optional_str,
    to_plain,
)
from unet3d.errors import UsageError
from unet3d.types import PRECISIONS, find_precision

LAUNCHERS = ("local", "torchrun", "slurm")

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


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """Limits, devices and processes of a run."""

    factory: Factory  # Lightning's Trainer with the arguments that have no field here
    accelerator: str
    devices: int | Literal["auto"]  # processes on this machine
    launch: str  # who starts the processes
    timeout_seconds: float
    sync_batchnorm: bool
    max_steps: int | None
    max_epochs: int | None
    max_seconds: float | None
    accumulate_grad_batches: int
    gradient_clip_val: float | None
    cuda_graph: bool | Literal["auto"]
    show_progress_bar: bool | Literal["auto"]

    @property
    def several_processes(self) -> bool:
        """Return whether a run has several processes; with one per GPU, assume several GPUs."""
        return self.launch != "local" or self.devices != 1


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSettings:
    """The sliding window over whole volumes."""

    overlap: float
    batch_size: int  # windows at a time


@dataclass(frozen=True, kw_only=True)
class FinalEvaluationSettings:
    """The evaluation of the best checkpoint when training ends."""

    enabled: bool
    tolerance_mm: float
    draw_worst: int


@dataclass(frozen=True, kw_only=True)
class MemoryCheckSettings:
    """The memory estimate before the run."""

    estimate: bool
    if_too_large: str
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
    loggers: Mapping[str, Factory]
    precision: str
    compile: bool
    tf32: bool
    fold: int | None  # None: train on every case
    seed: int
    resume: str | None
    init_from: Path | None
    freeze: tuple[str, ...]  # names of submodules
    head_warmup: float  # fraction of the run in which only the heads learn
    lr_factors: Mapping[str, float]  # of submodules, by name
    ema_decay: float | None  # None: no average of the weights
    save_every_seconds: float
    max_skipped_steps: int
    inference: SlidingWindowSettings
    validate_hd95: bool
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

    def with_dataset(
        self,
        *,
        in_channels: int,
        num_classes: int,
        regions: Mapping[str, Sequence[int]] | None,
        region_labels: Sequence[int] | None,
        ignore_labels: Sequence[int],
        unknown_classes: Mapping[int, tuple[int, ...]],
    ) -> "TrainingSettings":
        """Return the settings with what the dataset says, also where the loss follows it."""
        plain = regions and {name: list(labels) for name, labels in regions.items()}
        values = {
            "in_channels": in_channels,
            "num_classes": num_classes,
            "regions": plain,
            "region_labels": None if region_labels is None else list(region_labels),
            "ignore_label": list(ignore_labels) or None,
        }
        loss = self.loss.bind_references({f"data.{key}": value for key, value in values.items()})
        return replace(
            self,
            data=replace(
                self.data,
                in_channels=in_channels,
                num_classes=num_classes,
                regions=regions and {name: tuple(labels) for name, labels in regions.items()},
                region_labels=None if region_labels is None else tuple(region_labels),
                ignore_labels=tuple(ignore_labels),
                unknown_classes=unknown_classes,
            ),
            loss=loss,
            resolved={
                **self.resolved,
                "data": {**self.resolved["data"], **values},
                "loss": dict(loss.arguments),
            },
        )

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
            names = [override.lstrip("+~").partition("=")[0] for override in kept]
            kept = [
                override
                for override, name in zip(kept, names, strict=True)
                if not name.startswith(f"{group}.") or name.startswith(known)
            ]
    return kept


def load_strategy(name: str) -> Factory:
    """Return what builds an option of the group `checkpointing`."""
    node = OmegaConf.load(get_config_dir() / "checkpointing" / f"{name}.yaml")
    return Factory("checkpointing", to_plain(node))


def parse_training(composed: ComposedConfig) -> TrainingSettings:
    """Check and parse the config of a training run."""
    config, composition = composed.config, composed.composition
    return TrainingSettings(
        composition=composition,
        resolved=_resolve(config),
        data=parse_data(config),
        network=parse_network(config, composition),
        augmentation=read_factory(config, "augmentation"),
        checkpointing=read_factory(config, "checkpointing"),
        loss=read_factory(config, "loss"),
        optimizer=read_factory(config, "optimizer"),
        scheduler=read_factory(config, "scheduler"),
        trainer=_parse_trainer(config),
        metrics=read_factories(config, "metrics"),
        callbacks=read_factories(config, "callbacks"),
        loggers=read_factories(config, "logger"),
        precision=parse_precision(read(config, "precision")),
        compile=read_bool(config, "compile"),
        tf32=read_bool(config, "tf32"),
        fold=_parse_fold(read(config, "fold")),
        seed=_parse_seed(read(config, "seed")),
        resume=_parse_resume(config),
        init_from=read_optional_path(config, "init_from"),
        freeze=_parse_freeze(config),
        head_warmup=_parse_head_warmup(config),
        lr_factors=_parse_lr_factors(config),
        ema_decay=_parse_ema_decay(config),
        save_every_seconds=read_float(config, "save_every_seconds"),
        max_skipped_steps=read_int(config, "max_skipped_steps", minimum=0),
        inference=parse_windows(config, "inference."),
        validate_hd95=read_bool(config, "validation.hd95"),
        evaluation=FinalEvaluationSettings(
            enabled=read_bool(config, "evaluation.enabled"),
            tolerance_mm=read_float(config, "evaluation.tolerance_mm"),
            draw_worst=read_int(config, "evaluation.draw_worst", minimum=0),
        ),
        memory=MemoryCheckSettings(
            estimate=read_bool(config, "memory.estimate"),
            if_too_large=read_choice(config, "memory.if_too_large", ("warn", "error", "ignore")),
            snapshot=read_bool(config, "memory.snapshot"),
        ),
    )


def parse_precision(value: Any, key: str = "precision") -> str:
    """Parse a precision, which may be an int or Lightning's name of it."""
    precision = find_precision(value)
    if precision is None:
        raise UsageError(f"{key} must be one of {', '.join(PRECISIONS)}, got {value!r}")
    return precision


def parse_windows(config: DictConfig, prefix: str = "") -> SlidingWindowSettings:
    """Parse the sliding window."""
    overlap = read_float(config, f"{prefix}overlap")
    if overlap >= 1:
        raise UsageError(f"{prefix}overlap must be in [0, 1), got {overlap:g}")
    return SlidingWindowSettings(
        overlap=overlap, batch_size=read_int(config, f"{prefix}batch_size", minimum=1)
    )


def _resolve(config: DictConfig) -> dict[str, Any]:
    """Return the config as plain values; the dataset's layout only if data.root is given."""
    if OmegaConf.is_missing(config.data, "root"):
        config = deepcopy(config)
        config.data.layout = MISSING
    precision = parse_precision(read(config, "precision"))
    values = {str(key): value for key, value in to_plain(config).items()}
    return {**values, "precision": int(precision) if precision.isdecimal() else precision}


def _parse_trainer(config: DictConfig) -> TrainerSettings:
    factory = read_factory(config, "trainer")
    arguments = {k: v for k, v in factory.arguments.items() if k not in TRAINER_KEYS}
    for key in sorted(RESERVED_KEYS & arguments.keys()):
        raise UsageError(f"trainer.{key} cannot be set: unet3d sets what it controls itself")
    clip = read(config, "trainer.gradient_clip_val")
    read_optional_int(config, "trainer.check_val_every_n_epoch", minimum=1)
    read_int(config, "trainer.num_sanity_val_steps", minimum=-1)
    read_int(config, "trainer.log_every_n_steps", minimum=0)
    if "limit_train_batches" in arguments:
        read_float(config, "trainer.limit_train_batches", exclusive=True)
    max_steps = read_optional_int(config, "trainer.max_steps", minimum=1)
    max_epochs = read_optional_int(config, "trainer.max_epochs", minimum=1)
    max_seconds = read_duration(config, "trainer.max_time")
    if max_steps is None and max_epochs is None and max_seconds is None:
        max_epochs = DEFAULT_MAX_EPOCHS
    return TrainerSettings(
        factory=replace(factory, arguments=arguments),
        accelerator=_parse_accelerator(config),
        devices=read_devices(config, "trainer.devices"),
        launch=read_choice(config, "trainer.launch", LAUNCHERS),
        timeout_seconds=read_float(config, "trainer.timeout_seconds", exclusive=True),
        sync_batchnorm=read_bool(config, "trainer.sync_batchnorm"),
        max_steps=max_steps,
        max_epochs=max_epochs,
        max_seconds=max_seconds,
        accumulate_grad_batches=read_int(config, "trainer.accumulate_grad_batches", minimum=1),
        gradient_clip_val=None
        if clip is None
        else read_float(config, "trainer.gradient_clip_val", exclusive=True),
        cuda_graph=_parse_bool_or_auto(config, "trainer.cuda_graph"),
        show_progress_bar=_parse_bool_or_auto(config, "trainer.enable_progress_bar"),
    )


def _parse_accelerator(config: DictConfig) -> str:
    if read(config, "trainer.accelerator") == "gpu":  # Lightning's name
        return "cuda"
    accelerator = read_device(config, "trainer.accelerator")
    processes = (read(config, "trainer.launch"), read(config, "trainer.devices"))
    if ":" in accelerator and processes != ("local", 1):
        raise UsageError(
            f"trainer.accelerator={accelerator} is one GPU: for several processes, use "
            "trainer.accelerator=cuda"
        )
    return accelerator


def _parse_bool_or_auto(config: DictConfig, key: str) -> bool | Literal["auto"]:
    value = read(config, key)
    if value == "auto" or isinstance(value, bool):
        return value
    raise UsageError(f"{key} must be auto, true or false, got {value!r}")


def _parse_fold(value: Any) -> int | None:
    if value in (None, "none"):
        return None
    if type(value) is not int or value < 0:  # the dataset says how many there are
        raise UsageError(f"fold must be an int >= 0 or none, got {value!r}")
    return value


def _parse_seed(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**32:
        raise UsageError(f"seed must be an int in 0..2^32 - 1, got {value!r}")
    return value


def _parse_freeze(config: DictConfig) -> tuple[str, ...]:
    names = read_names(config, "freeze")
    if names and read_bool(config, "trainer.sync_batchnorm"):
        raise UsageError("freeze= and trainer.sync_batchnorm=true cannot be combined")
    return names


def _parse_head_warmup(config: DictConfig) -> float:
    fraction = read_float(config, "head_warmup")
    if fraction >= 1:
        raise UsageError(f"head_warmup must be in [0, 1), got {fraction:g}")
    return fraction


def _parse_lr_factors(config: DictConfig) -> dict[str, float]:
    value = read(config, "lr_factors")
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(is_number(v) and v > 0 for v in value.values()):
        raise UsageError(
            "lr_factors must be parts of the network with a factor > 0, as in "
            f"lr_factors={{encoder:0.1}}, got {value!r}"
        )
    return {str(name): float(factor) for name, factor in value.items()}


def _parse_ema_decay(config: DictConfig) -> float | None:
    if read(config, "ema_decay") is None:
        return None
    decay = read_float(config, "ema_decay", exclusive=True)
    if decay >= 1:
        raise UsageError(f"ema_decay must be in (0, 1), got {decay:g}")
    return decay


def _parse_resume(config: DictConfig) -> str | None:
    resume = read_optional_str(config, "resume")
    if resume not in (None, "auto") and read(config, "init_from") is not None:
        raise UsageError(
            "use either resume= (continue a run) or init_from= (start a new run from its weights), "
            "not both"
        )
    return resume
