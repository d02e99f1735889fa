from pathlib import Path

import pytest

from tests.config.helpers.configs import with_values
from unet3d.config.settings.evaluation import parse_evaluation
from unet3d.errors import UsageError


def parse(**values):
    return parse_evaluation(with_values("evaluate", values))


def test_the_defaults_score_every_label():
    settings = parse()
    assert settings.predictions == (Path("p"),)
    assert settings.references == Path("r")
    assert not settings.skip_missing_predictions
    assert settings.classes is None
    assert settings.regions is None
    assert settings.tolerance_mm == 1.0


@pytest.mark.parametrize(
    ("values", "field", "expected"),
    [
        ({"missing_predictions": "skip"}, "skip_missing_predictions", True),
        ({"predictions": "a,b"}, "predictions", (Path("a"), Path("b"))),
        ({"classes": ["background", "liver"]}, "classes", ("background", "liver")),
        ({"regions": {"whole": [1, 2]}}, "regions", {"whole": (1, 2)}),
        ({"ignore_label": -1}, "ignore_labels", (-1,)),
        ({"tolerance_mm": 0}, "tolerance_mm", 0.0),
        ({"tolerance_mm": {"liver": 2, "tumor": 0.5}}, "tolerance_mm", {"liver": 2, "tumor": 0.5}),
    ],
)
def test_a_value_is_parsed(values, field, expected):
    assert getattr(parse(**values), field) == expected


@pytest.mark.parametrize(
    ("key", "values", "expected"),
    [
        ("missing_predictions", ["fault"], "missing_predictions must be one of error, skip"),
        (
            "classes",
            ["liver", ["liver"], ["a", "a"], {"a": 1}],
            "classes must be unique names, background first",
        ),
        ("regions", ["x", [1]], "regions must be names with their labels"),
        ("tolerance_mm", [-1, "far", True], "tolerance_mm must be a distance in mm"),
        ("tolerance_mm", [{"liver": -1}], "tolerance_mm.liver must be a distance in mm"),
        ("ignore_label", [1.5], "ignore_label must be an int"),
        ("draw_worst", [-1], "draw_worst must be an int >= 0"),
        ("workers", [0], "workers must be an int >= 1"),
        ("debug", ["loud"], "debug must be true or false"),
    ],
)
def test_a_wrong_value_is_refused(key, values, expected):
    for value in values:
        with pytest.raises(UsageError) as caught:
            parse(**{key: value})
        assert str(caught.value).startswith(expected)


@pytest.mark.parametrize("name", ["report.json", "curves.json"])
def test_the_report_of_a_run_is_not_replaced(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(UsageError, match=r"holds a training run.*as in output=.*/scores"):
        parse(output=str(tmp_path))
    parse(output=str(tmp_path / "scores"))


def test_the_output_must_be_a_folder_and_images_must_exist(tmp_path):
    file = tmp_path / "scores"
    file.touch()
    with pytest.raises(UsageError, match=r"output: .*scores is a file; it must be a folder"):
        parse(output=str(file))
    with pytest.raises(UsageError, match=r"images: .*none is neither a file nor a folder"):
        parse(images=str(tmp_path / "none"))
    assert parse(output=str(tmp_path), images=str(file)).images == file
