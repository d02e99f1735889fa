import json
from pathlib import Path

import pytest

from unet3d.data.case import Case
from unet3d.data.layouts.splits import split_cases
from unet3d.errors import UsageError


def cases(count):
    return [Case(name=f"case_{n:03d}", images=(), label=Path()) for n in range(count)]


def test_folds_are_nnunets():
    """The validation cases of sklearn's KFold(5, shuffle=True, random_state=12345) on 12 names."""
    held_out = [[int(c.name[-3:]) for c in split_cases(cases(12), fold)[1]] for fold in range(5)]
    assert held_out == [[0, 3, 8], [7, 10, 11], [6, 9], [1, 4], [2, 5]]


def test_every_case_validates_once_and_never_trains_then():
    seen = []
    for fold in range(5):
        training, validation = split_cases(cases(13), fold)
        assert not set(training) & set(validation)
        assert len(training) + len(validation) == 13
        seen += validation
    assert sorted(c.name for c in seen) == [c.name for c in cases(13)]


def test_fold_none_trains_on_every_case():
    assert split_cases(cases(3), None) == (cases(3), [])


@pytest.mark.parametrize("fold", [-1, 5])
def test_a_fold_that_is_not_there_is_refused(fold):
    with pytest.raises(UsageError, match=r"0\.\.4"):
        split_cases(cases(9), fold)


def test_too_few_cases_for_folds_are_refused_with_the_way_out():
    with pytest.raises(UsageError, match="fold=none"):
        split_cases(cases(4), 0)


def test_a_file_may_say_what_the_folds_are(tmp_path):
    file = tmp_path / "splits.json"
    file.write_text(json.dumps([{"train": ["case_000", "case_002"], "val": ["case_001"]}]))
    training, validation = split_cases(cases(4), 0, file)
    assert [c.name for c in training] == ["case_000", "case_002"]
    assert [c.name for c in validation] == ["case_001"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "must be a JSON list"),
        ('[{"train": []}]', "must be a JSON list"),
        ('[{"train": ["case_009"], "val": []}]', "has not: case_009"),
        ('[{"train": ["case_001"], "val": ["case_001"]}]', "trains and validates on case_001"),
        ('[{"train": [], "val": ["case_001"]}]', "no cases to train on"),
        ("[]", "fold must be"),
        (None, "there is no"),
    ],
)
def test_a_file_of_folds_that_makes_no_sense_is_refused(tmp_path, content, said):
    file = tmp_path / "splits.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UsageError, match=said):
        split_cases(cases(4), 0, file)


def patients(count):
    """Two scans of each, and the patient of every scan."""
    names = [f"p{n:02d}_{scan}" for n in range(count) for scan in "ab"]
    return [Case(name=name, images=(), label=Path()) for name in names], {n: n[:3] for n in names}


def test_scans_of_a_patient_never_fall_on_both_sides_of_a_split():
    scans, groups = patients(7)
    seen = []
    for fold in range(5):
        sides = [{groups[c.name] for c in part} for part in split_cases(scans, fold, groups=groups)]
        assert not sides[0] & sides[1]
        assert sides[0] | sides[1] == set(groups.values())
        seen += sides[1]
    assert sorted(seen) == sorted(set(groups.values()))


def test_groups_are_cut_as_cases_are():
    scans, groups = patients(12)
    for fold in range(5):
        held_out = [int(c.name[-3:]) for c in split_cases(cases(12), fold)[1]]
        assert [
            int(c.name[1:3]) for c in split_cases(scans, fold, groups=groups)[1][::2]
        ] == held_out


def test_fewer_groups_than_folds_are_refused():
    scans, groups = patients(4)
    with pytest.raises(UsageError, match="4 groups are too few for 5 folds: fold=none"):
        split_cases(scans, 0, groups=groups)


def test_a_file_of_folds_that_splits_a_group_is_refused_with_the_group(tmp_path):
    scans, groups = patients(2)
    file = tmp_path / "splits.json"
    file.write_text(json.dumps([{"train": ["p00_a", "p01_a"], "val": ["p01_b"]}]))
    with pytest.raises(
        UsageError, match=r"fold 0 trains on p01_a and validates on p01_b.*, p01: move"
    ):
        split_cases(scans, 0, file, groups)
    file.write_text(json.dumps([{"train": ["p00_a"], "val": ["p01_b"]}]))
    assert [c.name for c in split_cases(scans, 0, file, groups)[1]] == ["p01_b"]
