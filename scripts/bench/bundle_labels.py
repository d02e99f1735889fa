"""Compare the labels of a bundle without unet3d with those of `unet3d predict`.

    python -m scripts.bench.bundle_labels data/Task04_Hippocampus --steps 300
    python -m scripts.bench.bundle_labels data/Dataset029_BRATS6 --steps 60

A network is trained for some steps on a Decathlon task or an nnU-Net data set and exported as a
bundle. scripts/predict.py in it, and MONAI, segment the scans of the data set. Of the voxels whose
labels differ, the largest distance between the two highest logits is reported. The result is added
to benchmarks/<name>-bundle.json.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nibabel as nib
import numpy as np

import unet3d
from unet3d.data.layouts.scans import find_scans
from unet3d.report.run_report import collect_versions
from unet3d.units import MIB
from unet3d.workflows.export.export_checkpoint import get_size

ROOT = Path(__file__).resolve().parents[2]


def run(*words: object, cwd: Path = ROOT) -> None:
    subprocess.run([sys.executable, "-W", "ignore", *map(str, words)], cwd=cwd, check=True)


def read_voxels(path: Path) -> np.ndarray:
    image: Any = nib.load(path)
    return np.asarray(image.dataobj)


def compare(labels: Path, reference: Path, probabilities: Path) -> dict[str, float]:
    """Count the voxels that differ, and find the largest distance of their two best logits."""
    own, other, values = map(read_voxels, (reference, labels, probabilities))
    differs = own != other
    values = values[differs].astype(np.float64)
    best = np.sort(np.log(np.maximum(values, 1e-300)), axis=-1)
    gap = best[:, -1] - best[:, -2]
    return {
        "voxels": own.size,
        "foreground": int((own > 0).sum()),
        "different": int(differs.sum()),
        "largest_gap": float(gap.max(initial=0)),
    }


def measure(root: Path, steps: int, count: int, work: Path) -> dict[str, Any]:
    """Train, export, segment and compare."""
    layout = "nnunet" if (root / "imagesTr").is_dir() and "Dataset" in root.name else "decathlon"
    words = [f"data={layout}", f"data.root={root}", "fold=none", f"trainer.max_steps={steps}"]
    words += ["model=unet_tiny", "data.patch_size=[32,32,32]", "data.spacing_mm=median"]
    trained = unet3d.train(words, folder=work / "run", log=print)
    segmenter = unet3d.load(trained.checkpoint, device="cpu")
    bundle = segmenter.save(work / "bundle")
    scans = find_scans(root / "imagesTr", segmenter.channels)[:count]
    images = work / "images"
    images.mkdir()
    for scan in scans:
        for file in scan.files:
            shutil.copy(file, images / file.name)
    run(
        *("-m", "unet3d.cli.main", "predict", f"checkpoint={trained.checkpoint}", "device=cpu"),
        *(f"input={images}", f"output={work / 'ours'}", "save_probabilities=true"),
        "keep_largest_component=none",
    )
    monai = ["-m", "monai.bundle", "run", "--config_file", "configs/inference.json"]
    folders = ["--dataset_dir", images, "--output_dir", work / "monai"]
    run(*monai, *folders, cwd=bundle)
    found: dict[str, list[dict[str, float]]] = {"script": [], "monai": []}
    for scan in scans:
        target = work / "script" / f"{scan.name}.nii.gz"
        target.parent.mkdir(exist_ok=True)
        run(bundle / "scripts" / "predict.py", *(images / f.name for f in scan.files), target)
        monai_file = work / "monai" / scan.files[0].name
        ours = work / "ours" / target.name
        probabilities = work / "ours" / "probabilities" / f"{scan.name}.nii"
        found["script"].append(compare(target, ours, probabilities))
        found["monai"].append(compare(monai_file, ours, probabilities))
    return {
        "steps": steps,
        "cases": len(scans),
        "bundle_mib": get_size(bundle) / MIB,
        **{
            name: {
                key: (max if key == "largest_gap" else sum)(c[key] for c in cases)
                for key in cases[0]
            }
            for name, cases in found.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--cases", type=int, default=10)
    parser.add_argument("--name", default="cpu")
    args = parser.parse_args()
    path = ROOT / "benchmarks" / f"{args.name}-bundle.json"
    result = json.loads(path.read_text()) if path.exists() else {}
    with TemporaryDirectory() as folder:
        result[args.root.name] = measure(args.root.absolute(), args.steps, args.cases, Path(folder))
    result["versions"] = collect_versions()
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result[args.root.name], indent=1))


if __name__ == "__main__":
    main()
