"""A file that survives a full disk: training continues with a warning."""

import sys
from pathlib import Path

from unet3d.errors import describe_os_error


class AppendOnlyFile:
    """A file to which a record is appended completely or not at all.

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
            self.warn(error)

    def warn(self, error: OSError) -> None:
        """Say once that metrics are missing."""
        if not self.warned:
            self.warned = True
            reason = describe_os_error(error, self.path.parent)
            warn(f"some metrics were not logged; training continues: {reason}")

    def flush(self) -> None:
        """Do nothing: writes are not buffered."""

    def close(self) -> None:
        """Mark as closed; the file is open only while a record is written."""
        self.closed = True


def warn(message: str) -> None:
    """Print to standard error, which works next to a progress bar and from a thread."""
    print(f"unet3d: {message}", file=sys.stderr)
