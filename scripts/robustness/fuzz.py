"""Give commands inputs drawn at random: none may crash, hang, or do more than its command does.

    python -m scripts.robustness.fuzz                            # 10,000 inputs, into benchmarks/
    python -m scripts.robustness.fuzz --inputs 300               # fewer; writes nothing
    python -m scripts.robustness.fuzz --kind volume --keep FOLDER  # keep the files of failures

Checkpoints, volumes, experiments and command lines. Each input runs in a process of its own, under
an audit hook and limits of time and memory: see scripts/robustness/fuzzing/isolation.py.
"""

import argparse
import atexit
import gc
import os
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from scripts.robustness.corrupted_inputs import fork
from scripts.robustness.fuzzing.checkpoints import draw_checkpoints
from scripts.robustness.fuzzing.configs import draw_experiments, draw_overrides
from scripts.robustness.fuzzing.isolation import (
    FAILURES,
    LIMIT_MIB,
    LIMIT_SECONDS,
    Input,
    Outcome,
    compose,
    run_command,
    run_isolated,
)
from scripts.robustness.fuzzing.volumes import SAMPLES, draw_volumes, write_samples
from unet3d.cli.main import COMMANDS
from unet3d.data.layouts.synthetic import write_dataset
from unet3d.report.run_report import collect_versions, write_report

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "benchmarks" / "cpu-fuzz.json"
INPUTS = 10_000

TRAIN = (
    *("train", "data=decathlon", "data.root=set", "data.cache=out/cache", "fold=none"),
    *("data.patch_size=[8,8,8]", "data.batch_size=1", "model.width=2", "model.depth=2"),
    *("trainer.enable_progress_bar=false", "trainer.accelerator=cpu", "memory.estimate=false"),
    *("evaluation.enabled=false", "trainer.max_steps=1", "hydra.run.dir=out/run"),
)
"""A run of a step on the valid dataset."""

KINDS: dict[str, int] = {"checkpoint": 4, "volume": 3, "experiment": 2, "override": 2}
"""Kinds of inputs, and how many of each are drawn, relative to the others."""

LAZY = (
    *("SimpleITK", "tifffile", "imagecodecs", "zarr", "pydicom", "highdicom", "safetensors"),
    *("unet3d.workflows.segmenter", "lightning.pytorch.loggers", "tensorboard.summary.writer"),
)
"""Modules that commands import on first use: once here, instead of in each process."""


@dataclass
class Results:
    """What became of inputs, and the first ones that failed."""

    verdicts: Counter[tuple[str, str]] = field(default_factory=Counter)  # by kind and verdict
    failures: list[str] = field(default_factory=list)
    longest_seconds: float = 0.0
    most_mib: float = 0.0

    def add(self, item: Input, outcome: Outcome) -> None:
        """Count an input."""
        verdict = outcome.verdict
        self.verdicts[item.kind, verdict] += 1
        self.longest_seconds = max(self.longest_seconds, outcome.seconds)
        self.most_mib = max(self.most_mib, outcome.mib)
        if verdict in FAILURES:
            tail = "\n  ".join([*outcome.acts, *outcome.stderr.strip().splitlines()[-6:]])
            self.failures.append(
                f"{verdict} ({outcome.code}, {outcome.seconds:.1f} s, {outcome.mib:.0f} MiB): "
                f"{item.describe()}\n  {tail}"
            )

    def merge(self, other: "Results") -> None:
        """Add the results of another process."""
        self.verdicts += other.verdicts
        self.failures += other.failures
        self.longest_seconds = max(self.longest_seconds, other.longest_seconds)
        self.most_mib = max(self.most_mib, other.most_mib)


def create_valid_inputs(folder: Path) -> None:
    """Write a dataset, a scan in every format, and a checkpoint, without defects."""
    folder.mkdir()

    def train() -> int:
        Path("set").mkdir()
        write_dataset(
            Path("set"), classes=3, cases=3, size=[12, 10, 8], spacing_mm=[1, 1, 2], noise=0.1,
            seed=1,
        )  # fmt: skip
        return run_command(Input(kind="valid", words=TRAIN))

    code, _, _, stderr = fork(train, folder, 300)
    if code:
        sys.exit(f"could not create the valid inputs: {stderr}")
    shutil.copy(folder / "out" / "run" / "checkpoints" / "last.ckpt", folder / "run.ckpt")
    shutil.rmtree(folder / "out" / "run")
    (folder / "scans").mkdir()
    shutil.copy(folder / "set" / "imagesTr" / "case_000.nii.gz", folder / "scans" / "a.nii.gz")
    write_samples(folder)


def draw_inputs(original: Path, kinds: Sequence[str]) -> st.SearchStrategy[Input]:
    """Return a strategy for inputs of these kinds."""
    strategies: dict[str, st.SearchStrategy[Input]] = {
        "checkpoint": draw_checkpoints(original, TRAIN),
        "volume": draw_volumes(original, TRAIN),
        "experiment": draw_experiments(TRAIN),
        "override": draw_overrides(TRAIN),
    }
    drawn = [kind for kind in kinds for _ in range(KINDS[kind])]

    @st.composite
    def draw_input(draw: st.DrawFn) -> Input:
        return draw(strategies[draw(st.sampled_from(drawn))])

    return draw_input()


