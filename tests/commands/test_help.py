"""`unet3d COMMAND --help`, and what starts without heavy imports."""

import json
import os
import subprocess
import sys
from pathlib import Path

from unet3d.__main__ import main

HEAVY = ("torch", "lightning", "monai", "nibabel", "scipy", "matplotlib")

ANSWERED = {
    "--help": 0,
    "--version": 0,
    "train --help": 0,
    "predict": 2,
    "evaluate": 2,
    "export": 2,
    "compare": 2,
    "check data=nnunet": 2,
    "plan data=nnunet": 2,
    "download": 2,
}
"""Commands that end before heavy imports, some without their mandatory keys: their exit codes."""

RUN_ALL = f"""
import json, sys
from unet3d.__main__ import main
for words in {list(ANSWERED)}:
    code = main(words.split())
    print()
    print(json.dumps([words, code, [name for name in {HEAVY} if name in sys.modules]]))
    if words == "--version":
        assert "hydra" not in sys.modules
"""


def test_help_and_missing_keys_are_answered_without_heavy_imports(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", RUN_ALL],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    answers = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("[")]
    assert answers == [[words, code, []] for words, code in ANSWERED.items()], ended.stderr
    first, *_ = ended.stderr.splitlines()
    assert first.startswith("unet3d: checkpoint, input, output must be given: checkpoint=... ")


def test_the_usage_line_has_the_required_keys(capsys):
    assert main(["predict", "--help"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "usage: unet3d predict checkpoint=... input=... output=... [key=value ...]"


def test_keys_are_shown_with_their_comments_and_required_ones_first(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["train", "data=pairs", "optimizer.lr=0.5", "--help"]) == 0
    keys = capsys.readouterr().out.partition("\nkeys: key=value (... = required)\n")[2]
    assert keys.startswith("  data.root=... ")
    lines = {line.split()[0]: line for line in keys.splitlines() if "=" in line}
    assert lines["compile=false"].endswith("turns fused blocks off, takes more")
    assert "optimizer.lr=0.5" in lines
    assert "_target_=" not in keys
