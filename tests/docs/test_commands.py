"""What pages tell readers to type works.

The blocks of a page run one after the other in one folder, as a reader would work through it:

    ```bash                              commands, with limits so that they end in seconds
    ```python                            a program
    ```yaml title="conf/pool/x.yaml"     a file to write, in any language; in a file of the project,
                                         the first line of the block is there, the others are added
    ```text                              output of the command before: `unet3d memory` is run as
                                         written, and values that differ by over 1 % fail
"""

import json
import locale
import os
import re
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.config.helpers.configs import SHRUNK
from tests.contract.test_nnunet import NAME, plans  # noqa: F401  (a fixture)
from tests.docs.helpers.pages import (
    PAGES,
    ROOT,
    Block,
    is_module,
    page_name,
    read_blocks,
    split_commands,
)
from unet3d.__main__ import COMMANDS, main
from unet3d.commands import memory
from unet3d.memory import fit as estimate
from unet3d.training import run_reports

pytestmark = pytest.mark.slow

LONG = frozenset(
    """augmentation cross-validation formats labels memory network nnunet optimization python runs
    share sweeps troubleshooting""".split()
)
"""Pages that take longest, of things that have tests of their own: `make long` runs them."""

ELSEWHERE = ("torchrun", "sbatch", "srun", "docker", "podman", "apptainer", "singularity")
"""Programs that start processes elsewhere: the commands that they start are only composed."""

COMPOSED = (
    *("trainer=ddp", "trainer.devices=", "hydra/launcher=", "measure=true"),
    *("trainer.accelerator=cuda", "device=cuda", "budget_gib=auto", "compile=true"),
    "init_from=hf://",
)
"""Several processes, a GPU, minutes of compiling: only composed as well, like download and view."""

FLAGS = {"--help", "--version", "--cfg"}

TINY_STEP = ["volume=[32,16,16]", "data.patch_size=[32,16,16]"]
LIMITS = {
    "memory": TINY_STEP,
    "suggest": [*TINY_STEP[1:], "precisions=[bf16]", "patches=[1]", "strategies=[fused]"],
    "plan": ["model.width=4", "model.convs_per_level=1"],
    "lr": ["steps=20"],
}
"""What is added to a command; a trace costs operations, not sizes."""

READ_LATER = r"(hydra\.|output|callbacks|logger|metrics|experiment|scheduler|resume|data=|-m$)"
"""Words of trainings whose validations or files matter; others only take their step."""

STEP_ONLY = ["trainer.num_sanity_val_steps=0", "+trainer.limit_val_batches=0", "logger=none"]


def parse_unet3d(words: list[str]) -> list[str] | None:
    """Return command and overrides, whatever starts them; None for another program."""
    for at, word in enumerate(words):
        if word in ("train.py", "slurm.sh"):
            return ["train", *words[at + 1 :]]
        if word in COMMANDS and words[0] in ("unet3d", *ELSEWHERE):
            return words[at:]
    return words[1:] if words[0] == "unet3d" else None


def shorten(words: list[str], small: list[str], page: str) -> list[str]:
    """Add limits so that a command ends in seconds; small volumes where it names none.

    A run is evaluated if the page reads the result.
    """
    command, *given = words
    if "-m" in given and "fold=0,1,2,3,4" not in given:  # the first two values of a sweep
        given = [re.sub(r"^([\w.@/]+=[^\[,]+,[^,]+),.*", r"\1", word) for word in given]
    options = {word.partition("=")[0]: word.partition("=")[2] for word in given}
    network = options.get("model") or options.get("experiment", "")
    if command in ("memory", "suggest") and network.startswith("unet_"):
        given += ["model.depth=2", "model.convs_per_level=1", "model.deep_supervision=false"]
    if options.get("benchmark") == "true":
        return [*words, "data.patch_size=[8,8,8]", "model.depth=2", "model.width=4", "seconds=1"]
    if command == "plan" and "max_time" not in options:
        given += ["measure_time=false"]
    if command not in ("train", "lr", "search"):
        return [command, *given, *LIMITS.get(command, [])]
    folder = re.escape(options.get("output") or "?")
    is_read = re.search(rf"{folder}(/[*?])?/validation", page)
    extra = [word for word in small if not (is_read and word.startswith("evaluation"))]
    experiment = options.get("experiment", "example")
    is_synthetic = experiment.startswith("example") and "data" not in options
    if not is_synthetic:
        extra = [word for word in extra if not word.startswith("data.")]
        extra += ["data.batch_size=2", "data.patches_per_case=1", "data.num_workers=0"]
    if "data" in options:
        extra += ["data.patch_size=[16,16,16]"]
    extra = [word for word in extra if word.split("=")[0] not in options]
    if command != "train":
        return [command, *given, *extra, *LIMITS.get(command, [])]
    if not any(re.match(READ_LATER, word) for word in given):
        extra += STEP_ONLY
    is_planned = "experiment" in options and not network.endswith(".json")
    narrow = SHRUNK.get(network, ["model.width=4"] if is_planned else [])
    limits = [word for word in small if word.startswith("trainer.")]
    return [command, *given, *extra, *limits, *narrow]


