import json
from pathlib import Path

import pytest

from unet3d.data.case import Case
from unet3d.data.layouts.splits import find_likely_groups, read_groups, split_cases
from unet3d.errors import UsageError


def make_cases(count):
    return [Case(name=f"case_{n:03d}", images=(), label=Path()) for n in range(count)]


def test_folds_match_nnunet():
    """The expected cases are from sklearn's KFold(5, shuffle=True, random_state=12345)."""
    parts = [split_cases(make_cases(12), fold)[1] for fold in range(5)]
    held_out = [[int(case.name[-3:]) for case in part] for part in parts]
    assert held_out == [[0, 3, 8], [7, 10, 11], [6, 9], [1, 4], [2, 5]]


def test_an_unknown_fold_is_refused_and_none_trains_on_every_case():
    assert split_cases(make_cases(3), None) == (make_cases(3), [])
    for fold in (-1, 5):
        with pytest.raises(UsageError, match=r"0\.\.4"):
            split_cases(make_cases(9), fold)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "must be a JSON list"),
        ('[{"train": ["case_001", 1], "val": []}]', "not in the dataset: 1"),
        ('[{"train": ["case_001"], "val": ["case_001"]}]', "trains and validates on case_001"),
        (None, "no file"),
    ],
)
def test_an_invalid_file_of_folds_is_refused(tmp_path, content, message):
    file = tmp_path / "splits.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UsageError, match=message):
        split_cases(make_cases(4), 0, file)


def write_folds(folder, *folds):
    file = folder / "splits.json"
    file.write_text(json.dumps([{"train": train, "val": val} for train, val in folds]))
    return file


def test_a_fold_beyond_those_of_a_file_is_refused(tmp_path):
    file = write_folds(tmp_path, *((["case_000", "case_001"], [f"case_00{n}"]) for n in (2, 3)))
    training, validation = split_cases(make_cases(4), 1, file)
    assert [c.name for c in training] == ["case_000", "case_001"]
    assert [c.name for c in validation] == ["case_003"]
    with pytest.raises(UsageError, match=r"fold must be 0\.\.1, the folds of .*, or none, got 2"):
        split_cases(make_cases(4), 2, file)


def make_patients(count):
    """Return two scans per patient, and the patient of every scan."""
    names = [f"p{n:02d}_{scan}" for n in range(count) for scan in "ab"]
    return [Case(name=name, images=(), label=Path()) for name in names], {n: n[:3] for n in names}


def test_groups_are_split_like_cases():
    scans, groups = make_patients(12)
    for fold in range(5):
        held_out = [int(c.name[-3:]) for c in split_cases(make_cases(12), fold)[1]]
        training, validation = split_cases(scans, fold, groups=groups)
        assert not {c.name[:3] for c in training} & {c.name[:3] for c in validation}
        assert len(training) + len(validation) == 24
        assert [int(c.name[1:3]) for c in validation[::2]] == held_out
    with pytest.raises(UsageError, match="4 groups cannot be split into 5 folds: set fold=none"):
        split_cases(scans[:8], 0, groups=groups)


def test_a_file_of_folds_that_splits_a_group_is_refused(tmp_path):
    scans, groups = make_patients(2)
    file = write_folds(tmp_path, (["p00_a", "p01_a"], ["p01_b"]))
    with pytest.raises(UsageError, match="fold 0 trains and validates on cases of p01, which"):
        split_cases(scans, 0, file, groups)
    write_folds(tmp_path, (["p00_a"], ["p01_b"]))
    assert [c.name for c in split_cases(scans, 0, file, groups)[1]] == ["p01_b"]


NAMES = ["patient001_frame01", "patient001_frame12", "patient002_frame01"]
GROUPS = dict(zip(NAMES, ["001", "001", "002"], strict=True))


def test_groups_are_captured_from_names_or_read_from_a_file(tmp_path):
    assert read_groups(r"patient(\d+)_(frame)\d+", NAMES) == GROUPS
    rows = ["case,patient", *(f"{case}, {group}" for case, group in GROUPS.items())]
    contents = {"a.json": json.dumps(GROUPS | {"other": 7}), "a.csv": "\n".join(rows)}
    contents["b.csv"] = contents["a.csv"].replace(",", ";")  # as Excel writes it in Europe
    for file, content in contents.items():
        (tmp_path / file).write_text(content)
        assert read_groups(str(tmp_path / file), NAMES) == GROUPS


