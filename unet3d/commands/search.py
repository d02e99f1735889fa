"""`unet3d search`: find hyperparameters with Optuna, as a study in a file of the search's folder.

Hydra's own Optuna sweeper is tied to an old Optuna and cannot prune. Here each trial's values
depend on the seed, its number and the results before it alone, so a search that was killed proposes
what it would have proposed without.
"""

import json
import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import product
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

from unet3d.commands.compare import print_sweep_summary
from unet3d.commands.train import train
from unet3d.config.compose import (
    ComposedConfig,
    compose_config,
    format_overrides,
    protect_overrides,
    to_yaml_literal,
)
from unet3d.config.fields import integer, number, read, read_settings
from unet3d.errors import (
    DoesNotFitError,
    RunError,
    UsageError,
    explain_missing_packages,
    summarize_error,
)
from unet3d.memory.estimate import add_context_bytes
from unet3d.memory.fit import estimate_configured_step
from unet3d.report.run_report import write_report
from unet3d.signals import SignalListener
from unet3d.step.config import StepConfig
from unet3d.text import GIB, format_bytes, format_columns, pluralize
from unet3d.training.callbacks.stopping import check_mode
from unet3d.training.callbacks.trials import PrunedTrialError, PruningCallback
from unet3d.training.config import TrainConfig, parse_train_config
from unet3d.training.run_folder import TRAINING_MARKERS, open_run_folder

OWN_KEYS = "space trials startup budget_gib monitor mode prune prune_after".split()
"""Keys that `unet3d train` does not have."""


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """What to vary, and how long to search."""

    overrides: tuple[str, ...]  # of every trial
    space: Mapping[str, Any]  # by key: a distribution of Optuna
    trials: Annotated[int, integer(">= 1")]
    startup: Annotated[int, integer(">= 1")]
    budget_gib: Annotated[float | None, number("above 0")]
    monitor: str
    mode: Literal["max", "min"]
    prune: bool
    prune_after: Annotated[int, integer(">= 1")]
    seed: int

    def __post_init__(self):
        check_mode("mode", self.monitor, self.mode)

    @property
    def choose(self) -> Callable[..., Any]:
        """Return what chooses the best of several values."""
        return max if self.mode == "max" else min

    def make_trial(self, values: Mapping[str, Any]) -> TrainConfig:
        """Return the settings of a trial with these values, which goes on where it was stopped."""
        own = protect_overrides([f"{key}={value}" for key, value in values.items()], sweep=False)
        composed = compose_config([*self.overrides, *own], "train")
        return replace(parse_train_config(composed), resume="auto")


def read_config(composed: ComposedConfig) -> SearchConfig:
    """Read the config, and refuse what no trial could train with or log."""
    config = composed.config
    training = parse_train_config(composed)
    if training.trainer.several_processes:
        raise UsageError("search trains each trial in one process: set trainer.devices=1")
    if training.fold is None:
        raise UsageError("search needs validation cases, fold=none has none")
    if training.resume is not None:
        raise UsageError("search resumes automatically: remove resume=")
    words = composed.composition.overrides
    overrides = tuple(w for w in words if re.split("[.=]", w.lstrip("+~"))[0] not in OWN_KEYS)
    space = read_space(read(config, "space"))
    settings = read_settings(
        SearchConfig, config, overrides=overrides, space=space, seed=training.seed
    )
    # The lowest number of a range stands for all of them.
    choices = {key: getattr(d, "choices", None) or (d.low,) for key, d in space.items()}
    first = {key: values[0] for key, values in choices.items()}
    settings.make_trial(first)
    for key, values in choices.items():
        for value in values[1:]:
            settings.make_trial(first | {key: value})
    return settings


