"""Cut, train and predict on OME-Zarr stores that are larger than what is allowed of RAM.

    python -m scripts.bench.larger_than_memory    # writes benchmarks/cpu-larger-than-memory.json

A store of 64 GiB (float32) takes little of the disk: its chunks are links to one of few files.
Prediction is measured on stores of 0.5, 1, 2 and 64 GiB (which takes an hour), with
memory_gib=0.5 (64 GiB: 2), a network of 1 channel, which learns nothing,
and windows that do not overlap.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from scripts.bench.results import ROOT, make_parser, write_results

CHUNK, ORIGINALS = 128, 25
SIDE = {0.5: (512, 512, 512), 1: (640, 640, 640), 2: (768, 768, 896), 64: (2560, 2560, 2688)}
"""Sizes of stores (z, y, x) by their GiB."""
SPLIT = ["gap=37", "count=16", "size=[112,112,112]"]
DATA = [
    "data=pairs",
    "data.classes=[background,cell]",
    "data.ignore_label=255",
    "data.normalize=ct",
]
NETWORK = ["model.width=1", "model.depth=2", "data.patch_size=[64,64,64]", "data.batch_size=2"]


def make_store(folder: Path, gib: float) -> None:
    """Write an image and labels of few different chunks."""
    shutil.rmtree(folder, ignore_errors=True)
    rng, shape = np.random.default_rng(0), SIDE[gib]
    grid = np.stack(np.meshgrid(*[np.arange(CHUNK)] * 3, indexing="ij"))
    arrays, roots = [], [folder / "image.ome.zarr", folder / "label.ome.zarr"]
    for root, dtype in zip(roots, ("float32", "uint8"), strict=True):
        group = zarr.open_group(root, mode="w")
        axes = [{"name": axis, "type": "space", "unit": "micrometer"} for axis in "zyx"]
        scale = [{"type": "scale", "scale": [1.0, 1.0, 1.0]}]
        levels = [{"path": "0", "coordinateTransformations": scale}]
        group.attrs["ome"] = {"version": "0.5", "multiscales": [{"axes": axes, "datasets": levels}]}
        chunks = (CHUNK,) * 3
        arrays.append(group.create_array("0", shape=shape, chunks=chunks, dtype=dtype))
    corners = list(np.ndindex(*(-(-size // CHUNK) for size in shape)))
    files = [[root / "0" / "c" / "/".join(map(str, c)) for root in roots] for c in corners]
    for corner in corners[:ORIGINALS]:
        cell = np.linalg.norm(grid - rng.uniform(30, 98, 3)[:, None, None, None], axis=0) < 25
        box = tuple(slice(CHUNK * k, CHUNK * (k + 1)) for k in corner)
        image, label = arrays
        image[box] = np.round(rng.normal(100, 10, cell.shape)) + 60 * cell  # which compresses
        label[box] = cell
    for n, (image, label) in enumerate(files[ORIGINALS:]):
        for file, original in zip((image, label), files[n % ORIGINALS], strict=True):
            file.parent.mkdir(parents=True, exist_ok=True)
            os.link(original, file)


def run(folder: Path, *words: str) -> dict[str, float]:
    """Run a command; return its seconds and its peak of resident memory."""
    program = (
        "import resource, sys; from unet3d.__main__ import main; code = main(sys.argv[1:]); "
        "print('PEAK', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, "
        "resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(code)"
    )
    print(" ".join(words), flush=True)
    start = time.perf_counter()
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        encoding="utf-8",
        check=True,
    )
    own, children = map(int, ended.stdout.split("PEAK")[-1].split())
    mib = (own + children) / 2**10
    return {"seconds": round(time.perf_counter() - start, 1), "resident_mib": round(mib)}


def main() -> None:
    parser = make_parser(
        "scripts.bench.larger_than_memory", __doc__, output="cpu-larger-than-memory.json"
    )
    options = parser.parse_args()
    root = ROOT / "outputs" / "larger_than_memory"
    results: dict[str, Any] = {}
    make_store(root / "64", 64)
    shutil.rmtree(root / "blocks", ignore_errors=True)
    cut = ["image=64/image.ome.zarr", "label=64/label.ome.zarr", "output=blocks", *SPLIT]
    results["cut, 64 GiB"] = run(root, "cut", *cut)
    results["check"] = run(root, "check", *DATA, "data.root=blocks")
    shutil.rmtree(root / "run", ignore_errors=True)
    results["train, 200 steps"] = run(
        *(
            root,
            "train",
            *DATA,
            *NETWORK,
            "data.root=blocks",
            "output=run",
            "trainer.max_steps=200",
        ),
        *("evaluation.enabled=false", "data.num_workers=0", "trainer.enable_progress_bar=false"),
    )
    for gib in (0.5, 1, 2, 64):
        if gib < 64:
            make_store(root / str(gib), gib)
        results[f"predict, {gib} GiB"] = run(
            *(root, "predict", "checkpoint=run", f"input={gib}/image.ome.zarr"),
            f"memory_gib={2 if gib == 64 else 0.5}",
            *(f"output={gib}/labels.ome.zarr", "overlap=0", "overwrite=true"),
            "keep_largest_component=none",
        )
        print(json.dumps(results, indent=1), flush=True)
    write_results(options.output, {"stores": results})


if __name__ == "__main__":
    main()
