"""What decides a training step: its settings, also with some of them changed."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from torch import nn

from unet3d.config.compose import Composition, Config
from unet3d.config.fields import (
    DEVICE_KIND,
    PRECISION,
    integer,
    mapping_of,
    number,
    read_settings,
    word_or,
)
from unet3d.config.instantiate import Factory, read_option
from unet3d.data.config import DataConfig, parse_data_config
from unet3d.data.dataset import ResolvedDataset
from unet3d.loss.build import build_loss
from unet3d.model.config import NetworkConfig, parse_network_config

FACTORS = mapping_of(
    number("above 0"), "parts of the network with a factor above 0, as in {encoder:0.1}"
)


@dataclass(frozen=True, kw_only=True)
class WindowConfig:
    """The sliding window over whole volumes."""

    overlap: Annotated[float, number(">= 0", "below 1")]
    batch_size: Annotated[int, integer(">= 1")]  # windows at a time


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """Data, network, objective, and how a step computes them: what its memory depends on."""

    data: DataConfig
    network: NetworkConfig
    strategy: str  # the option of the group `checkpointing`
    checkpointing: Factory
    loss: Factory
    optimizer: Factory
    precision: Annotated[str, PRECISION]
    compile: bool
    freeze: tuple[str, ...]  # names of submodules
    head_warmup: Annotated[float, number(">= 0", "below 1")]  # fraction that only the heads learn
    lr_factors: Annotated[Mapping[str, float], word_or(None, FACTORS, {})]  # of submodules, by name
    ema_decay: Annotated[float | None, number("above 0", "below 1")]  # None: no average
    windows: Annotated[WindowConfig, "inference"]  # of validation
    accelerator: Annotated[str, word_or("gpu", DEVICE_KIND, "cuda"), "trainer.accelerator"]
    several_processes: bool
    micro_batches: Annotated[int, integer(">= 1"), "trainer.accumulate_grad_batches"]
    clip_norm: Annotated[float | None, number("above 0"), "trainer.gradient_clip_val"]
    cuda_graph: Annotated[bool | Literal["auto"], "trainer.cuda_graph"]

    def vary(self, changes: Mapping[str, Any]) -> "StepConfig":
        """Return the step with other values by key, or with other options of its groups."""
        step = self
        for key, value in changes.items():
            (group, _, name), network = key.partition("."), step.network
            if group == "data":
                step = step.with_data(**{name: tuple(value) if isinstance(value, list) else value})
            elif key == "checkpointing":
                step = step.with_strategy(value)
            elif group == "checkpointing":
                step = replace(step, checkpointing=step.checkpointing.bind(**{name: value}))
            elif group in ("model", "pool"):
                step = replace(step, network=network.vary(group, name, value)).with_data()
            else:  # a field
                step = replace(step, **{key: value})
        return step

    def with_data(self, **changes: Any) -> "StepConfig":
        """Return the step with other data; arguments that follow a key of it follow the new one."""
        step = replace(self, data=replace(self.data, **changes))
        values = {f"data.{key}": value for key, value in list_data_values(step.data).items()}
        parts = self.network.model, self.network.pool, self.loss
        model, pool, loss = (part.bind_references(values) for part in parts)
        return replace(step, network=replace(self.network, model=model, pool=pool), loss=loss)

    def with_dataset(self, dataset: ResolvedDataset) -> "StepConfig":
        """Return the step with what the dataset says of channels and classes."""
        annotated = dataset.annotations
        return self.with_data(
            in_channels=len(dataset.channels),
            num_classes=len(dataset.classes),
            regions=dataset.regions,
            region_labels=dataset.region_labels,
            ignore_labels=dataset.ignore_labels,
            unannotated_classes=annotated.unannotated_classes if annotated else {},
        )

    def with_strategy(self, name: str, **arguments: Any) -> "StepConfig":
        """Return the step with another option of the group `checkpointing`, changed."""
        factory = read_option("checkpointing", name)
        return replace(self, strategy=name, checkpointing=factory.bind(**arguments))

    def build_loss(self) -> nn.Module:
        data = self.data
        unknown = None if data.annotated is None else data.unannotated_classes
        return build_loss(self.loss, regions=data.regions, unannotated_classes=unknown)


def list_data_values(data: DataConfig) -> dict[str, Any]:
    """Return the values of `data` that arguments may follow, as a config has them."""
    regions, labels, ignored = data.regions, data.region_labels, data.ignore_labels
    return {
        "in_channels": data.in_channels,
        "num_classes": data.num_classes,
        "regions": None if regions is None else {k: list(own) for k, own in regions.items()},
        "region_labels": None if labels is None else list(labels),
        "ignore_label": list(ignored) if ignored else None,
        "patch_size": list(data.patch_size),
        "batch_size": data.batch_size,
    }


def read_step(config: Config, composition: Composition, *, several_processes: bool) -> StepConfig:
    """Read what a step depends on."""
    return read_settings(
        StepConfig,
        config,
        data=parse_data_config(config),
        network=parse_network_config(config, composition),
        strategy=composition.choices.get("checkpointing", "fused"),
        several_processes=several_processes,
    )
