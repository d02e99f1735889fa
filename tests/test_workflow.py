"""The workflow that checks every push, as far as it can be read without running it."""

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
FILE = ROOT / ".github" / "workflows" / "check.yaml"
WORKFLOW = yaml.safe_load(FILE.read_text())
JOBS = WORKFLOW["jobs"]


def commands(job: str) -> list[str]:
    return [line for step in JOBS[job]["steps"] for line in step.get("run", "").splitlines()]


def test_every_supported_python_is_checked():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [re.fullmatch(r".*Python :: (3\.\d+)", line) for line in project["classifiers"]]
    pythons = JOBS["check"]["strategy"]["matrix"]["python"]
    assert pythons == [found[1] for found in named if found]
    assert project["requires-python"] == f">={pythons[0]}"


def test_what_people_run_is_what_is_checked():
    assert any(line.startswith("make check") for line in commands("check"))
    assert "\ncheck:" in (ROOT / "Makefile").read_text()


def test_what_is_built_is_kept():
    assert "python -m build" in commands("package")
    kept = JOBS["package"]["steps"][-1]
    assert kept["uses"].startswith("actions/upload-artifact@")
    assert kept["with"]["if-no-files-found"] == "error"


def test_actions_are_pinned_and_may_only_read():
    used = re.findall(r"uses: (\S+)(.*)", FILE.read_text())
    assert used
    for action, comment in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action)
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment)
    assert WORKFLOW["permissions"] == {"contents": "read"}
    for job in JOBS.values():
        assert "permissions" not in job
        assert job["timeout-minutes"] <= 60
    assert "://" not in FILE.read_text()