def read_space(space: Any) -> dict[str, Any]:
    """Return a distribution of Optuna for each key."""
    if isinstance(space, str):
        if not Path(space).is_file():
            raise UsageError(f"space: no file {Path(space).absolute()}")
        space = yaml.safe_load(Path(space).read_text("utf-8"))
    if not isinstance(space, dict) or not space:
        raise UsageError(
            "space must be keys with what to try, as in space={pool:[max,median]}, or a file of "
            f"these, got {space!r}"
        )
    with explain_missing_packages("search", "optuna"):
        import_module("optuna")
    distributions = {}
    for key, values in space.items():
        try:
            distributions[str(key)] = make_distribution(values)
        except (ArithmeticError, KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"space.{key} must be a list of values, or {{low: NUMBER, high: NUMBER}} with "
                f"log: true or step: NUMBER, got {values!r}: {summarize_error(error)}"
            ) from error
    return distributions


def make_distribution(values: Any) -> Any:
    """Return Optuna's distribution of the values of a list, or of the numbers of a range."""
    from optuna import distributions

    if isinstance(values, list):
        return distributions.CategoricalDistribution(tuple(map(to_yaml_literal, values)))
    is_integer = isinstance(values["low"], int) and isinstance(values["high"], int)
    kind = distributions.IntDistribution if is_integer else distributions.FloatDistribution
    return kind(**values)


def main(composed: ComposedConfig, folder: Path) -> int:
    """Train trial after trial, print and write what they reached, and compare their runs."""
    settings = read_config(composed)
    # A search goes on with what its folder holds.
    with open_run_folder(folder, resume="auto", log=print):
        if any(any(folder.glob(name)) for name in TRAINING_MARKERS):
            raise UsageError(f"{folder} holds a run, not a search: set another output=")
        trials = run_trials(settings, folder)
        best = settings.choose(
            (trial for trial in trials if trial["state"] == "complete"),
            key=lambda trial: trial["value"],
            default=None,
        )
        write_report({"best": best, "trials": trials}, folder / "search.json")
        print("\n" + format_columns(make_rows(settings, trials), left=2 + len(settings.space)))
        if best is not None:
            overrides = format_overrides(best["values"])
            reached = f"{best['value']:.4f}, trial {best['trial']}"
            print(f"\nbest {settings.monitor}: {reached}: {overrides}")
        print_sweep_summary(folder)
    return 1 if any(trial["state"] == "fail" for trial in trials) else 0


def run_trials(settings: SearchConfig, folder: Path) -> list[dict[str, Any]]:
    """Train until there are enough trials; return all of them."""
    with open_study(settings, folder) as study:
        from optuna.trial import TrialState

        while (trial := get_next_trial(study, settings)) is not None:
            print(f"\ntrial {trial.number}: {format_overrides(trial.params)}")
            state = run_trial(study, trial, settings, folder / f"trial-{trial.number:03d}")
            results = get_results(study, trial).values()
            value = settings.choose(results) if state == "COMPLETE" else None
            study.tell(trial, value, state=TrialState[state])
            trials = list_trials(study)
            if len(trials) > 2 and all(t["state"] == "fail" for t in trials):
                raise UsageError(f"the first {len(trials)} trials failed: {trials[-1]['error']}")
        return list_trials(study)


def run_trial(study: Any, trial: Any, settings: SearchConfig, folder: Path) -> str:
    """Train one trial, unless it is estimated to need too much memory; return how it ended."""

    def report(validation: int, value: float) -> bool:
        """Note the value of a validation, once; return whether the trial should stop."""
        if validation not in get_results(study, trial) and value == value:
            trial.report(value, validation)
        return settings.prune and trial.should_prune()

    try:
        run_settings = settings.make_trial(trial.params)
        if settings.budget_gib is not None:
            needed = estimate_run_bytes(run_settings.step)
            trial.set_user_attr("predicted_gib", needed / GIB)
            if needed / GIB > settings.budget_gib:
                print(f"not trained: a step is estimated to need {format_bytes(needed)}")
                return "PRUNED"  # Optuna takes it for the worst
        callback = PruningCallback(report, monitor=settings.monitor)
        with SignalListener().listening() as signals:
            train(run_settings, folder, signals, callbacks=[callback], log=print)
        if not get_results(study, trial):
            raise RunError(f"the run ended before any validation logged {settings.monitor}")
    except PrunedTrialError:
        print(f"pruned after {pluralize(len(get_results(study, trial)), 'validation')}")
        return "PRUNED"
    except (DoesNotFitError, RunError, UsageError) as error:
        print(f"failed: {error}")
        trial.set_user_attr("error", summarize_error(error))
        return "FAIL"
    return "COMPLETE"


