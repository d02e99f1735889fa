"""Values of classes in label files: listed, named in a table, or those that occur."""

import json

import numpy as np
import pytest

from tests.data.helpers.cases import noise, write_case
from unet3d.data.label_values import read_label_values
from unet3d.data.preprocessing.pipeline import Preprocessing
from unet3d.errors import UsageError

COLORS = """# No. Label Name:   R   G   B   A
0   Unknown                 0   0   0   0
17  Left-Hippocampus      220 216  20   0

53\tRight-Hippocampus\t220 216 20 0
17  Left-Hippocampus      220 216  20   0
53 again 1 2 3 0
"""


@pytest.fixture
def cases(tmp_path):
    label = np.zeros((8, 8, 8), np.float32)
    label[2:4], label[6], label[7] = 17, -1, np.nan
    damaged = write_case(tmp_path, noise(8, 8, 8), name="damaged")  # whose checks say so
    damaged.label.write_bytes(b"")
    return [write_case(tmp_path, noise(8, 8, 8), label), damaged]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ([0, 1035, 17], {0: None, 1035: None, 17: None}),
        ({"background": 0, "left": 17}, {0: "background", 17: "left"}),
        ("auto", {0: None, 17: None}),
        ("colors.txt", {0: "Unknown", 17: "Left-Hippocampus"}),
        ("words.csv", {0: "rest", 17: "Hippocampus, left"}),
        ("names.json", {0: None, 17: "left"}),
        ("areas.txt", {0: None, 17: "4 area 4p E"}),
        ("atlas.tsv", {0: "rest", 17: "Temporal Gyrus, anterior; left"}),
        ("columns.csv", {0: None, 17: 'the "left" one'}),
        ("itk.label", {0: None, 17: 'Left "Hippo", head'}),
        ("words.txt", {0: None, 17: "left"}),
        ("plain.txt", {0: None, 17: "V 1 2 3"}),
        ("rgb.txt", {0: "Unknown", 17: "Area 44"}),
        ("pandas.csv", {0: "rest", 17: "left"}),
        ("sides.csv", {0: "rest", 17: "kidney"}),
        ("reset.csv", {0: "rest", 17: "left"}),
        ("colors.csv", {0: None, 17: "left"}),
        ("quoted.txt", {0: None, 17: 'the "left" one'}),
        ("opaque.txt", {0: "Unknown", 17: "Left"}),
        ("lobules.txt", {0: None, 17: "Lobule 4"}),
        ("hex.csv", {0: None, 17: "left"}),
        ("bars.txt", {0: None, 17: "left"}),
        ("quotes.txt", {0: None, 17: "left one"}),
        ("comments.txt", {0: None, 17: "left"}),
        ("names.csv", {0: None, 17: "3rd; ventricle"}),
        ("floats.csv", {0: "rest", 17: "left"}),
    ],
)
def test_values_are_listed_or_those_that_occur(tmp_path, monkeypatch, cases, setting, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "colors.txt").write_text(COLORS)
    (tmp_path / "words.csv").write_text('0,rest\n17,"Hippocampus, left",L\n')
    (tmp_path / "names.json").write_text(json.dumps({"left": 17, "right": 53}))
    (tmp_path / "areas.txt").write_text("17 4 area 4p E 1 2 3\n")
    (tmp_path / "atlas.tsv").write_text("0\trest\n17\tTemporal Gyrus, anterior; left\n")
    (tmp_path / "columns.csv").write_text('Color,Name,Index\nred,"the ""left"" one",17\n')
    (tmp_path / "itk.label").write_text('17 255 0 0 1 1 1 "Left "Hippo", head"\n')
    (tmp_path / "words.txt").write_text('{"17":\n "left"}')
    (tmp_path / "plain.txt").write_text("17 V 1 2 3\n53 other\n")
    (tmp_path / "rgb.txt").write_text("0 Unknown 0 0 0\n17 Area 44 10 20 30\n")
    (tmp_path / "pandas.csv").write_text(",label,name\n0,0,rest\n1,17,left\n17,53,right\n")
    (tmp_path / "sides.csv").write_text("Label,Side,Structure\n0,,rest\n17,left,kidney\n")
    (tmp_path / "reset.csv").write_text("index,label,name\n0,0,rest\n1,17,left\n17,53,right\n")
    (tmp_path / "colors.csv").write_text("17,left,255,0,0\n53,,0,0,0,0\n")
    (tmp_path / "quoted.txt").write_text('17 the "left" one\n')
    colors = "0 Unknown 0 0 0 0\n17 Left 220 216 20 0\n53 Right 103 255 255\n"
    (tmp_path / "opaque.txt").write_text(colors)
    (tmp_path / "lobules.txt").write_text("17 Lobule 4 10 20 30\n53 Crus 1 40 50 60\n")
    (tmp_path / "hex.csv").write_text("17,#ff0000,left\n53,#00ff00,right\n")
    (tmp_path / "bars.txt").write_text("17 | left\n53 | right\n")
    (tmp_path / "quotes.txt").write_text('17 "left one" 1 2 3 0\n53 "right" 1 2 3 0\n')
    (tmp_path / "comments.txt").write_text("17 left 1 2 3 0 # as seen\n53 right 1 2 3 0\n")
    (tmp_path / "names.csv").write_text("name,index\n3rd; ventricle,17\nCSF,53\n")
    (tmp_path / "floats.csv").write_text("index,name\n0.0,rest\n17.0,left\n")
    for _ in range(2):  # the second time, they are in the cache
        found = read_label_values(setting, lambda: cases, tmp_path / "cache", [-1])
        assert list(found.items()) == list(expected.items())


