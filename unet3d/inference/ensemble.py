"""Load checkpoints as networks that predict together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from unet3d.checkpoint_file import extract_weights, find_mismatch, load_checkpoint
from unet3d.data.preprocessing.cache import digest_file
from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.data.preprocessing.statistics import TrainingStatistics
from unet3d.errors import UsageError
from unet3d.export.bundle import (
    DESCRIPTION_FILE,
    download_bundle,
    get_network_path,
    is_bundle,
    is_on_hub,
    read_bundle,
)
from unet3d.model.build import build_saved_network
from unet3d.types import Triple


@dataclass(frozen=True, kw_only=True)
class Ensemble:
    """Networks that take the same channels and give the same classes."""

    networks: tuple[nn.Module, ...]
    channels: tuple[str, ...]
    classes: tuple[str, ...]  # of the labels 0, 1, 2, ...
    regions: dict[str, list[int]] | None  # the networks' outputs instead, if classes overlap
    keep_largest_component: tuple[str, ...]  # classes for which all members chose it
    preprocessing: Preprocessing
    patch_size: Triple
    precision: str  # in training
    region_labels: list[int] | None = None  # that predictions have in each region
    training_statistics: tuple[TrainingStatistics, ...] = ()  # of members that have them
    mirroring_axes: tuple[int, ...] | None = None  # flipped in all trainings; None: unknown
    digests: tuple[str, ...] = ()  # of the members' files


@dataclass(frozen=True, kw_only=True)
class TrainedNetwork:
    """One network, with what is known of its training."""

    path: Path  # of the checkpoint or the bundle
    network: nn.Module
    metadata: Mapping[str, Any]
    patch_size: Triple
    digest: str = ""  # of the contents of its files

    @property
    def channels(self) -> list[str]:
        """Return the names of the input channels."""
        return list(self.metadata["channels"])

    @property
    def outputs(self) -> list[str]:
        """Return the name of each output: a class or a region."""
        return list(self.metadata.get("regions") or self.metadata["classes"])

    @property
    def normalizations(self) -> list[str]:
        """Return the normalization method of each channel."""
        methods = list(self.metadata["preprocessing"]["normalize"])
        return methods if len(methods) == len(self.channels) else methods * len(self.channels)


def load_members(
    paths: Sequence[Path], allow_targets: Sequence[str] | None
) -> list[TrainedNetwork]:
    """Load the networks of checkpoints, run folders or bundles that belong together.

    They may name the classes of these packages besides ours; None: any.
    """
    members: list[TrainedNetwork] = []
    for path in map(resolve_checkpoint, paths):
        digest = digest_checkpoint(path)  # before it is read: training may replace it
        for content in read_bundle(path) if is_bundle(path) else [load_checkpoint(path)]:
            metadata = content.get("unet3d")
            if not isinstance(metadata, Mapping):
                raise UsageError(
                    f"{path} is not a checkpoint of unet3d: it does not describe its network"
                )
            if members:
                check_compatible(members[0].path, members[0].metadata, path, metadata)
            weights = extract_weights(path, content)
            network = load_network(path, metadata, weights, allow_targets)
            d, h, w = metadata["config"]["data"]["patch_size"]
            members.append(
                TrainedNetwork(
                    path=path,
                    network=network,
                    metadata=metadata,
                    patch_size=(d, h, w),
                    digest=digest,
                )
            )
    return members


def resolve_checkpoint(path: Path) -> Path:
    """Return a checkpoint file or a bundle: the path, or the best checkpoint of a run folder.

    A run without a best checkpoint gives its last one. A bundle on a hub is downloaded.
    """
    if is_on_hub(path):
        return download_bundle(path)
    if not path.is_dir() or is_bundle(path):
        return path
    for name in ("best.ckpt", "last.ckpt"):
        if (path / "checkpoints" / name).is_file():
            return path / "checkpoints" / name
    raise UsageError(
        f"checkpoint={path}: found neither best.ckpt nor last.ckpt in {path / 'checkpoints'}"
    )


def digest_checkpoint(path: Path) -> str:
    """Return a digest of the files that are read of a checkpoint or a bundle, if they are there."""
    weights = sorted(get_network_path(path, 0, "").parent.glob("*.safetensors"))
    files = [path / DESCRIPTION_FILE, *weights] if is_bundle(path) else [path]
    return " ".join(digest_file(file) for file in files if file.is_file())


def load_ensemble(paths: Sequence[Path], allow_targets: Sequence[str] | None = ()) -> Ensemble:
    """Load the networks of checkpoints; refuse those that do not belong together."""
    loaded = load_members(paths, allow_targets)
    members = [member.metadata for member in loaded]
    first = members[0]
    return Ensemble(
        networks=tuple(member.network for member in loaded),
        channels=tuple(first["channels"]),
        classes=tuple(first["classes"]),
        regions=first.get("regions"),
        region_labels=first.get("region_labels"),
        keep_largest_component=find_largest_component_classes(members),
        mirroring_axes=find_common_mirroring_axes(members),
        preprocessing=Preprocessing.from_dict(first["preprocessing"]),
        patch_size=loaded[0].patch_size,
        precision=str(first["config"]["precision"]),
        training_statistics=tuple(
            TrainingStatistics.from_dict(metadata["training_statistics"])
            for metadata in members
            if metadata.get("training_statistics") is not None
        ),
        digests=tuple(member.digest for member in loaded),
    )


def find_largest_component_classes(members: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the classes for which all members chose to keep only the largest component."""
    chosen = [metadata.get("keep_largest_component") or () for metadata in members]
    return tuple(name for name in chosen[0] if all(name in other for other in chosen))


def find_common_mirroring_axes(members: Sequence[Mapping[str, Any]]) -> tuple[int, ...] | None:
    """Return the axes that the training of every member flipped; None if one does not say."""
    trained = [metadata.get("mirroring_axes") for metadata in members]
    known = [axes for axes in trained if axes is not None]
    if len(known) < len(trained):
        return None
    return tuple(axis for axis in range(3) if all(axis in axes for axes in known))


def load_network(
    path: Path,
    metadata: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    allow_targets: Sequence[str] | None,
) -> nn.Module:
    """Build the network that metadata describes, with its weights, ready to predict."""
    prefix = "model."
    state = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
    try:
        network = build_saved_network(metadata, allow_targets)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    mismatch = find_mismatch(network.state_dict(), state)
    if mismatch is not None:
        raise UsageError(f"{path}: its weights do not match its network: {mismatch}")
    network.load_state_dict(state)
    return network.eval().requires_grad_(False)


def check_compatible(
    first_path: Path, first: Mapping[str, Any], second_path: Path, second: Mapping[str, Any]
) -> None:
    """Refuse an ensemble whose members differ in what a prediction depends on."""
    keys = ("channels", "classes", "regions", "region_labels")
    one, other = (
        {
            **{key: metadata.get(key) for key in keys},
            **metadata["preprocessing"],
            "data.patch_size": metadata["config"]["data"]["patch_size"],
        }
        for metadata in (first, second)
    )
    differences = [
        f"{key} is {one.get(key)} and {other.get(key)}"
        for key in dict.fromkeys([*one, *other])
        if one.get(key) != other.get(key)
    ]
    if differences:
        raise UsageError(
            f"{first_path} and {second_path} cannot form an ensemble: {'; '.join(differences)}"
        )
