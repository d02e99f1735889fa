"""Plan spacing, patch, levels, checkpointing and batch for a dataset and a memory budget."""

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import prod

import numpy as np

from unet3d.data.config import DataConfig
from unet3d.data.dataset import (
    ValidCases,
    build_layout,
    choose_normalization,
    choose_split,
    resolve_dataset,
)
from unet3d.data.layouts.splits import explain_too_few, read_groups, split_cases
from unet3d.data.layouts.synthetic import GeneratedDataset
from unet3d.data.preprocessing.channels import compute_resampled_shape
from unet3d.data.preprocessing.fingerprint import CaseFingerprint, fingerprint_dataset
from unet3d.data.preprocessing.pipeline import choose_background
from unet3d.errors import DoesNotFitError, UsageError
from unet3d.machine import CUDA_CONTEXT_BYTES
from unet3d.memory.estimate import add_context_bytes
from unet3d.memory.fit import (
    Changes,
    check_configured_batch,
    count_windows,
    estimate_configured_step,
    find_largest_batch,
    list_strategies,
)
from unet3d.peak_memory import MemoryRecord
from unet3d.planning.topology import (
    Levels,
    choose_initial_patch,
    choose_target_spacing,
    find_median_shape,
    list_patches,
    plan_levels,
    round_up_to_multiple,
)
from unet3d.step.config import StepConfig
from unet3d.text import format_bytes
from unet3d.types import FloatTriple, Triple

IsOverridden = Callable[[str], bool]
"""Whether the command line sets a key."""

BATCH_FRACTION = 0.05
"""A batch holds at most this fraction of the dataset's voxels, but at least two patches."""

MAX_BATCH_SIZE = 32

MAX_WINDOWS = 1000
"""Windows of the largest case that are traced in about half a minute; more are not."""

UNPLANNED_SIDE_MULTIPLE = 8
"""Patch sides are multiples of this where the network's levels are not planned here."""

MIN_ORDERED_CASES = 20
"""Cases that must have both classes, or their order may be chance."""

ORDERED_FRACTION = 0.95
"""Fraction of these cases in which one class comes first along an axis that is not flipped."""

MASKED_FRACTION = 0.75
"""Below this median fraction of foreground box in the file, normalization masks the background."""


@dataclass(frozen=True, kw_only=True)
class DatasetFingerprint:
    """Fingerprints of the usable cases, the classes and channels of the dataset, and its split."""

    fingerprints: list[CaseFingerprint]
    classes: tuple[str, ...]
    outputs: Collection[str]  # the regions, or else the classes
    channels: tuple[str, ...]
    skipped: list[str]  # cases that data.invalid_cases=skip skips, and why
    group_by: str | None  # what the plan sets data.group_by to, if anything
    notes: Sequence[str]  # on the groups, and on a file of folds in the dataset's folder
    too_few: str | None  # why there are no folds
    num_training: int  # usable cases that are not held out


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """What was decided, and from what."""

    num_cases: int
    num_training: int  # of these, those that are not held out
    spacing_mm: FloatTriple
    median_shape: FloatTriple  # of the cases at that spacing
    normalize: list[str]
    initial_patch: Triple  # the patch that no budget would make smaller
    patch_size: Triple
    levels: Levels
    model: Changes  # the levels, where they are left open
    batch_size: int
    strategy: Changes  # of checkpointing, or nothing
    peak: MemoryRecord


def inspect_dataset(
    data: DataConfig, fold: int | None, is_overridden: IsOverridden
) -> DatasetFingerprint:
    """Read every usable case, or its cached fingerprint."""
    layout = build_layout(data)
    facts = resolve_dataset(data, layout)
    usable = ValidCases(data, layout, facts)
    chosen = data.background
    background = chosen if is_overridden("data.background") else choose_background(facts.channels)
    fingerprints = usable.run_on_valid_cases(
        lambda cases: fingerprint_dataset(
            cases, data.orientation, data.cache, background, facts.ignore_labels
        )
    )
    fingerprints = [fingerprint.with_classes(facts.label_values) for fingerprint in fingerprints]
    notes, group_by, too_few = [], None, None
    cases = training = layout.list_cases()
    if fold is not None:  # keep the scans of a patient in one fold, if there are enough for folds
        rule, names = choose_split(data, cases), [case.name for case in cases]
        notes, groups, likely = [rule.note] if rule.note else [], rule.groups, rule.likely_groups
        if likely is not None and rule.file is None and not is_overridden("data.group_by"):
            group_by, groups = likely.pattern, read_groups(likely.pattern, names)
            notes.append(f"{likely.message}: the plan sets {likely.option}")
        too_few = explain_too_few(names, groups) if rule.file is None else None
        training = cases if too_few else split_cases(cases, fold, rule.file, groups)[0]
    trains = {case.name for case in training}
    return DatasetFingerprint(
        fingerprints=fingerprints,
        classes=facts.classes,
        outputs=facts.regions or facts.classes,
        channels=facts.channels,
        skipped=[finding.describe() for finding in usable.skipped],
        group_by=group_by,
        notes=notes,
        too_few=too_few,
        num_training=max(1, sum(case.name in trains for case in usable.cases)),
    )


