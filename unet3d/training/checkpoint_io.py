"""How Lightning's checkpoints are written: atomically, with the one before, and on a full disk."""

from pathlib import Path
from typing import Any

from lightning.pytorch.plugins.io import TorchCheckpointIO

from unet3d.checkpoint_file import LAST, PREVIOUS, load_checkpoint, save_checkpoint
from unet3d.errors import describe_os_error
from unet3d.files import replace_with_copy
from unet3d.training.loggers import warn


class AtomicCheckpointIO(TorchCheckpointIO):
    """Save checkpoints atomically, keep the one before last.ckpt, and survive a full disk.

    Lightning's own plugin goes through $TMPDIR without fsync: with $TMPDIR on another file system,
    a kill left an empty last.ckpt and no other. A checkpoint that cannot be written costs a
    warning: the next save tries again, and the previous checkpoint stays intact.
    """

    def __init__(self) -> None:
        self.failed_saves: dict[str, str] = {}  # checkpoint name: why its last save failed

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        path = Path(path)
        try:
            if path.name == LAST and path.exists():
                replace_with_copy(path, path.with_name(PREVIOUS))
            save_checkpoint(checkpoint, path)
        except OSError as error:
            kept = "keeping the previous checkpoint" if path.exists() else "no previous checkpoint"
            message = f"{describe_os_error(error, path)}; {kept}"
            if path.name not in self.failed_saves:
                warn(f"{message}; training continues")
            self.failed_saves[path.name] = message
        else:
            self.failed_saves.pop(path.name, None)

    def load_checkpoint(self, path: Any, *_: Any, **__: Any) -> dict[str, Any]:
        return load_checkpoint(Path(path), mmap=False)