@pytest.mark.parametrize(
    ("group_by", "content", "message"),
    [
        (r"patient(\d+", None, r"missing \), .*; it must be a regular expression with a capture"),
        (r"(\d+)_frame01", None, "captures nothing from 1 of 3 cases: patient001_frame12"),
        ("none.json", None, "no file .*none.json"),
        ("a.csv", "a,b,c\n", "or a CSV file with the columns"),
        ("a.csv", "a,1\na,2\n", "has two groups for a"),
        ("a.csv", "patient001_frame01,1\n", "no group for 2 of 3 cases: patient001_frame12, pat"),
    ],
)
def test_what_leaves_cases_without_a_group_is_refused(
    tmp_path, monkeypatch, group_by, content, message
):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(group_by).write_text(content)
    with pytest.raises(UsageError, match=message):
        read_groups(group_by, NAMES)


def make_names(pattern, patients, scans):
    return [pattern.format(p, s) for p in patients for s in scans]


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        (make_names("patient{:03d}_frame{:02d}", range(2), range(30)), r"(.+)_frame\d+"),
        (["p1_baseline", "p1_followup2", "p2_baseline"], r"(.+?)(?:_baseline|_followup\d+)$"),
        (make_names("training{:02d}_{:02d}", range(1, 6), range(1, 5)), r"(.+)_\d+"),
        (make_names("hip{:02d}_{}", range(5), "LR"), "(.+?)(?:_L|_R)$"),
        (make_names("p{}-{}", range(5), ("pre", "post")), "(.+?)(?:-post|-pre)$"),
        (make_names("knee{}{}", range(5), "ab"), "(.+?)(?:a|b)$"),
        (make_names("s{}_{:02d}", (1, 2), range(1, 7)), None),  # two scanners
        (make_names("center{}_{:03d}", range(4), range(50)), None),
        (make_names("patient{:03d}_frame01", range(9), [0]), None),
        ([], None),
    ],
)
def test_names_with_several_scans_per_patient_alone_get_a_pattern_that_works(names, pattern):
    hint = find_likely_groups(names)
    assert (hint and hint.option) == (pattern and f"data.group_by='{pattern}'")
    assert not pattern or 1 < len(set(read_groups(pattern, names).values())) < len(names)


DAYS = "2021-03-01 2021-03-15 2021-04-02 2022-01-09".split()


@pytest.mark.parametrize(
    ("names", "num_patients"),
    [
        (make_names("sub-{:02d}_ses-{}", (1, 2, 3), ["1_run-1", "1_run-2", "2_run-1"]), 3),
        (make_names("s{:02d}_ses-{}", (1, 2), ["1_run-1", "2_run-1", "2_run-2", "pre"]), 2),
        (["sub-01_ses-1", "sub-01_ses-2_run-1", "sub-02", "sub-02_ses-M12"], 2),
        (make_names("pat{:02d}_{}", (1, 2), DAYS), 2),
        (make_names("pat{:02d}_{}", (1, 2), [day.replace("-", "_") for day in DAYS]), 2),
        (make_names("MS{:02d}-{}", (1, 2), [day.replace("-", "") for day in DAYS]), 2),
        (make_names("p{}_t{}", range(5), range(2)), 5),
        (make_names("P{}_T{}", range(5), range(7)), 5),
        (make_names("subj{:02d}{}", (1, 2), ["bl1", "bl2", "tp3"]), 2),
        (make_names("{}_{}", "ABC", ["pre", "post"]), 3),
        (make_names("OAS{}_MR_d{:04d}", range(30001, 30004), [129, 757]), 3),
        (make_names("sub{:02d}_{}", (1, 2, 3), ["base", "fu1"]), 3),
        (make_names("s1_{:02d}_ses{}", range(9), (1, 2)), 9),  # of one scanner
        (make_names("center{}_{}", (1, 2), ["01_t1", "01_t2", "02_t1", "03_t1"]), 6),
    ],
)
def test_all_scans_of_a_patient_are_in_one_group(names, num_patients):
    hint = find_likely_groups(names)
    assert f"scans of {num_patients} patients" in hint.message
    assert len(set(read_groups(hint.pattern, names).values())) == num_patients
