"""A command without its mandatory keys answers before anything heavy is imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

from unet3d.cli.main import main

LACKING = {
    "predict": "checkpoint, input and output must be given: checkpoint=... input=... output=...",
    "evaluate": "predictions, references and output must be given: predictions=... ",
    "export": "checkpoint and output must be given: checkpoint=... output=...",
    "compare": "runs must be given: runs=... (unet3d compare RUN ...: folders of runs, ",
    "check data=nnunet": "data.root must be given: data.root=... (the data set's folder)",
    "plan data=nnunet": "budget_gib and data.root must be given: budget_gib=... data.root=...",
    "download": "task must be given: task=... (name of the task: Task01_BrainTumour",
}

HEAVY = ("torch", "lightning", "monai", "nibabel", "scipy", "matplotlib")

RUN_ALL = f"""
import json, sys
from unet3d.cli.main import main
for words in {list(LACKING)}:
    code = main(words.split())
    print(json.dumps([words, code, [name for name in {HEAVY} if name in sys.modules]]))
"""


def test_every_command_names_its_missing_keys_in_one_line_and_imports_nothing_heavy(tmp_path):
    root = str(Path(__file__).parents[2])
    ended = subprocess.run(
        [sys.executable, "-c", RUN_ALL],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
    )
    answers = [json.loads(line) for line in ended.stdout.splitlines()]
    assert answers == [[words, 2, []] for words in LACKING], ended.stderr
    for said, line in zip(LACKING.values(), ended.stderr.splitlines(), strict=True):
        assert line.startswith(f"unet3d: {said}")


def test_one_missing_key_comes_with_what_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["predict", "checkpoint=a", "input=b"]) == 2
    said = "output must be given: output=... (a folder, or a .nii or .nii.gz for a single scan)"
    assert capsys.readouterr().err == f"unet3d: {said}\n"


def test_what_reads_no_data_set_needs_no_folder_of_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["memory", "data=nnunet", "format=none"])
    assert "data.root" not in capsys.readouterr().err
