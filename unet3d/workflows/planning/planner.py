"""A data set and a budget -> spacing, patch, levels, checkpointing and batch that fit it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from unet3d.config.compose import ComposedConfig
from unet3d.config.instantiate import (
    build_source,
    parse_background,
    parse_spacing,
    resolve_dataset_facts,
)
from unet3d.data.preprocessing.background import AUTO, auto_background
from unet3d.data.preprocessing.fingerprint import CaseFingerprint, fingerprint_dataset
from unet3d.errors import DoesNotFitError, UsageError
from unet3d.memory.record import MemoryRecord
from unet3d.types import Triple
from unet3d.workflows.dataset_check import UsableCases
from unet3d.workflows.memory.estimate import with_batch, with_overrides
from unet3d.workflows.memory.strategies import list_strategies
from unet3d.workflows.memory.suggest import check_configured_batch, find_largest_batch
from unet3d.workflows.planning.topology import (
    LARGEST,
    Levels,
    find_median_shape,
    initial_patch,
    list_patches,
    plan_levels,
    round_up_to_multiple,
    target_spacing,
)

BATCH_SHARE = 0.05
"""A batch holds no more of the data set's voxels than this, but two patches at least."""

MOST_BATCH = 32

OWN_KEYS = ("budget_gib", "name", "overwrite", "measure_time", "debug")
"""Of planning, not of the run that is planned."""

OWN_FACTOR = 8
"""Sides of patches are multiples of this where the network's levels are not ours to plan."""

STEPS = 50_000
"""Optimizer steps of a run."""

EPOCH_STEPS = 50
"""At least so many from one validation to the next: a run that is cut short has curves too."""

VALIDATION_SHARE = 0.03
"""So many windows of validation for a patch of training: each takes less than a patch's step."""

FOLDS = 5

MASKED = 0.75
"""Below this median share of the box in the file, normalisation leaves the background out."""


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """What was decided, and from what."""

    cases: int
    channels: tuple[str, ...]
    spacing_mm: tuple[float, float, float]
    median: tuple[float, float, float]  # voxels of the median case at that spacing
    normalize: list[str]
    first: Triple  # the patch that no budget would make smaller
    patch: Triple
    levels: Levels
    batch: int
    strategy: tuple[str, ...]
    peak: MemoryRecord


@dataclass(frozen=True, kw_only=True)
class DatasetFacts:
    """A data set, looked at."""

    prints: list[CaseFingerprint]
    classes: tuple[str, ...]
    channels: tuple[str, ...]
    left_out: list[str]  # cases that data.invalid_cases=skip leaves out, and why


def inspect_dataset(request: ComposedConfig) -> DatasetFacts:
    """Read the data set, or what is remembered of it."""
    cfg = request.config
    source = build_source(cfg)
    classes, channels = resolve_dataset_facts(cfg, source.describe())
    usable = UsableCases(cfg, source, channels)  # those that training would use
    cache = Path(cfg.data.cache)
    asked = auto_background(channels)
    if request.is_overridden("data.background"):
        asked = parse_background(cfg)
    prints = usable.run_excluding_bad(
        lambda cases: fingerprint_dataset(cases, cfg.data.orientation, cache, asked)
    )
    left_out = [finding.message() for finding in usable.left_out]
    return DatasetFacts(prints=prints, classes=classes, channels=channels, left_out=left_out)


def make_plan(request: ComposedConfig, told: DatasetFacts, budget: int) -> TrainingPlan:
    """The largest patch that fits with a batch of two, then the largest batch."""
    data = request.config.data
    if not isinstance(data.batch_size, int) or data.batch_size < 1:
        raise UsageError(f"data.batch_size must be an int >= 1, got {data.batch_size}")
    shapes, spacings = [p.shape for p in told.prints], [p.spacing_mm for p in told.prints]
    target = target_spacing(spacings, shapes)
    if data.spacing_mm not in (None, "median"):
        target = parse_spacing(data.spacing_mm)
    median = find_median_shape(spacings, shapes, target)
    patches = list_candidate_patches(request, target, median)
    first = patches[0]
    patch = patches[
        find_first(
            lambda p: patch_fits(request, p, plan_levels(target, p), budget, first=p == first),
            patches,
        )
    ]
    most = limit_batch(patch, median, len(shapes))
    if request.is_overridden("data.batch_size"):
        most = data.batch_size
    shape = plan_levels(target, patch)
    strategy, batch, peak = choose_strategy(request, patch, shape, budget, most)
    return TrainingPlan(
        cases=len(told.prints),
        channels=told.channels,
        spacing_mm=target,
        median=median,
        normalize=choose_normalization(request, told),
        first=first,
        patch=patch,
        levels=shape,
        batch=batch,
        strategy=strategy,
        peak=peak,
    )


