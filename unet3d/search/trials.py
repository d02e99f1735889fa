"""Run the trials of a search, one after the other."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from unet3d.config.settings.search import SearchSettings
from unet3d.config.settings.training import TrainingSettings
from unet3d.errors import DoesNotFitError, RunError, UsageError, summarize_error
from unet3d.search.study import SearchStudy
from unet3d.text import pluralize
from unet3d.training.callbacks.trial_report import TrialPruned, TrialReport
from unet3d.units import CUDA_CONTEXT_BYTES, GIB, format_bytes
from unet3d.workflows.memory.estimate import estimate_memory
from unet3d.workflows.memory.oom_advice import get_device_bytes

Train = Callable[[TrainingSettings, Path, TrialReport], None]

MAX_FAILURES = 3
"""Trials that fail before any has succeeded, and end the search."""


def run_trials(
    settings: SearchSettings, folder: Path, train: Train, log: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Train until there are enough trials; return all of them."""
    with SearchStudy(settings, folder) as study:
        while (trial := study.next_trial()) is not None:
            values = study.draw_values(trial)
            chosen = " ".join(f"{key}={value}" for key, value in values.items())
            log(f"\ntrial {trial.number}: {chosen}")
            run_trial(study, trial, values, folder / f"trial-{trial.number:03d}", train, log)
            trials = study.list_trials()
            failed = [t for t in trials if t["state"] == "fail"]
            if len(failed) == len(trials) >= MAX_FAILURES:
                raise UsageError(f"the first {len(failed)} trials failed: {failed[-1]['error']}")
        return study.list_trials()


def run_trial(
    study: SearchStudy,
    trial: Any,
    values: dict[str, Any],
    folder: Path,
    train: Train,
    log: Callable[[str], None],
) -> None:
    """Train one trial, unless it is estimated to need too much memory."""
    settings = study.settings
    report = TrialReport(partial(study.report, trial), monitor=settings.monitor)
    try:
        run_settings = settings.make_trial(values)
        if settings.budget_gib is not None:
            needed = predict_bytes(run_settings)
            trial.set_user_attr("predicted_gib", needed / GIB)
            if needed / GIB > settings.budget_gib:
                log(f"not trained: a step is estimated to need {format_bytes(needed)}")
                study.finish(trial, "pruned")  # Optuna takes it for the worst
                return
        train(run_settings, folder, report)
    except TrialPruned:
        study.finish(trial, "pruned")
        validations = study.list_trials()[trial.number]["validations"]
        log(f"pruned after {pluralize(validations, 'validation')}")
    except (DoesNotFitError, RunError, UsageError) as error:
        log(f"failed: {error}")
        study.finish(trial, "failed", error=summarize_error(error))
    else:
        study.finish(trial, "complete")


def predict_bytes(settings: TrainingSettings) -> int:
    """Return the bytes that a run is estimated to need of its device."""
    estimate = estimate_memory(settings, validates=False)
    if settings.trainer.accelerator == "cpu":
        return estimate.peak.allocated or 0
    return get_device_bytes(estimate) + CUDA_CONTEXT_BYTES
