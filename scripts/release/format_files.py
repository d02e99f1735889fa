"""Write a checkpoint and a bundle of the current format, which tests read from then on.

    python -m scripts.release.format_files

They go to tests/released/VERSION/, with the logits of a patch. Run it when a format
version is raised, and keep the files of the versions before.
"""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

import unet3d
from unet3d.checkpoint_file import FORMAT_VERSION, load_checkpoint, save_checkpoint
from unet3d.export import bundle
from unet3d.inference.ensemble import load_ensemble

FOLDER = Path(__file__).parents[2] / "tests" / "released"
OVERRIDES = [
    *("model.width=2", "model.depth=2", "pool=median", "trainer.max_steps=2", "trainer=default"),
    *("data.layout.size=[16,16,16]", "data.layout.num_cases=5", "data.patch_size=[8,8,8]"),
    *("trainer.accelerator=cpu", "data.num_workers=0", "evaluation.enabled=false"),
]
KEPT = ("state_dict", "unet3d")
"""What inference reads; the rest of a checkpoint is for resuming with the same release."""


def main() -> None:
    folder = FOLDER / str(FORMAT_VERSION)
    assert bundle.FORMAT_VERSION == FORMAT_VERSION, "raise both versions together"
    shutil.rmtree(folder, ignore_errors=True)
    with TemporaryDirectory() as name:
        work = Path(name)
        paths = [f"data.root={work / 'data'}", f"data.cache={work / 'cache'}"]
        result = unet3d.train([*OVERRIDES, *paths], folder=work / "run")
        content = load_checkpoint(result.checkpoint)
        config = content["unet3d"]["config"]
        config["data"] |= {"root": "data", "cache": "cache"}
        config["data"]["layout"]["root"] = "data"
        save_checkpoint({key: content[key] for key in KEPT}, folder / "best.ckpt")
        unet3d.load(folder / "best.ckpt").save(work / "bundle")
        (folder / "bundle" / "models").mkdir(parents=True)
        for part in ("bundle.json", "models/network_0.safetensors"):
            shutil.copy(work / "bundle" / part, folder / "bundle" / part)
    patch = torch.linspace(-2, 2, 8**3).reshape(1, 1, 8, 8, 8)
    np.save(folder / "logits.npy", load_ensemble([folder / "best.ckpt"]).networks[0](patch))


if __name__ == "__main__":
    main()
