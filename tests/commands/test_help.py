"""`unet3d COMMAND --help`, and what starts without heavy imports."""

import os
import subprocess
import sys
from pathlib import Path

from unet3d.__main__ import main

ANSWERED = ["--help", "train --help", "predict", "evaluate", "export", "compare", "download"]
ANSWERED += ["check data=nnunet", "plan data=nnunet"]
HEAVY = ["torch", "lightning", "monai", "nibabel", "scipy", "matplotlib"]
CODE = f"""
import sys
from unet3d.__main__ import main
codes = [main(words.split()) for words in {ANSWERED}]
assert codes == [0, 0] + 7 * [2], codes
assert not {{*{HEAVY}}} & {{*sys.modules}}, {{*sys.modules}}
"""


def test_help_and_missing_keys_are_answered_without_heavy_imports(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", CODE]
    ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_the_help_of_train_is_an_overview_that_names_the_way_to_each_group(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["train", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 100
    words = {line.split()[0] for line in lines if line.startswith("  ")}
    assert {"data=synthetic", "model=unet_tiny", "precision=32", "evaluation.tta=false"} <= words
    assert main(["train", "--help", "pool"]) == 0
    shown = capsys.readouterr().out
    assert "pool=approx_median" in shown
    assert "optimizer" not in shown
    assert main(["train", "pool=approx_median", "pool", "--help"]) == 0
    assert "pool.tau=0.1" in capsys.readouterr().out
    assert main(["train", "--help", "all"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 300


def test_the_help_of_a_command_with_a_group_says_how_to_list_its_options(capsys):
    assert main(["evaluate", "--help"]) == 0
    assert "options that --help metrics lists; here metrics=none\n" in capsys.readouterr().out


def test_keys_are_shown_with_their_comments_and_required_ones_first(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["train", "data=pairs", "optimizer.lr=0.5", "--help"]) == 0
    keys = capsys.readouterr().out.partition("\nkeys: key=value (... = required):\n")[2]
    assert keys.startswith("  data.root=... ")
    lines = {line.split()[0]: line for line in keys.splitlines() if "=" in line}
    assert lines["compile=false"].endswith("turns fused blocks off, takes more")
    assert "optimizer.lr=0.5" in lines
    assert "_target_=" not in keys
