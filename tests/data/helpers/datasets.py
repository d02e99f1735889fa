"""The small datasets of the contract, with a number of cases: case_00, case_01, ..."""

import json
from pathlib import Path

from tests.contract.helpers import datasets as contract
from tests.contract.helpers.datasets import AFFINE as AFFINE
from tests.contract.helpers.datasets import SIZE as SIZE
from tests.contract.helpers.datasets import make_image as make_image
from tests.contract.helpers.datasets import make_label as make_label
from tests.contract.helpers.datasets import save as save_volume  # noqa: F401


def list_names(cases: int) -> list[str]:
    return [f"case_{n:02d}" for n in range(cases)]


def write_decathlon(root: Path, cases: int) -> Path:
    return contract.write_decathlon(root, list_names(cases))


def write_pairs(root: Path, cases: int) -> Path:
    return contract.write_pairs(root, list_names(cases))


def write_nnunet(root: Path, cases: int, **content) -> Path:
    """Write cases with two channels; `content` replaces parts of dataset.json."""
    file = contract.write_nnunet(root, list_names(cases)) / "dataset.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **content}))
    return root
