"""Datasets and predictions in every format; docs/how-to/formats.md walks through all five."""

import json

import numpy as np
import pytest

from tests.data.helpers.datasets import make_image, make_label
from tests.data.helpers.formats import (
    write_itk,
    write_nifti,
    write_numpy,
    write_zarr,
)
from unet3d.__main__ import main

STRAIGHT = np.diag([0.75, 0.5, 2.0, 1.0])


@pytest.mark.parametrize(
    ("suffix", "name", "write"), [(".nrrd", "NRRD", write_itk), (".npy", "NumPy", write_numpy)]
)
def test_check_names_the_format_and_what_it_does_not_hold(tmp_path, capsys, suffix, name, write):
    arrays = {"images": make_image(1), "labels": make_label(1)}
    for kind, array in arrays.items():
        (tmp_path / kind).mkdir()
        for n in range(2):
            write(tmp_path / kind / f"{n}{suffix}", array, STRAIGHT)
    patterns = [f"data.{kind}={kind}/*{suffix}" for kind in arrays]
    words = ["data=pairs", f"data.root={tmp_path}", "data.num_classes=3", *patterns]
    main(["check", "format=json", *words])
    shown = json.loads(capsys.readouterr().out)
    assert shown["about"].startswith(f"{name}, 12 x 10 x 8 voxels of ")
    hints = ["2 of 2 cases have no voxel spacing: 1 mm is assumed"] if suffix == ".npy" else []
    assert [hint["message"] for hint in shown["hints"]] == hints


@pytest.mark.slow
def test_evaluate_matches_formats_and_refuses_other_grids(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("predictions", "references"):
        (tmp_path / folder).mkdir()
    for n, name in enumerate("abc"):
        write_itk(tmp_path / "references" / f"{name}.mha", make_label(n), STRAIGHT)
    write_nifti(tmp_path / "predictions" / "a.nii.gz", make_label(0), STRAIGHT)
    write_zarr(tmp_path / "predictions" / "b.zarr", make_label(1), STRAIGHT)
    np.save(tmp_path / "predictions" / "c.npy", make_label(2))
    words = ["predictions=predictions", "references=references", "output=scores"]
    assert main(["evaluate", *words, "draw_worst=0"]) == 1
    result = json.loads((tmp_path / "scores" / "evaluation.json").read_text())
    for name in "ab":
        assert {scores["dice"] for scores in result["cases"][name].values()} == {1.0}
    assert "predictions/c.npy has affine" in result["errors"]["c"]
