import json

import pytest

from unet3d.data.layouts.groups import find_likely_groups, read_groups
from unet3d.errors import UsageError

NAMES = ["patient001_frame01", "patient001_frame12", "patient002_frame01"]
GROUPS = dict(zip(NAMES, ["001", "001", "002"], strict=True))


def test_the_first_capture_group_of_the_pattern_is_the_group():
    assert read_groups(r"patient(\d+)_(frame)\d+", NAMES) == GROUPS


def test_groups_can_be_read_from_a_file(tmp_path):
    rows = ["case,patient", *(f"{case}, {group}" for case, group in GROUPS.items())]
    contents = {"a.json": json.dumps(GROUPS | {"other": 7}), "a.csv": "\n".join(rows)}
    for file, content in contents.items():
        (tmp_path / file).write_text(content)
        assert read_groups(str(tmp_path / file), NAMES) == GROUPS


@pytest.mark.parametrize(
    ("group_by", "message"),
    [
        (r"patient(\d+", r"is not a valid regular expression: missing \)"),
        (r"patient\d+", "has no capture group: "),
        (r"(\d+)_frame01", "captures nothing from 1 of 3 cases: patient001_frame12"),
        (r"(x?)", "captures nothing from 3 of 3 cases: patient001_frame01, patient001_frame12,"),
        ("none.json", "no file .*none.json"),
    ],
)
def test_a_pattern_that_leaves_cases_without_a_group_is_refused(group_by, message):
    with pytest.raises(UsageError, match=message):
        read_groups(group_by, NAMES)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("a.json", "{", "must be a JSON object"),
        ("a.json", '{"patient001_frame01": [1]}', "must be a JSON object"),
        ("a.csv", "a,b,c\n", "or a CSV file with the columns"),
        ("a.csv", "a,1\na,2\n", "has two groups for a: 1 and 2"),
        ("a.csv", "patient001_frame01,1\n", "no group for 2 of 3 cases: patient001_frame12, pat"),
    ],
)
def test_a_file_that_leaves_cases_without_a_group_is_refused(tmp_path, file, content, message):
    (tmp_path / file).write_text(content)
    with pytest.raises(UsageError, match=message):
        read_groups(str(tmp_path / file), NAMES)


def make_names(pattern, patients, scans):
    return [pattern.format(p, s) for p in patients for s in scans]


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        (make_names("patient{:03d}_frame{:02d}", range(1, 4), (1, 12)), r"(.+)_frame\d+"),
        (make_names("patient{:03d}_frame{:02d}", range(2), range(30)), r"(.+)_frame\d+"),
        (["sub-01_ses-1", "sub-01_ses-2", "sub-02_ses-1"], r"(.+)_ses-\d+"),
        (["p1_baseline", "p1_followup2", "p2_baseline"], r"(.+)(?:_baseline|_followup\d+)"),
        (make_names("training{:02d}_{:02d}", range(1, 6), range(1, 5)), r"(.+)_\d+"),
    ],
)
def test_names_with_several_scans_per_patient_get_a_pattern_that_works(names, pattern):
    hint = find_likely_groups(names)
    assert hint is not None
    assert hint.option == f"data.group_by='{pattern}'"
    groups = read_groups(pattern, names)
    assert 1 < len(set(groups.values())) < len(names)


@pytest.mark.parametrize(
    "names",
    [
        make_names("BRATS_{:03d}", range(1, 9), [0]),
        make_names("Task04_{1:03d}", [0], range(20)),
        make_names("center{}_{:03d}", range(4), range(50)),
        make_names("patient{:03d}_frame01", range(9), [0]),
        ["case_000"],
        [],
    ],
)
def test_names_with_one_scan_per_patient_get_no_hint(names):
    assert find_likely_groups(names) is None
