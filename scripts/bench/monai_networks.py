"""Train the networks of MONAI on the default job, and compare Dice, memory and time.

    pip install '.[swin]'
    python -m scripts.bench.monai_networks    # writes benchmarks/<name>-monai-networks.json

Each run is `unet3d train model=NETWORK`; finished runs are not repeated. Then steps are timed, with
one thread, and the memory of a step on a GPU in precision 16 is predicted.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch

from unet3d.config.compose import compose_config
from unet3d.config.settings.training import TrainingSettings, parse_training
from unet3d.machine.device import Precision
from unet3d.memory.estimate import estimate_step
from unet3d.report.run_report import collect_versions
from unet3d.units import MIB
from unet3d.workflows.memory.training_step import NullListener, make_step_factory

ROOT = Path(__file__).resolve().parents[2]
NETWORKS = {
    "unet_tiny": [],
    "basic_unet": [],
    "dynunet": [],
    "segresnet": [],
    "segresnet_ds": [],
    "attention_unet": [],
    "mednext": [],
    "unetr": [],
    "swin_unetr": ["model.norm_name=batch"],  # patches of 32 end in single voxels
}
UNET3D = (sys.executable, "-W", "ignore", "-m", "unet3d.cli.main")


def train(name: str, folder: Path) -> None:
    """Train a network, unless its run is finished."""
    run = folder / name
    if (run / "report.json").is_file():
        return
    words = [f"model={name}", *NETWORKS[name], f"hydra.run.dir={run}", "resume=auto"]
    words += [f"data.root={folder / 'synthetic'}", f"data.cache={folder / 'cache'}"]
    subprocess.run([*UNET3D, "train", *words], check=True, cwd=ROOT)


def read_settings(name: str) -> TrainingSettings:
    """Return the settings of a network's run."""
    settings = parse_training(compose_config([f"model={name}", *NETWORKS[name]], "train"))
    return settings if name.startswith("unet_") else settings.with_strategy("none")


def predict_peak_mib(name: str) -> int:
    """Return the estimated peak of a step on a GPU."""
    if name.startswith("unet_"):  # MONAI's import sets it for its own networks: a larger workspace
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    else:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    make_step = make_step_factory(read_settings(name), Precision("16", "16"), cuda=True)
    return round((estimate_step(make_step, cuda=True).peak.allocated or 0) / MIB)


def time_step(name: str) -> float:
    """Return the median seconds of a step on this CPU, with one thread."""
    torch.set_num_threads(1)
    step, seconds = make_step_factory(read_settings(name), Precision("32", "32"), cuda=False)(), []
    for _ in range(6):
        start = time.perf_counter()
        step.train(NullListener())
        seconds.append(time.perf_counter() - start)
    return round(median(seconds[1:]), 3)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.monai_networks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--name", default="cpu", help="prefix of the result file")
    parser.add_argument("--folder", type=Path, default=Path("outputs/monai-networks"))
    options = parser.parse_args(argv)
    folder: Path = options.folder.absolute()
    for name in NETWORKS:
        train(name, folder)
    runs = ",".join(str(folder / name) for name in NETWORKS)
    compare = [*UNET3D, "compare", f"runs=[{runs}]", "format=json", "report=null"]
    printed = subprocess.run(compare, check=True, stdout=subprocess.PIPE, cwd=ROOT).stdout
    rows = {}
    for row in json.loads(printed):
        name = Path(row["run"]).name
        rows[name] = {
            "overrides": NETWORKS[name],
            "parameters": row["parameters"],
            "steps": row["steps"],
            "dice": row["dice"],
            "step_seconds": time_step(name),
            "predicted_gpu_mib": predict_peak_mib(name),
        }
        print(name, rows[name], flush=True)
    report = {
        "command": "python -m scripts.bench.monai_networks",
        "versions": collect_versions(),
        "rows": {name: rows[name] for name in NETWORKS},
    }
    path = ROOT / "benchmarks" / f"{options.name}-monai-networks.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
