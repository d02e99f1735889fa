"""The GitHub workflow that checks every push, without running it."""

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
FILE = ROOT / ".github" / "workflows" / "check.yaml"
WORKFLOW = yaml.safe_load(FILE.read_text())
JOBS = WORKFLOW["jobs"]


def list_commands(job: str) -> list[str]:
    return [line for step in JOBS[job]["steps"] for line in step.get("run", "").splitlines()]


def test_every_supported_python_is_checked():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    matches = [re.fullmatch(r".*Python :: (3\.\d+)", line) for line in project["classifiers"]]
    pythons = JOBS["check"]["strategy"]["matrix"]["python"]
    assert pythons == [match[1] for match in matches if match]
    assert project["requires-python"] == f">={pythons[0]}"


def test_ci_runs_make_check():
    assert any(line.startswith("make check") for line in list_commands("check"))
    assert "\ncheck:" in (ROOT / "Makefile").read_text()


def test_the_wheel_and_the_sdist_are_uploaded():
    assert "python -m build" in list_commands("package")
    upload = JOBS["package"]["steps"][-1]
    assert upload["uses"].startswith("actions/upload-artifact@")
    assert upload["with"]["if-no-files-found"] == "error"


def test_actions_are_pinned_and_have_read_access_only():
    actions = re.findall(r"uses: (\S+)(.*)", FILE.read_text())
    assert actions
    for action, comment in actions:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action)
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment)
    assert WORKFLOW["permissions"] == {"contents": "read"}
    for job in JOBS.values():
        assert "permissions" not in job
        assert job["timeout-minutes"] <= 60
    assert "://" not in FILE.read_text()