def make_plan(
    config: StepConfig,
    dataset: DatasetFingerprint,
    budget: int,
    is_overridden: IsOverridden,
    *,
    max_batch_size: int = MAX_BATCH_SIZE,
) -> TrainingPlan:
    """Choose the largest patch that fits with a batch of two, then the largest batch."""
    target, median = choose_resolution(config.data, dataset)
    patches = _list_candidate_patches(config, target, median, is_overridden)
    strategies: Sequence[Changes] = [{}]
    if not is_overridden("checkpointing"):  # from the least work to the least memory
        strategies = [{"checkpointing": name} for name in list_strategies(config)]
    given_batch = config.data.batch_size if is_overridden("data.batch_size") else None

    def with_patch(patch: Triple) -> StepConfig:
        levels = _get_model_changes(config, plan_levels(target, patch), is_overridden)
        return config.vary({"data.patch_size": patch, **levels})

    def fits(patch: Triple) -> bool:
        variant = with_patch(patch).vary({"data.batch_size": given_batch or 2})
        last = strategies[:-3:-1]  # one of the last two needs the least memory
        return any(check_configured_batch(variant.vary(s), budget) is not None for s in last)

    # Most budgets suffice for the first patch. If one fits, every smaller one does, too.
    index = 0 if fits(patches[0]) else bisect_left(patches, True, 1, key=fits)
    if index == len(patches):
        raise DoesNotFitError(
            f"no patch down to {format_dims(patches[-1])} fits the budget with a batch of 2 and "
            "the leanest checkpointing: raise budget_gib (of a GPU, its context takes "
            f"{format_bytes(CUDA_CONTEXT_BYTES)}), or "
            "choose a narrower network (model.width=)"
        )
    patch, num_cases = patches[index], len(dataset.fingerprints)
    levels, planned = plan_levels(target, patch), with_patch(patch)
    limit = given_batch or min(max_batch_size, compute_max_batch_size(patch, median, num_cases))
    batches = range(given_batch or 2, limit + 1)
    strategy, batch_size, peak = choose_strategy(planned, strategies, budget, batches)
    crop_fraction = float(np.median([case.crop_fraction for case in dataset.fingerprints]))
    usual = "zscore_nonzero" if crop_fraction < MASKED_FRACTION else "zscore"
    return TrainingPlan(
        num_cases=num_cases,
        num_training=dataset.num_training,
        spacing_mm=target,
        median_shape=median,
        normalize=list(choose_normalization(config.data, dataset.channels, usual=usual)),
        initial_patch=patches[0],
        patch_size=patch,
        levels=levels,
        model=_get_model_changes(config, levels, is_overridden),
        batch_size=batch_size,
        strategy=strategy,
        peak=peak,
    )


def check_largest_case(
    config: StepConfig, dataset: DatasetFingerprint, plan: TrainingPlan, budget: int
) -> list[str]:
    """Return a warning if validation of the largest case is estimated not to fit the budget."""
    shapes = (
        compute_resampled_shape(case.shape, case.spacing_mm, plan.spacing_mm)
        for case in dataset.fingerprints
    )
    largest = max(shapes, key=prod)
    sizes = {"data.patch_size": plan.patch_size, "data.batch_size": plan.batch_size}
    run = config.vary({**sizes, **plan.model, **plan.strategy})
    if prod(largest) <= prod(plan.patch_size) or count_windows(run, largest) > MAX_WINDOWS:
        return []
    needed = add_context_bytes(estimate_configured_step(run, largest).run_peak)
    if needed <= budget:
        return []
    return [
        f"validation of the largest case, {format_dims(largest)} voxels, is estimated to take "
        f"{format_bytes(needed)} with a GPU's context, over the budget: set a smaller "
        "data.patch_size"
    ]


def choose_resolution(
    data: DataConfig, dataset: DatasetFingerprint
) -> tuple[FloatTriple, FloatTriple]:
    """Return the spacing in mm, and the median shape of the cases at that spacing."""
    cases = dataset.fingerprints
    shapes, spacings = [case.shape for case in cases], [case.spacing_mm for case in cases]
    chosen = data.spacing_mm
    target = chosen if isinstance(chosen, tuple) else choose_target_spacing(spacings, shapes)
    return target, find_median_shape(spacings, shapes, target)


def make_batch_limit(
    data: DataConfig, fold: int | None, is_overridden: IsOverridden
) -> Callable[[Triple], int]:
    """Return a function from a patch to the largest batch that is worth trying on a dataset."""
    exists = data.layout is not None and data.root is not None and data.root.is_dir()
    if not exists or isinstance(data.layout(), GeneratedDataset):
        return lambda patch: MAX_BATCH_SIZE
    dataset = inspect_dataset(data, fold, is_overridden)
    median, count = choose_resolution(data, dataset)[1], len(dataset.fingerprints)
    return lambda patch: compute_max_batch_size(patch, median, count)


