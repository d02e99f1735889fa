import csv
import math

from unet3d.report.evaluation import make_score_rows, write_csv

NAN = math.nan


def make_scores(dice, **others):
    return {"dice": dice, "hd95_mm": 1.0, "reference_ml": 1.0, "prediction_ml": 1.0, **others}


def write_and_read(cases, file):
    write_csv(cases, file)
    with file.open(newline="") as lines:
        return list(csv.reader(lines))


def test_the_csv_has_a_row_per_case_and_class(tmp_path):
    cases = {"x": {"a": make_scores(0.25), "b": make_scores(NAN)}, "y, z": {"a": make_scores(1.0)}}
    header, *rows = write_and_read(cases, tmp_path / "e.csv")
    assert header[:3] == ["case", "class", "dice"]
    assert [row[:3] for row in rows] == [["x", "a", "0.25"], ["x", "b", ""], ["y, z", "a", "1.0"]]


def test_the_table_shows_means_intervals_and_counts():
    def make_row(*interval):
        values = dict(zip(("mean", "low", "high", "cases"), interval, strict=True))
        return dict.fromkeys(("dice", "iou", "hd95_mm", "surface_dice"), values)

    overall = make_row(0.5, 0.25, 0.75, 7)
    rows = {"a": overall, "b": make_row(0.5, NAN, NAN, 1), "c": make_row(NAN, NAN, NAN, 0)}
    per_class = {name: row | {"absent_from_one": 3} for name, row in rows.items()}
    assert make_score_rows({"per_class": per_class, "mean": overall})[1:] == [
        ("a", "0.5000 [0.2500, 0.7500]", "0.5000", "0.50", "0.5000", "7", "3"),
        ("b", "0.5000", "0.5000", "0.50", "0.5000", "1", "3"),
        ("c", "-", "-", "-", "-", "0", "3"),
        ("mean", "0.5000 [0.2500, 0.7500]", "0.5000", "0.50", "0.5000", "", ""),
    ]
