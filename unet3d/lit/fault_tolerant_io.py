"""Checkpoints and event files that survive a full disk: training continues with a warning."""

import sys
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from unet3d.lit.callbacks.checkpoints import AtomicCheckpointIO
from unet3d.lit.lightning_internals import get_file_writer, has_writer, replace_event_file


class FaultTolerantCheckpointIO(AtomicCheckpointIO):
    """Continue training when a checkpoint cannot be written; the next save tries again.

    As saving is atomic, the previous checkpoint stays intact.
    """

    def __init__(self) -> None:
        self.failed_saves: dict[str, str] = {}  # checkpoint name: why its last save failed

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        path = Path(path)
        try:
            super().save_checkpoint(checkpoint, path, storage_options)
        except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError from OSError
            cause = error if isinstance(error, OSError) else error.__context__
            if not isinstance(cause, OSError):
                raise
            kept = "keeping the previous checkpoint" if path.exists() else "no previous checkpoint"
            message = f"{path}: {cause.strerror}; {kept}"
            if path.name not in self.failed_saves:
                warn(f"{message}; training continues")
            self.failed_saves[path.name] = message
        else:
            self.failed_saves.pop(path.name, None)


class FaultTolerantTensorBoardLogger(TensorBoardLogger):
    """Continue training when metrics cannot be written."""

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """Return TensorBoard's writer."""
        created = has_writer(self)
        writer = super().experiment
        if not created:
            replace_event_file(get_file_writer(writer), AppendOnlyEventFile)
        return writer

    def save(self) -> None:
        """Write no hparams.yaml: a run has its config.yaml."""

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Flush, but stay open: Dashboard writes final metrics after training."""
        if has_writer(self):
            self.experiment.flush()


class AppendOnlyEventFile:
    """An event file to which a record is appended completely or not at all.

    With TensorBoard's own file an error ends the writer thread with a traceback, and the next log
    call ends the run.
    """

    def __init__(self, path: Path):
        self.path = path
        self.closed = self.warned = False

    def write(self, record: bytes) -> None:
        """Append a record; drop it if the disk is full."""
        try:
            with self.path.open("ab", buffering=0) as file:
                end = file.tell()
                try:
                    while record:
                        record = record[file.write(record) :]
                except OSError:
                    file.truncate(end)  # a partial record would hide all later ones
                    raise
        except OSError as error:
            if not self.warned:
                self.warned = True
                warn(
                    f"{self.path.parent}: {error.strerror}; some metrics were not logged; training "
                    "continues"
                )

    def flush(self) -> None:
        """Do nothing: writes are not buffered."""

    def close(self) -> None:
        """Mark as closed; the file is open only while a record is written."""
        self.closed = True


def warn(message: str) -> None:
    """Print to standard error, which works next to a progress bar and from a thread."""
    print(f"unet3d: {message}", file=sys.stderr)
