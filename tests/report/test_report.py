import json
import math

import numpy as np
import torch

from unet3d.report.report import write
from unet3d.report.slices import middle_slices, palette


def test_a_report_is_json_that_any_reader_takes(tmp_path):
    write({"a": math.nan, "b": [math.inf, 1.0], "c": {1: "x"}}, tmp_path / "report.json")
    text = (tmp_path / "report.json").read_text()
    assert json.loads(text, parse_constant=str) == {"a": None, "b": [None, 1.0], "c": {"1": "x"}}
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


def test_slices_show_image_reference_and_prediction_through_the_structure():
    image = torch.randn(20, 30, 40)
    reference = torch.zeros(20, 30, 40, dtype=torch.uint8)
    reference[3:5, 4:6, 5:7] = 1
    picture = middle_slices(image, reference, torch.zeros_like(reference))
    assert picture.shape[0] == 3
    assert 0 <= picture.min() <= picture.max() <= 1
    top, middle, bottom = np.split(picture, 3, axis=1)
    coloured = [np.ptp(part, axis=0).max() > 0.1 for part in (top, middle, bottom)]
    assert coloured == [False, True, False]


def test_neighbouring_classes_have_different_colours():
    colours = palette(8)
    apart = [np.abs(a - b).sum() for i, a in enumerate(colours) for b in colours[:i]]
    assert min(apart) > 0.2
