"""What all benchmarks share: options, processes of their own, and files of results."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

from unet3d.report.run_report import collect_versions

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
TRAIN = (
    *(sys.executable, "-W", "ignore", "-m", "unet3d", "train"),
    "trainer.enable_progress_bar=false",
)


def make_parser(module: str, description: str | None, *, output: str) -> argparse.ArgumentParser:
    """Return a parser with the option --output, a file of benchmarks/ by default."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, default=BENCHMARKS / output, help="result file")
    return parser


def run_in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of a module in a process of its own; return its result."""
    environ = {"OPENBLAS_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}  # functions set torch's
    with patch.dict(os.environ, environ), ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def train(words: Sequence[str], folder: Path, threads: int) -> dict[str, Any]:
    """Train in a process of its own unless the run is finished; return the run's report."""
    report = folder / "report.json"
    if not report.is_file() or not json.loads(report.read_text())["finished"]:
        print(" ".join(words), flush=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        command = [*TRAIN, *words, f"hydra.run.dir={folder}", "resume=auto"]
        environ = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        with folder.with_suffix(".log").open("a") as log:
            subprocess.run(command, cwd=ROOT, env=environ, check=True, stdout=log, stderr=log)
    return json.loads(report.read_text())


def follow_memory(profiler: Any) -> Iterator[tuple[str, int]]:
    """Yield the name of each event of a profile of a CPU, and the bytes that are in use then."""
    in_use = 0
    events = profiler.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: (event.start_ns(), event.nbytes())):
        in_use += event.nbytes() if event.name() == "[memory]" else 0
        yield event.name(), in_use


def read_results(path: Path) -> dict[str, Any]:
    """Return the recorded results; nothing without the file."""
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}


def write_results(path: Path, results: dict[str, Any], *, update: bool = False) -> None:
    """Write results with the versions of packages; with `update`, keep the other parts."""
    before = read_results(path) if update else {}
    content = before | {"versions": collect_versions()} | results
    path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    print(f"wrote {path}")
