import json
from pathlib import Path

import numpy as np
import pytest

from tests.contract.helpers.datasets import save
from unet3d.__main__ import main
from unet3d.evaluation import options

pytestmark = pytest.mark.slow


def make_labels(seed):
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
        save(tmp_path / "references" / f"{name}.nii.gz", make_labels(seed))
        predicted = make_labels(seed)
        predicted[predicted == 2] = 0 if name == "b" else 2
        save(tmp_path / "predictions" / f"{name}.nii", np.roll(predicted, name == "b", 0))
    return tmp_path


FOLDERS = ("predictions=predictions", "references=references", "output=out")


def evaluate(*words, base=FOLDERS):
    return main(["evaluate", *base, *words])


def read_result(folder="out"):
    return json.loads((Path(folder) / "evaluation.json").read_text())


def test_a_tolerance_that_hides_every_error_is_named(folder, capsys):
    assert evaluate("draw_worst=0", "tolerance_mm=2") == 0
    assert "accepts errors" not in capsys.readouterr().err
    assert evaluate("draw_worst=0", "tolerance_mm=20") == 0
    shown = capsys.readouterr()
    assert "accepts errors of 20 mm, but a.nii.gz is 27 mm large" in shown.out + shown.err


def test_a_tolerance_is_compared_with_the_spacing_that_one_of_the_labels_has(folder, capsys):
    tifffile = pytest.importorskip("tifffile")
    micrometers = {f"PhysicalSize{axis}": 0.3 for axis in "XYZ"}
    for kind, metadata in (("predicted", micrometers), ("drawn", {})):
        (folder / kind).mkdir()
        file = folder / kind / "a.ome.tif"
        tifffile.imwrite(file, make_labels(0).T, metadata={"axes": "ZYX", **metadata})
    assert (
        evaluate("draw_worst=0", base=("predictions=predicted", "references=drawn", "output=o"))
        == 0
    )
    shown = capsys.readouterr()
    assert "accepts errors of 1 mm, but a.ome.tif is 0.0063 mm large" in shown.out + shown.err


def test_arrays_that_may_be_transposed_are_named(folder, capsys):
    tifffile = pytest.importorskip("tifffile")
    for kind, write in (("stacks", tifffile.imwrite), ("arrays", np.save)):
        (folder / kind).mkdir()
        name = f"a.{'tif' if kind == 'stacks' else 'npy'}"
        write(folder / kind / name, np.arange(1000, dtype=np.uint8).reshape(10, 10, 10) % 2)
    words = "predictions=arrays", "references=stacks", "output=out", "draw_worst=0"
    assert evaluate(base=words) == 0
    shown = capsys.readouterr()
    message = "a.npy is read as x, y, z, but arrays in TIFF, such as a.tif, as z, y, x"
    assert message in shown.out + shown.err


@pytest.mark.parametrize("values", [None, [0, 1, 2]])
def test_classes_in_another_order_than_those_of_the_checkpoint_are_refused(
    folder, capsys, monkeypatch, values
):
    preprocessing = {"label_values": values, "ignore_labels": []}
    trained = {
        "unet3d": {"classes": ["background", "head", "tail"], "preprocessing": preprocessing}
    }
    monkeypatch.setattr(options, "load_run", lambda path: trained)
    monkeypatch.setattr(options, "group_cases_by_use", lambda *_: None)
    assert evaluate("checkpoint=run", "classes=[background,tail,head]") == 2
    error = capsys.readouterr().err
    assert "classes: the checkpoint's order is background, head, tail" in error
    assert evaluate("checkpoint=run", "classes=[background,Kopf,Ende]", "draw_worst=0") == 0


