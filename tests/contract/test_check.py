"""`unet3d check`, and what training does with the same faults."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import nibabel
import numpy as np
import pytest

from tests.contract.conftest import call, working_folder
from tests.contract.helpers.datasets import AFFINE, SIZE, make_label, save, write_decathlon

pytestmark = pytest.mark.slow


def change_voxel(path: Path, value: float) -> None:
    voxels = nibabel.load(path).get_fdata().astype(np.float32)
    voxels[3, 3, 3] = value
    save(path, voxels)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def move(path: Path) -> None:
    affine = AFFINE.copy()
    affine[0, 3] = 5
    save(path, make_label(43), affine)


FAULTS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "missing_label": ("label", Path.unlink, "missing"),
    "missing_image": ("image", Path.unlink, "missing"),
    "empty_file": ("image", lambda path: path.write_bytes(b""), "empty"),
    "no_volume": ("image", lambda path: path.write_bytes(b"x" * 999), "read|NIfTI|gzip"),
    "truncated_image": ("image", truncate, "(?i)compress|end|read"),
    "truncated_label": ("label", truncate, "(?i)compress|end|read"),
    "nan": ("image", lambda path: change_voxel(path, np.nan), "(?i)nan|finite"),
    "infinity": ("image", lambda path: change_voxel(path, np.inf), "(?i)infinit|finite"),
    "constant_image": ("image", lambda path: save(path, np.full(SIZE, 7.0)), "7"),
    "label_out_of_range": ("label", lambda path: change_voxel(path, 9), "9.*0.*2"),
    "fractional_label": ("label", lambda path: change_voxel(path, 1.5), "1.5"),
    "shape": ("label", lambda path: save(path, make_label(41)[:12]), "12 x 16 x 16"),
    "spacing": (
        "label",
        lambda path: save(path, make_label(42), np.diag([1.0, 1, 3, 1])),
        "1 x 1 x 3 mm",
    ),
    "offset": ("label", move, "5 mm"),
    "orientation": (
        "label",
        lambda path: save(path, make_label(44), AFFINE @ np.diag([-1.0, 1, 1, 1])),
        "LAS",
    ),
    "two_channels": (
        "image",
        lambda path: save(path, np.random.default_rng(1).normal(size=(*SIZE, 2))),
        "2 channels",
    ),
}
"""What is broken in the case of this name: the file, how, and a pattern of what is said of it."""

INTACT = ["intact_0", "intact_1", "intact_2", "intact_3", "intact_4", "intact_5"]


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a dataset with one case for each fault, and a copy of another case."""
    root = write_decathlon(tmp_path_factory.mktemp("damaged"), [*INTACT, *FAULTS, "copied"])
    for name, (kind, change, _) in FAULTS.items():
        change(root / f"{kind}sTr" / f"{name}.nii.gz")
    for folder in ("imagesTr", "labelsTr"):
        content = (root / folder / "intact_0.nii.gz").read_bytes()
        (root / folder / "copied.nii.gz").write_bytes(content)
    return root


@pytest.fixture(scope="module")
def findings(damaged: Path) -> list[dict[str, str]]:
    """Check the damaged dataset once, voxels included."""
    with working_folder(damaged):
        words = [f"data.root={damaged}", "format=json", "output=findings.json"]
        ended = call("check", "data=decathlon", *words)
    assert ended.code == 1, ended.err
    return json.loads((damaged / "findings.json").read_text())["errors"]


def test_a_clean_dataset_passes_with_exit_code_0(unet3d, tmp_path):
    write_decathlon(tmp_path / "scans", INTACT)
    ended = unet3d("check", "data=decathlon", "data.root=scans")
    assert ended.code == 0
    assert "6 cases" in ended.out


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_with_its_case_its_file_and_advice(findings, fault):
    kind, _, pattern = FAULTS[fault]
    (finding,) = [finding for finding in findings if finding["case"] == fault]
    assert finding["file"].endswith(f"{kind}sTr/{fault}.nii.gz")
    assert re.search(pattern, finding["message"])
    assert finding["advice"]


