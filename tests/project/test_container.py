"""The container's files, without building it; scripts/release/container.sh builds and tests it."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def test_the_container_has_an_allowed_version_of_every_dependency():
    """Except torch, which is an argument and brings its own packages."""
    content = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = content["project"]
    groups = {
        "requirements.txt": project["dependencies"] + project["optional-dependencies"]["export"],
        "build.txt": content["build-system"]["requires"],
    }
    torch = re.findall(r"^ARG TORCH=(torch)==(\S+)$", (ROOT / "Dockerfile").read_text(), re.M)
    for name, requirements in groups.items():
        text = (ROOT / "container" / name).read_text()
        locked = dict(re.findall(r"^([a-z0-9-]+)==(\S+) \\$", text, re.MULTILINE))
        assert not [n for n in locked if re.fullmatch("torch|triton|nvidia-.*|cuda-.*", n)]
        versions = locked | dict(torch)
        for requirement in map(Requirement, requirements):
            assert requirement.specifier.contains(versions[requirement.name]), requirement
