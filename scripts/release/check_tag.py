"""Check that a tag is the version of the package: python -m scripts.release.check_tag v0.1.0

The version must have a section in CHANGELOG.md that is not called unreleased.
"""

import re
import sys
from pathlib import Path

from unet3d import __version__

ROOT = Path(__file__).resolve().parents[2]


def find_problem(tag: str, version: str, changelog: str) -> str | None:
    """Return why the tag cannot be released.

    >>> find_problem("v1.1", "1.0", "## 1.0 (2026-12-01)")
    'the tag v1.1 is not v1.0, the version in unet3d/__init__.py'
    >>> find_problem("v1.0", "1.0", "## 1.0 (unreleased)")
    'CHANGELOG.md has no released section for 1.0: replace (unreleased) by the date'
    """
    if tag != f"v{version}":
        return f"the tag {tag} is not v{version}, the version in unet3d/__init__.py"
    if re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", changelog, re.MULTILINE):
        return None
    return f"CHANGELOG.md has no released section for {version}: replace (unreleased) by the date"


if __name__ == "__main__":
    sys.exit(find_problem(sys.argv[1], __version__, (ROOT / "CHANGELOG.md").read_text()))
