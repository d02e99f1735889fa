"""Estimate the recorded rows of the GPU report again, with today's code; needs no GPU.

    python -m scripts.gpu.reestimate benchmarks/nvidia-h100-80gb-hbm3.json

A measurement stays valid when the estimate changes: this replaces the estimates and the errors.
"""

import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from scripts.bench.step import estimate
from scripts.gpu.steps import (
    FORUM_RUN,
    compose_step,
    describe_errors,
    list_forum_steps,
    list_graph_steps,
    list_peer_steps,
    list_tile_steps,
)
from unet3d.memory.estimate import MemoryEstimate
from unet3d.memory.fit import estimate_configured_step

Estimator = Callable[[], MemoryEstimate]


def list_estimators(parts: dict[str, Any]) -> dict[tuple[str, str], Estimator]:
    """Return, by part and row, what estimates the row again."""
    steps = {
        "forum": list_forum_steps(),
        "tile_size": list_tile_steps(),
        "peers": list_peer_steps(),
        "graphs": list_graph_steps(),
    }
    configs = {
        ("forum", f"{n}, {FORUM_RUN}"): [f"experiment=example_{n}"] for n in ("small", "large")
    }
    for row in parts.get("predict", {}).get("rows", {}):
        words = [*row.split(), "data.num_classes=5", "trainer.accelerator=gpu"]
        configs["predict", row] = words
    return {
        (part, name): partial(estimate, make, size, 2, "16", cuda=True)
        for part, rows in steps.items()
        for name, (make, size) in rows.items()
    } | {row: partial(estimate_config, words) for row, words in configs.items()}


def estimate_config(words: list[str]) -> MemoryEstimate:
    return estimate_configured_step(compose_step(words))


def assume_gpu(parts: dict[str, Any]) -> AbstractContextManager:
    """Estimate for the GPU of the report instead of this machine's, in a `with` statement."""
    if float(parts["environment"]["rows"]["machine"]["capability"]) >= 9:
        return patch.dict(os.environ, CUBLAS_WORKSPACE_CONFIG=":4096:8")  # 32 MiB, its default
    return nullcontext()


def main() -> None:
    path = Path(sys.argv[1])
    results = json.loads(path.read_text())
    parts = results["parts"]
    for (part, name), run in list_estimators(parts).items():
        if row := parts.get(part, {}).get("rows", {}).get(name):
            with assume_gpu(parts):
                row |= describe_errors(run(), row["measured"])
            print(f"{part}, {name}: {row['allocated_error_percent']:+.2f} %", flush=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
