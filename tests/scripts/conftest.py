"""Fixtures for scripts: quality with a fake training, and a rehearsed GPU report."""

import json
import shutil
from pathlib import Path

import pytest

from scripts.bench import quality
from scripts.gpu import report

HELPERS = Path(__file__).parent / "helpers"


@pytest.fixture
def run_quality(tmp_path, monkeypatch, capsys):
    """Run scripts.bench.quality with a fake train.py: (exit code, output, result file)."""
    shutil.copy(HELPERS / "fake_train.py", tmp_path / "train.py")
    monkeypatch.setattr(quality, "ROOT", tmp_path)

    def run(*words, file="cpu-quality.json"):
        folders = ["--runs", str(tmp_path / "runs"), "--output", str(tmp_path)]
        code = quality.main([*words, *folders])
        path = tmp_path / file
        result = json.loads(path.read_text()) if path.exists() else {}
        return code, capsys.readouterr().out, result

    return run


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    """A folder with five parts of the GPU report in their smallest form, measured on the CPU."""
    folder = tmp_path_factory.mktemp("rehearsed")
    assert (
        report.main(
            [
                "--rehearse",
                "--output",
                str(folder),
                "forum",
                "predict",
                "tuned",
                "callbacks",
                "nccl",
            ]
        )
        == 0
    )
    return folder
