"""Read files of text and JSON that somebody else made: each is read to its end, or refused."""

import json
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any

MAX_BYTES = 2**28
"""The largest text; a list of a million cases has less."""


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; what is wrong with it is an OSError or a ValueError."""
    try:
        return json.loads(read_text(path))
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def read_text(path: Path, limit: int = MAX_BYTES) -> str:
    """Return the text of a file, which may be a link to another one, but not to a device.

    Editors on Windows begin a file with a byte-order mark, which is left out.

    >>> read_text(Path("/dev/zero"))
    Traceback (most recent call last):
        ...
    ValueError: it is not a regular file
    """
    status = path.stat()
    if not S_ISREG(status.st_mode) and not S_ISDIR(status.st_mode):
        raise ValueError("it is not a regular file")
    if status.st_size > limit:
        raise ValueError(f"it has more than {limit:,} bytes")
    return path.read_bytes().decode("utf-8-sig")
