"""Pair images and labels by file name patterns."""

import re
from collections.abc import Iterator, Sequence
from glob import escape
from pathlib import Path

from unet3d.data.case import Case, DatasetDescription, Finding
from unet3d.data.formats.hdf5 import split_array
from unet3d.data.formats.ome_zarr import is_within_zarr
from unet3d.data.formats.volumes import (
    SUFFIX_LIST,
    SUFFIXES,
    advise_conversion,
    describe_nested_series,
    is_volume,
    split_suffix,
)
from unet3d.errors import UsageError
from unet3d.text import join_first, pluralize


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Return what matches paths or names in which every * stands for the same `name`."""
    first, *rest = map(re.escape, pattern.split("*"))
    return re.compile(first + "(?P<name>[^/]+)" + "(?P=name)".join(rest))


class Pairs:
    """Files in `root` by pattern: one image pattern per channel and one label pattern.

    `*` stands for the case's name and matches within one folder or file name; if a pattern has
    several, all of them stand for the same name. An array of HDF5 files is named: *.h5/raw, an
    image within an OME-Zarr, too: *.zarr/labels/cells.
    """

    def __init__(
        self,
        root: str,
        *,
        images: str | Sequence[str],
        labels: str,
        channels: Sequence[str] | None,
        classes: Sequence[str] | None,
        num_classes: int | None,
    ):
        self.root = Path(root)
        if not isinstance(labels, str):
            raise UsageError(
                f"data.labels must be one pattern, got {labels!r}: write masks of several classes "
                "to one file, with a number for each"
            )
        patterns = [images] if isinstance(images, str) else images
        self.images, self.labels = [p.rstrip("/") for p in patterns], labels.rstrip("/")
        self.patterns = [*(("images", pattern) for pattern in self.images), ("labels", self.labels)]
        for key, pattern in self.patterns:
            is_folder = "." not in pattern.rpartition("*")[2]  # as those of DICOM images
            is_within = not {"**", "..", ""} & set(pattern.split("/"))
            is_file = split_suffix(Path(pattern))[1] != "" or is_within_zarr(Path(pattern))
            if not ("*" in pattern and is_within and (is_folder or is_file)):
                raise UsageError(
                    f"data.{key} must be a pattern within data.root, with * for the case's name, "
                    f"that ends in {SUFFIX_LIST}, such as {key}/*.nii.gz, or is that of folders "
                    f"of DICOM images, such as {key}/*; got {pattern!r}{advise_conversion(pattern)}"
                )
        if not images or len({*self.images, self.labels}) <= len(self.images):
            raise UsageError(
                "data.images needs one pattern per channel and data.labels a different one, "
                f"got {self.images} and {labels}"
            )
        for key, names in (("channels", channels), ("classes", classes)):
            if isinstance(names, str):
                raise UsageError(f"data.{key} must be a list of names, got {names!r}")
        names = channels or (f"channel_{n}" for n in range(len(self.images)))
        self.channels = tuple(map(str, names))
        self.classes = tuple(map(str, classes or (f"class_{n}" for n in range(num_classes or 0))))

    def describe(self) -> DatasetDescription:
        return DatasetDescription(channels=self.channels, classes=self.classes)

    def list_cases(self) -> list[Case]:
        """Return a case for every name that any pattern matches, sorted by name."""
        if not self.root.is_dir():
            raise UsageError(f"data.root: no folder {self.root.absolute()}")
        names, assigned = set(), set()
        # a*.nii also matches a*_label.nii: a file belongs to the longest pattern that matches it.
        for key, pattern in sorted(self.patterns, key=lambda p: -len(p[1])):
            matches = {self._get_file(pattern, name): name for name in self._match_names(pattern)}
            new_names = {name for file, name in matches.items() if file not in assigned}
            if not new_names:
                same = ", where every * stands for the same name" if pattern.count("*") > 1 else ""
                endings = {split_suffix(path)[1] for path in self.root.glob(pattern)} - {""}
                if endings and not pattern.endswith(tuple(endings)):
                    same += f": the files there end in {', '.join(sorted(endings))}"
                raise UsageError(
                    f"data.{key}: no file in {self.root.absolute()} matches {pattern}{same}"
                    f"{describe_nested_series(self.root)}"
                )
            names |= new_names
            assigned |= set(matches)
        return [
            Case(
                name=name,
                images=tuple(self._get_file(pattern, name) for pattern in self.images),
                label=self._get_file(self.labels, name),
            )
            for name in sorted(names)
        ]

    def find_problems(self) -> list[Finding]:
        """Return a hint on volumes that no pattern matches, whatever the case of their ending."""
        used = {
            split_array(file)[0]
            for case in self.list_cases()
            for file in (*case.images, case.label)
        }
        # Other .npy files are those of a cache, which may be in the same folder.
        suffixes = tuple(s for s in SUFFIXES if s != ".npy" or self.labels.endswith(s))
        unused = [
            path
            for path in sorted(self.root.rglob("[!.]*"))
            if path.name.lower().endswith(suffixes) and used.isdisjoint((path, *path.parents))
        ]
        if not unused:
            return []
        listed = join_first([path.relative_to(self.root).as_posix() for path in unused], 3)
        verbs = ("matches", "is") if len(unused) == 1 else ("match", "are")
        message = f"{pluralize(len(unused), 'volume')} {verbs[0]} no pattern of data.images and "
        message += f"data.labels, and {verbs[1]} left out: {listed}"
        advice = "rename them, or change the patterns, if they belong to the dataset"
        return [Finding(None, None, message, advice, is_hint=True)]

    def _get_file(self, pattern: str, name: str) -> Path:
        return self.root / pattern.replace("*", name)

    def _match_names(self, pattern: str) -> Iterator[str]:
        pattern = pattern.removesuffix(f"/{split_array(Path(pattern))[1]}")
        path = compile_pattern(pattern)
        for file in self.root.glob("*".join(map(escape, pattern.split("*")))):
            match = path.fullmatch(file.relative_to(self.root).as_posix())
            # A file x.ome.tif is called x elsewhere, so *.tif is not its pattern.
            if match and is_volume(file) and pattern.endswith(split_suffix(file)[1]):
                yield match["name"]
