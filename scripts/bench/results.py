"""What all benchmarks share: options, processes of their own, and files of results."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from unet3d.report.run_report import collect_versions

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
TRAIN = (sys.executable, "-W", "ignore", "-m", "unet3d", "train")


def make_parser(module: str, description: str | None, *, output: str) -> argparse.ArgumentParser:
    """Return a parser with the option --output, a file of benchmarks/ by default."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, default=BENCHMARKS / output, help="result file")
    return parser


def run_child(module: str, *words: object) -> Any:
    """Run a script of this repository; return what its last line has as JSON."""
    command = [sys.executable, "-W", "ignore", "-m", module, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def read_results(path: Path) -> dict[str, Any]:
    """Return the recorded results; nothing without the file."""
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}


def write_results(path: Path, results: dict[str, Any], *, update: bool = False) -> None:
    """Write results with the versions of packages; with `update`, keep the other parts."""
    before = read_results(path) if update else {}
    content = before | {"versions": collect_versions()} | results
    path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    print(f"wrote {path}")
