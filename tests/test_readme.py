"""The documents are true: what they tell to type runs, and what they point at is there.

The blocks of a page run one after the other in one folder, as a reader would work through it:

    ```bash                     commands, with limits that let them end in seconds
    ```python                   a program
    ```yaml conf/pool/x.yaml    a file to write, whatever the language
    ```text                     lines that the command before it says: `unet3d memory` is run as it
                                stands, and figures that are off by 1 % fail
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.data.helpers.folders import nnunet
from tests.test_conf import SHRUNK
from unet3d.cli import memory
from unet3d.cli.main import COMMANDS, main
from unet3d.config.compose import compose_config, get_config_dir
from unet3d.workflows.memory import estimate

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    p for p in ROOT.rglob("*.md") if not any(n[0] == "." for n in p.relative_to(ROOT).parts)
)
PAGES = [p for p in DOCUMENTS if re.search(r"^```(bash|python)", p.read_text(), re.MULTILINE)]

ELSEWHERE = ("torchrun", "sbatch", "srun", "docker", "podman", "apptainer", "singularity")
"""Who starts processes on other machines and in containers: what they start is composed only."""

COMPOSED = (
    *("get_data", "trainer=ddp", "trainer.devices=", "hydra/launcher=", "measure=true"),
    *("trainer.accelerator=gpu", "device=gpu", "budget_gib=auto", "compile=true"),
)
"""A download, several processes, a GPU, minutes of compiling: the same."""

FLAGS = {"--help", "--version", "--cfg"}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(page: Path) -> Iterator[tuple[str, str, str]]:
    """Language, file and content of each."""
    fenced = re.compile(r"^```(\w+) ?(\S*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    for block in fenced.finditer(page.read_text()):
        yield block[1], block[2], block[3]


def commands(block: str) -> list[list[str]]:
    """The words of each line; one that ends with a backslash goes on."""
    lines = block.replace("\\\n", " ").splitlines()
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


def asked_of_unet3d(words: list[str]) -> list[str] | None:
    """Verb and overrides, whoever starts it; None: it is another program."""
    for at, word in enumerate(words):
        if word in ("train.py", "scripts/slurm.sh"):
            return ["train", *words[at + 1 :]]
        if word in COMMANDS and words[0] in ("unet3d", *ELSEWHERE):
            return words[at:]
    return words[1:] if words[0] == "unet3d" else None


def shortened(words: list[str], small: list[str], page: str) -> list[str]:
    """With limits that let a command end in seconds; small volumes where it names none.

    A run is evaluated if the page looks at what that leaves.
    """
    verb, *given = words
    if "-m" in given and "fold=0,1,2,3,4" not in given:  # of what a sweep tries, the first two
        given = [re.sub(r"^([\w.@/]+=[^\[,]+,[^,]+),.*", r"\1", word) for word in given]
        words = [verb, *given]
    options = {word.partition("=")[0]: word.partition("=")[2] for word in given}
    network = options.get("model") or options.get("experiment", "")
    narrow = SHRUNK.get(network, ["model.width=4"] if "experiment" in options else [])
    if verb in ("memory", "fit"):  # what a trace costs is its operations, not its sizes
        few = ["model.depth=2", "model.convolutions=1"] if network.startswith("unet_") else []
        own = {
            "memory": ["volume=[32,16,16]"],
            "fit": ["precisions=[bf16]", "patches=[1]", "strategies=[none]"],
        }
        return [*words, *own[verb], *few, "data.patch_size=[32,16,16]"]
    if verb == "plan":
        return [*words, "model.width=4", "model.convolutions=1", "measure_time=false"]
    if verb != "train":
        return words
    folder = options.get("hydra.run.dir") or options.get("hydra.sweep.dir") or "?"
    looked_at = re.search(rf"{re.escape(folder)}(/\*)?/validation", page)
    extra = [word for word in small if not (looked_at and word.startswith("evaluation"))]
    made_up = options.get("experiment", "forum").startswith("forum") and "data" not in options
    if not made_up:
        extra = [word for word in extra if not word.startswith("data.")]
        extra += ["data.batch_size=2", "data.patches_per_case=1", "data.num_workers=0"]
    limits = [word for word in extra if word.startswith("trainer.")]
    extra = [word for word in extra if word.split("=")[0] not in options]
    return [*words, *extra, *limits, *narrow]


class Reader:
    """Somebody who works through a page."""

    def __init__(self, small: list[str], monkeypatch, capsys):
        self.small, self.monkeypatch, self.capsys = small, monkeypatch, capsys
        self.page = ""
        self.said: list[str] = []  # lines, by the last command

    def follow(self, page: Path) -> None:
        self.page = page.read_text()
        for (language, file, content), (after, *_) in pairwise([*blocks(page), ("", "", "")]):
            if file:
                Path(file).parent.mkdir(parents=True, exist_ok=True)
                Path(file).write_text(content)
            elif language == "python":
                subprocess.run([sys.executable, "-c", content], check=True, timeout=60)
            elif language == "bash":
                for words in commands(content):
                    self.type(words, whole=after == "text")
            elif language == "text":
                lines = [line for line in content.splitlines() if line.strip(" .")]
                assert not [line for line in lines if not self.was_said(line)]

    def type(self, words: list[str], *, whole: bool) -> None:
        """One command; with `whole` a prediction is made as it stands."""
        while re.fullmatch(r"[A-Z_]+=.*", words[0]):
            self.set(*words.pop(0).split("=", 1))
        line, asked = shlex.join(words), asked_of_unet3d(words)
        if asked is None:
            assert words[0] in ELSEWHERE or OTHERS[words[0]](words), line
            return
        if words[0] in ELSEWHERE or any(w.startswith(c) for w in asked for c in COMPOSED):
            asked = [*(word for word in asked if word != "-m"), "--cfg", "job"]
        whole &= asked[0] == "memory"
        if not whole and not FLAGS & set(asked):
            asked = shortened(asked, self.small, self.page)
        with self.monkeypatch.context() as patched:
            if whole:  # what would help takes several predictions, and pages do not quote it
                patched.setattr(memory, "savings", lambda *_: [])
            self.capsys.readouterr()
            assert ended(asked) == 0, line
        self.said = self.capsys.readouterr().out.splitlines()

    def set(self, variable: str, value: str) -> None:
        """What stands before a command."""
        self.monkeypatch.setenv(variable, value)
        if variable == "PYTHONPATH":
            self.monkeypatch.syspath_prepend(str(Path(value).absolute()))

    def was_said(self, line: str) -> bool:
        """A line that begins with the same words, and figures within 1 %."""
        words, figures = parts(line)
        for said in self.said:
            others, real = parts(said)
            near = pytest.approx(real[: len(figures)], rel=0.01, abs=0.2)
            if others.startswith(words) and figures == near:
                return True
        return False


def ended(words: list[str]) -> int:
    """A command's exit code."""
    try:
        return main(words)
    except SystemExit as leave:  # Hydra's way out of --help
        return int(leave.code or 0)