def fuzz(
    original: Path,
    count: int,
    number: int,
    *,
    kinds: Sequence[str] = tuple(KINDS),
    act: Callable[[Input], int] = run_command,
    keep: Path | None = None,
) -> Results:
    """Draw inputs, the same ones for the same number, and run `act` on each."""
    results = Results()

    @seed(number)
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(draw_inputs(original, kinds))
    def run(item: Input) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "work"
            unused = [] if item.kind == "volume" else [SAMPLES]
            shutil.copytree(original, folder, ignore=shutil.ignore_patterns(*unused))
            if item.is_file and item.words[0] != "load":
                compose(item.words)  # in this process, for all later ones
            outcome = run_isolated(item, folder, lambda: act(item))
            results.add(item, outcome)
            if results.verdicts.total() % 250 == 0:
                print(f"job {number}: {results.verdicts.total()} of {count}", file=sys.stderr)
            if outcome.verdict in FAILURES and keep is not None:
                name = f"{outcome.verdict} {number} {results.verdicts.total()}".replace(" ", "-")
                shutil.copytree(folder, keep / name, symlinks=True, dirs_exist_ok=True)

    run()
    return results


def prepare(threads: int = 1) -> None:
    """Import what commands import, before all forks."""
    torch.set_num_threads(threads)
    sys.dont_write_bytecode = True
    os.environ["MPLBACKEND"] = "agg"
    warnings.simplefilter("ignore")
    for command in COMMANDS:
        import_module(f"unet3d.cli.{command}")
    for name in LAZY:
        import_module(name)
    gc.collect()
    gc.freeze()  # or each process would copy what its collector looks at
    atexit.register(gc.unfreeze)  # or Triton's functions are reported as leaks


def format_table(results: Results) -> str:
    """Count verdicts, one line per kind of input."""
    found = [name for name in FAILURES if any(v == name for _, v in results.verdicts)]
    heads = ("accepted", "refused", *found)
    lines = ["".join(f"{head:>18}" for head in ("", "inputs", *heads))]
    for kind in KINDS:
        counts = [results.verdicts[kind, head] for head in heads]
        lines.append("".join(f"{cell:>18}" for cell in (kind, sum(counts), *counts)))
    return "\n".join(lines)


def build_report(results: Results, number: int, seconds: float) -> dict[str, Any]:
    """Return the content of the result file."""
    verdicts = ("accepted", "refused", *FAILURES)
    return {
        "command": f"python -m scripts.robustness.fuzz --inputs {results.verdicts.total()} "
        f"--seed {number}",
        "seed": number,
        "limit_seconds": LIMIT_SECONDS,
        "limit_mib": LIMIT_MIB,
        "versions": collect_versions(),
        "inputs": results.verdicts.total(),
        "failures": sum(results.verdicts[kind, name] for kind in KINDS for name in FAILURES),
        "kinds": {kind: {v: results.verdicts[kind, v] for v in verdicts} for kind in KINDS},
        "longest_seconds": round(results.longest_seconds, 1),
        "most_mib": round(results.most_mib),
        "seconds": round(seconds),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.robustness.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--inputs", type=int, default=INPUTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes that run inputs")
    parser.add_argument("--kind", choices=KINDS, action="append", help="only this kind")
    parser.add_argument("--keep", type=Path, help="folder for the files of inputs that fail")
    parser.add_argument("--output", type=Path, help=f"default for {INPUTS} inputs: {OUTPUT.name}")
    options = parser.parse_args()
    prepare()
    start, results = time.perf_counter(), Results()
    with tempfile.TemporaryDirectory() as scratch:
        original = Path(scratch) / "original"
        create_valid_inputs(original)
        shares = [options.inputs // options.jobs] * options.jobs
        shares[0] += options.inputs % options.jobs
        with ProcessPoolExecutor(options.jobs, get_context("fork")) as pool:
            futures = [
                pool.submit(
                    fuzz,
                    original,
                    share,
                    1000 * options.seed + job,
                    kinds=options.kind or tuple(KINDS),
                    keep=options.keep,
                )
                for job, share in enumerate(shares)
            ]
            for future in futures:
                results.merge(future.result())
    for failure in results.failures:
        print(
            re.sub(r"[\0-\x08\x0b-\x1f\x7f-\x9f]", "?", failure).encode("utf-8", "replace").decode()
        )
    print(format_table(results))
    output = options.output or (OUTPUT if options.inputs >= INPUTS and not options.kind else None)
    if output is not None:
        write_report(build_report(results, options.seed, time.perf_counter() - start), output)
    return int(bool(results.failures))


if __name__ == "__main__":
    sys.exit(main())