def limit_batch(patch: Triple, median: Sequence[float], cases: int) -> int:
    """Return the largest batch that is tried.

    >>> limit_batch((64, 64, 64), (128, 128, 128), 20)
    8
    """
    return max(2, min(MOST_BATCH, round(prod(median) * cases * BATCH_SHARE / prod(patch))))


def find_first(fits: Callable[[Triple], bool], patches: Sequence[Triple]) -> int:
    """The place of the first that fits, where each after one that fits does too: by halving.

    The first of all is tried first: most budgets have room for it.
    """
    if fits(patches[0]):
        return 0
    low, high = 1, len(patches)
    while low < high:
        middle = (low + high) // 2
        if fits(patches[middle]):
            high = middle
        else:
            low = middle + 1
    if low == len(patches):
        raise DoesNotFitError(
            f"no patch down to {join_by_x(patches[-1])} fits the budget with a batch of "
            "2 and the leanest checkpointing: a narrower network (model.width=16) may"
        )
    return low


def list_candidate_patches(
    request: ComposedConfig, spacing_mm: Sequence[float], median: Sequence[float]
) -> list[Triple]:
    """Patches from the largest down, or the one that was asked for."""
    own = "depth" not in request.config.model  # a network with levels of its own
    if request.is_overridden("data.patch_size"):
        asked = list(request.config.data.patch_size)
        if len(asked) != 3 or not all(type(side) is int and side > 0 for side in asked):
            raise UsageError(f"data.patch_size must be three ints >= 1, got {asked}")
        d, h, w = asked
        shape = plan_levels(spacing_mm, (d, h, w))
        if not shape.windows and get_model_overrides(request, shape):
            raise UsageError(
                f"data.patch_size={format_list((d, h, w))} leaves nothing to pool at "
                f"{format_list(spacing_mm)} mm: give one axis 12 voxels, or set model.depth"
            )
        return [(d, h, w)]
    found = list_patches(spacing_mm, median)
    if own:
        found = [p for p in found if all(n % OWN_FACTOR == 0 for n in p)]
        return found or [round_up_to_multiple(initial_patch(spacing_mm, median), [OWN_FACTOR] * 3)]
    if not found:
        raise UsageError(
            f"the median case has {format_list(median)} voxels at {format_list(spacing_mm)} mm, too few to "
            "pool: set a finer data.spacing_mm"
        )
    return found


def with_patch(
    request: ComposedConfig, patch: Triple, shape: Levels, strategy: Sequence[str]
) -> ComposedConfig:
    """The request with a patch, its levels and a strategy."""
    words = [
        f"data.patch_size={format_list(patch)}",
        *get_model_overrides(request, shape),
        *strategy,
    ]
    return with_overrides(request, *words)


def list_plan_strategies(request: ComposedConfig) -> Sequence[tuple[str, ...]]:
    """What to try: a larger patch is worth redoing convolutions, a larger batch is not."""
    if request.is_overridden("checkpointing"):
        return [()]
    return [(f"checkpointing={rung}",) for rung in list_strategies(request)]


def patch_fits(
    request: ComposedConfig, patch: Triple, shape: Levels, budget: int, *, first: bool = False
) -> bool:
    """Whether a patch fits with the leanest strategy and the least batch.

    Of the first one the strategy with the least work is tried before: if it fits, all is decided.
    """
    known = list_plan_strategies(request)
    least = 2 if not request.is_overridden("data.batch_size") else request.config.data.batch_size
    return any(
        check_configured_batch(
            with_batch(with_patch(request, patch, shape, strategy), least), budget
        )
        is not None
        for strategy in ((known[0], known[-1]) if first and len(known) > 1 else known[-1:])
    )


def choose_strategy(
    request: ComposedConfig, patch: Triple, shape: Levels, budget: int, most: int
) -> tuple[tuple[str, ...], int, MemoryRecord]:
    """The strategy with the least work that fits a batch of two, and the largest batch of it."""
    found = None
    for strategy in list_plan_strategies(request):
        found = find_largest_batch(with_patch(request, patch, shape, strategy), budget, most=most)
        if found is not None and found[0] >= min(2, most):
            return strategy, *found
    raise DoesNotFitError(f"a batch of {most} does not fit with any strategy")


def get_model_overrides(request: ComposedConfig, shape: Levels) -> list[str]:
    """The levels as overrides, where the network and the command line leave them open."""
    if "depth" not in request.config.model:
        return []
    if request.is_overridden("model.depth") or request.is_overridden("model.channels"):
        return []
    return [
        f"model.depth={len(shape.kernels)}",
        f"model.pool_kernel=[{','.join(format_list(w) for w in shape.windows)}]",
        f"model.kernel_size=[{','.join(format_list(k) for k in shape.kernels)}]",
    ]


def format_list(numbers: Sequence[float]) -> str:
    """As an override's value.

    >>> format_list((1, 2, 2))
    '[1,2,2]'
    """
    return f"[{','.join(f'{n:.7g}' for n in numbers)}]"


