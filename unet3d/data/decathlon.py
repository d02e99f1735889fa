"""The layout of the Medical Segmentation Decathlon: dataset.json, imagesTr/, labelsTr/."""

import json
from pathlib import Path
from typing import Any

from unet3d.data.case import Case, Description
from unet3d.types import Misuse


class Decathlon:
    """A task's folder as it was unpacked."""

    def __init__(self, root: str):
        self.root = Path(root)

    def describe(self) -> Description:
        """Channels and classes, in the order of their numbers."""
        content = self._json()
        return Description(
            channels=_in_order(content, "modality", self.root),
            classes=_in_order(content, "labels", self.root),
        )

    def cases(self) -> list[Case]:
        """The training cases, by name."""
        found = []
        for entry in self._json().get("training", []):
            try:
                image, label = self.root / entry["image"], self.root / entry["label"]
            except (KeyError, TypeError):
                raise Misuse(
                    f"{self.root / 'dataset.json'}: each entry of training needs image and label, "
                    f"got {entry!r}"
                ) from None
            name = image.name.removesuffix(".gz").removesuffix(".nii")
            found.append(Case(name=name, images=(image,), label=label))
        if not found:
            raise Misuse(f"{self.root / 'dataset.json'} lists no training cases")
        return sorted(found, key=lambda case: case.name)

    def _json(self) -> dict[str, Any]:
        path = self.root / "dataset.json"
        try:
            content = json.loads(path.read_text())
        except FileNotFoundError:
            raise Misuse(
                f"data.root: no dataset.json in {self.root.absolute()}; a Decathlon task is a "
                "folder with dataset.json, imagesTr/ and labelsTr/"
            ) from None
        except (OSError, ValueError) as error:
            raise Misuse(f"{path} cannot be read as JSON: {error}") from None
        if not isinstance(content, dict):
            raise Misuse(f"{path} must hold one JSON object")
        return content


def _in_order(content: dict[str, Any], key: str, root: Path) -> tuple[str, ...]:
    names = content.get(key)
    try:
        numbered = {int(number): str(name) for number, name in dict(names or {}).items()}
    except (TypeError, ValueError):
        numbered = {}
    if not numbered or sorted(numbered) != list(range(len(numbered))):
        raise Misuse(
            f"{root / 'dataset.json'}: {key} must name 0, 1, 2, ... in a row, got {names!r}"
        )
    return tuple(numbered[n] for n in sorted(numbered))
