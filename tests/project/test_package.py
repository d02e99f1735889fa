"""The wheel and the sdist: their files, their description and the requirements."""

import ast
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
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Path]:
    """Build a wheel and an sdist as pip does."""
    pytest.importorskip("hatchling.build")
    from hatchling.build import build_sdist, build_wheel

    folder = tmp_path_factory.mktemp("dist")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        names = {"wheel": build_wheel(str(folder)), "sdist": build_sdist(str(folder))}
    return {kind: folder / name for kind, name in names.items()}


def list_files(*folders: str) -> set[str]:
    """Return the files of the project in these folders."""
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    return {
        str(path.relative_to(ROOT))
        for path in paths
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_a_wheel_has_the_package_its_kernels_configs_slurm_script_and_the_license(built):
    names = set(zipfile.ZipFile(built["wheel"]).namelist())
    metadata = {
        name for name in names if name.startswith(f"unet3d_lightning-{__version__}.dist-info/")
    }
    others = {f"unet3d/{name}" for name in list_files("conf")} | {"unet3d/slurm.sh"}
    assert names - metadata == list_files("unet3d") | others
    assert {
        "unet3d/py.typed",
        "unet3d/pool/kernels/cpp/pool.cpp",
        "unet3d/conf/train.yaml",
    } <= names
    assert f"unet3d_lightning-{__version__}.dist-info/licenses/LICENSE" in metadata
    scripts = f"unet3d_lightning-{__version__}.dist-info/entry_points.txt"
    assert b"unet3d = unet3d.__main__:main" in zipfile.ZipFile(built["wheel"]).read(scripts)


def test_an_sdist_has_everything_for_building_and_testing(built):
    with tarfile.open(built["sdist"]) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    needed = list_files("unet3d", "conf", "container", "tests", "scripts", "docs", "benchmarks")
    assert not needed - inside
    assert {"pyproject.toml", "README.md", "LICENSE", "Makefile", "train.py"} <= inside
    assert {"Dockerfile", ".dockerignore", "compose.yaml"} <= inside
    data = [name for name in inside if name.endswith((".ckpt", ".nii", ".nii.gz", ".so"))]
    assert not [name for name in data if not name.startswith("tests/released/")]


def test_the_description_for_package_indexes_has_no_links_to_files(built):
    name = f"unet3d_lightning-{__version__}.dist-info/METADATA"
    metadata = message_from_bytes(zipfile.ZipFile(built["wheel"]).read(name))
    text = metadata.get_payload()
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "](docs/" not in text
    assert "](benchmarks/" not in text
    assert len(text) > 0.8 * len((ROOT / "README.md").read_text())
    assert metadata["License-Expression"] == "MIT"


def test_every_imported_package_is_required_and_every_required_one_is_imported():
    names = {"yaml": "pyyaml", "hydra": "hydra-core", "PIL": "pillow", "pynvml": "nvidia-ml-py"}
    required = {Requirement(line).name for line in PROJECT["dependencies"]}
    imported = set()
    for path in (ROOT / "unet3d").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add((node.module or "").partition(".")[0])
    outside = {names.get(name, name) for name in imported - sys.stdlib_module_names - {"unet3d"}}
    extras = PROJECT["optional-dependencies"]
    groups = "bundle dicom export hub itk mlflow nnunet nvml openvino search tiff view wandb zarr"
    optional = {Requirement(line).name for name in groups.split() for line in extras[name]}
    assert outside - required - optional == {"triton"}  # torch installs it for GPUs
    assert required <= outside | {"tensorboard"}  # torch's SummaryWriter needs it