class Reader:
    """Work through a page."""

    def __init__(self, small: list[str], monkeypatch, capsys):
        self.small, self.monkeypatch, self.capsys = small, monkeypatch, capsys
        self.page = ""
        self.output: list[str] = []  # lines of the last command

    def follow(self, page: Path) -> None:
        self.page = page.read_text()
        for block, after in pairwise([*read_blocks(page), Block("", "", "")]):
            if block.file:
                write_block(Path(block.file), block.content)
            elif block.language == "python":
                exec(compile(block.content, f"{page}, python", "exec"), {"__name__": "__main__"})
            elif block.language == "text":
                lines = [line for line in block.content.splitlines() if line.strip(" .")]
                assert not [line for line in lines if not self.was_printed(line)]
            else:
                for words in split_commands(block.content):
                    self.type(words, as_written=after.language == "text" and not after.file)

    def type(self, words: list[str], *, as_written: bool) -> None:
        """Run a command; with `as_written` a memory estimate is not shortened."""
        while re.fullmatch(r"[A-Z_]+=.*", words[0]):
            variable, value = words.pop(0).split("=", 1)
            if variable == "PYTHONPATH":  # for commands in this process, and for programs
                self.monkeypatch.syspath_prepend(str(Path(value).absolute()))
                value = os.pathsep.join([value, str(ROOT)])
            self.monkeypatch.setenv(variable, value)
        line, command = shlex.join(words), parse_unet3d(words)
        if command is None:
            assert words[0] in ELSEWHERE or OTHERS[words[0]](words), line
            return
        is_composed = words[0] in ELSEWHERE or command[0] in ("download", "view")
        if is_composed or any(word.startswith(COMPOSED) for word in command):
            command = [*first_combination(command), "--cfg", "job"]
        elif not (as_written and command[0] == "memory") and not FLAGS & set(command):
            command = shorten(command, self.small, self.page)
        self.capsys.readouterr()
        assert main(command) == 0, line
        self.output = self.capsys.readouterr().out.splitlines()

    def was_printed(self, line: str) -> bool:
        """Whether a line begins with the same words, and values within 1 %."""
        words, values = split_values(line)
        for printed in self.output:
            others, real = split_values(printed)
            near = pytest.approx(real[: len(values)], rel=0.01, abs=0.2)
            if others.startswith(words) and values == near:
                return True
        return False


