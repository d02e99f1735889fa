"""Read what W&B and MLflow were given, from their files."""

from pathlib import Path
from typing import Any

from unet3d.lit.loggers.wandb_file import read_history

Points = list[tuple[int, str, Any]]


def read_wandb(folder: Path) -> tuple[set[str], Points]:
    """Return the ids of all offline runs in a folder, and their (step, name, value)."""
    ids = {path.stem for path in folder.glob("wandb/offline-run-*/*.wandb")}
    points = []
    for row in read_history(folder, "*"):
        step = row.pop("trainer/global_step")
        points += [(step, name, v) for name, v in row.items() if not name.startswith("_")]
    return ids, points


def read_mlflow(folder: Path) -> tuple[set[str], Points]:
    """Return the ids of all runs in a folder's database, and their (step, name, value)."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("unet3d")
    assert experiment is not None
    ids, points = set(), []
    for run in client.search_runs([experiment.experiment_id]):
        ids.add(run.info.run_id)
        for name in run.data.metrics:
            history = client.get_metric_history(run.info.run_id, name)
            points += [(m.step, name, m.value) for m in history]
    return ids, points