def parts(line: str) -> tuple[str, list[float]]:
    """Words, and the figures between them.

    >>> parts("input   7,001.5  1 %")
    ('input # # %', [7001.5, 1.0])
    """
    number = r"[-+]?\d[\d,]*(?:\.\d+)?"
    figures = [float(n.replace(",", "")) for n in re.findall(number, line)]
    return " ".join(re.sub(number, "#", line).split()), figures


def made(words: list[str]) -> bool:
    """`make TARGET ARGS="overrides"`."""
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    overrides = [o for w in words if w.startswith("ARGS=") for o in w[5:].split()]
    target = words[1]
    return target in targets and (
        target != "train" or main(["train", *overrides, "--cfg", "job"]) == 0
    )


def installed(words: list[str]) -> bool:
    """`pip install ...`, with extras that there are."""
    extras = [extra for word in words for extra in re.findall(r"\[(\w+)\]", word)]
    text = (ROOT / "pyproject.toml").read_text()
    return words[1] == "install" and all(re.search(rf"^{e} = \[", text, re.M) for e in extras)


def script(words: list[str]) -> bool:
    """`python scripts/x.py --option`, and the options are its own."""
    file = ROOT / words[1]
    flags = [word.split("=")[0] for word in words if word.startswith("--")]
    return file.is_file() and all(flag in file.read_text() for flag in flags)


