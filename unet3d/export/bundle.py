"""Write and read bundles: folders with trained networks and all that it takes to use them.

docs/reference/bundle.md describes the format. `unet3d.load` reads its weights, also of bundles on
Hugging Face's hub (hf://OWNER/NAME, or hf://OWNER/NAME@REVISION); MONAI and the script in it run
its exported networks, without this package.
"""

import json
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from unet3d.checkpoint_file import check_format_version, download
from unet3d.data.layouts.dataset_json import load_json_object
from unet3d.errors import UsageError, explain_missing_packages, summarize_error
from unet3d.files import read_json

FORMAT = "unet3d bundle"
FORMAT_VERSION = 1
"""Raised when an older unet3d could not read a bundle any more."""

DESCRIPTION_FILE = "bundle.json"
PACKAGE = Path(__file__).parents[1]
SCRIPTS = PACKAGE / "export" / "bundle_scripts"


def is_bundle(path: Path) -> bool:
    """Return whether a path is the folder of a bundle."""
    return (path / DESCRIPTION_FILE).is_file()


def get_network_path(folder: Path, number: int, suffix: str) -> Path:
    """Return a file of a network: .safetensors, .onnx or .pt2."""
    return folder / "models" / f"network_{number}{suffix}"


def write_description(
    folder: Path, pipeline: Mapping[str, Any], members: Sequence[Mapping[str, Any]], card: str
) -> None:
    """Write what surrounds the networks: descriptions, MONAI's configs, scripts, a model card.

    `pipeline` describes the inputs and outputs, and `members` are the metadata of each network.
    """
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "unet3d": pipeline["unet3d"],
        "pipeline": pipeline,
        "members": list(members),
    }
    configs, docs, scripts = (folder / name for name in ("configs", "docs", "scripts"))
    for part in (configs, docs, scripts / "pipeline"):
        part.mkdir(parents=True)
    _write_json(content, folder / DESCRIPTION_FILE)
    _write_json(make_monai_metadata(pipeline), configs / "metadata.json")
    inference = read_json(SCRIPTS / "inference.json")
    inference["data"] = inference["data"].replace("NUM_CHANNELS", str(len(pipeline["channels"])))
    inference["inferer"]["roi_size"] = pipeline["patch_size"]
    highest = max(len(pipeline["classes"]) - 1, *pipeline["labels"])
    save = inference["postprocessing"]["transforms"][-1]
    save["output_dtype"] = "uint8" if highest < 256 else "uint16"
    _write_json(inference, configs / "inference.json")
    (docs / "README.md").write_text(card, "utf-8")
    with (folder / "models" / "model.pt").open("wb") as file:
        torch.save({}, file)  # weights that MONAI Label requires, for a network that has its own
    for script in SCRIPTS.glob("*.py"):
        _copy_module(script, scripts / script.name, scripts / "pipeline")


def _copy_module(source: Path, target: Path, pipeline: Path) -> None:
    """Copy a module, and into `pipeline` the modules of unet3d that it imports."""
    text = source.read_text("utf-8")
    imported = re.compile(r"^from unet3d\.([\w.]+\.)?(\w+) import", re.MULTILINE)
    target.write_text(imported.sub(r"from pipeline.\2 import", text), "utf-8")
    for package, name in imported.findall(text):
        if not (pipeline / f"{name}.py").exists():
            module = PACKAGE / package.replace(".", "/") / f"{name}.py"
            _copy_module(module, pipeline / module.name, pipeline)


def make_monai_metadata(pipeline: Mapping[str, Any]) -> dict[str, Any]:
    """Return configs/metadata.json, as MONAI's model zoo has it."""
    metadata = read_json(SCRIPTS / "metadata.json")
    metadata["changelog"] = {"1.0.0": f"exported by unet3d {pipeline['unet3d']}"}
    metadata["task"] = f"segmentation of {', '.join(pipeline['outputs'])}"
    metadata |= {f"{name}_version": version(name) for name in ("monai", "numpy")}
    metadata["pytorch_version"] = torch.__version__.partition("+")[0]
    metadata["required_packages_version"] = {n: version(n) for n in ("nibabel", "scipy")}
    data = metadata["network_data_format"]
    image, prediction = data["inputs"]["image"], data["outputs"]["pred"]
    for part, names in ((image, pipeline["channels"]), (prediction, pipeline["outputs"])):
        part |= {"num_channels": len(names), "channel_def": dict(enumerate(names))}
        part["spatial_shape"] = pipeline["patch_size"]
    return metadata


def _write_json(content: Any, path: Path) -> None:
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", "utf-8")


def read_bundle(folder: Path) -> list[dict[str, Any]]:
    """Return the networks of a bundle as checkpoints hold them: weights and metadata."""
    path = folder / DESCRIPTION_FILE
    content = load_json_object(path, f"no file {path}")
    if content.get("format") != FORMAT:
        raise UsageError(f"{path} does not describe a unet3d bundle")
    check_format_version(path, content, FORMAT_VERSION)
    with explain_missing_packages(path, "safetensors"):
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    networks = []
    for number, metadata in enumerate(content["members"]):
        path = get_network_path(folder, number, ".safetensors")
        try:
            weights = {f"model.{name}": weight for name, weight in load_file(path).items()}
        except (OSError, SafetensorError) as error:
            raise UsageError(f"{path} cannot be read: {summarize_error(error)}") from error
        networks.append({"state_dict": weights, "unet3d": metadata})
    return networks


def download_bundle(path: Path) -> Path:
    """Return the folder of a bundle on the hub with what is read of it."""
    return download(path, [DESCRIPTION_FILE, "models/*.safetensors"], is_a="bundle")