def estimate_run_bytes(step: StepConfig) -> int:
    """Return the bytes that a run is estimated to need of its device."""
    peak = estimate_configured_step(step).run_peak
    if step.accelerator == "cpu":
        return peak.allocated or 0
    return add_context_bytes(peak)


@contextmanager
def open_study(settings: SearchConfig, folder: Path) -> Generator[Any]:
    """Open the study of a folder, or begin it; refuse to go on with another search."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    folder.mkdir(parents=True, exist_ok=True)
    storage = optuna.storages.RDBStorage(f"sqlite:///{folder / 'search.db'}")
    try:
        study = optuna.create_study(
            storage=storage,
            study_name="search",
            direction="maximize" if settings.mode == "max" else "minimize",
            load_if_exists=True,
            pruner=optuna.pruners.MedianPruner(
                n_startup_trials=settings.startup, n_warmup_steps=settings.prune_after
            ),
        )
        fixed = {
            "space": {key: str(distribution) for key, distribution in settings.space.items()},
            "overrides": list(settings.overrides),
            "monitor": settings.monitor,
            "mode": settings.mode,
        }
        saved = study.user_attrs.get("settings", fixed)
        for key, value in fixed.items():
            if saved[key] != value:
                raise UsageError(
                    f"{folder} holds a search with {key} {json.dumps(saved[key])}, not "
                    f"{json.dumps(value)}: choose another output="
                )
        study.set_user_attr("settings", fixed)
        yield study
    finally:
        storage.remove_session()
        storage.engine.dispose()


def get_next_trial(study: Any, settings: SearchConfig) -> Any | None:
    """Return a trial that was interrupted, or a new one; None if there are enough.

    Each combination of a space of lists is tried once if there are trials for all.
    """
    import optuna

    trials = study.get_trials(deepcopy=False)
    study.sampler = optuna.samplers.TPESampler(
        seed=(settings.seed + len(trials)) % 2**32, n_startup_trials=settings.startup
    )
    running = [t for t in trials if t.state == optuna.trial.TrialState.RUNNING]
    if running:
        trial = optuna.trial.Trial(study, running[0]._trial_id)
        # As ask() does, which may have been killed before it had all values.
        for key, distribution in settings.space.items():
            trial._suggest(key, distribution)
        return trial
    if len(trials) >= settings.trials:
        return None
    choices = [getattr(distribution, "choices", ()) for distribution in settings.space.values()]
    if 0 < prod(map(len, choices)) <= settings.trials:
        tried = [trial.params for trial in trials]
        grid = (dict(zip(settings.space, values, strict=True)) for values in product(*choices))
        values = next((values for values in grid if values not in tried), None)
        if values is None:
            return None
        study.enqueue_trial(values)
    return study.ask(settings.space)


def get_results(study: Any, trial: Any) -> dict[int, float]:
    """Return the value of each validation of a trial."""
    return study.get_trials(deepcopy=False)[trial.number].intermediate_values


def list_trials(study: Any) -> list[dict[str, Any]]:
    """Return what is known of each trial, for people and programs."""
    return [
        {
            "trial": trial.number,
            "state": trial.state.name.lower(),
            "value": trial.value,
            "validations": len(trial.intermediate_values),
            "values": dict(trial.params),
            **trial.user_attrs,
        }
        for trial in study.get_trials(deepcopy=False)
    ]


def make_rows(settings: SearchConfig, trials: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return a header, and one row per trial."""
    rows = [("trial", "state", *settings.space, settings.monitor, "validations", "predicted GiB")]
    for trial in trials:
        values = [trial["values"].get(key) for key in settings.space]
        value, predicted = trial["value"], trial.get("predicted_gib")
        shown = [f"{v:.3g}" if isinstance(v, float) else str(v) for v in values]
        score = "-" if value is None or trial["state"] != "complete" else f"{value:.4f}"
        counts = str(trial["validations"]), "-" if predicted is None else f"{predicted:.2f}"
        rows.append((str(trial["trial"]), trial["state"], *shown, score, *counts))
    return rows