OTHERS = {
    "make": made,
    "pip": installed,
    "python": script,
    "tensorboard": lambda words: Path(words[words.index("--logdir") + 1]).is_dir(),
}
"""Programs that are not run, and what must be right about their words."""


@pytest.fixture(scope="module")
def known():
    """Predictions that were made already: pages ask for the same ones again and again."""
    return {}


@pytest.fixture
def reader(small, known, tmp_path, monkeypatch, decathlon_folder, capsys):
    """In a folder with the hippocampus in data/, in two layouts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "Task04_Hippocampus").symlink_to(decathlon_folder)
    nnunet(tmp_path / "data" / "Dataset004_Hippocampus", 5)
    keys, trace = list(compose_config([], "train").config), estimate.trace_step

    def traced(request, used, **options):
        key = f"{OmegaConf.to_yaml(OmegaConf.masked_copy(request.config, keys))} {used} {options}"
        if key not in known:
            known[key] = trace(request, used, **options)
        return known[key]

    monkeypatch.setattr(estimate, "trace_step", traced)
    return Reader(small, monkeypatch, capsys)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_a_page_tells_to_do_works(reader, page):
    reader.follow(page)


def test_the_readme_names_every_option_and_file():
    text = (ROOT / "README.md").read_text()
    shown = {p.stem for p in get_config_dir().glob("*/[!_]*.yaml")} - {"none", "tensorboard"}
    assert not [option for option in shown if f"`{option}`" not in text]
    rooms = [p.name for p in (ROOT / "unet3d").iterdir() if p.is_dir() and p.name[0] != "_"]
    assert not [room for room in rooms if f"unet3d/{room}/" not in text]


def prose(page: Path) -> str:
    """Without code."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "code", text)


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere_and_pictures_are_there_and_small(page):
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        path = page.parent / file if file else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            dead.append(target)
        elif path.suffix == ".png":
            assert path.stat().st_size < 300_000
    assert dead == []


@pytest.mark.parametrize("page", DOCUMENTS, ids=name_of)
def test_files_of_the_project_that_are_named_are_there(page):
    named = re.findall(r"`((?:unet3d|scripts|tests|benchmarks|docs)/[\w/.-]+)`", page.read_text())
    examples = [n for n in named if Path(n).stem == "x"]
    assert not [n for n in named if n not in examples and not (ROOT / n).exists()]


def test_every_result_has_the_command_that_remakes_it():
    text = (ROOT / "benchmarks" / "README.md").read_text()
    devices = r"<device>|[\w.]+"  # a row may stand for one device or for all
    rows = [
        re.escape(n).replace("<device>", f"({devices})") for n in re.findall(r"`(\S+\.json)`", text)
    ]
    results = [p.name for p in (ROOT / "benchmarks").glob("*.json")]
    assert not [name for name in results if not any(re.fullmatch(row, name) for row in rows)]


def test_every_page_of_docs_can_be_reached_from_its_index():
    links = re.findall(r"\]\(([^)#\s]+)", (ROOT / "docs" / "index.md").read_text())
    reached = {(ROOT / "docs" / link).resolve() for link in links}
    pages = set((ROOT / "docs").rglob("*.md")) - {ROOT / "docs" / "index.md"}
    assert not [name_of(page) for page in pages if page.resolve() not in reached]


def test_the_tables_are_those_of_the_result_files():
    import importlib.util

    spec = importlib.util.spec_from_file_location("tables", ROOT / "scripts" / "readme_tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    for document in tables.documents():
        text = document.read_text()
        assert tables.filled(text) == text, name_of(document)