def test_regions_and_partial_labels_are_those_of_the_checkpoint(folder, monkeypatch):
    labels = {"background": 0, "head": 1, "tail": 2}
    (folder / "dataset.json").write_text(json.dumps({"labels": labels}))
    trained = {"classes": list(labels), "regions": {"all": [1, 2], "end": [2]}}
    monkeypatch.setattr(options, "load_run", lambda path: {"unet3d": trained})
    monkeypatch.setattr(options, "group_cases_by_use", lambda *_: None)
    words = ["checkpoint=run", "draw_worst=0"]
    assert evaluate(*words) == 0
    assert read_result()["classes"] == trained["regions"]
    assert evaluate(*words, "regions={whole:[1,2]}") == 0
    assert read_result()["classes"] == {"whole": [1, 2]}
    trained["regions"] = None
    trained["config"] = {"data": {"annotated": {"b": ["head"], "of_another_dataset": ["tail"]}}}
    own = ["annotated={b:[head,tail]}"], ["regions={x:1}"]
    named = ["classes=[background,a,b]"], ["regions={both:[1,2],x:1}"]
    for changes, unknown in (
        *(([], {"tail"}), (own[0], set()), (own[1], set())),
        *((named[0], {"b"}), (named[1], {"both"})),
    ):
        assert evaluate(*words, *changes) == 0
        scores = read_result()["cases"]["b"]
        assert {name for name in scores if scores[name]["dice"] is None} == unknown
    (folder / "dataset.json").write_text(json.dumps({"labels": {"bg": 0, "Head": 1, "Tail": 2}}))
    assert evaluate(*words) == 0
    assert read_result()["cases"]["b"]["Tail"]["dice"] is None


def test_an_ignored_label_of_dataset_json_is_ignored_whoever_names_the_classes(folder):
    (folder / "dataset.json").write_text(json.dumps({"labels": {"bg": 0, "head": 1, "ignore": 2}}))
    assert evaluate("draw_worst=0") == 0
    found = read_result()["cases"]
    assert evaluate("draw_worst=0", "classes=[rest,head]") == 0
    assert read_result()["cases"] == found
    (folder / "dataset.json").write_text("{}")
    assert evaluate("draw_worst=0", "classes=[rest,head,tail]") == 0


def test_a_label_that_training_ignored_is_ignored_whatever_dataset_json_says(folder, monkeypatch):
    trained = {"classes": ["class_0", "class_1"], "preprocessing": {"ignore_labels": [2]}}
    monkeypatch.setattr(options, "load_run", lambda path: {"unet3d": trained})
    monkeypatch.setattr(options, "group_cases_by_use", lambda *_: None)
    words = ["checkpoint=run", "draw_worst=0"]
    for labels in ({"bg": 0, "head": 1, "other": 2}, {"bg": 0, "head": 1}):
        (folder / "dataset.json").write_text(json.dumps({"labels": labels}))
        assert evaluate(*words) == 0
        result = read_result()
        assert result["classes"] == {"head": [1]}
        assert result["ignore_labels"] == [2]
    (folder / "dataset.json").unlink()
    assert evaluate(*words, "classes=[rest,head,tail]") == 0
    assert read_result()["classes"] == {"head": [1], "tail": [2]}


def test_checkpoints_that_define_labels_otherwise_are_refused(folder, monkeypatch, capsys):
    runs = {
        "a": {"classes": ["rest", "head", "tail"]},
        "b": {"classes": ["rest", "head", "tail"], "regions": {"all": [1, 2]}},
    }
    monkeypatch.setattr(options, "load_run", lambda path: {"unet3d": runs[path.name]})
    monkeypatch.setattr(options, "group_cases_by_use", lambda *_: None)
    assert evaluate("checkpoint=[a,a]", "draw_worst=0") == 0
    assert evaluate("checkpoint=[a,b]", "draw_worst=0") == 2
    assert "b was trained with other classes, regions" in capsys.readouterr().err


@pytest.mark.parametrize("order", ["a,b,c", "c,b,a"])
def test_a_case_is_annotated_as_any_of_several_runs_says(folder, monkeypatch, order):
    names = {"classes": ["rest", "head", "tail"]}
    runs = {
        "a": {**names, "config": {"data": {"annotated": {"a": ["head"]}}}},
        "b": {**names, "config": {"data": {"annotated": {"b": ["tail"]}}}},
        "c": names,
    }
    monkeypatch.setattr(options, "load_run", lambda path: {"unet3d": runs[path.name]})
    monkeypatch.setattr(options, "group_cases_by_use", lambda *_: None)
    assert evaluate(f"checkpoint=[{order}]", "draw_worst=0") == 0
    scores = read_result()["cases"]
    assert scores["a"]["tail"]["dice"] is scores["b"]["head"]["dice"] is None
    assert None not in (scores["a"]["head"]["dice"], scores["b"]["tail"]["dice"])


