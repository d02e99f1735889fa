"""Log to MLflow, a file or a server; a run that is resumed continues there."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from unet3d.errors import UsageError
from unet3d.lit.loggers.held_rows import HeldRows, Row
from unet3d.lit.loggers.run_logger import RunFacts

MAX_PARAMETER = 6000
"""Characters of a parameter's value that MLflow takes."""


class RunMlflowLogger(Logger):
    """Log metrics by step, images as artifacts and hyperparameters as parameters.

    Metrics are sent when a checkpoint is saved. Lightning's MLFlowLogger would log the steps since
    the last checkpoint twice after a kill.
    """

    def __init__(
        self,
        save_dir: Path,
        *,
        experiment: str,
        tracking_uri: str | None = None,
        run_name: str | None = None,
    ):
        super().__init__()
        try:
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise UsageError("logger=mlflow needs pip install 'unet3d[mlflow]'") from error
        self.folder, self.experiment, self.run_name = Path(save_dir), experiment, run_name
        self.tracking_uri = tracking_uri or f"sqlite:///{self.folder.absolute() / 'mlflow.db'}"
        self.make_client, self.client = MlflowClient, None
        self.rows = HeldRows(self.folder / "mlflow", self._send)

    @property
    def name(self) -> str:
        """Return the experiment's name."""
        return self.experiment

    @property
    def version(self) -> str | None:
        """Return the run's id."""
        return self.rows.run_id

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Log parameters; a resumed run has the same."""
        for name, value in params.items():
            self._call("log_param", name, str(value)[:MAX_PARAMETER])

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add values to the row of a step."""
        self.rows.add({name: float(value) for name, value in metrics.items()}, step)

    def start(self, facts: RunFacts, step: int) -> None:
        """Open the run, or continue it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.client = client = self.make_client(tracking_uri=self.tracking_uri)
        if self.rows.run_id is None:
            known = client.get_experiment_by_name(self.experiment)
            if known is not None:
                experiment_id = known.experiment_id
            else:
                artifacts = None
                if self.tracking_uri.startswith("sqlite:"):
                    artifacts = (self.folder.absolute() / "mlflow" / "artifacts").as_uri()
                experiment_id = client.create_experiment(self.experiment, artifacts)
            run_name = self.run_name or self.folder.resolve().name
            self.rows.run_id = client.create_run(experiment_id, run_name=run_name).info.run_id
        client.update_run(self.rows.run_id, status="RUNNING")
        self.log_hyperparams(facts.choices)
        self._call("log_text", facts.config, "config.yaml")

    def log_image(self, name: str, image: np.ndarray, step: int) -> None:
        """Add an image to the row of a step."""
        self.rows.add_image(name, image, step)

    def forget_after(self, step: int) -> None:
        """Continue the folder's run, if there is one."""
        self.rows.continue_from(step)

    def flush(self) -> None:
        """Send the rows of completed steps."""
        if self.client is not None:
            self.rows.flush()

    def close(self, *, finished: bool) -> None:
        """End the run; the last row of one that may be resumed is not complete."""
        if self.client is not None:
            self.rows.flush(all_rows=finished)
            self._call("set_terminated", "FINISHED" if finished else "KILLED")
            self.client = None

    def save(self) -> None:
        """Do nothing: rows are sent with the next checkpoint."""

    def _send(self, step: int, row: Row) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = {n: v for n, v in row.items() if not isinstance(v, Path)}
        self._call("log_batch", [Metric(n, v, now, step) for n, v in metrics.items()])
        for name, value in row.items():
            if isinstance(value, Path):
                self._call("log_artifact", str(value), f"images/{name}")

    def _call(self, method: str, *arguments: Any) -> None:
        getattr(self.client, method)(self.rows.run_id, *arguments)