def choose_normalization(request: ComposedConfig, told: DatasetFacts) -> list[str]:
    """For each channel: by modality, and without the background where that is much of a volume."""
    asked = request.config.data.normalize
    if asked != "auto":
        return [asked] if isinstance(asked, str) else list(asked)
    masked = float(np.median([p.kept for p in told.prints])) < MASKED
    usual = "zscore_nonzero" if masked else "zscore"
    return ["ct" if name.upper() == "CT" else usual for name in told.channels]


def find_constant_border(told: DatasetFacts, request: ComposedConfig) -> tuple[float, float] | None:
    """The least and the greatest value of borders that are constant and not 0, if there are any.

    None where the command line says what is background.
    """
    found = [value for p in told.prints for value in p.background if value != 0]
    return (
        None if request.is_overridden("data.background") or not found else (min(found), max(found))
    )


def plan_schedule(request: ComposedConfig, plan: TrainingPlan) -> tuple[int, int]:
    """Patches per case in an epoch, and epochs from one validation to the next."""
    whole = request.config.fold in (None, "none")
    training = plan.cases if whole else max(1, plan.cases * (FOLDS - 1) // FOLDS)
    patches = max(1, round(EPOCH_STEPS * plan.batch / training))
    steps = -(-training * patches // plan.batch)
    windows = prod(
        1 if n <= p else -(-2 * (n - p) // p) + 1
        for n, p in zip(plan.median, plan.patch, strict=True)
    )
    validating = (plan.cases - training) * windows / plan.batch  # windows overlap by half
    wanted = max(EPOCH_STEPS, validating / VALIDATION_SHARE)
    return patches, max(1, round(wanted / steps))


def explain_limits(request: ComposedConfig, plan: TrainingPlan) -> list[str]:
    """Why the patch and the batch are not larger."""
    most = limit_batch(plan.patch, plan.median, plan.cases)
    if request.is_overridden("data.patch_size"):
        patch = "the patch is the one that was asked for"
    elif plan.patch != plan.first:
        patch = f"the patch is limited by the budget: {join_by_x(plan.first)} would not fit"
    elif all(p >= n for p, n in zip(plan.patch, plan.median, strict=True)):
        patch = "the patch covers the median case: a larger one would see nothing more"
    else:
        patch = f"the patch has the {LARGEST:,} voxels at most that a plan begins with"
    if request.is_overridden("data.batch_size"):
        batch = "the batch is the one that was asked for"
    elif plan.batch < most:
        batch = f"the batch is limited by the budget: {plan.batch + 1} patches would not fit"
    elif most == MOST_BATCH:
        batch = f"the batch is at most {MOST_BATCH}"
    elif most > 2:
        share = f"{100 * BATCH_SHARE:g} % of the data set's voxels"
        batch = f"the batch is limited to {share}"
    else:
        batch = f"the batch is 2: one more would be over {100 * BATCH_SHARE:g} % of the data set"
    return [patch, batch]


def join_by_x(numbers: Sequence[float]) -> str:
    """Numbers with x between them.

    >>> join_by_x((1.0, 0.5, 3))
    '1 x 0.5 x 3'
    """
    return " x ".join(f"{n:g}" for n in numbers)


def render_experiment(request: ComposedConfig, told: DatasetFacts, plan: TrainingPlan) -> str:
    """The plan as an experiment's YAML, with what the command line said."""
    patches, epochs = plan_schedule(request, plan)
    data: dict[str, Any] = {
        "spacing_mm": list(plan.spacing_mm),
        "normalize": plan.normalize,
        "patch_size": list(plan.patch),
        "batch_size": plan.batch,
        "patches_per_case": patches,
    }
    if find_constant_border(told, request):
        asked = auto_background(told.channels)
        data["background"] = AUTO if set(asked) == {AUTO} else list(asked)
    values: dict[str, Any] = {
        "data": data,
        "trainer": {"max_steps": STEPS, "check_val_every_n_epoch": epochs},
    }
    words = [
        *get_model_overrides(request, plan.levels),
        *plan.strategy,
        f"precision={request.config.precision}",
    ]
    words += [w for w in request.overrides if w.split("=")[0] not in OWN_KEYS]
    chosen = dict(request.choices) | {"checkpointing": "fused"}
    groups = {"data", "model", "pool", "checkpointing", "augmentation", "optimizer", "loss"}
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        if key in groups:
            chosen[key] = value
        elif not key.startswith("hydra"):
            set_nested(values, key.split("."), yaml.safe_load(value))
    said = [f"  - override /{group}: {chosen[group]}" for group in sorted(groups & set(chosen))]
    body = yaml.safe_dump(values, sort_keys=False, default_flow_style=None)
    return "\n".join(["defaults:", *said, body])


def set_nested(values: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set a nested key.

    >>> values = {}
    >>> set_nested(values, ["a", "b"], 1)
    >>> values
    {'a': {'b': 1}}
    """
    for key in path[:-1]:
        values = values.setdefault(key, {})
    values[path[-1]] = value
