"""Identify files by their contents, which are read again only if a file may have changed."""

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2s, file_digest
from pathlib import Path
from stat import S_ISREG
from typing import Any

from unet3d.data.formats.volumes import list_files
from unet3d.errors import UsageError
from unet3d.files import atomic_write, name_file, read_json

FILE = "contents.json"

RECENT_SECONDS = 1.0
"""A file that was changed so recently may change again within the resolution of its times."""


class ContentDigests:
    """Digests of volumes, remembered in a folder with the size, times and inode of their files.

    The times are those of the contents and of the inode, which no program can set: a file that is
    replaced, rewritten or gets its old time back is read again.
    """

    def __init__(self, folder: Path):
        self.file = folder / FILE
        self.known = self._read()
        self.new: dict[str, list[str]] = {}

    def digest(self, volume: Path) -> str:
        """Return a digest of all files of a volume; paths do not matter."""
        path, parts = os.path.realpath(volume), list_parts(volume)
        stats = [part.stat() for part in parts]
        state = [(s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for s in stats]
        version = _hash([*map(os.fsencode, parts), json.dumps(state).encode()])
        if (known := self.known.get(path)) is not None and known[0] == version:
            return known[1]
        digest = digest_parts(volume, parts)
        changed = max((max(s.st_mtime, s.st_ctime) for s in stats), default=0.0)
        if changed < time.time() - RECENT_SECONDS:
            self.new[path] = [version, digest]
        return digest

    def save(self) -> None:
        """Remember the digests of files that were read, besides those of others."""
        if not self.new:
            return
        kept = {path: entry for path, entry in self._read().items() if Path(path).exists()}
        with suppress(OSError), atomic_write(self.file) as draft:
            draft.write_text(json.dumps({**kept, **self.new}), "utf-8")

    def _read(self) -> dict[str, Any]:
        """Return what is remembered; nothing if it is damaged."""
        with suppress(OSError, ValueError):
            content = read_json(self.file)
            if isinstance(content, dict):
                return {k: v for k, v in content.items() if _is_entry(v)}
        return {}


def digest_volume(volume: Path) -> str:
    """Return a digest of all files of a volume, which are read; paths do not matter."""
    return digest_parts(volume, list_parts(volume))


def list_parts(volume: Path) -> list[Path]:
    """Return the files of a volume that exists."""
    if not volume.exists():
        raise UsageError(f"{volume.absolute()} is missing")
    parts = list_files(volume)
    for part in parts:
        if not S_ISREG(part.stat().st_mode):  # reading a pipe or a device may never end
            raise UsageError(f"{part} is not a regular file")
    return parts


def digest_parts(volume: Path, parts: Sequence[Path]) -> str:
    """Return a digest of files, whose names count where a volume is more than one."""
    if parts == [volume]:
        return digest_file(volume)
    names = [os.fsencode(part.relative_to(volume.parent)) for part in parts]
    return _hash([*names, *(digest_file(part).encode() for part in parts)])


def digest_file(file: Path) -> str:
    """Return a digest of the contents of a file."""
    with name_file(file), file.open("rb") as stream:
        return file_digest(stream, "blake2b").hexdigest()


def _is_entry(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(v, str) for v in value)


def _hash(parts: Sequence[bytes]) -> str:
    return blake2s(b"\0".join(parts)).hexdigest()
