import json
from pathlib import Path

import numpy as np
import pytest

from unet3d.cli.main import main

pytestmark = pytest.mark.slow


def save(path, array, spacing_mm=(1.0, 1.0, 2.0)):
    import nibabel

    path.parent.mkdir(exist_ok=True)
    affine = np.diag([*spacing_mm, 1.0])
    nibabel.save(nibabel.Nifti1Image(np.asarray(array), affine), path)


def labels(seed):
    """Return labels of two blocks."""
    volume = np.zeros((12, 14, 10), np.uint8)
    x, y = np.random.default_rng(seed).integers(0, 5, 2)
    volume[x : x + 5, y : y + 4, 2:6] = 1
    volume[x : x + 5, y + 4 : y + 7, 2:6] = 2
    return volume


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Three cases, predicted one voxel off; a and c perfectly so in the first class."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate("abc"):
        save(tmp_path / "references" / f"{name}.nii.gz", labels(seed))
        predicted = labels(seed)
        predicted[predicted == 2] = 0 if name == "b" else 2
        save(tmp_path / "predictions" / f"{name}.nii", np.roll(predicted, name == "b", 0))
    return tmp_path


FOLDERS = ("predictions=predictions", "references=references", "output=out")


def evaluated(*words, base=FOLDERS):
    return main(["evaluate", *base, *words])


def result(folder="out"):
    return json.loads((Path(folder) / "evaluation.json").read_text())


def test_every_case_is_scored_and_files_are_written(folder, capsys):
    assert evaluated() == 0
    found = result()
    assert found["classes"] == {"1": [1], "2": [2]}
    assert found["cases"]["a"]["1"]["dice"] == found["cases"]["c"]["2"]["surface_dice"] == 1
    assert found["cases"]["b"]["1"]["dice"] == pytest.approx(0.8)
    assert found["cases"]["b"]["1"]["hd95_mm"] == 1
    assert found["cases"]["b"]["2"]["dice"] == 0
    assert found["cases"]["b"]["2"]["hd95_mm"] == pytest.approx(np.linalg.norm([12, 14, 20]))
    assert found["per_class"]["2"]["absent_from_one"] == 1
    assert found["per_class"]["1"]["dice"]["mean"] == pytest.approx(2.8 / 3)
    assert found["mean"]["dice"]["mean"] == pytest.approx((2.8 / 3 + 2 / 3) / 2)
    assert [w["case"] for w in found["worst"]] == ["b", "a", "c"]
    written = {str(p.relative_to(folder / "out")) for p in (folder / "out").rglob("*.*")}
    assert written == {
        *("evaluation.json", "evaluation.csv", "evaluation.png", "report.html"),
        *("worst/1_b.png", "worst/2_a.png", "worst/3_c.png"),
    }
    message = capsys.readouterr()
    assert "3/3 c: Dice 1.0000\n" in message.err
    assert "0.9333" in message.out
    assert "out/evaluation.csv" in message.out


@pytest.mark.parametrize(
    ("written", "names"),
    [
        ({"0": "background", "1": "head", "2": "tail"}, ["head", "tail"]),
        ({"background": 0, "tail": 2, "head": 1}, ["tail", "head"]),
    ],
)
def test_class_names_come_from_a_dataset_json_above_the_references(folder, written, names):
    (folder / "dataset.json").write_text(json.dumps({"labels": written}))
    assert evaluated("draw_worst=0") == 0
    assert list(result()["classes"]) == names


def test_class_names_regions_and_tolerances_can_be_configured(folder):
    assert evaluated("classes=[background,head,tail]", "draw_worst=0") == 0
    assert result()["classes"] == {"head": [1], "tail": [2]}
    assert evaluated("regions={all:[1,2],end:2}", "tolerance_mm={all:2,end:0}", "draw_worst=1") == 0
    found = result()
    assert found["classes"] == {"all": [1, 2], "end": [2]}
    assert found["tolerance_mm"] == {"all": 2, "end": 0}
    assert (
        found["cases"]["b"]["all"]["prediction_ml"]
        == found["cases"]["b"]["all"]["reference_ml"] * 4 / 7
    )
    assert [p.name for p in (folder / "out" / "worst").iterdir()] == ["1_b.png"]


