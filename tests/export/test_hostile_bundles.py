"""A bundle is read as plain values and weights, or refused in one line."""

import json
import os

import pytest
import torch

from unet3d.errors import UsageError
from unet3d.export.bundle import DESCRIPTION_FILE, get_network_path, read_bundle, write_weights
from unet3d.workflows.inference.ensemble import load_ensemble

CONTENT = {"format": "unet3d bundle", "format_version": 1, "members": [{}]}


@pytest.fixture
def bundle(tmp_path):
    weights = get_network_path(tmp_path, 0, ".safetensors")
    weights.parent.mkdir()
    write_weights({"a": torch.ones(2)}, weights)
    (tmp_path / DESCRIPTION_FILE).write_text(json.dumps(CONTENT), "utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 10**6, "cannot be read"),
        (json.dumps({**CONTENT, "x": 1}).replace("1}", "[" * 60 + "]" * 60 + "}"), "50 deep"),
        (json.dumps({**CONTENT, "x": [0] * 1_000_001}), "more than 1,000,000 values"),
        (" " * 2**24 + "{}", "more than 16,777,216 bytes"),
        (json.dumps({**CONTENT, "x": 1}).replace("1}", "9" * 9999 + "}"), "cannot be read"),
        (json.dumps({**CONTENT, "members": [1]}), "does not describe its network"),
        ("\0", "cannot be read"),
    ],
)
def test_a_description_that_is_not_plain_or_endless_is_refused(bundle, text, message):
    (bundle / DESCRIPTION_FILE).write_text(text, "utf-8")
    with pytest.raises(UsageError, match=message) as raised:
        load_ensemble([bundle])
    assert "\n" not in str(raised.value)


def test_weights_that_never_end_are_not_waited_for(bundle):
    path = get_network_path(bundle, 0, ".safetensors")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UsageError, match="the bundle is incomplete"):
        read_bundle(bundle)


@pytest.mark.parametrize("change", [lambda raw: raw[:40], lambda raw: b"\xff" * 8 + raw])
def test_weights_that_are_cut_or_declare_more_than_there_is_are_refused(bundle, change):
    path = get_network_path(bundle, 0, ".safetensors")
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UsageError, match="cannot be read"):
        read_bundle(bundle)