def test_values_of_labels_that_change_are_read_again(tmp_path, cases):
    arguments = "auto", lambda: cases, tmp_path / "cache", [-1]
    assert list(read_label_values(*arguments)) == [0, 17]
    write_case(tmp_path, noise(8, 8, 8), np.full((8, 8, 8), 5, np.int16))
    assert list(read_label_values(*arguments)) == [0, 5]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ([0, 17, 17], "names a value twice"),
        ([17, 0], "of which 0, the background, is first; got 17, 0"),
        ([*range(9), 70_000], r"values of 0\.\.65535, .* got 70000$"),
        ("names.json", "names.json does not name 17, which labels hold"),
        ("empty.txt", "must name values of labels"),
        ("other.txt", "must name values of labels"),
        ("missing.txt", "cannot be read"),
        ("twice.txt", "twice.txt names 17 twice: left, right"),
        ("values.json", "values.json must map values to names, not 17 to 53"),
        ("repeated.json", "repeated.json names 17 twice: left, right"),
        ("null.json", "null.json must map values to names, not 17 to None"),
        ("true.json", "true.json must map values to names, not 17 to True"),
        ("nested.json", "nested.json must map values to names, not 17 to "),
        ("float.json", r"float.json must map values to names, not left to 17.0"),
        ("numbers.csv", "numbers.csv must map values to names, not 17 to 44"),
        ("numbers.txt", "numbers.txt must map values to names, not 17 to 1e3"),
        ("voxels.csv", "call the columns of a table index and name, not id, voxels, color"),
        ("bad.json", "bad.json cannot be read: "),
        ("list.json", "list.json must name values of labels"),
        ("comment.csv", "which number of 1, 17, left is the value"),
        ("last.tsv", "which number of 1, left, 17 is the value"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(tmp_path, monkeypatch, cases, setting, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "names.json").write_text(json.dumps({"right": 53}))
    (tmp_path / "twice.txt").write_text("17 left\n17 right\n")
    (tmp_path / "values.json").write_text(json.dumps({"17": 53, "53": 17}))
    (tmp_path / "empty.txt").write_text("value,name\n")
    (tmp_path / "other.txt").write_text("no values here\n")
    (tmp_path / "repeated.json").write_text('{"17": "left", "17": "right"}')
    (tmp_path / "null.json").write_text('{"17": null}')
    (tmp_path / "true.json").write_text('{"17": true}')
    (tmp_path / "nested.json").write_text('{"17": {"name": "left"}}')
    (tmp_path / "float.json").write_text('{"left": 17.0}')
    (tmp_path / "numbers.csv").write_text("17,44\n")
    (tmp_path / "numbers.txt").write_text("17 1e3\n")
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "voxels.csv").write_text("id,voxels,color\n17,1 200,red\n")
    (tmp_path / "list.json").write_text("[17]")
    (tmp_path / "comment.csv").write_text("#No,LabelID,LabelName\n1,17,left\n17,53,right\n")
    (tmp_path / "last.tsv").write_text("1\tleft\t17\n17\tright\t53\n")
    with pytest.raises(UsageError, match=message):
        read_label_values(setting, lambda: cases, tmp_path / "cache", [-1])


@pytest.mark.parametrize(
    ("settings", "values", "expected"),
    [
        ({"num_classes": 3}, [0, 2, -1], [0, 2, 255]),
        ({"num_classes": 300}, [0, 299, -1], [0, 299, 32767]),
        ({"num_classes": 3, "label_values": (0, 1035, 17)}, [0, 17, 1035, -1], [0, 2, 1, 255]),
    ],
)
def test_values_become_classes_and_voxels_to_skip(settings, values, expected):
    preprocessing = Preprocessing(ignore_labels=(-1,), **settings)
    classes = preprocessing.to_classes(np.array(values, np.int32))
    assert (classes.tolist(), classes.itemsize) == (expected, 1 + (expected[-1] > 255))
