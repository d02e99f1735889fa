"""Compute the figures of docs/tutorials/big-volume.md; needs no GPU.

python -m scripts.bench.big    # writes benchmarks/predicted-big.json, in a few minutes
"""

import argparse
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from unet3d.cli.main import main as run_command
from unet3d.report.run_report import collect_versions

ROOT = Path(__file__).resolve().parents[2]

JOB = "model=unet_nnunet data.num_classes=5 data.patch_size=[256,256,128] precision=16"
COMMANDS = {
    "study": f"memory vary=checkpointing {JOB}",
    "fit": f"suggest budget_gib=4 {JOB}",
}
FIELDS = ("value", "overrides", "peak_allocated_bytes", "peak_reserved_bytes", "extra_compute")


def query(words: str) -> Any:
    """Run a command of unet3d and return its JSON output."""
    with TemporaryDirectory() as folder:
        output = Path(folder) / "output.json"
        code = run_command([*words.split(), "format=json", f"output={output}"])
        if code:
            sys.exit(code)
        return json.loads(output.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.big",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "predicted-big.json")
    options = parser.parse_args()
    report: dict[str, Any] = {
        "command": "python -m scripts.bench.big",
        "versions": collect_versions(),
    }
    for name, words in COMMANDS.items():
        report[name] = [{k: row[k] for k in FIELDS if k in row} for row in query(words)]
        report[f"{name} command"] = f"unet3d {words}"
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