def compute_max_batch_size(patch: Triple, median_shape: Sequence[float], num_cases: int) -> int:
    """Return the largest batch that is tried.

    >>> compute_max_batch_size((64, 64, 64), (128, 128, 128), 20)
    8
    """
    patches = prod(median_shape) * num_cases * BATCH_FRACTION / prod(patch)
    return max(2, min(MAX_BATCH_SIZE, round(patches)))


def _list_candidate_patches(
    config: StepConfig,
    spacing_mm: Sequence[float],
    median_shape: Sequence[float],
    is_overridden: IsOverridden,
) -> list[Triple]:
    """Return patches from the largest down, or the one that is configured."""

    def format_list(numbers: Sequence[float]) -> str:
        return f"[{','.join(f'{n:.7g}' for n in numbers)}]"

    if is_overridden("data.patch_size"):
        patch = config.data.patch_size
        levels = plan_levels(spacing_mm, patch)
        if not levels.pool_windows and _get_model_changes(config, levels, is_overridden):
            raise UsageError(
                f"data.patch_size={format_list(patch)} leaves nothing to pool at "
                f"{format_list(spacing_mm)} mm: give one axis at least 12 voxels, or set "
                "model.depth"
            )
        return [patch]
    patches = list_patches(spacing_mm, median_shape)
    if "depth" not in config.network.model.arguments:  # its levels cannot be planned
        patches = [p for p in patches if all(n % UNPLANNED_SIDE_MULTIPLE == 0 for n in p)]
        largest = choose_initial_patch(spacing_mm, median_shape)
        return patches or [round_up_to_multiple(largest, [UNPLANNED_SIDE_MULTIPLE] * 3)]
    if not patches:
        raise UsageError(
            f"the median case has {format_list(median_shape)} voxels at "
            f"{format_list(spacing_mm)} mm, too few to pool: set a finer data.spacing_mm"
        )
    return patches


def choose_strategy(
    config: StepConfig, strategies: Sequence[Changes], budget: int, batches: range
) -> tuple[Changes, int, MemoryRecord]:
    """Return the strategy with the least work that fits one of the batches, and its largest one.

    A larger patch is worth recomputing convolutions, a larger batch is not.
    """
    for strategy in strategies:
        result = find_largest_batch(config.vary(strategy), budget, limit=batches[-1])
        if result is not None and result[0] in batches:
            return strategy, *result
    raise DoesNotFitError(
        f"no checkpointing strategy fits a batch of {batches[0]} in the budget: raise "
        "budget_gib, or lower data.batch_size or data.patch_size"
    )


def _get_model_changes(config: StepConfig, levels: Levels, is_overridden: IsOverridden) -> Changes:
    """Return the levels, where the network and the command line leave them open."""
    has_depth = "depth" in config.network.model.arguments
    if not has_depth or is_overridden("model.depth") or is_overridden("model.channels"):
        return {}
    has_one_output = len(levels.kernels) < 4 and not is_overridden("model.deep_supervision")
    is_supervised = config.network.model.arguments.get("deep_supervision", False)
    return {
        **({"model.deep_supervision": False} if is_supervised and has_one_output else {}),
        "model.depth": len(levels.kernels),
        "model.pool_kernel": [list(window) for window in levels.pool_windows],
        "model.kernel_size": [list(kernel) for kernel in levels.kernels],
    }


def find_constant_border(
    dataset: DatasetFingerprint, is_overridden: IsOverridden
) -> tuple[int, float, float] | None:
    """Return the number of cases with constant borders that are not 0, and the range of these.

    None without any, or if overridden.
    """
    found = [values for case in dataset.fingerprints if (values := set(case.background) - {0})]
    if is_overridden("data.background") or not found:
        return None
    return len(found), min(map(min, found)), max(map(max, found))


def find_ordered_axes(
    fingerprints: Sequence[CaseFingerprint], classes: Sequence[str]
) -> dict[int, tuple[str, str]]:
    """Return the axes along which one class nearly always comes before another.

    A flip makes the first look like the second there, as with the left and the right ventricle.
    Each axis has both classes.
    """
    found: dict[int, tuple[str, str]] = {}
    for a, b in permutations(range(1, len(classes)), 2):
        both = [case.centers for case in fingerprints if {a, b} <= case.centers.keys()]
        if len(both) >= MIN_ORDERED_CASES:
            shares = np.mean([np.greater(centers[b], centers[a]) for centers in both], axis=0)
            for axis in np.flatnonzero(shares >= ORDERED_FRACTION).tolist():
                found.setdefault(axis, (classes[a], classes[b]))
    return found


def format_dims(numbers: Sequence[float]) -> str:
    """Join numbers by x.

    >>> format_dims((1.0, 0.5, 3))
    '1 x 0.5 x 3'
    """
    return " x ".join(f"{n:g}" for n in numbers)
