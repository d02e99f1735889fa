"""Compute the figures of docs/tutorials/big-volume.md; needs no GPU.

python -m scripts.bench.big    # writes benchmarks/predicted-big.json, in a few minutes
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from scripts.bench.results import make_parser, write_results
from unet3d.__main__ import main as run_command

JOB = "model=unet_nnunet data.num_classes=5 data.patch_size=[256,256,128] precision=16"
COMMANDS = {
    "study": f"memory vary=checkpointing {JOB}",
    "fit": f"suggest budget_gib=4 {JOB}",
}
FIELDS = ("value", "overrides", "peak_allocated_bytes", "peak_reserved_bytes", "extra_compute")


def query(words: str) -> list[dict[str, Any]]:
    """Run a command of unet3d and return its JSON output."""
    with TemporaryDirectory() as folder:
        output = Path(folder) / "output.json"
        code = run_command([*words.split(), "format=json", f"output={output}"])
        if code:
            sys.exit(code)
        content = json.loads(output.read_text())
        rows = content if isinstance(content, list) else [content]
        return [{key: row[key] for key in FIELDS if key in row} for row in rows]


def main() -> None:
    options = make_parser("scripts.bench.big", __doc__, output="predicted-big.json").parse_args()
    results = {name: query(words) for name, words in COMMANDS.items()}
    write_results(options.output, {"command": "python -m scripts.bench.big", **results})


if __name__ == "__main__":
    main()
