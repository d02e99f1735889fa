"""The wheel and the sdist: their files, their description and the requirements."""

import ast
import re
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from unet3d import __version__

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
INFO = f"unet3d_lightning-{__version__}.dist-info"


def list_files(*folders: str) -> set[str]:
    """Return the files of the project in these folders."""
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    return {
        str(path.relative_to(ROOT))
        for path in paths
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_a_wheel_has_the_package_its_configs_and_a_description_without_links_to_files(
    tmp_path, monkeypatch
):
    build = pytest.importorskip("hatchling.build")
    monkeypatch.chdir(ROOT)
    wheel = zipfile.ZipFile(tmp_path / build.build_wheel(str(tmp_path)))
    names = {name for name in wheel.namelist() if not name.startswith(INFO)}
    others = {f"unet3d/{name}" for name in list_files("conf")} | {"unet3d/slurm.sh"}
    assert names == list_files("unet3d") | others
    assert {"unet3d/py.typed", "unet3d/conf/train.yaml"} <= names
    assert wheel.read(f"{INFO}/licenses/LICENSE")
    assert b"unet3d = unet3d.__main__:main" in wheel.read(f"{INFO}/entry_points.txt")
    metadata = message_from_bytes(wheel.read(f"{INFO}/METADATA"))
    assert metadata["License-Expression"] == "MIT"
    text = metadata.get_payload()
    assert not re.search(r"\]\((docs|benchmarks)/", text)
    headings = re.findall(r"^## .*", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert re.findall(r"^## .*", text, re.MULTILINE) == headings[:-1]  # without the documentation
    assert not re.search(r"^(\*|!\[)", text, re.MULTILINE)  # pictures and their captions


def test_an_sdist_has_everything_for_building_and_testing(tmp_path, monkeypatch):
    build = pytest.importorskip("hatchling.build")
    monkeypatch.chdir(ROOT)
    with tarfile.open(tmp_path / build.build_sdist(str(tmp_path))) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    needed = list_files("unet3d", "conf", "container", "tests", "scripts", "docs", "benchmarks")
    assert needed | {"pyproject.toml", "Makefile", "Dockerfile", "train.py"} <= inside
    data = [name for name in inside if name.endswith((".ckpt", ".nii", ".nii.gz", ".so"))]
    assert not [name for name in data if not name.startswith("tests/released/")]


def test_every_imported_package_is_required_and_every_required_one_is_imported():
    names = {"yaml": "pyyaml", "hydra": "hydra-core", "PIL": "pillow", "pynvml": "nvidia-ml-py"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {Requirement(line).name for line in project["dependencies"]}
    imported = set()
    for path in (ROOT / "unet3d").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add((node.module or "").partition(".")[0])
    outside = {names.get(name, name) for name in imported - sys.stdlib_module_names - {"unet3d"}}
    extras = project["optional-dependencies"]
    groups = {"bundle", "dicom", "export", "hdf5", "hub", "itk", "mlflow", "nnunet", "nvml"}
    groups |= {"blosc2", "openvino", "search", "tiff", "view", "wandb", "zarr"}
    optional = {Requirement(line).name for name in groups for line in extras[name]}
    assert outside - required - optional == {"triton"}  # torch installs it for GPUs
    assert required <= outside | {"tensorboard"}  # torch's SummaryWriter needs it
