"""Remake the container's locks: python scripts/lock.py, with pip-tools, on the Python of its BASE.

container/requirements.txt: what unet3d[export] needs at run time, but torch, which is an argument
of the Dockerfile, and the CUDA packages and Triton, which torch brings in the versions it was built
with.
container/build.txt: what makes wheels of sources. Names, versions and the hashes of all files of
a version, for every platform; no addresses, so that a mirror serves as well as the index.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "container"
TORCHS_OWN = re.compile(r"(torch|triton|nvidia-.*|cuda-.*)==")
OPTIONS = (
    *("--generate-hashes", "--allow-unsafe", "--strip-extras", "--quiet"),
    *("--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links"),
    *("--no-emit-trusted-host", "--output-file", "-"),
)


def wanted() -> dict[str, list[str]]:
    """What each lock is made for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed, extras = project["project"]["dependencies"], project["project"]["optional-dependencies"]
    return {
        "requirements.txt": [argument("TORCH"), *needed, *extras["export"]],
        "build.txt": [*project["build-system"]["requires"], "setuptools"],  # for old sources
    }


def argument(name: str) -> str:
    """An argument's default in the Dockerfile."""
    found = re.search(rf"^ARG {name}=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert found, f"the Dockerfile has no ARG {name}="
    return found[1]


def resolved(requirements: Iterable[str]) -> str:
    """What pip would install, with hashes."""
    command = [sys.executable, "-m", "piptools", "compile", *OPTIONS, "-"]
    text = "\n".join(requirements)
    return subprocess.run(command, input=text, stdout=subprocess.PIPE, text=True, check=True).stdout


def packages(lock: str) -> list[str]:
    """`name==version`, each with the lines of its hashes."""
    return re.findall(r"^\S+==\S+.*\n(?:    --hash=.*\n)+", lock, re.MULTILINE)


def main() -> None:
    python = f"python:{sys.version_info.major}.{sys.version_info.minor}"
    if not argument("BASE").startswith(python):
        sys.exit(f"the image has {argument('BASE')}: run this with its Python, not with {python}")
    for name, requirements in wanted().items():
        kept = [p for p in packages(resolved(requirements)) if not TORCHS_OWN.match(p)]
        (FOLDER / name).write_text("".join(["# Made by scripts/lock.py\n", *sorted(kept)]))
        print(f"container/{name}: {len(kept)} packages")


if __name__ == "__main__":
    main()
