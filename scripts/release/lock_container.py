"""Pin the container's packages: python -m scripts.release.lock_container

Needs pip-tools, and the Python version of the Dockerfile's BASE. It writes names, versions and the
hashes of all files of each version, for every platform, and no addresses, so that mirrors of the
package index work too:

container/requirements.txt  what unet3d[export] needs at run time, without torch, which is an
                            argument of the Dockerfile, and without the CUDA packages and Triton,
                            which torch pins itself
container/build.txt         what builds wheels from sources
"""

import argparse
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "container"
HEADER = "# GeneratedDataset by scripts/release/lock_container.py\n"
PINNED_BY_TORCH = re.compile(r"(torch|triton|nvidia-.*|cuda-.*)==")
OPTIONS = (
    *("--generate-hashes", "--allow-unsafe", "--strip-extras", "--quiet"),
    *("--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links"),
    *("--no-emit-trusted-host", "--output-file", "-"),
)


def read_requirements() -> dict[str, list[str]]:
    """Return the requirements for each lock file."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    dependencies = project["project"]["dependencies"]
    export = project["project"]["optional-dependencies"]["export"]
    return {
        "requirements.txt": [read_argument("TORCH"), *dependencies, *export],
        "build.txt": [*project["build-system"]["requires"], "setuptools"],  # for old sources
    }


def read_argument(name: str) -> str:
    """Return the default of an argument of the Dockerfile."""
    match = re.search(rf"^ARG {name}=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert match, f"the Dockerfile has no ARG {name}="
    return match[1]


def resolve(requirements: Iterable[str]) -> str:
    """Return what pip would install, with hashes."""
    command = [sys.executable, "-m", "piptools", "compile", *OPTIONS, "-"]
    text = "\n".join(requirements)
    return subprocess.run(command, input=text, stdout=subprocess.PIPE, text=True, check=True).stdout


def split_packages(lock: str) -> list[str]:
    """Return `name==version` with the lines of its hashes, for each package."""
    return re.findall(r"^\S+==\S+.*\n(?:    --hash=.*\n)+", lock, re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.release.lock_container",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args()
    python = f"python:{sys.version_info.major}.{sys.version_info.minor}"
    if not read_argument("BASE").startswith(python):
        sys.exit(f"the image has {read_argument('BASE')}, this is {python}: use the same version")
    for name, requirements in read_requirements().items():
        packages = [
            p for p in split_packages(resolve(requirements)) if not PINNED_BY_TORCH.match(p)
        ]
        (FOLDER / name).write_text("".join([HEADER, *sorted(packages)]))
        print(f"container/{name}: {len(packages)} packages")


if __name__ == "__main__":
    main()
