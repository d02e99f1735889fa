"""The container's files, without building it; scripts/release/container.sh builds and tests it."""

import re
import shlex
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def read_versions(lock: Path) -> dict[str, str]:
    """Return {name: version} of a lock file."""
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+) \\$", lock.read_text(), re.MULTILINE))


def read_instructions() -> list[str]:
    """Return the instructions of the Dockerfile, one per line, without comments."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#"))
    return [" ".join(line.split()) for line in text.replace("\\\n", " ").splitlines() if line]


def read_project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_lock_files_have_an_allowed_version_of_every_dependency():
    extras = read_project()["project"]["optional-dependencies"]
    groups = {
        "requirements.txt": read_project()["project"]["dependencies"] + extras["export"],
        "build.txt": read_project()["build-system"]["requires"],
    }
    for name, requirements in groups.items():
        versions = read_versions(ROOT / "container" / name)
        for requirement in map(Requirement, requirements):
            if requirement.name != "torch":
                assert requirement.specifier.contains(versions[requirement.name]), requirement


def test_torch_is_an_argument_and_neither_it_nor_its_own_dependencies_are_locked():
    (version,) = (line for line in read_instructions() if line.startswith("ARG TORCH="))
    requirement = next(
        r for r in map(Requirement, read_project()["project"]["dependencies"]) if r.name == "torch"
    )
    assert requirement.specifier.contains(version.removeprefix("ARG TORCH=torch=="))
    names = read_versions(ROOT / "container" / "requirements.txt")
    assert not [n for n in names if n == "torch" or n.startswith(("triton", "nvidia-", "cuda-"))]


def test_everything_except_torch_is_downloaded_by_hash_and_nothing_is_cached():
    pip = [line for line in read_instructions() if re.search(r"pip (install|wheel)", line)]
    assert all("--no-cache-dir" in line for line in pip)
    for line in pip:
        if "${TORCH}" not in line:
            assert "--no-deps" in line
            local = "--no-index" in line or shlex.split(line)[-1] == "."
            assert local or "--require-hashes" in line
        if "wheel " in line:
            assert "--no-build-isolation" in line  # build tools must be the pinned ones
