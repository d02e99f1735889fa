"""Print the folder for `nnUNet_extTrainer`, in which nnU-Net finds the trainer.

In a terminal, print the command that sets it.
"""

import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

FIRST = (2, 8)  # the version that finds trainers in other folders


def main() -> int:
    """Check the installation and print the folder."""
    folder = Path(__file__).parent / "trainer"
    try:
        found = version("nnunetv2")
    except PackageNotFoundError:
        found = "0.0"
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < FIRST:
        have = "it is not installed" if found == "0.0" else f"{found} is installed"
        print(
            f"nnU-Net 2.8 or later is needed, {have}: pip install 'nnunetv2>=2.8'", file=sys.stderr
        )
        return 1
    print(f"export nnUNet_extTrainer={folder}" if sys.stdout.isatty() else folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
