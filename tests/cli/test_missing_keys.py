"""A command without its mandatory keys ends before heavy imports."""

import json
import os
import subprocess
import sys
from pathlib import Path

from unet3d.cli.main import main

MISSING = {
    "predict": "checkpoint, input and output must be given: checkpoint=... input=... output=...",
    "evaluate": "predictions, references and output must be given: predictions=... ",
    "export": "checkpoint and output must be given: checkpoint=... output=...",
    "compare": "runs must be given: runs=... (runs to compare: run folders, ",
    "check data=nnunet": "data.root must be given: data.root=... (folder of the dataset)",
    "plan data=nnunet": "data.root must be given: data.root=... (folder of the dataset)",
    "download": "task must be given: task=... (name of the task: Task01_BrainTumour",
}

HEAVY = ("torch", "lightning", "monai", "nibabel", "scipy", "matplotlib")

RUN_ALL = f"""
import json, sys
from unet3d.cli.main import main
for words in {list(MISSING)}:
    code = main(words.split())
    print(json.dumps([words, code, [name for name in {HEAVY} if name in sys.modules]]))
"""


def test_every_command_lists_its_missing_keys_without_heavy_imports(tmp_path):
    root = str(Path(__file__).parents[2])
    ended = subprocess.run(
        [sys.executable, "-c", RUN_ALL],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
    )
    answers = [json.loads(line) for line in ended.stdout.splitlines()]
    assert answers == [[words, 2, []] for words in MISSING], ended.stderr
    for message, line in zip(MISSING.values(), ended.stderr.splitlines(), strict=True):
        assert line.startswith(f"unet3d: {message}")


def test_a_single_missing_key_is_described(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["predict", "checkpoint=a", "input=b"]) == 2
    about = "output folder, or a file for a single scan, whose ending is the format"
    expected = f"unet3d: output must be given: output=... ({about})\n"
    assert capsys.readouterr().err == expected


def test_a_command_that_reads_no_dataset_does_not_require_its_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["memory", "data=nnunet", "format=none"])
    assert "data.root" not in capsys.readouterr().err
