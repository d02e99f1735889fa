"""Log to Weights & Biases, online or offline; a run that is resumed continues there."""

import json
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal

import yaml
from lightning.pytorch.utilities import rank_zero_only

from unet3d.errors import UsageError, need_packages
from unet3d.lit.loggers.append_only_file import AppendOnlyFile
from unet3d.lit.loggers.held_rows import HeldRowsLogger, Row, from_json, to_json
from unet3d.lit.loggers.run_logger import RunFacts
from unet3d.lit.loggers.wandb_file import read_history

STEP = "trainer/global_step"


class RunWandbLogger(HeldRowsLogger):
    """Log rows of W&B's history under the step of the trainer.

    Rows are sent when a checkpoint is saved. Lightning's WandbLogger would log the steps since the
    last checkpoint twice after a kill, and lose what W&B has not written yet: here a journal keeps
    all rows, and a resumed run sends what W&B's files do not have.
    """

    def __init__(
        self,
        save_dir: Path,
        *,
        project: str,
        mode: Literal["offline", "online"] = "offline",
        entity: str | None = None,
        run_name: str | None = None,
    ):
        folder = Path(save_dir)
        super().__init__(folder / "wandb" / "held", project)
        with need_packages("logger=wandb", "wandb"):
            import wandb
        if mode not in ("online", "offline"):
            raise UsageError(f"logger.wandb.mode is online or offline, got {mode}")
        self.wandb, self.folder = wandb, folder
        self.project, self.mode, self.entity, self.run_name = project, mode, entity, run_name
        self.run: Any = None

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Set the run's config."""
        self.run.config.update(dict(params), allow_val_change=True)

    def start(self, facts: RunFacts, step: int) -> None:
        """Open the run, or continue it; its config has the hyperparameters first."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.rows.run_id = self.rows.run_id or token_hex(4)
        self.run = self.wandb.init(
            id=self.rows.run_id,
            resume="allow",
            dir=str(self.folder),
            project=self.project,
            mode=self.mode,
            entity=self.entity,
            name=self.run_name or self.folder.resolve().name,
            settings=self.wandb.Settings(silent=True, console="off"),
        )
        self.run.define_metric(STEP)
        self.run.define_metric("*", step_metric=STEP)
        self.log_hyperparams({**facts.choices, "config": yaml.safe_load(facts.config)})
        self.is_open = True
        self._send_lost_rows()

    def end(self, *, finished: bool) -> None:
        """End the run; a run that is resumed continues it."""
        self.run.finish(exit_code=0 if finished else 1)

    def send(self, step: int, row: Row) -> None:
        """Note a row in the journal, and give it to W&B."""
        self._get_journal().write(f"{json.dumps({'step': step, 'row': to_json(row)})}\n".encode())
        self._log(step, row)

    def _send_lost_rows(self) -> None:
        """Send the rows of earlier processes that W&B's files do not have."""
        path = self._get_journal().path
        if not path.exists():
            return
        known = {row.get(STEP) for row in read_history(self.folder, str(self.rows.run_id))}
        lines = map(json.loads, path.read_text("utf-8").splitlines())
        rows = {line["step"]: line["row"] for line in lines}
        for step, row in rows.items():
            if step not in known:
                self._log(step, from_json(row))
        self.rows.skip_to(max(rows, default=-1) + 1)

    def _log(self, step: int, row: Row) -> None:
        image = self.wandb.Image
        values = {n: image(str(v)) if isinstance(v, Path) else v for n, v in row.items()}
        self.run.log({**values, STEP: step}, step=step)

    def _get_journal(self) -> AppendOnlyFile:
        return AppendOnlyFile(self.rows.folder / f"{self.rows.run_id}.jsonl")
