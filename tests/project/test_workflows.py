"""The workflows of GitHub, without running them, and the versions that they check and release."""

import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement

from scripts.release.lowest_versions import list_constraints
from unet3d import __version__

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FILES = sorted((ROOT / ".github" / "workflows").iterdir())
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in FILES}
MAY_WRITE = {
    *(("docs", "publish"), ("release", "image"), ("release", "publish"), ("release", "pypi")),
}


def test_actions_are_pinned():
    actions = [a for path in FILES for a in re.findall(r"uses: (\S+)(.*)", path.read_text())]
    assert actions
    pinned = re.compile(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
    assert not [action for action in actions if not pinned.fullmatch("".join(action))]


def test_only_publishing_may_write_and_no_job_runs_for_hours():
    jobs = {(w, name): job for w, flow in WORKFLOWS.items() for name, job in flow["jobs"].items()}
    assert all(flow["permissions"] == {"contents": "read"} for flow in WORKFLOWS.values())
    writing = {name for name, job in jobs.items() if "write" in job.get("permissions", {}).values()}
    assert writing == MAY_WRITE
    assert max(job["timeout-minutes"] for job in jobs.values()) <= 60


def test_every_supported_python_is_checked_the_first_with_the_lowest_versions():
    matches = [re.fullmatch(r".*Python :: (3\.\d+)", line) for line in PROJECT["classifiers"]]
    jobs = WORKFLOWS["check"]["jobs"]
    pythons = jobs["check"]["strategy"]["matrix"]["python"]
    assert pythons == [match[1] for match in matches if match]
    assert PROJECT["requires-python"] == f">={pythons[0]}"
    assert jobs["lowest"]["steps"][1]["with"]["python-version"] == pythons[0]
    constraints = dict(line.split("==") for line in list_constraints())
    for requirement in map(Requirement, PROJECT["dependencies"]):
        lowest = constraints.pop(requirement.name)
        assert requirement.specifier.contains(lowest)
        assert f">={lowest}" in str(requirement.specifier)
    assert not constraints


def test_a_citation_names_the_version_and_the_license():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert (citation["version"], citation["license"]) == (__version__, PROJECT["license"])


def test_the_first_screen_of_the_readme_names_the_two_commands_that_ci_runs():
    """`make check` has `make test` as its last part."""
    commands = re.findall(
        r"^make \w+", "\n".join((ROOT / "README.md").read_text().split("\n")[:30]), re.M
    )
    assert commands == ["make train", "make test"]
    run = re.findall(r"^make \w+", (ROOT / ".ci" / "run").read_text(), re.M)
    assert run == ["make train", "make check"]
    assert re.search(r"^check:.* test$", (ROOT / "Makefile").read_text(), re.M)
