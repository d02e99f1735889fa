"""A folder of the cache: one process fills it while others wait, and each reads it again."""

import json
import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar
from zlib import crc32

import numpy as np

from unet3d.data.formats.numpy_file import save_array
from unet3d.files import lock_file, name_file

T = TypeVar("T")

VALUES = "values.json"

PARSING = Lock()
"""Held while numpy parses a header with ast.literal_eval, which two threads at once break in Python
3.11 (https://github.com/python/cpython/issues/106905)."""


class DamagedEntryError(ValueError):
    """A folder of the cache cannot be used; the message says why."""


def find_entry(folder: Path, read: Callable[[Path], T]) -> T | None:
    """Return what `read` makes of a folder; None if it is missing or damaged."""
    try:
        return read(folder)
    except DamagedEntryError:
        return None


@contextmanager
def lock_cache(folder: Path, read: Callable[[Path], object]) -> Generator[Path | None]:
    """Yield an empty folder that replaces `folder` on success; None if `read` finds an entry in it.

    Other threads, ranks and runs that want the same folder wait.
    """
    draft = folder.with_name(f".{folder.name}")
    with lock_file(folder.with_name(f".{folder.name}.lock")):
        if find_entry(folder, read) is not None:
            yield None
            return
        shutil.rmtree(draft, ignore_errors=True)  # of a process that was killed
        draft.mkdir()
        try:
            yield draft
            shutil.rmtree(folder, ignore_errors=True)
            draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def write_entry(folder: Path, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]) -> None:
    """Write arrays, and values with the checksums of the arrays.

    Nothing is synced to disk: what a power failure loses is found by its size or its checksum.
    """
    records = {}
    for key, array in arrays.items():
        array = np.ascontiguousarray(array)
        save_array(folder / f"{key}.npy", array)
        records[key] = {"shape": list(array.shape), "crc32": crc32(array.data)}
    with name_file(folder / VALUES):
        (folder / VALUES).write_text(json.dumps({"values": values, "arrays": records}), "utf-8")


def read_entry(folder: Path) -> dict[str, Any]:
    """Return the values, and what was recorded of the arrays, whose files must be complete."""
    try:
        content = (folder / VALUES).read_text("utf-8")
        entry = json.loads(content.partition("\n")[0])  # older entries have a line more
    except (OSError, ValueError) as error:
        raise DamagedEntryError(f"{VALUES} cannot be read: {error}") from None
    for name in entry["arrays"]:
        map_array(folder, name)
    return entry


def map_array(folder: Path, name: str) -> np.ndarray:
    """Map an array that `write_entry` has written."""
    try:
        with PARSING:
            return np.lib.format.open_memmap(folder / f"{name}.npy", "r")
    except (FileNotFoundError, ValueError) as error:  # its header, or its size
        raise DamagedEntryError(f"{name}.npy cannot be read: {error}") from None


def verify_arrays(folder: Path) -> None:
    """Compare all arrays of a folder with their checksums."""
    for name, record in read_entry(folder)["arrays"].items():
        if crc32(np.asarray(map_array(folder, name)).data) != record["crc32"]:
            raise DamagedEntryError(f"{name}.npy does not have its checksum")
