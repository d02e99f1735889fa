"""Identify files by their contents, which are read again only if a file may have changed."""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2s, file_digest
from pathlib import Path

from unet3d.data.case import Case
from unet3d.data.findings import collect_findings
from unet3d.data.formats.volumes import list_files
from unet3d.files import atomic_write, name_file, read_json


def digest_cases(cases: Sequence[Case], folder: Path) -> list[tuple[str, ...]]:
    """Return a digest of each volume of each case; all are tried before a problem is raised.

    Digests are remembered in a folder with the size, times and inode of the files. The times are
    those of the contents and of the inode, which no program can set: a file that is replaced,
    rewritten or gets its old time back is read again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    known: dict[str, list[str]] = {}
    with suppress(OSError, ValueError):  # where it is missing or damaged, all files are read
        known = read_json(folder / "contents.json")
    new: dict[str, list[str]] = {}

    def digest(volume: Path) -> str:
        path, parts = os.path.realpath(volume), list_files(volume)
        stats = [part.stat() for part in parts]
        state = [(s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for s in stats]
        version = _hash([*map(os.fsencode, parts), json.dumps(state).encode()])
        if path in known and known[path][0] == version:
            return known[path][1]
        new[path] = [version, digest_volume(volume)]
        return new[path][1]

    contents = collect_findings(lambda case: tuple(map(digest, (*case.images, case.label))), cases)
    if new:
        with suppress(OSError), atomic_write(folder / "contents.json") as draft:
            draft.write_text(json.dumps(known | new), "utf-8")
    return contents


def digest_volume(volume: Path) -> str:
    """Return a digest of all files of a volume, whose names count where these are several."""
    parts = list_files(volume)
    if parts == [volume]:
        return digest_file(volume)
    names = [os.fsencode(part.relative_to(volume.parent)) for part in parts]
    return _hash([*names, *(digest_file(part).encode() for part in parts)])


def digest_file(file: Path) -> str:
    """Return a digest of the contents of a file."""
    with name_file(file), file.open("rb") as stream:
        return file_digest(stream, "blake2b").hexdigest()


def _hash(parts: Sequence[bytes]) -> str:
    return blake2s(b"\0".join(parts)).hexdigest()