def test_a_case_with_the_voxels_of_another_is_named_with_it(findings):
    pair = {"intact_0", "copied"}
    copies = [finding for finding in findings if finding["case"] in pair]
    assert {Path(finding["file"]).parent.name for finding in copies} == {"imagesTr", "labelsTr"}
    for finding in copies:
        (other,) = pair - {finding["case"]}
        assert other in finding["message"]


def test_nothing_is_reported_about_intact_cases(findings):
    assert not [finding for finding in findings if finding["case"] in INTACT[1:]]


def test_headers_alone_show_what_they_show_without_reading_voxels(unet3d, damaged, tmp_path):
    words = ["read_voxels=false", "format=json", f"output={tmp_path / 'findings.json'}"]
    assert unet3d("check", "data=decathlon", f"data.root={damaged}", *words).code == 1
    found = json.loads((tmp_path / "findings.json").read_text())["errors"]
    cases = {finding["case"] for finding in found}
    assert {"missing_label", "shape", "spacing", "two_channels"} <= cases
    assert not {"nan", "label_out_of_range", "constant_image"} & cases


@pytest.fixture
def train(unet3d, small, tmp_path):
    """Train for a step on a dataset in the layout of the Decathlon."""
    base = [
        w for w in small if ".layout" not in w and not w.startswith(("data.root", "data.cache"))
    ]

    def train_on(root: Path, *words: str):
        data = ["data=decathlon", f"data.root={root}", f"data.cache={tmp_path / 'cache'}"]
        return unet3d("train", *base, *data, f"hydra.run.dir={tmp_path / 'run'}", *words)

    return train_on


def test_training_refuses_a_dataset_with_faults_and_names_the_check(train, damaged):
    ended = train(damaged)
    assert ended.code == 2
    assert "unet3d check" in ended.err
    assert "missing_label" in ended.err


def test_training_skips_invalid_cases_on_request_and_names_them(train, damaged, tmp_path):
    ended = train(damaged, "data.invalid_cases=skip")
    assert ended.code == 0, ended.err
    skipped = {line.split(":")[1].strip() for line in ended.out.splitlines() if "skipped" in line}
    assert skipped == FAULTS.keys() - {"constant_image"}
    assert json.loads((tmp_path / "run" / "report.json").read_text())["steps"] == 1


@pytest.fixture
def patients(tmp_path) -> Path:
    """Write two scans of each of five patients."""
    names = [f"p{patient}_visit{visit}" for patient in range(5) for visit in (1, 2)]
    return write_decathlon(tmp_path / "scans", names)


def get_validation_cases(run: Path) -> set[str]:
    return set(json.loads((run / "evaluation" / "evaluation.json").read_text())["cases"])


def test_scans_of_a_patient_stay_on_one_side_of_a_split(train, patients, tmp_path):
    words = ["data.group_by='(p.)_visit.'", "evaluation.enabled=true", "evaluation.draw_worst=0"]
    ended = train(patients, *words)
    assert ended.code == 0, ended.err
    (patient,) = {name[:2] for name in get_validation_cases(tmp_path / "run")}
    assert get_validation_cases(tmp_path / "run") == {f"{patient}_visit1", f"{patient}_visit2"}


def test_folds_of_a_file_beside_the_dataset_are_used(train, patients, tmp_path):
    names = [path.name.partition(".")[0] for path in (patients / "imagesTr").iterdir()]
    held_out = ["p1_visit2", "p3_visit1", "p4_visit1"]
    folds = [{"train": sorted({*names} - {*held_out}), "val": held_out}]
    (patients / "splits_final.json").write_text(json.dumps(folds))
    ended = train(patients, "evaluation.enabled=true", "evaluation.draw_worst=0")
    assert ended.code == 0, ended.err
    assert get_validation_cases(tmp_path / "run") == {*held_out}


def test_two_scans_of_a_patient_are_a_hint_with_the_option_to_set(unet3d, patients):
    ended = unet3d("check", "data=decathlon", f"data.root={patients}", "read_voxels=false")
    assert ended.code == 0
    assert "data.group_by=" in ended.out
