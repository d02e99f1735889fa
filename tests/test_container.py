"""What can be told of the container without one; scripts/container.sh builds and runs it."""

import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
LOCKS = sorted((ROOT / "container").glob("*.txt"))


def pinned(lock: Path) -> dict[str, str]:
    """Versions by name."""
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+) \\$", lock.read_text(), re.MULTILINE))


def instructions() -> list[str]:
    """Those of the Dockerfile, each on one line, without comments."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#"))
    return [" ".join(line.split()) for line in text.replace("\\\n", " ").splitlines() if line]


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_a_lock_holds_names_versions_and_hashes_and_nothing_else(lock):
    first, *lines = lock.read_text().splitlines()
    assert first == "# Made by scripts/lock.py"
    package = r"[a-z0-9-]+==[^\s/@]+ \\"
    digest = r"    --hash=sha256:[0-9a-f]{64}( \\)?"
    assert not [line for line in lines if not re.fullmatch(f"{package}|{digest}", line)]
    assert len(pinned(lock)) == sum(re.fullmatch(package, line) is not None for line in lines)


def test_the_locks_have_every_dependency_in_a_version_that_it_may_have():
    extras = project()["project"]["optional-dependencies"]
    asked = {
        "requirements.txt": project()["project"]["dependencies"] + extras["export"],
        "build.txt": project()["build-system"]["requires"],
    }
    for name, requirements in asked.items():
        versions = pinned(ROOT / "container" / name)
        for requirement in map(Requirement, requirements):
            if requirement.name != "torch":
                assert requirement.specifier.contains(versions[requirement.name]), requirement


def test_torch_is_an_argument_and_neither_it_nor_what_it_alone_brings_is_locked():
    (version,) = (line for line in instructions() if line.startswith("ARG TORCH="))
    wanted = next(
        r for r in map(Requirement, project()["project"]["dependencies"]) if r.name == "torch"
    )
    assert wanted.specifier.contains(version.removeprefix("ARG TORCH=torch=="))
    names = pinned(ROOT / "container" / "requirements.txt")
    assert not [n for n in names if n == "torch" or n.startswith(("triton", "nvidia-", "cuda-"))]


def test_torch_has_a_layer_of_its_own_before_everything_that_changes_more_often():
    final = instructions()
    final = final[max(i for i, line in enumerate(final) if line.startswith("FROM")) :]
    torch = final.index('RUN pip install --no-cache-dir "${TORCH}"')
    others = [i for i, line in enumerate(final) if "pip install" in line and i != torch]
    copies = [i for i, line in enumerate(final) if line.startswith("COPY")]
    assert min(others + copies) > torch
    arguments = [line.split("=")[0] for line in final[:torch] if line.startswith("ARG")]
    assert arguments == ["ARG TORCH"]  # any other would make the layer anew


def test_what_is_fetched_but_torch_is_fetched_by_hash_and_nothing_is_cached():
    pip = [line for line in instructions() if re.search(r"pip (install|wheel)", line)]
    assert all("--no-cache-dir" in line for line in pip)
    for line in pip:
        if "${TORCH}" not in line:
            assert "--no-deps" in line
            local = "--no-index" in line or shlex.split(line)[-1] == "."
            assert local or "--require-hashes" in line
        if "wheel " in line:
            assert "--no-build-isolation" in line  # else it would be built by what is not pinned


def test_the_image_runs_unet3d_as_a_user_by_number_that_is_not_root():
    lines = instructions()
    (user,) = (line for line in lines if line.startswith("USER"))
    assert re.fullmatch(r"USER [1-9]\d*:[1-9]\d*", user)
    (entry,) = (line for line in lines if line.startswith("ENTRYPOINT"))
    assert yaml.safe_load(entry.removeprefix("ENTRYPOINT "))[-1] == "unet3d"
    assert 'CMD ["train"]' in lines


def test_all_that_a_run_writes_lies_in_the_volumes():
    (volumes,) = (line for line in instructions() if line.startswith("VOLUME"))
    volumes = yaml.safe_load(volumes.removeprefix("VOLUME "))
    (environment,) = (line for line in instructions() if line.startswith("ENV HOME="))
    places = dict(word.split("=", 1) for word in environment.split()[1:])
    for name in ("HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        assert any(Path(places[name]).is_relative_to(volume) for volume in volumes), name
    assert "WORKDIR /job" in instructions()
    assert "/job" in volumes


def test_nothing_gets_into_the_image_that_is_not_named():
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] != "#"]
    assert rules[0] == "*"
    named = {rule[1:] for rule in rules if rule.startswith("!")}
    copies = [line.split()[1:-1] for line in instructions() if line.startswith("COPY ")]
    ours = {word for words in copies if words[0][:2] != "--" for word in words}
    copied = {"container/*.txt" if word.startswith("container") else word for word in ours}
    assert named == copied


def test_compose_gives_a_run_what_it_needs():
    service = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["unet3d"]
    assert service["read_only"]
    assert service["shm_size"]
    (devices,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert devices["capabilities"] == ["gpu"]
    binds = {v["target"] for v in service["volumes"] if isinstance(v, dict)}
    assert binds == {"/job/data", "/job/outputs"}
    assert "cache:/cache" in service["volumes"]


@pytest.mark.parametrize(
    ("tool", "file"), [("hadolint", "Dockerfile"), ("shellcheck", "scripts/container.sh")]
)
def test_linters_have_nothing_to_say(tool, file):
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    done = subprocess.run([tool, str(ROOT / file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
