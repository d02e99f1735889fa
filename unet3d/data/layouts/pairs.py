"""Images and labels that are paired by their names."""

import re
from collections.abc import Iterator, Sequence
from glob import escape
from pathlib import Path

from unet3d.data.case import Case, Description
from unet3d.data.findings import Finding
from unet3d.data.nifti.stream import is_volume
from unet3d.errors import UsageError


class Pairs:
    """Files in `root` by pattern: one pattern of images for each channel, one of labels.

    `*` stands for the case's name, within one folder or file name; where a pattern has several,
    all stand for the same name.
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
        self.images = [images] if isinstance(images, str) else list(images)
        self.labels = labels
        for key, pattern in self._patterns():
            text = pattern if isinstance(pattern, str) else ""
            if (
                "*" not in text
                or not text.endswith((".nii", ".nii.gz"))
                or {"**", "..", ""} & set(text.split("/"))
            ):
                raise UsageError(
                    f"data.{key} must be a pattern within data.root, with * for the case's name, "
                    f"that ends in .nii or .nii.gz, as in {key}/*.nii.gz; got {pattern!r}"
                )
        if not images or len({*self.images, labels}) <= len(self.images):
            raise UsageError(
                "data.images needs one pattern for each channel and data.labels another, "
                f"got {self.images} and {labels}"
            )
        for key, names in (("channels", channels), ("classes", classes)):
            if isinstance(names, str):
                raise UsageError(f"data.{key} must be a list of names, got {names!r}")
        if len(self.images) > 1 and channels is not None and len(channels) != len(self.images):
            raise UsageError(f"data.channels names {len(channels)} of {len(self.images)} channels")
        if classes is None and not isinstance(num_classes, int):
            raise UsageError(
                "files alone do not say their classes: give data.classes=[background, ...] or "
                f"data.num_classes=, with the background; got {num_classes!r}"
            )
        names = channels or (f"channel_{n}" for n in range(len(self.images)))
        self.channels = tuple(map(str, names))
        self.classes = tuple(map(str, classes or (f"class_{n}" for n in range(num_classes or 0))))

    def describe(self) -> Description:
        """What the options say."""
        return Description(channels=self.channels, classes=self.classes)

    def cases(self) -> list[Case]:
        """Every name that any pattern finds."""
        if not self.root.is_dir():
            raise UsageError(f"data.root: no folder {self.root.absolute()}")
        names, taken = set(), set()
        # a*.nii finds a*_label.nii as well: a file belongs to the longest pattern that finds it.
        for key, pattern in sorted(self._patterns(), key=lambda p: -len(p[1])):
            files = {self._file(pattern, name): name for name in self._found(pattern)}
            own = {name for file, name in files.items() if file not in taken}
            if not own:
                raise UsageError(f"data.{key}: no file in {self.root.absolute()} is like {pattern}")
            names |= own
            taken |= set(files)
        return [
            Case(
                name=name,
                images=tuple(self._file(pattern, name) for pattern in self.images),
                label=self._file(self.labels, name),
            )
            for name in sorted(names)
        ]

    def faults(self) -> list[Finding]:
        """None: a file that a pattern finds belongs to a case, and others are not looked for."""
        return []

    def _patterns(self) -> list[tuple[str, str]]:
        return [*(("images", pattern) for pattern in self.images), ("labels", self.labels)]

    def _file(self, pattern: str, name: str) -> Path:
        return self.root / pattern.replace("*", name)

    def _found(self, pattern: str) -> Iterator[str]:
        parts = pattern.split("*")
        start, *rest = map(re.escape, parts)
        name = re.compile(start + "(?P<name>[^/]+)" + "(?P=name)".join(rest))
        for file in self.root.glob("*".join(map(escape, parts))):
            match = name.fullmatch(file.relative_to(self.root).as_posix())
            if match and is_volume(file):
                yield match["name"]
