"""The workflow that publishes the site, as far as it can be read without running it."""

import re
import tomllib

import pytest
import yaml

from tests.docs.helpers.pages import ROOT

pytestmark = pytest.mark.slow

FILE = ROOT / ".github" / "workflows" / "docs.yaml"
JOBS = yaml.safe_load(FILE.read_text())["jobs"]


def test_the_published_site_is_built_like_the_checked_one():
    makefile = (ROOT / "Makefile").read_text()
    steps = "\n".join(step.get("run", "") for step in JOBS["build"]["steps"])
    assert "mkdocs build --strict" in steps
    assert "mkdocs build --strict" in makefile
    (check,) = re.findall(r"^check: (.*)$", makefile, re.MULTILINE)
    assert "docs" in check.split()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (package,) = project["optional-dependencies"]["docs"]
    assert f'pip install "{package}"' in steps


def test_actions_are_pinned_and_only_publishing_may_write():
    used = re.findall(r"uses: (\S+)(.*)", FILE.read_text())
    assert used
    for action, comment in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action)
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment)
    writing = {name for name, job in JOBS.items() if "write" in job["permissions"].values()}
    assert writing == {"publish"}


def test_the_site_loads_nothing_from_other_hosts():
    config = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in config
    assert "://" not in config
