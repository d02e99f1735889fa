"""What is built of the project, and what of it needs which package."""

import ast
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from unet3d import __version__

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Path]:
    """A wheel and an sdist, built as pip would."""
    pytest.importorskip("hatchling.build")
    from hatchling.build import build_sdist, build_wheel

    folder = tmp_path_factory.mktemp("dist")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        made = {"wheel": build_wheel(str(folder)), "sdist": build_sdist(str(folder))}
    return {kind: folder / name for kind, name in made.items()}


def files(*folders: str) -> set[str]:
    """What a folder of the project holds, as far as it is the project's."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    return {
        str(path.relative_to(ROOT))
        for path in found
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_a_wheel_has_the_package_its_kernels_its_options_and_the_licence(built):
    inside = set(zipfile.ZipFile(built["wheel"]).namelist())
    about = {name for name in inside if name.startswith(f"unet3d-{__version__}.dist-info/")}
    assert inside - about == files("unet3d") | {f"unet3d/{name}" for name in files("conf")}
    assert {"unet3d/py.typed", "unet3d/pool/cpp/pool.cpp", "unet3d/conf/train.yaml"} <= inside
    assert f"unet3d-{__version__}.dist-info/licenses/LICENSE" in about
    scripts = f"unet3d-{__version__}.dist-info/entry_points.txt"
    assert b"unet3d = unet3d.cli.main:main" in zipfile.ZipFile(built["wheel"]).read(scripts)


def test_an_sdist_has_all_that_building_and_testing_need(built):
    with tarfile.open(built["sdist"]) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    needed = files("unet3d", "conf", "container", "tests", "scripts", "docs", "benchmarks")
    assert not needed - inside
    assert {"pyproject.toml", "README.md", "LICENSE", "Makefile", "train.py"} <= inside
    assert {"Dockerfile", ".dockerignore", "compose.yaml"} <= inside
    assert not [name for name in inside if name.endswith((".ckpt", ".nii", ".nii.gz", ".so"))]


def test_the_page_of_a_package_index_shows_no_picture_that_it_does_not_have(built):
    name = f"unet3d-{__version__}.dist-info/METADATA"
    told = message_from_bytes(zipfile.ZipFile(built["wheel"]).read(name))
    text = told.get_payload()
    assert told["Description-Content-Type"] == "text/markdown"
    assert "](docs/" not in text
    assert "](benchmarks/" not in text
    assert len(text) > 0.9 * len((ROOT / "README.md").read_text())
    assert told["License-Expression"] == "MIT"


def test_what_the_dockerfile_copies_is_enough_to_build_the_wheel(tmp_path):
    pytest.importorskip("hatchling.build")
    stage = (ROOT / "Dockerfile").read_text().partition("AS wheel")[2].partition("FROM ")[0]
    for line in stage.splitlines():
        words = line.split()
        if words[:1] != ["COPY"]:
            continue
        *sources, target = words[1:]
        for source in sources:
            place = tmp_path / target
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, place, dirs_exist_ok=True)
            else:
                place.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, place)
    code = "from hatchling.build import build_wheel; print(build_wheel('.'))"
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    inside = zipfile.ZipFile(tmp_path / ended.stdout.split()[-1]).namelist()
    assert "unet3d/conf/train.yaml" in inside
    assert "unet3d/model/lean/cpp/lean.cpp" in inside


def test_every_package_that_is_imported_is_required():
    names = {"yaml": "pyyaml", "hydra": "hydra-core", "PIL": "pillow"}
    required = {Requirement(line).name for line in PROJECT["dependencies"]}
    found = set()
    for path in (ROOT / "unet3d").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add((node.module or "").partition(".")[0])
    outside = {names.get(name, name) for name in found - sys.stdlib_module_names - {"unet3d"}}
    export = {Requirement(line).name for line in PROJECT["optional-dependencies"]["export"]}
    assert outside - required - export == {"triton"}  # torch brings it where there is a GPU
    assert required <= outside | {"tensorboard"}  # torch's writer of curves needs it
