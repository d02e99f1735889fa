"""Write a folder of the cache, and find out whether it is still what was written."""

import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from unet3d.data.formats.numpy_file import save_array
from unet3d.files import name_file

VALUES = "values.json"

HEADER_LENGTH_BYTES = 2
"""Size of the length of a header in version 1.0 of NumPy's format."""


class DamagedEntryError(ValueError):
    """A folder of the cache cannot be used; the message says why."""


@contextmanager
def refuse_incomplete_values() -> Generator[None]:
    """Raise DamagedEntryError where values of an entry are missing, or of other types."""
    try:
        yield
    except DamagedEntryError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError):
        raise DamagedEntryError("its values are incomplete") from None


def write_entry(
    folder: Path, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any], name: str
) -> None:
    """Write arrays, and values with the checksums of all and the name that the folder will have.

    Nothing is synced to disk: what a power failure loses is found by its checksum.
    """
    records = {}
    for key, array in arrays.items():
        array = np.ascontiguousarray(array)
        save_array(folder / f"{key}.npy", array)
        records[key] = {**_describe(array), "crc32": crc32(array.data)}
    content = json.dumps({"name": name, "values": values, "arrays": records})
    text = f"{content}\n{crc32(content.encode())}\n"
    with name_file(folder / VALUES):
        (folder / VALUES).write_text(text, "utf-8")


def read_entry(folder: Path) -> dict[str, Any]:
    """Return the values, and what was recorded of the arrays."""
    try:
        content, checksum = (folder / VALUES).read_text("utf-8").split("\n")[:2]
        if crc32(content.encode()) != int(checksum):
            raise DamagedEntryError(f"{VALUES} does not have its checksum")
        entry = json.loads(content)
    except OSError as error:
        raise DamagedEntryError(f"{VALUES} cannot be read: {error.strerror}") from None
    except DamagedEntryError:
        raise
    except (ValueError, RecursionError):
        raise DamagedEntryError(f"{VALUES} is damaged") from None
    if not isinstance(entry, dict) or entry.get("name") != folder.name:
        raise DamagedEntryError("it was written as another folder")
    return entry


def map_array(folder: Path, name: str) -> np.ndarray:
    """Map an array that `write_entry` has written; np.load would open its file three times."""
    with (folder / f"{name}.npy").open("rb") as file:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError("it has another version of NumPy's format")
        header = file.read(HEADER_LENGTH_BYTES)
        header += file.read(int.from_bytes(header, "little"))
        shape, dtype = _parse_header(header)
        return np.memmap(file, dtype, "r", file.tell(), shape)


def verify_arrays(folder: Path, entry: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every array by name if it has its recorded shape, dtype and checksum."""
    for name, record in entry["arrays"].items():
        path = folder / f"{name}.npy"
        if path.exists() and not path.is_file():  # opening a pipe waits for what it never gets
            raise DamagedEntryError(f"{path.name} is not a regular file")
        try:
            array = map_array(folder, name)
        except Exception as error:  # a damaged header raises anything
            reason = error.strerror if isinstance(error, OSError) else None
            raise DamagedEntryError(f"{name}.npy cannot be read: {reason or error}") from None
        expected = {key: value for key, value in record.items() if key != "crc32"}
        if not array.flags.c_contiguous or _describe(array) != expected:
            raise DamagedEntryError(
                f"{name}.npy has shape {list(array.shape)} and dtype {array.dtype}, not "
                f"{record['shape']} and {record['dtype']}"
            )
        if crc32(np.asarray(array).data) != record["crc32"]:
            raise DamagedEntryError(f"{name}.npy does not have its checksum")
        yield name, array


@lru_cache(maxsize=1024)
def _parse_header(header: bytes) -> tuple[tuple[int, ...], np.dtype]:
    """Return the shape and dtype; most arrays of a dataset share their header with others."""
    shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(BytesIO(header))
    if is_fortran or dtype.hasobject:
        raise ValueError("it is not a C-contiguous array of numbers")
    return shape, dtype


def _describe(array: np.ndarray) -> dict[str, Any]:
    return {"shape": list(array.shape), "dtype": array.dtype.str}