def test_groups_of_a_run_that_are_not_found_from_here_are_asked_for(folder, monkeypatch, capsys):
    trained = {"classes": ["rest", "head", "tail"], "config": {"data": {"group_by": "none.csv"}}}
    monkeypatch.setattr(options, "load_run", lambda path: {"unet3d": trained})
    monkeypatch.setattr(options, "group_cases_by_use", lambda *_: None)
    assert evaluate("checkpoint=run", "draw_worst=0") == 2
    assert "none.csv: it says which cases of the run belong together" in capsys.readouterr().err
    assert evaluate("checkpoint=run", "draw_worst=0", "group_by='(.+)'") == 0


def test_patterns_may_name_cases_that_are_not_predicted(folder):
    next((folder / "predictions").glob("b*")).unlink()
    words = ["draw_worst=0", "classes=[background,head,tail]", "missing_predictions=skip"]
    assert evaluate(*words, "annotated={b:[head]}") == 0
    assert evaluate(*words, "annotated={d:[head]}") == 2


def test_files_that_are_named_as_the_scans_of_a_run_are_its_cases(folder, monkeypatch):
    """In `images: scans/*_ct.nii.gz` the case is `*`; predict names labels by the whole file."""
    for file in [*folder.glob("*/*.nii*")]:
        file.rename(file.with_name(file.name.replace(".", "1_ct.", 1)))
    settings = {"images": ["scans/*_ct.nii.gz"], "labels": "segs/*_seg.nii.gz"}
    settings |= {"annotated": {"b1": ["head"]}, "group_by": "([ab])1"}
    trained = {"classes": ["background", "head", "tail"], "config": {"data": settings}}
    content: dict = {"unet3d": trained, "callbacks": {}}
    cases = {"training": {"b1": ""}, "validation": {}}
    content["callbacks"]["ResumeState"] = {"fixed_settings": {"cases": cases}}
    monkeypatch.setattr(options, "load_run", lambda path: content)
    assert evaluate("checkpoint=run", "draw_worst=0") == 0
    found = read_result()
    scores = found["cases"]["b1_ct"]
    assert [name for name in scores if scores[name]["dice"] is None] == ["tail"]
    assert found["roles"] == {
        "training": ["b1_ct"],
        "validation": [],
        "held out": ["a1_ct", "c1_ct"],
    }
    assert found["groups"] == {"a1_ct": "a", "b1_ct": "b", "c1_ct": "c1"}


def test_a_file_that_names_its_labels_otherwise_is_not_scored(folder):
    """As 3D Slicer writes them."""
    SimpleITK = pytest.importorskip("SimpleITK")
    for n, names in enumerate((["head", "tail"], ["tail", "Head"])):
        image = SimpleITK.GetImageFromArray(make_labels(0))
        for k, name in enumerate(names):
            image.SetMetaData(f"Segment{k}_LabelValue", str(k + 1))
            image.SetMetaData(f"Segment{k}_Name", name)
        for part in ("slices", "truth"):
            (folder / part).mkdir(exist_ok=True)
            SimpleITK.WriteImage(image, str(folder / part / f"{n}.seg.nrrd"))
    words = ["classes=[background,head,tail]", "draw_worst=0"]
    base = ("predictions=slices", "references=truth", "output=out")
    assert evaluate(*words, base=base) == 1
    found = read_result()
    assert [*found["cases"]] == ["0.seg"]
    assert "1.seg.nrrd calls label 1 tail, which is 2" in found["errors"]["1.seg"]


def test_class_names_come_from_dataset_json_and_they_and_tolerances_can_be_configured(folder):
    written = {"background": 0, "tail": 2, "head": 1}
    (folder / "dataset.json").write_text(json.dumps({"labels": written}))
    assert evaluate("draw_worst=0") == 0
    assert list(read_result()["classes"]) == ["tail", "head"]
    assert evaluate("classes=[background,head,tail]", "draw_worst=0") == 0
    assert list(read_result()["classes"]) == ["head", "tail"]
    assert evaluate("regions={all:[1,2],end:2}", "tolerance_mm={all:2,end:0}", "draw_worst=1") == 0
    found = read_result()
    assert found["classes"] == {"all": [1, 2], "end": [2]}
    assert found["tolerance_mm"] == {"all": 2, "end": 0}
    whole = found["cases"]["b"]["all"]
    assert whole["prediction_ml"] == whole["reference_ml"] * 4 / 7
    assert [p.name for p in (folder / "out" / "worst").iterdir()] == ["1_b.png"]


