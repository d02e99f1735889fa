"""Plan how long a run trains and how often it is validated."""

from math import ceil, prod

from unet3d.config.settings.training import TrainingSettings
from unet3d.workflows.planning.planner import TrainingPlan

MAX_STEPS = 50_000
"""Optimizer steps of a planned run."""

MIN_STEPS_PER_VALIDATION = 50
"""Validation comes no more often: frequent enough for a short run to have curves, too."""

VALIDATION_FRACTION = 0.03
"""Windows of validation per patch of training; a window takes less than a patch's step."""

NUM_FOLDS = 5


def plan_schedule(settings: TrainingSettings, plan: TrainingPlan) -> tuple[int, int]:
    """Return patches per case in an epoch, and epochs between validations."""
    num_training = plan.num_cases
    if settings.fold is not None:
        num_training = max(1, plan.num_cases * (NUM_FOLDS - 1) // NUM_FOLDS)
    patches_per_case = max(1, round(MIN_STEPS_PER_VALIDATION * plan.batch_size / num_training))
    steps_per_epoch = ceil(num_training * patches_per_case / plan.batch_size)
    windows_per_case = prod(  # windows overlap by half
        1 if size <= patch else ceil(2 * (size - patch) / patch) + 1
        for size, patch in zip(plan.median_shape, plan.patch_size, strict=True)
    )
    windows = (plan.num_cases - num_training) * windows_per_case / plan.batch_size
    steps = max(MIN_STEPS_PER_VALIDATION, windows / VALIDATION_FRACTION)
    return patches_per_case, max(1, round(steps / steps_per_epoch))
