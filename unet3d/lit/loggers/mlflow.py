"""Log to MLflow, a file or a server; a run that is resumed continues there."""

import time
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from unet3d.errors import need_packages
from unet3d.lit.loggers.held_rows import HeldRowsLogger, Row
from unet3d.lit.loggers.run_logger import RunFacts

MAX_PARAMETER = 6000
"""Characters of a parameter's value that MLflow takes."""


class RunMlflowLogger(HeldRowsLogger):
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
        folder = Path(save_dir)
        super().__init__(folder / "mlflow", experiment)
        with need_packages("logger=mlflow", "mlflow"):
            from mlflow.tracking import MlflowClient
        self.folder, self.experiment, self.run_name = folder, experiment, run_name
        self.tracking_uri = tracking_uri or f"sqlite:///{self.folder.absolute() / 'mlflow.db'}"
        self.make_client, self.client = MlflowClient, None

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Log parameters; a resumed run has the same."""
        for name, value in params.items():
            self._call("log_param", name, str(value)[:MAX_PARAMETER])

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
        else:
            self.rows.skip_to(self._find_next_step(self.rows.run_id))
        client.update_run(self.rows.run_id, status="RUNNING")
        self.log_hyperparams(facts.choices)
        self._call("log_text", facts.config, "config.yaml")
        self.is_open = True

    def end(self, *, finished: bool) -> None:
        """Mark the run as finished, or as killed: a run that is resumed continues it."""
        self._call("set_terminated", "FINISHED" if finished else "KILLED")

    def send(self, step: int, row: Row) -> None:
        """Log a row's metrics and its images."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        for name, value in row.items():  # first: a row whose metrics are there is complete
            if isinstance(value, Path):
                self._call("log_artifact", str(value), f"images/{name}")
        metrics = {n: v for n, v in row.items() if not isinstance(v, Path)}
        self._call("log_batch", [Metric(n, v, now, step) for n, v in metrics.items()])

    def _find_next_step(self, run_id: str) -> int:
        """Return the step after the last held row that was sent: a kill may leave it unnoted."""
        assert self.client is not None
        rows = self.rows.rows.values()
        names = {n for row in rows for n, value in row.items() if not isinstance(value, Path)}
        histories = [self.client.get_metric_history(run_id, name) for name in names]
        return 1 + max((point.step for points in histories for point in points), default=-1)

    def _call(self, method: str, *arguments: Any) -> None:
        getattr(self.client, method)(self.rows.run_id, *arguments)