def test_the_worst_cases_are_drawn_over_their_images_if_there_are_any(folder, capsys):
    noise = np.random.default_rng(0).random((12, 14, 10, 2), np.float32)
    save(folder / "images" / "a_0000.nii.gz", noise)
    save(folder / "images" / "b.nii.gz", noise[1:])
    assert evaluate("images=images") == 0
    message = capsys.readouterr().err
    assert "a is drawn" not in message
    assert "b is drawn without its image: images/b.nii.gz has shape [11, 14, 10]" in message
    assert "c is drawn without its image: images has no volume named c or c_0000" in message
    written = {path.name for path in (folder / "out" / "worst").iterdir()}
    assert written == {"1_b.png", "2_a.png", "3_c.png"}


MOVED = np.diag([1, 1, 2.01, 1])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda p: save(p, make_labels(1)[1:]),
            "has [12, 14, 10]: both must be on the same voxel grid",
        ),
        (lambda p: save(p, make_labels(1), MOVED), "2.01, 0.0]], references/b.nii.gz has [["),
        (lambda p: save(p, make_labels(1).astype(np.int16) - 1), "must be 0 or above, it holds -1"),
        (
            lambda p: save(p.parent / "b.nii.gz", make_labels(1)),
            "several files with the same name: pre",
        ),
    ],
)
def test_an_invalid_case_is_named_and_the_others_are_scored(folder, capsys, spoil, message):
    spoil(folder / "predictions" / "b.nii")
    assert evaluate("draw_worst=0") == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert "1 of 3 cases have errors: b" in captured.out
    assert list(read_result()["cases"]) == ["a", "c"]
    assert message in read_result()["errors"]["b"]


def test_grids_of_micrometers_that_differ_by_half_a_voxel_are_different_ones(folder, capsys):
    for name, micrometers in (("references", (0.3, 0.3, 1)), ("predictions", (0.5, 0.5, 1))):
        save(
            folder / name / "b.nii.gz", make_labels(1), np.diag([*np.divide(micrometers, 1000), 1])
        )
    (folder / "predictions" / "b.nii").unlink()
    assert evaluate("draw_worst=0") == 1
    assert "has affine [[0.0005, 0.0, 0.0, 0.0]" in capsys.readouterr().err


def test_a_label_without_a_class_is_an_error_and_earlier_results_are_overwritten(folder, capsys):
    assert evaluate() == 0
    assert evaluate("classes=[background,head]") == 1  # no case is without fault
    message = capsys.readouterr().err
    assert "a: ERROR predictions/a.nii: labels must be 0, 1, it holds 2: correct it, or" in message
    assert read_result()["per_class"] == {}
    left = {p.name for p in (folder / "out").iterdir()}
    assert left == {"evaluation.json", "worst", "report.html"}
    assert list((folder / "out" / "worst").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["predictions=predictions/a.nii"], "must be folders, or two files"),
        (["predictions=empty"], "no volume in empty (none) has the name of one in"),
        (["classes=[x,a,b]", "tolerance_mm={a:1}"], "must name every class once: a, b; it names a"),
        (["classes=[x,a,b]", "ignore_label=1"], "ignore_label=1 is a label of the class a"),
    ],
)
def test_a_usage_error_is_one_line(folder, capsys, words, message):
    (folder / "empty").mkdir()
    given = {w.split("=")[0] for w in words}
    base = [w for w in FOLDERS if w.split("=")[0] not in given]
    assert evaluate(*words, base=base) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "out").exists()


def test_folders_patterns_files_and_workers_give_the_same_scores(folder, capsys):
    for n in range(7):
        save(folder / "predictions" / f"extra{n}.nii", make_labels(n))
    assert evaluate("draw_worst=0") == 0
    expected = read_result()
    assert "7 predictions without a reference: extra0, extra1, " in capsys.readouterr().err
    assert len(expected["predictions_without_reference"]) == 7
    (folder / "second").mkdir()
    (folder / "predictions" / "b.nii").rename(folder / "second" / "b.nii")
    for several in ("predictions,second", "[ps]*"):
        words = (f"predictions={several}", *FOLDERS[1:], "workers=2")
        assert evaluate("draw_worst=0", base=words) == 0
        assert read_result()["cases"] == expected["cases"]
    assert evaluate(base=("predictions=none_*", *FOLDERS[1:])) == 2
    files = ("predictions=predictions/a.nii", "references=references/a.nii.gz", "output=out")
    assert evaluate(base=files) == 0
    assert read_result()["cases"] == {"a": expected["cases"]["a"]}
    assert read_result()["mean"]["dice"] == {"mean": 1, "low": None, "high": None}
