"""Checkpoints that survive a full disk: training continues with a warning."""

from pathlib import Path
from typing import Any

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
