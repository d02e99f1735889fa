"""Read label names from the dataset.json near a folder of labels."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from unet3d.data.formats.labels import MAX_LABEL
from unet3d.errors import UsageError
from unet3d.files import read_json


@dataclass(frozen=True, kw_only=True)
class LabelNames:
    """Foreground classes and their labels; classes may overlap."""

    classes: Mapping[str, tuple[int, ...]]
    known_labels: frozenset[int] | None  # labels that a file may hold; None: any
    ignore_labels: tuple[int, ...] = ()

    def __post_init__(self):
        for name, labels in self.classes.items():
            if not labels or not all(0 < label <= MAX_LABEL for label in labels):
                raise UsageError(f"class {name}: labels must be 1..{MAX_LABEL}, got {list(labels)}")


def find_label_names(folder: Path) -> LabelNames | None:
    """Read dataset.json in the folder or its parent; return None if there is none.

    The Decathlon writes {"1": "liver"}, nnU-Net {"liver": 1, "all": [1, 2], "ignore": 3}.
    """
    for parent in (folder, folder.absolute().parent):
        if (parent / "dataset.json").is_file():
            return _read_label_names(parent / "dataset.json")
    return None


def _read_label_names(file: Path) -> LabelNames:
    try:
        content = read_json(file)["labels"]
        by_number = all(str(key).lstrip("-").isdigit() for key in content)
        pairs = [(v, k) if by_number else (k, v) for k, v in content.items()]
        named = {
            str(name): tuple(map(int, labels if isinstance(labels, list) else [labels]))
            for name, labels in pairs
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{file}: labels cannot be read ({error!r}); set classes=[background, ...]"
        ) from None
    classes = {k: v for k, v in named.items() if k != "ignore" and v != (0,)}
    if len(named) < len(pairs) or not classes:
        raise UsageError(f"{file}: labels must name each class once; set classes=[background, ...]")
    known = frozenset(label for labels in named.values() for label in labels) | {0}
    return LabelNames(classes=classes, known_labels=known, ignore_labels=named.get("ignore", ()))
