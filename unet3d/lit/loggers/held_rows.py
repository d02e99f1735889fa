"""Log each step once to a service that cannot take anything back.

A killed run continues from its last checkpoint and logs the steps since then again. So rows wait
here until a checkpoint contains them. The row of the current step may get more values: it waits in
a file, with its images.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from unet3d.errors import summarize_error
from unet3d.files import atomic_write
from unet3d.lit.loggers.append_only_file import warn
from unet3d.lit.loggers.image_file import write_image

Row = dict[str, float | Path]


def to_json(row: Row) -> dict[str, Any]:
    """Return a row for a file."""
    return {name: str(v) if isinstance(v, Path) else v for name, v in row.items()}


def from_json(row: Mapping[str, Any]) -> Row:
    """Return a row that was in a file."""
    return {name: Path(v) if isinstance(v, str) else v for name, v in row.items()}


class HeldRows:
    """Rows by step, which `send` takes in order, each once; images are paths of PNG files.

    `folder` keeps what the next process needs: the id of the run there, the first step that was
    not sent, and the rows that were not. If the process is killed between sending rows and writing
    this file, they are sent twice, unless the logger knows better (`skip_to`).
    """

    def __init__(self, folder: Path, send: Callable[[int, Row], None]):
        self.folder, self.send = folder, send
        self.run_id: str | None = None
        self.next_step = 0  # the first that was not sent
        self.rows: dict[int, Row] = {}
        self.warned = False

    def continue_from(self, step: int) -> None:
        """Continue the log of the folder's earlier run, which logs `step` and later again."""
        if step == 0 or not self._path.exists():
            return
        saved = json.loads(self._path.read_text("utf-8"))
        self.run_id, self.next_step = saved["run_id"], saved["next_step"]
        self.rows = {int(n): from_json(row) for n, row in saved["rows"].items() if int(n) < step}

    def skip_to(self, step: int) -> None:
        """Note that all rows before `step` were sent."""
        self.next_step = max(self.next_step, step)
        self.rows = {n: row for n, row in self.rows.items() if n >= step}

    def add(self, metrics: Mapping[str, float | Path], step: int | None) -> None:
        """Add values to the row of a step, unless it was sent."""
        if step is not None and step >= self.next_step:
            self.rows.setdefault(step, {}).update(metrics)

    def add_image(self, name: str, image: np.ndarray, step: int) -> None:
        """Write an image to a file, and add it to the row of a step."""
        try:
            path = write_image(self.folder, name, image, step)
        except OSError as error:
            self._warn(summarize_error(error))
        else:
            self.add({name: path}, step)

    def flush(self, *, all_rows: bool = False) -> None:
        """Send all rows but that of the current step, or `all_rows`, and note what was sent."""
        steps = sorted(self.rows)
        for step in steps if all_rows else steps[:-1]:
            try:
                self.send(step, self.rows[step])
            except Exception as error:  # of any service; the next flush tries again
                self._warn(summarize_error(error))
                break
            del self.rows[step]
            self.next_step = step + 1
        rows = {step: to_json(row) for step, row in self.rows.items()}
        content = {"run_id": self.run_id, "next_step": self.next_step, "rows": rows}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with atomic_write(self._path) as draft:
                draft.write_text(json.dumps(content), "utf-8")
        except OSError as error:
            self._warn(summarize_error(error))

    @property
    def _path(self) -> Path:
        return self.folder / "held.json"

    def _warn(self, reason: str) -> None:
        if not self.warned:
            self.warned = True
            warn(f"{self.folder}: {reason}; some metrics may be missing; training continues")


class HeldRowsLogger(Logger):
    """What loggers of services share: rows are sent when a checkpoint is saved.

    Subclasses open their run in `start`, send rows with `send`, and end the run in `end`.
    """

    def __init__(self, folder: Path, name: str):
        super().__init__()
        self.rows = HeldRows(folder, self.send)
        self.service_name, self.is_open = name, False

    @property
    def name(self) -> str:
        """Return the name of the project or experiment."""
        return self.service_name

    @property
    def version(self) -> str | None:
        """Return the run's id."""
        return self.rows.run_id

    def send(self, step: int, row: Row) -> None:
        """Give a row to the service."""
        raise NotImplementedError

    def end(self, *, finished: bool) -> None:
        """End the service's run."""
        raise NotImplementedError

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add values to the row of a step."""
        self.rows.add({name: float(value) for name, value in metrics.items()}, step)

    def log_image(self, name: str, image: np.ndarray, step: int) -> None:
        """Add an image to the row of a step."""
        self.rows.add_image(name, image, step)

    def forget_after(self, step: int) -> None:
        """Continue the folder's run, if there is one."""
        self.rows.continue_from(step)

    def flush(self) -> None:
        """Send the rows of completed steps."""
        if self.is_open:
            self.rows.flush()

    def close(self, *, finished: bool) -> None:
        """End the run; the last row of one that may be resumed is not complete."""
        if self.is_open:
            self.rows.flush(all_rows=finished)
            self.end(finished=finished)
            self.is_open = False

    def save(self) -> None:
        """Do nothing: rows are sent with the next checkpoint."""
