"""Checkpoints that survive a full disk: training continues with a warning."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from unet3d.errors import get_advice
from unet3d.lit.callbacks.checkpoints import AtomicCheckpointIO
from unet3d.lit.loggers.append_only_file import warn


class FaultTolerantCheckpointIO(AtomicCheckpointIO):
    """Continue training when a checkpoint cannot be written; the next save tries again.

    As saving is atomic, the previous checkpoint stays intact.
    """

    def __init__(self) -> None:
        self.failed_saves: dict[str, str] = {}  # checkpoint name: why its last save failed

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        super_save = super().save_checkpoint
        self._try(Path(path), lambda: super_save(checkpoint, path, storage_options))

    def copy_checkpoint(self, path: Path, target: Path) -> None:
        super_copy = super().copy_checkpoint
        self._try(target, lambda: super_copy(path, target))

    def _try(self, path: Path, write: Callable[[], None]) -> None:
        """Write a checkpoint; warn once if that fails, and note why."""
        try:
            write()
        except OSError as error:
            kept = "keeping the previous checkpoint" if path.exists() else "no previous checkpoint"
            message = f"{path}: {error.strerror or error}; {kept}"
            if path.name not in self.failed_saves:
                warn(": ".join(filter(None, (f"{message}; training continues", get_advice(error)))))
            self.failed_saves[path.name] = ": ".join(filter(None, (message, get_advice(error))))
        else:
            self.failed_saves.pop(path.name, None)
