"""The container's files, without building it; scripts/release/container.sh builds and tests it."""

import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
LOCKS = sorted((ROOT / "container").glob("*.txt"))


def read_versions(lock: Path) -> dict[str, str]:
    """Return {name: version} of a lock file."""
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+) \\$", lock.read_text(), re.MULTILINE))


def read_instructions() -> list[str]:
    """Return the instructions of the Dockerfile, one per line, without comments."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#"))
    return [" ".join(line.split()) for line in text.replace("\\\n", " ").splitlines() if line]


def read_project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_a_lock_file_has_only_names_versions_and_hashes(lock):
    first, *lines = lock.read_text().splitlines()
    assert first == "# GeneratedDataset by scripts/release/lock_container.py"
    package = r"[a-z0-9-]+==[^\s/@]+ \\"
    digest = r"    --hash=sha256:[0-9a-f]{64}( \\)?"
    assert not [line for line in lines if not re.fullmatch(f"{package}|{digest}", line)]
    assert len(read_versions(lock)) == sum(
        re.fullmatch(package, line) is not None for line in lines
    )


def test_the_lock_files_have_an_allowed_version_of_every_dependency():
    extras = read_project()["project"]["optional-dependencies"]
    groups = {
        "requirements.txt": read_project()["project"]["dependencies"] + extras["export"],
        "build.txt": read_project()["build-system"]["requires"],
    }
    for name, requirements in groups.items():
        versions = read_versions(ROOT / "container" / name)
        for requirement in map(Requirement, requirements):
            if requirement.name != "torch":
                assert requirement.specifier.contains(versions[requirement.name]), requirement


def test_torch_is_an_argument_and_neither_it_nor_its_own_dependencies_are_locked():
    (version,) = (line for line in read_instructions() if line.startswith("ARG TORCH="))
    requirement = next(
        r for r in map(Requirement, read_project()["project"]["dependencies"]) if r.name == "torch"
    )
    assert requirement.specifier.contains(version.removeprefix("ARG TORCH=torch=="))
    names = read_versions(ROOT / "container" / "requirements.txt")
    assert not [n for n in names if n == "torch" or n.startswith(("triton", "nvidia-", "cuda-"))]


def test_torch_has_its_own_layer_before_everything_that_changes_more_often():
    final = read_instructions()
    final = final[max(i for i, line in enumerate(final) if line.startswith("FROM")) :]
    torch = final.index('RUN pip install --no-cache-dir "${TORCH}"')
    others = [i for i, line in enumerate(final) if "pip install" in line and i != torch]
    copies = [i for i, line in enumerate(final) if line.startswith("COPY")]
    assert min(others + copies) > torch
    arguments = [line.split("=")[0] for line in final[:torch] if line.startswith("ARG")]
    assert arguments == ["ARG TORCH"]  # any other would invalidate the layer


def test_everything_except_torch_is_downloaded_by_hash_and_nothing_is_cached():
    pip = [line for line in read_instructions() if re.search(r"pip (install|wheel)", line)]
    assert all("--no-cache-dir" in line for line in pip)
    for line in pip:
        if "${TORCH}" not in line:
            assert "--no-deps" in line
            local = "--no-index" in line or shlex.split(line)[-1] == "."
            assert local or "--require-hashes" in line
        if "wheel " in line:
            assert "--no-build-isolation" in line  # build tools must be the pinned ones


def test_the_image_runs_unet3d_as_a_numeric_user_that_is_not_root():
    lines = read_instructions()
    (user,) = (line for line in lines if line.startswith("USER"))
    assert re.fullmatch(r"USER [1-9]\d*:[1-9]\d*", user)
    (entry,) = (line for line in lines if line.startswith("ENTRYPOINT"))
    assert yaml.safe_load(entry.removeprefix("ENTRYPOINT "))[-1] == "unet3d"
    assert 'CMD ["train"]' in lines


def test_all_files_that_a_run_writes_are_in_the_volumes():
    (volumes,) = (line for line in read_instructions() if line.startswith("VOLUME"))
    volumes = yaml.safe_load(volumes.removeprefix("VOLUME "))
    (environment,) = (line for line in read_instructions() if line.startswith("ENV HOME="))
    folders = dict(word.split("=", 1) for word in environment.split()[1:])
    for name in ("HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        assert any(Path(folders[name]).is_relative_to(volume) for volume in volumes), name
    assert "WORKDIR /job" in read_instructions()
    assert "/job" in volumes


def test_dockerignore_admits_exactly_the_files_that_are_copied():
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] != "#"]
    assert rules[0] == "*"
    admitted = {rule[1:] for rule in rules if rule.startswith("!")}
    copies = [line.split()[1:-1] for line in read_instructions() if line.startswith("COPY ")]
    sources = {word for words in copies if words[0][:2] != "--" for word in words}
    copied = {"container/*.txt" if word.startswith("container") else word for word in sources}
    assert admitted == copied


def test_compose_provides_gpus_shared_memory_and_folders():
    service = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["unet3d"]
    assert service["read_only"]
    assert service["shm_size"]
    (devices,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert devices["capabilities"] == ["gpu"]
    binds = {v["target"] for v in service["volumes"] if isinstance(v, dict)}
    assert binds == {"/job/data", "/job/outputs"}
    assert "cache:/cache" in service["volumes"]


@pytest.mark.parametrize(
    ("tool", "file"), [("hadolint", "Dockerfile"), ("shellcheck", "scripts/release/container.sh")]
)
def test_linters_report_nothing(tool, file):
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    done = subprocess.run([tool, str(ROOT / file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
