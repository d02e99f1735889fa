"""`unet3d search`: find hyperparameters with Optuna."""

from pathlib import Path
from typing import Any

from unet3d.commands.compare import print_sweep_summary
from unet3d.commands.train import train
from unet3d.config.compose import ComposedConfig
from unet3d.config.settings.search import SearchSettings, parse_search
from unet3d.config.settings.training import TrainingSettings
from unet3d.errors import UsageError
from unet3d.report.run_report import write_report
from unet3d.search.trials import run_trials
from unet3d.stop_signals import SignalListener
from unet3d.text import format_columns
from unet3d.training.build_callbacks import check_search_monitor
from unet3d.training.callbacks.trial_report import TrialReport
from unet3d.training.run_folder import TRAINING_MARKERS, open_run_folder, write_records


def main(composed: ComposedConfig, folder: Path) -> int:
    """Train trial after trial, print and write what they reached, and compare their runs."""
    settings = parse_search(composed)
    check_search_monitor(settings.make_trial(settings.first_values), settings.monitor)
    with open_run_folder(  # a search goes on with what its folder holds
        folder, resume="auto", composition=composed.composition, log=print
    ) as own:
        if any(any(own.glob(name)) for name in TRAINING_MARKERS):
            raise UsageError(f"{own} holds a run, not a search: set another hydra.run.dir=")
        write_records(own, composed.composition.records)
        return search(settings, own)


def search(settings: SearchSettings, folder: Path) -> int:
    """Train trial after trial in a folder that is locked."""

    def try_settings(training: TrainingSettings, run_folder: Path, report: TrialReport) -> None:
        with SignalListener().listening() as signals:
            train(training, run_folder, signals, callbacks=[report], log=print)

    trials = run_trials(settings, folder, try_settings, print)
    best = find_best(settings, trials)
    write_report({"best": best, "trials": trials}, folder / "search.json")
    print("\n" + format_columns(make_rows(settings, trials), left=2 + len(settings.space)))
    if best is not None:
        overrides = " ".join(f"{key}={value}" for key, value in best["values"].items())
        print(f"\nbest {settings.monitor}: {best['value']:.4f}, trial {best['trial']}: {overrides}")
    print_sweep_summary(folder)
    return 1 if any(trial["state"] == "fail" for trial in trials) else 0


def find_best(settings: SearchSettings, trials: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the complete trial with the best value."""
    complete = [trial for trial in trials if trial["state"] == "complete"]
    sign = 1 if settings.mode == "max" else -1
    return max(complete, key=lambda trial: sign * trial["value"], default=None)


def make_rows(settings: SearchSettings, trials: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return a header, and one row per trial."""
    rows = [("trial", "state", *settings.space, settings.monitor, "validations", "predicted GiB")]
    for trial in trials:
        values = [format_number(trial["values"].get(key)) for key in settings.space]
        value, predicted = trial["value"], trial.get("predicted_gib")
        rows.append(
            (
                str(trial["trial"]),
                trial["state"],
                *values,
                "-" if value is None or trial["state"] != "complete" else f"{value:.4f}",
                str(trial["validations"]),
                "-" if predicted is None else f"{predicted:.2f}",
            )
        )
    return rows


def format_number(value: Any) -> str:
    """Return a value in few digits."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
