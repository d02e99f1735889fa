import json

import pytest

from unet3d.data.layouts.decathlon import Decathlon
from unet3d.errors import UsageError


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "one JSON object"),
        (json.dumps({"labels": {"0": "a"}, "modality": {"0": "CT"}}), "no training cases"),
        (json.dumps({"training": ["x"]}), "needs image and label, got 'x'"),
        (json.dumps({"training": [{"image": "x"}]}), "needs image and label, got {'image': 'x'}"),
    ],
)
def test_an_invalid_dataset_json_is_refused(tmp_path, content, message):
    (tmp_path / "dataset.json").write_text(content)
    with pytest.raises(UsageError, match=message):
        Decathlon(str(tmp_path)).list_cases()


@pytest.mark.parametrize("labels", [None, {}, {"1": "a"}, {"a": 0}, ["background"]])
def test_labels_must_be_numbered_without_gaps(tmp_path, labels):
    (tmp_path / "dataset.json").write_text(json.dumps({"labels": labels, "modality": {"0": "x"}}))
    with pytest.raises(UsageError, match="labels must name"):
        Decathlon(str(tmp_path)).describe()
