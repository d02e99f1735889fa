"""The recordings of evidence/."""

import gzip
import json
from pathlib import Path
from typing import Any

EVIDENCE = Path(__file__).resolve().parents[1] / "evidence"
SNAPSHOTS = sorted((EVIDENCE / "snapshots").glob("*.json.gz"))


def read_evidence(path: Path) -> dict[str, Any]:
    """Return the content of a compressed recording."""
    with gzip.open(path) as file:
        return json.load(file)
