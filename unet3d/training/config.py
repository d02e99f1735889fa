"""Settings of a training run: those of its steps, and those of the Trainer around them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from unet3d.config.compose import ComposedConfig, Composition, resolve_config
from unet3d.config.fields import DURATION, OptionType, integer, number, read_settings
from unet3d.config.instantiate import Factory, read_factory
from unet3d.data.config import DataConfig
from unet3d.errors import UsageError
from unet3d.step.config import StepConfig, read_step

DEFAULT_MAX_EPOCHS = 20
"""The limit of a run whose config sets none of trainer.max_steps, max_epochs and max_time."""

TRAINER_KEYS = ("timeout_seconds", "launch", "cuda_graph")
"""Keys of the group `trainer` that Lightning's Trainer does not have."""

OWN_ARGUMENTS = (
    *("strategy", "num_nodes", "plugins", "logger", "callbacks", "default_root_dir"),
    *("enable_checkpointing", "enable_model_summary", "use_distributed_sampler", "precision"),
    "overfit_batches",  # would replace our data loaders
)
REFUSED_KEYS = {
    **dict.fromkeys(OWN_ARGUMENTS, "unet3d sets this argument of Lightning's Trainer itself"),
    "gradient_clip_algorithm": "gradients are clipped by their norm, to trainer.gradient_clip_val",
    "limit_train_batches": "an epoch has data.patches_per_case patches of every case",
    "val_check_interval": "validations follow epochs: set trainer.check_val_every_n_epoch",
}
"""Arguments of Lightning's Trainer that no config may set, and why. The last ones would be ignored,
or would move the batch at which a run resumes."""

DEVICES = replace(
    integer(">= 1"),
    words="a number of processes, not of a GPU (trainer.accelerator=cuda:1 trains on one GPU, "
    "CUDA_VISIBLE_DEVICES=0,1 with trainer.devices=2 on several)",
)

FOLD = OptionType(  # the dataset says how many there are
    "an int >= 0 or none",
    lambda value: value in (None, "none", "all") or integer(">= 0").accepts(value),
    lambda value: None if value in ("none", "all") else value,
)


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Limits, devices and processes of a run."""

    factory: Factory  # Lightning's Trainer with the arguments that have no field
    devices: Annotated[int | Literal["auto"], DEVICES]  # processes on this machine
    launch: Literal["local", "torchrun", "slurm"]  # who starts the processes
    timeout_seconds: Annotated[float, number("above 0")]
    sync_batchnorm: bool
    max_steps: Annotated[int | None, integer(">= 1")]
    max_epochs: Annotated[int | None, integer(">= 1")]
    max_seconds: Annotated[float | None, DURATION, "max_time"]
    check_val_every_n_epoch: Annotated[int | Literal["auto"] | None, integer(">= 1")]
    show_progress_bar: Annotated[bool | Literal["auto"], "enable_progress_bar"]

    @property
    def several_processes(self) -> bool:
        """Return whether a run has several processes; with one per GPU, assume several GPUs."""
        return self.launch != "local" or self.devices != 1


@dataclass(frozen=True, kw_only=True)
class FinalEvaluationConfig:
    """The evaluation of the best checkpoint when training ends."""

    enabled: bool
    tolerance_mm: Annotated[float, number(">= 0")]
    draw_worst: Annotated[int, integer(">= 0")]
    tta: bool


@dataclass(frozen=True, kw_only=True)
class MemoryCheckConfig:
    """The memory estimate before the run."""

    estimate: bool
    if_too_large: Literal["warn", "error", "ignore"]
    snapshot: bool


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What a run is configured with."""

    composition: Composition
    resolved: Mapping[str, Any]  # the config as plain values, for records
    step: StepConfig
    trainer: TrainerConfig
    augmentation: Factory
    scheduler: Factory
    metrics: Mapping[str, Factory]  # by name
    callbacks: Mapping[str, Factory]
    loggers: Annotated[Mapping[str, Factory], "logger"]
    tf32: bool
    fold: Annotated[int | None, FOLD]  # None: train on every case
    seed: Annotated[int, integer(">= 0", f"below {2**32}")]
    resume: str | None
    init_from: Path | None
    save_every_seconds: Annotated[float, number(">= 0")]
    max_skipped_steps: Annotated[int, integer(">= 0")]
    validate_hd95: Annotated[bool, "validation.hd95"]
    evaluation: FinalEvaluationConfig
    memory: MemoryCheckConfig

    def __post_init__(self):
        if self.step.freeze and self.trainer.sync_batchnorm:
            raise UsageError("freeze= and trainer.sync_batchnorm=true cannot be combined")
        if self.step.cuda_graph is True and self.trainer.sync_batchnorm:
            raise UsageError(
                "trainer.cuda_graph=true and trainer.sync_batchnorm=true cannot be combined: ranks "
                "exchange statistics during forward"
            )
        if self.resume not in (None, "auto") and self.init_from is not None:
            raise UsageError(
                "use either resume= (continue a run) or init_from= (start a new run from its "
                "weights), not both"
            )
        if ":" in self.step.accelerator and self.trainer.several_processes:
            raise UsageError(
                f"trainer.accelerator={self.step.accelerator} is one GPU: for several processes, "
                "use trainer.accelerator=cuda"
            )

    @property
    def data(self) -> DataConfig:
        """Return the settings of the data."""
        return self.step.data


def parse_train_config(composed: ComposedConfig) -> TrainConfig:
    """Read the config of a training run."""
    config, composition = composed.config, composed.composition
    factory = read_factory(config, "trainer")
    arguments = {k: v for k, v in factory.arguments.items() if k not in TRAINER_KEYS}
    for key in sorted(REFUSED_KEYS.keys() & arguments.keys()):
        raise UsageError(f"trainer.{key} cannot be set: {REFUSED_KEYS[key]}")
    factory = replace(factory, arguments=arguments)
    trainer = read_settings(TrainerConfig, config, "trainer.", factory=factory)
    if trainer.max_steps is trainer.max_epochs is trainer.max_seconds is None:
        trainer = replace(trainer, max_epochs=DEFAULT_MAX_EPOCHS)
    return read_settings(
        TrainConfig,
        config,
        composition=composition,
        resolved=resolve_config(config),
        step=read_step(config, composition, several_processes=trainer.several_processes),
        trainer=trainer,
    )


def list_choices(settings: TrainConfig) -> dict[str, str]:
    """Return the option of each group, and the strategy that is used."""
    return {**settings.composition.choices, "checkpointing": settings.step.strategy}
