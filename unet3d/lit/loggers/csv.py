"""Log to files that need no program: metrics.csv, images as PNG, hyperparameters as YAML.

Lightning's CSVLogger deletes the file of an earlier run in the same folder, and holds all rows in
memory.
"""

import csv
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from unet3d.files import atomic_write, name_file
from unet3d.lit.loggers.append_only_file import AppendOnlyFile
from unet3d.lit.loggers.image_file import write_image
from unet3d.lit.loggers.run_logger import RunFacts
from unet3d.text import format_cell


class CsvLogger(Logger):
    """Write a row per step, with a column per metric; a full disk does not stop the run."""

    def __init__(self, save_dir: Path, name: str = "csv"):
        super().__init__()
        self.folder, self.directory_name = Path(save_dir) / name, name
        self.path = self.folder / "metrics.csv"
        self.file = AppendOnlyFile(self.path)
        self.columns: list[str] = []
        self.row: dict[str, Any] = {}  # of the current step
        self.is_written = True  # whether the file has the current row
        self.size: int | None = None  # of the file without the current row, once it was written

    @property
    def name(self) -> str:
        """Return the name of the folder."""
        return self.directory_name

    @property
    def version(self) -> str:
        """Return an empty name: a run has one log."""
        return ""

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Write hparams.yaml."""
        self._write(self.folder / "hparams.yaml", yaml.safe_dump(dict(params), sort_keys=False))

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add values to the row of a step."""
        if self.row.get("step") != step:
            self.flush()
            self.row = dict[str, Any](step=step)
            self.size = None
        self.row |= {format_cell(key): float(value) for key, value in metrics.items()}
        self.is_written = False

    def start(self, facts: RunFacts, step: int) -> None:
        """Write the hyperparameters; the run has its config.yaml."""
        self.log_hyperparams(facts.choices)

    def log_image(self, name: str, image: np.ndarray, step: int) -> None:
        """Write images/NAME/STEP.png."""
        try:
            write_image(self.folder, name, image, step)
        except OSError as error:
            self.file.warn(error)

    def forget_after(self, step: int) -> None:
        """Delete the rows from `step` on; the last row left may still get values."""
        if not self.path.exists():
            return
        with name_file(self.path):
            rows = self._read_rows()
        self.columns = list(rows[0]) if rows else []
        rows = [row for row in rows if row["step"] and int(row["step"]) < step]
        last = rows.pop() if rows else None
        self._rewrite(rows)
        if last is not None:
            self.row = {**{k: v for k, v in last.items() if v}, "step": int(last["step"])}
            self.is_written = False
            self.flush()

    @rank_zero_only
    def flush(self) -> None:
        """Write the row of the current step; a later call replaces it if it has more values."""
        if self.is_written:
            return
        try:
            if self.size is not None:
                os.truncate(self.path, self.size)
            if new := [column for column in self.row if column not in self.columns]:
                self._add_columns(new)
            self.size = self.path.stat().st_size
        except OSError as error:
            self.file.warn(error)
            return
        self.file.write(self._format(self.row).encode())
        self.is_written = True

    def close(self, *, finished: bool) -> None:
        """Write the last row."""
        self.flush()

    def save(self) -> None:
        """Do nothing: the current step may have more values."""

    def finalize(self, status: str) -> None:
        """Write the last row; final metrics come later."""
        self.flush()

    def _add_columns(self, new: list[str]) -> None:
        """Rewrite the file with more columns: a few times, when metrics appear first."""
        rows = self._read_rows() if self.path.exists() else []
        self.columns += new
        self._rewrite(rows)

    def _read_rows(self) -> list[dict[str, Any]]:
        with self.path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        lines = self._format(dict(zip(self.columns, self.columns, strict=True)))
        self._write(self.path, lines + "".join(map(self._format, rows)))

    def _format(self, row: Mapping[str, Any]) -> str:
        line = io.StringIO()
        csv.writer(line, lineterminator="\n").writerow([row.get(key, "") for key in self.columns])
        return line.getvalue()

    def _write(self, path: Path, content: str) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as draft:
                draft.write_bytes(content.encode())
        except OSError as error:
            self.file.warn(error)
