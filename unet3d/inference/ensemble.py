"""Load checkpoints as networks that predict together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from unet3d.checkpoint_file import extract_weights, find_mismatch, is_on_hub, load_checkpoint
from unet3d.data.preprocessing.cache import digest_file
from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.data.preprocessing.statistics import TrainingStatistics
from unet3d.errors import UsageError
from unet3d.export.bundle import DESCRIPTION_FILE, download_bundle, is_bundle, read_bundle
from unet3d.files import find_run_checkpoint
from unet3d.model.config import parse_saved_network
from unet3d.types import Triple


@dataclass(frozen=True, kw_only=True)
class Ensemble:
    """Networks that take the same channels and give the same classes."""

    networks: tuple[nn.Module, ...]
    channels: tuple[str, ...]
    classes: tuple[str, ...]  # names of the labels 0, 1, 2, ...
    regions: dict[str, list[int]] | None  # the networks' outputs instead, if classes overlap
    keep_largest_component: tuple[str, ...]  # classes for which all members chose it
    preprocessing: Preprocessing
    patch_size: Triple
    precision: str  # what the first network was trained with
    region_labels: list[int] | None = None  # what predictions hold in each region
    training_statistics: tuple[TrainingStatistics, ...] = ()  # older members have none
    mirroring_axes: tuple[int, ...] | None = None  # flipped in all trainings; None: unknown
    names_axes: bool = False  # whether files that a training read did; older members do not say
    uses_tta: bool = False  # whether all trainings were evaluated with test-time augmentation
    digests: tuple[str, ...] = ()  # one per member, from the contents of its files

    def __str__(self) -> str:
        parameters = sum(p.numel() for network in self.networks for p in network.parameters())
        count, kind = len(self.networks), type(self.networks[0]).__name__
        return f"{kind if count == 1 else f'{count} networks'}, {parameters:,} parameters"

    def describe_mirroring(self) -> str:
        """Describe test-time augmentation along the axes that training flipped."""
        training = "training" if len(self.networks) == 1 else "the training of every network"
        if not self.mirroring_axes:
            return f"nothing to mirror, because there is no axis that {training} flipped"
        return f"mirroring the axes that {training} flipped: {list(self.mirroring_axes)}"


@dataclass(frozen=True, kw_only=True)
class TrainedNetwork:
    """One network, with what is known of its training."""

    path: Path  # checkpoint or bundle
    network: nn.Module
    metadata: Mapping[str, Any]
    patch_size: Triple
    digest: str = ""  # hash of the contents of its files

    @property
    def channels(self) -> list[str]:
        return list(self.metadata["channels"])

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
        files = sorted(path.glob("models/*.safetensors"))
        files = [path / DESCRIPTION_FILE, *files] if is_bundle(path) else [path]
        # Before it is read: training may replace it.
        digest = " ".join(digest_file(file) for file in files if file.is_file())
        for content in read_bundle(path) if is_bundle(path) else [load_checkpoint(path)]:
            members.append(load_member(path, content, digest, allow_targets))
            check_compatible(members[0], members[-1])
    return members


def resolve_checkpoint(path: Path) -> Path:
    """Return a checkpoint file or a bundle: of a run folder, its best or else last checkpoint."""
    if is_on_hub(path):
        return download_bundle(path)
    if not path.is_dir() or is_bundle(path):
        return path
    if (found := find_run_checkpoint(path)) is None:
        runs = any(path.glob("*/checkpoints"))  # of a sweep
        advice = f": name its runs, as in checkpoint='{path}/*'" if runs else ""
        raise UsageError(
            f"checkpoint={path}: found neither best.ckpt nor last.ckpt in {path / 'checkpoints'}"
            f"{advice}"
        )
    return found


def load_ensemble(paths: Sequence[Path], allow_targets: Sequence[str] | None = ()) -> Ensemble:
    """Load the networks of checkpoints; refuse those that do not belong together."""
    return combine_members(load_members(paths, allow_targets))


def combine_members(members: Sequence[TrainedNetwork]) -> Ensemble:
    """Return networks that belong together as an ensemble."""
    first, described = members[0].metadata, [member.metadata for member in members]
    components = [metadata.get("keep_largest_component") or () for metadata in described]
    mirrored: list[Any] = [metadata.get("mirroring_axes") for metadata in described]
    flipped = None if None in mirrored else tuple(sorted(set.intersection(*map(set, mirrored))))
    statistics = [metadata.get("training_statistics") for metadata in described]
    return Ensemble(
        networks=tuple(member.network for member in members),
        channels=tuple(first["channels"]),
        classes=tuple(first["classes"]),
        regions=first.get("regions"),
        region_labels=first.get("region_labels"),
        keep_largest_component=tuple(
            name for name in components[0] if all(name in others for others in components)
        ),
        mirroring_axes=flipped,
        names_axes=any(metadata.get("names_axes") for metadata in described),
        uses_tta=all(
            metadata.get("tta", metadata["config"].get("evaluation", {}).get("tta", False))
            for metadata in described
        ),
        preprocessing=Preprocessing.from_dict(first["preprocessing"]),
        patch_size=members[0].patch_size,
        precision=str(first["config"]["precision"]),
        training_statistics=tuple(map(TrainingStatistics.from_dict, filter(None, statistics))),
        digests=tuple(member.digest for member in members),
    )


def load_member(
    path: Path, content: Mapping[str, Any], digest: str, allow_targets: Sequence[str] | None
) -> TrainedNetwork:
    """Build the network that a checkpoint's metadata describes, with its weights."""
    metadata = content.get("unet3d")
    if not isinstance(metadata, Mapping):
        raise UsageError(f"{path} is not a checkpoint of unet3d: it does not describe its network")
    weights, prefix = extract_weights(path, content), "model."
    state = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
    try:
        network = parse_saved_network(metadata["config"], allow_targets).build()
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    mismatch = find_mismatch(network.state_dict(), state)
    if mismatch is not None:
        raise UsageError(f"{path}: its weights do not match its network: {mismatch}")
    network.load_state_dict(state)
    d, h, w = metadata["config"]["data"]["patch_size"]
    return TrainedNetwork(
        path=path,
        network=network.eval().requires_grad_(False),
        metadata=metadata,
        patch_size=(d, h, w),
        digest=digest,
    )


def check_compatible(first: TrainedNetwork, second: TrainedNetwork) -> None:
    """Refuse an ensemble whose members differ in what a prediction depends on."""
    keys = ("channels", "classes", "regions", "region_labels")
    one, other = (
        {key: member.metadata.get(key) for key in keys}
        | member.metadata["preprocessing"]
        | {"data.patch_size": list(member.patch_size)}
        for member in (first, second)
    )
    differences = [
        f"{key} is {one.get(key)} and {other.get(key)}"
        for key in one | other
        if one.get(key) != other.get(key)
    ]
    if differences:
        raise UsageError(
            f"{first.path} and {second.path} cannot form an ensemble: {'; '.join(differences)}"
        )
