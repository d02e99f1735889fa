"""Training and evaluation from Python: what the commands do, without prints and exit codes."""

from pathlib import Path

import numpy as np
import pytest

import unet3d
from tests.contract.helpers.datasets import save
from unet3d.errors import UsageError


@pytest.fixture
def predictions(tmp_path):
    """A folder of labels."""
    labels = np.random.default_rng(0).integers(0, 4, (12, 12, 12)).astype(np.uint8)
    return save(tmp_path / "predictions (1)" / "a.nii.gz", labels).parent


def test_a_missing_file_of_plans_or_folder_of_options_is_a_usage_error(small, tmp_path):
    with pytest.raises(UsageError, match="no file "):
        unet3d.train([*small, "experiment=none.json"])
    with pytest.raises(UsageError, match="config_dir: no folder "):
        unet3d.train(small, config_dir=tmp_path / "nothing")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"references": Path("nowhere")}, "references: nowhere is neither a file nor a folder"),
        ({"metrics": ["medal"]}, "no option metrics=medal"),
        ({"tolerance_mm": {"a": -1}}, "tolerance_mm must be a distance in mm"),
    ],
)
def test_a_wrong_argument_of_evaluate_is_a_usage_error(predictions, options, message):
    with pytest.raises(UsageError, match=message):
        unet3d.evaluate(**{"predictions": predictions, "references": predictions} | options)