def write_block(file: Path, content: str) -> None:
    """Write a file, or add lines to one of a copy of the project."""
    if file.parts[0] == "unet3d" and not Path("unet3d").exists():
        for folder in ("unet3d", "conf"):
            shutil.copytree(ROOT / folder, folder, dirs_exist_ok=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.exists() and file.parts[0] == "unet3d":
        first = content.splitlines(keepends=True)[0]
        text = file.read_text()
        assert text.count(first) == 1, f"{file} has no line {first}"
        content = text.replace(first, content)
    file.write_text(content)


def first_combination(words: list[str]) -> list[str]:
    """The first combination of a sweep, without the launcher of an optional package."""
    if "-m" not in words:
        return words
    words = [w for w in words if w != "-m" and not re.match(r"hydra[/.]launcher", w)]
    return [re.sub(r"^([\w.]+=[^\[{,]+),.*", r"\1", word) for word in words]


def split_values(line: str) -> tuple[str, list[float]]:
    """Separate words from the values between them: `input 7,001.5 1 %` is `input # # %`."""
    number = r"[-+]?\d[\d,]*(?:\.\d+)?"
    values = [float(n.replace(",", "")) for n in re.findall(number, line)]
    return " ".join(re.sub(number, "#", line).split()), values


def is_make(words: list[str]) -> bool:
    """`make TARGET ARGS="overrides"`."""
    overrides = [o for w in words if w.startswith("ARGS=") for o in w[5:].split()]
    if words[1] == "train" and main(["train", *overrides, "--cfg", "job"]) != 0:
        return False
    return f"\n{words[1]}:" in (ROOT / "Makefile").read_text()


def is_pip(words: list[str]) -> bool:
    """`pip install ...`, with extras that exist."""
    extras = [extra for word in words for extra in re.findall(r"\[(\w+)\]", word)]
    text = (ROOT / "pyproject.toml").read_text()
    return words[1] == "install" and all(re.search(rf"^{e} = \[", text, re.M) for e in extras)


def is_script(words: list[str]) -> bool:
    """`python -m scripts.x.y --option`, with options that it has; others are run."""
    if words[1].endswith("/scripts/predict.py") or words[1:3] == ["-m", "unet3d"]:
        return subprocess.run([sys.executable, "-W", "ignore", *words[1:]]).returncode == 0
    if words[1] != "-m":
        return False
    if words[2] == "monai.bundle":  # run in tests/commands/test_export_bundle.py
        return Path(words[words.index("--config_file") + 1]).is_file()
    path = ROOT / words[2].replace(".", "/")
    files = (*path.parent.glob("*.py"), *path.glob("*.py"), ROOT / "scripts/bench/results.py")
    text = "".join(file.read_text() for file in files)
    flags = [word.split("=")[0] for word in words if word.startswith("--")]
    return is_module(words[2]) and all(f'"{flag}"' in text for flag in flags)


OTHERS = {
    "make": is_make,
    "mkdir": lambda words: subprocess.run(words).returncode == 0,
    "pip": is_pip,
    "python": is_script,
    "tensorboard": lambda words: Path(words[words.index("--logdir") + 1]).is_dir(),
}
"""Other programs, and how their words are checked."""


TRACES: dict[str, Any] = {}
"""Traces that were made before: pages need the same ones again and again."""


@pytest.fixture
def reader(small, tmp_path, monkeypatch, decathlon_folder, plans, capsys):  # noqa: F811
    """A reader in a folder with the hippocampus in data/, in two layouts, and in brains/."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "Task04_Hippocampus").symlink_to(decathlon_folder)
    (tmp_path / "brains").mkdir()
    for part in ("images", "labels"):
        (tmp_path / "brains" / part).symlink_to(decathlon_folder / f"{part}Tr")
    table = "0 Unknown 0 0 0 0\n1 Left-Hippocampus 220 216 20 0\n2 Right-Hippocampus 220 216 20 0\n"
    (tmp_path / "FreeSurferColorLUT.txt").write_text(table)
    planned = "Dataset004_Hippocampus"  # as pages call it
    (tmp_path / "data" / planned).symlink_to(tmp_path / "nnUNet_raw" / NAME)
    (tmp_path / "nnUNet_preprocessed" / planned).symlink_to(plans.parent)
    splits = plans.with_name("splits_final.json")
    splits.write_text(json.dumps(2 * json.loads(splits.read_text())))  # a page trains fold 1
    trace = estimate.estimate_resolved_step

    def trace_once(step, precision, **options):
        key = f"{step} {precision} {options}"
        if key not in TRACES:
            TRACES[key] = trace(step, precision, **options)
        return TRACES[key]

    monkeypatch.setattr(estimate, "estimate_resolved_step", trace_once)
    # Figures take a seventh of the time, savings several estimates; no page quotes them.
    monkeypatch.setattr(run_reports, "draw_timeline", lambda run, report: None)
    alone = lambda *settings: (estimate.estimate_configured_step(*settings), [])  # noqa: E731
    monkeypatch.setattr(memory, "estimate_with_savings", alone)
    yield Reader(small, monkeypatch, capsys)
    locale.setlocale(locale.LC_CTYPE, "")  # reading a volume of docs/how-to/formats.md sets ASCII


def mark_long(page: Path):
    return pytest.param(page, marks=[pytest.mark.long] if page.stem in LONG else [])


@pytest.mark.parametrize("page", [*map(mark_long, PAGES)], ids=map(page_name, PAGES))
def test_the_commands_of_a_page_work(reader, page):
    reader.follow(page)
