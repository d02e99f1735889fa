"""Write a folder of the cache with checksums, and read it again."""

import json
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any
from zlib import crc32

import numpy as np

from unet3d.data.formats.numpy_file import save_array
from unet3d.files import name_file

VALUES = "values.json"

PARSING = Lock()
"""Held while numpy parses a header with ast.literal_eval, which two threads at once break in Python
3.11 (https://github.com/python/cpython/issues/106905)."""


class DamagedEntryError(ValueError):
    """A folder of the cache cannot be used; the message says why."""


def write_entry(
    folder: Path, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any], name: str
) -> None:
    """Write arrays, and values with the checksums of all and the name that the folder will have.

    Nothing is synced to disk: what a power failure loses is found by its size or its checksum.
    """
    records = {}
    for key, array in arrays.items():
        array = np.ascontiguousarray(array)
        save_array(folder / f"{key}.npy", array)
        records[key] = {
            "shape": list(array.shape),
            "dtype": array.dtype.str,
            "crc32": crc32(array.data),
        }
    content = json.dumps({"name": name, "values": values, "arrays": records})
    text = f"{content}\n{crc32(content.encode())}\n"
    with name_file(folder / VALUES):
        (folder / VALUES).write_text(text, "utf-8")


def read_entry(folder: Path) -> dict[str, Any]:
    """Return the values, and what was recorded of the arrays, whose files must be complete."""
    try:
        content, checksum = (folder / VALUES).read_text("utf-8").splitlines()
    except OSError as error:
        raise DamagedEntryError(f"{VALUES} cannot be read: {error.strerror}") from None
    except ValueError:
        raise DamagedEntryError(f"{VALUES} is damaged") from None
    if str(crc32(content.encode())) != checksum:
        raise DamagedEntryError(f"{VALUES} does not have its checksum")
    entry = json.loads(content)
    for name in entry["arrays"]:
        map_array(folder, name)
    return entry


def is_complete(folder: Path) -> bool:
    """Return whether `read_entry` can read a folder."""
    try:
        read_entry(folder)
    except DamagedEntryError:
        return False
    return True


def map_array(folder: Path, name: str) -> np.ndarray:
    """Map an array that `write_entry` has written; np.load would open its file three times."""
    path = folder / f"{name}.npy"
    try:
        with path.open("rb") as file:
            np.lib.format.read_magic(file)
            with PARSING:
                shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            return np.memmap(file, dtype, "r", file.tell(), shape)
    except FileNotFoundError:
        raise DamagedEntryError(f"{path.name} is missing") from None
    except ValueError as error:  # its header, or its size
        raise DamagedEntryError(f"{path.name} cannot be read: {error}") from None


def verify_arrays(folder: Path) -> None:
    """Compare all arrays of a folder with their checksums."""
    for name, record in read_entry(folder)["arrays"].items():
        if crc32(np.asarray(map_array(folder, name)).data) != record["crc32"]:
            raise DamagedEntryError(f"{name}.npy does not have its checksum")
