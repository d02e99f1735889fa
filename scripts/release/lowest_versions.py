"""Print the lowest version of each dependency that pyproject.toml allows, as constraints of pip.

python -m scripts.release.lowest_versions > lowest.txt && pip install -e '.[test]' -c lowest.txt
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def list_constraints() -> list[str]:
    """Return `name==version` for each dependency."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [
        re.sub(r"^([\w-]+)>=([\w.]+).*$", r"\1==\2", requirement)
        for requirement in project["dependencies"]
    ]


if __name__ == "__main__":
    print("\n".join(list_constraints()))
