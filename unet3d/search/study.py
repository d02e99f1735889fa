"""The study of a search: an Optuna study in a file of the search's folder.

Hydra's own Optuna sweeper is tied to an old Optuna and cannot prune. Here each trial's values
depend on the seed, its number and the results before it alone, so a search that was killed proposes
what it would have proposed without.
"""

import json
from pathlib import Path
from types import TracebackType
from typing import Any

from unet3d.config.settings.search import Range, SearchSettings
from unet3d.errors import UsageError, need_packages

FILE = "search.db"


def import_optuna() -> Any:
    """Import Optuna, which an extra installs."""
    with need_packages("search", "optuna"):
        import optuna
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


class SearchStudy:
    """Asks for trials and takes their results; all of them are in the file at once."""

    def __init__(self, settings: SearchSettings, folder: Path):
        self.optuna, self.settings = import_optuna(), settings
        folder.mkdir(parents=True, exist_ok=True)
        self.storage = self.optuna.storages.RDBStorage(f"sqlite:///{folder / FILE}")
        direction = "maximize" if settings.mode == "max" else "minimize"
        self.study = self.optuna.create_study(
            storage=self.storage,
            study_name="search",
            direction=direction,
            load_if_exists=True,
            pruner=self._make_pruner(),
        )
        self._check_settings(folder)

    def __enter__(self) -> "SearchStudy":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.storage.remove_session()
        self.storage.engine.dispose()

    def _check_settings(self, folder: Path) -> None:
        """Refuse to go on with another search than the folder's."""
        settings = self.settings
        fixed = {
            "space": {key: str(dimension) for key, dimension in settings.space.items()},
            "overrides": list(settings.overrides),
            "monitor": settings.monitor,
            "mode": settings.mode,
        }
        saved = self.study.user_attrs.get("settings")
        if saved is None:
            self.study.set_user_attr("settings", fixed)
            return
        for key, value in fixed.items():
            if saved[key] != value:
                raise UsageError(
                    f"{folder} holds a search with {key} {json.dumps(saved[key])}, not "
                    f"{json.dumps(value)}: choose another hydra.run.dir="
                )

    def next_trial(self) -> Any | None:
        """Return a trial that was interrupted, or a new one; None if there are enough."""
        trials = self.study.get_trials(deepcopy=False)
        self.study.sampler = self._make_sampler(len(trials))
        running = [t for t in trials if t.state == self.optuna.trial.TrialState.RUNNING]
        if running:
            return self.optuna.trial.Trial(self.study, running[0]._trial_id)
        return self.study.ask() if len(trials) < self.settings.trials else None

    def draw_values(self, trial: Any) -> dict[str, Any]:
        """Return the value of each key in a trial."""
        values: dict[str, Any] = {}
        for key, dimension in self.settings.space.items():
            if not isinstance(dimension, Range):
                values[key] = trial.suggest_categorical(key, dimension)
            elif dimension.is_integer:
                options = {"log": dimension.log, "step": int(dimension.step or 1)}
                values[key] = trial.suggest_int(key, dimension.low, dimension.high, **options)
            else:
                options = {"log": dimension.log, "step": dimension.step}
                values[key] = trial.suggest_float(key, dimension.low, dimension.high, **options)
        return values

    def report(self, trial: Any, validation: int, value: float) -> bool:
        """Note the value of a validation; return whether the trial should stop."""
        known = self.storage.get_trial(trial._trial_id).intermediate_values
        if validation not in known and value == value:
            trial.report(value, validation)
        return self.settings.prune and trial.should_prune()

    def finish(self, trial: Any, outcome: str, **attributes: Any) -> None:
        """Note that a trial is complete, pruned or failed, and what there is to know about it."""
        for name, attribute in attributes.items():
            trial.set_user_attr(name, attribute)
        states = self.optuna.trial.TrialState
        state = {"complete": states.COMPLETE, "pruned": states.PRUNED, "failed": states.FAIL}
        frozen = self.storage.get_trial(trial._trial_id)
        best = max if self.settings.mode == "max" else min
        value = best(frozen.intermediate_values.values(), default=None)
        if outcome == "complete" and value is not None:
            self.study.tell(trial, value)
        else:  # no validation, no value
            self.study.tell(trial, state=state["failed" if outcome == "complete" else outcome])

    def list_trials(self) -> list[dict[str, Any]]:
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
            for trial in self.study.get_trials(deepcopy=False)
        ]

    def _make_sampler(self, number: int) -> Any:
        seed = (self.settings.seed + number) % 2**32
        return self.optuna.samplers.TPESampler(seed=seed, n_startup_trials=self.settings.startup)

    def _make_pruner(self) -> Any:
        return self.optuna.pruners.MedianPruner(
            n_startup_trials=self.settings.startup, n_warmup_steps=self.settings.prune_after
        )
