"""A disk that is full or gone while training: the run goes on, and says so once."""

import sys
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.tensorboard.writer import FileWriter

from unet3d.lit.callbacks.checkpoints import AtomicCheckpointIO


class FaultTolerantCheckpointIO(AtomicCheckpointIO):
    """A checkpoint that cannot be written does not end the run, and is tried again in its turn.

    The one before it stays, since a checkpoint is whole or not there.
    """

    def __init__(self) -> None:
        self.missing: dict[str, str] = {}  # by name: why the newest one could not be written

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        path = Path(path)
        try:
            super().save_checkpoint(checkpoint, path, storage_options)
        except (OSError, RuntimeError) as error:  # torch.save hides the first behind the second
            cause = error if isinstance(error, OSError) else error.__context__
            if not isinstance(cause, OSError):
                raise
            before = "the one before it stays" if path.exists() else "there is none before it"
            line = f"{path}: {cause.strerror}"
            if path.name not in self.missing:
                warn_once(f"{line}; {before}, training goes on")
            self.missing[path.name] = f"{line}; {before}"
        else:
            self.missing.pop(path.name, None)


class FaultTolerantTensorBoardLogger(TensorBoardLogger):
    """Curves that cannot be written do not end the run."""

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """TensorBoard's writer."""
        fresh = self._experiment is None
        writer = super().experiment
        if fresh:
            make_fault_tolerant(writer._get_file_writer())
        return writer

    def save(self) -> None:
        """No hparams.yaml: a run has its config.yaml."""

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Training is over, but figures are still to come: see Dashboard."""
        if self._experiment is not None:
            self.experiment.flush()


class AppendOnlyEventFile:
    """An event file that takes whole records or nothing.

    TensorBoard writes in a thread that an error ends with a traceback; the run ended when it next
    had something to log.
    """

    def __init__(self, path: Path):
        self.path = path
        self.closed = self.said = False

    def write(self, record: bytes) -> None:
        """Append a record, or drop it."""
        try:
            with self.path.open("ab", buffering=0) as file:
                end = file.tell()
                try:
                    while record:
                        record = record[file.write(record) :]
                except OSError:
                    file.truncate(end)  # nobody could read on behind half a record
                    raise
        except OSError as error:
            if not self.said:
                self.said = True
                warn_once(
                    f"{self.path.parent}: {error.strerror}; curves have gaps, training goes on"
                )

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """No file stays open."""
        self.closed = True


def make_fault_tolerant(writer: FileWriter) -> None:
    """Let a writer go on when its file cannot be written."""
    events: Any = writer.event_writer
    records = events._async_writer._writer
    records._writer.close()
    records._writer = AppendOnlyEventFile(Path(events._file_name))


def warn_once(line: str) -> None:
    """On standard error, beside a progress bar or from a thread."""
    print(f"unet3d: {line}", file=sys.stderr)
