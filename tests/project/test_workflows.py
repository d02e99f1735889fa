"""The workflows of GitHub and the site that one of them publishes, without running them."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / ".github" / "workflows").iterdir())
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in FILES}
MAY_WRITE = {("docs", "publish"), ("release", "image"), ("release", "publish")}

every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def get_job(workflow: str, job: str) -> dict:
    return WORKFLOWS[workflow]["jobs"][job]


def read_project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@every_file
def test_actions_are_pinned(path):
    actions = re.findall(r"uses: (\S+)(.*)", path.read_text())
    assert actions
    for action, comment in actions:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action)
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment)


@every_file
def test_only_publishing_may_write_and_no_job_runs_for_hours(path):
    workflow = WORKFLOWS[path.stem]
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        writes = "write" in job.get("permissions", {}).values()
        assert writes == ((path.stem, name) in MAY_WRITE)
        assert job["timeout-minutes"] <= 60


def test_every_supported_python_is_checked():
    project = read_project()
    matches = [re.fullmatch(r".*Python :: (3\.\d+)", line) for line in project["classifiers"]]
    pythons = get_job("check", "check")["strategy"]["matrix"]["python"]
    assert pythons == [match[1] for match in matches if match]
    assert project["requires-python"] == f">={pythons[0]}"
