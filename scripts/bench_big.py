"""What docs/tutorials/big-volume.md says of its job: predicted, no GPU needed.

python scripts/bench_big.py    # into benchmarks/predicted-big.json, in some minutes
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from unet3d.cli.main import main as command  # noqa: E402
from unet3d.report.run_report import collect_versions  # noqa: E402

JOB = "model=unet_nnunet data.num_classes=5 data.patch_size=[256,256,128] precision=16"
COMMANDS = {
    "study": f"memory sweep=checkpointing {JOB}",
    "fit": f"suggest budget_gib=4 {JOB}",
}


def answered(words: str) -> Any:
    """What a command says for other programs."""
    with TemporaryDirectory() as folder:
        output = Path(folder) / "found.json"
        code = command([*words.split(), "format=json", f"output={output}"])
        if code:
            sys.exit(code)
        return json.loads(output.read_text())


def main() -> int:
    found: dict[str, Any] = {
        "command": "python scripts/bench_big.py",
        "versions": collect_versions(),
    }
    for name, words in COMMANDS.items():
        rows = answered(words)
        kept = (
            "value",
            "overrides",
            "peak_allocated_bytes",
            "peak_reserved_bytes",
            "extra_compute",
        )
        found[name] = [{key: row[key] for key in kept if key in row} for row in rows]
        found[f"{name} command"] = f"unet3d {words}"
    path = ROOT / "benchmarks" / "predicted-big.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