def test_the_worst_cases_are_drawn_over_their_images_if_there_are_any(folder, capsys):
    noise = np.random.default_rng(0).random((12, 14, 10, 2), np.float32)
    save(folder / "images" / "a_0000.nii.gz", noise)
    save(folder / "images" / "b.nii.gz", noise[1:])
    assert evaluated("images=images") == 0
    message = capsys.readouterr().err
    assert "a is drawn" not in message
    assert "b is drawn without its image: images/b.nii.gz has shape [11, 14, 10]" in message
    assert "c is drawn without its image: images has no volume named c or c_0000" in message
    assert len(list((folder / "out" / "worst").iterdir())) == 3


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:500]), "b.nii cannot be read as a volume"),
        (
            lambda p: save(p, labels(1)[1:]),
            "has [12, 14, 10]: both must be on the same voxel grid; resample the prediction",
        ),
        (
            lambda p: save(p, labels(1), (1, 1, 2.01)),
            "[0.0, 0.0, 2.01, 0.0]], references/b.nii.gz has [[",
        ),
        (
            lambda p: save(p, labels(1) / np.float32(2)),
            "labels must be integers, found 0.5",
        ),
        (
            lambda p: save(p, labels(1).astype(np.int16) - 1),
            "labels must be 0 or above, it holds -1",
        ),
        (lambda p: save(p, np.arange(1680, dtype=np.int16).reshape(12, 14, 10)), "is it an image?"),
        (
            lambda p: save(p.parent / "b.nii.gz", labels(1)),
            "several files with the same name: predictions/b.nii, ",
        ),
    ],
)
def test_an_invalid_case_is_named_and_the_others_are_scored(folder, capsys, spoil, message):
    spoil(folder / "predictions" / "b.nii")
    assert evaluated("draw_worst=0") == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert "1 of 3 cases have errors: b" in captured.out
    assert list(result()["cases"]) == ["a", "c"]
    assert message in result()["errors"]["b"]


def test_a_label_without_a_class_is_an_error(folder, capsys):
    assert evaluated("classes=[background,head]") == 1
    message = capsys.readouterr().err
    assert "a: ERROR predictions/a.nii: labels must be 0, 1, it holds 2" in message
    assert "b: ERROR references/b.nii.gz: labels must be 0, 1, it holds 2" in message
    assert result()["per_class"] == {}


def test_a_prediction_without_reference_is_only_mentioned(folder, capsys):
    for n in range(7):
        save(folder / "predictions" / f"extra{n}.nii", labels(n))
    assert evaluated("draw_worst=0") == 0
    assert "7 predictions without a reference: extra0, extra1, " in capsys.readouterr().err
    assert len(result()["predictions_without_reference"]) == 7


def test_results_of_an_earlier_evaluation_are_overwritten(folder):
    assert evaluated() == 0
    assert evaluated("draw_worst=1") == 0
    assert [p.name for p in (folder / "out" / "worst").iterdir()] == ["1_b.png"]
    assert evaluated("classes=[background,head]") == 1  # no case is without fault
    left = {p.name for p in (folder / "out").iterdir()}
    assert left == {"evaluation.json", "worst", "report.html"}
    assert list((folder / "out" / "worst").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["predictions=nowhere"], "predictions: nowhere is neither a file nor a folder"),
        (["predictions=predictions/a.nii"], "must be folders, or two files"),
        (["predictions=empty"], "no volume in empty (0 files) has the name of one in"),
        (["output=references/a.nii.gz"], "is a file; it must be a folder"),
        (["images=nowhere"], "images: nowhere is neither a file nor a folder"),
        (["workers=0"], "workers must be an int >= 1"),
        (["draw_worst=-1"], "draw_worst must be an int >= 0"),
        (["classes=[one]"], "classes must be unique names, background first"),
        (["regions=[1,2]"], "regions must be names with their labels"),
        (["regions={a:[0]}"], "class a: labels must be 1..65535, got [0]"),
        (["regions={a:x}"], "regions must be names with their labels"),
        (["tolerance_mm=-1"], "tolerance_mm must be a distance in mm"),
        (["tolerance_mm={a:1}"], "needs classes= or regions="),
        (["classes=[x,a,b]", "tolerance_mm={a:1}"], "must name every class once: a, b; it names a"),
        (["ignore_label=x"], "ignore_label must be an int"),
        (["classes=[x,a,b]", "ignore_label=1"], "ignore_label=1 is a label of the class a"),
    ],
)
def test_a_usage_error_is_one_line(folder, capsys, words, message):
    (folder / "empty").mkdir()
    given = {w.split("=")[0] for w in words}
    base = [w for w in FOLDERS if w.split("=")[0] not in given]
    if message.startswith("predictions and"):
        base = []
    assert evaluated(*words, base=base) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert error.startswith("unet3d: ")
    assert "\n" not in error
    assert not (folder / "out").exists()


def test_the_folds_of_a_cross_validation_are_scored_together(folder):
    (folder / "second").mkdir()
    (folder / "predictions" / "b.nii").rename(folder / "second" / "b.nii")
    several = ("predictions=predictions,second", *FOLDERS[1:])
    assert main(["evaluate", *several]) == 0
    assert {"a", "b"} <= set(result()["cases"])
    assert main(["evaluate", "predictions=[ps]*", *FOLDERS[1:]]) == 0
    assert {"a", "b"} <= set(result()["cases"])
    assert main(["evaluate", "predictions=none_*", *FOLDERS[1:]]) == 2


def test_several_workers_give_the_same_scores(folder):
    evaluated("draw_worst=0")
    evaluated("draw_worst=0", "workers=2", base=(*FOLDERS[:2], "output=other"))
    assert result("other") == result()


def test_two_files_are_one_case(folder):
    files = ("predictions=predictions/a.nii", "references=references/a.nii.gz", "output=out")
    assert evaluated(base=files) == 0
    found = result()
    assert list(found["cases"]) == ["a"]
    assert found["mean"]["dice"] == {"mean": 1, "low": None, "high": None}
