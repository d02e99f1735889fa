"""The Triton kernels without a GPU, and what is said without Triton."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from unet3d.triton_kernels import has_triton


@pytest.mark.parametrize(
    "module",
    [
        pytest.param("tests.loss.helpers.interpreted", marks=pytest.mark.slow),
        pytest.param("tests.model.helpers.operators", marks=pytest.mark.slow),
        pytest.param("tests.pool.helpers.interpreted", marks=pytest.mark.long),
    ],
)
def test_interpreted_kernels_equal_plain_pytorch(module):
    """In a process of its own: Triton reads the variable when kernels are defined."""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr


def test_without_triton_each_kind_of_kernels_warns_once_and_says_what_to_do(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "triton", None)
    has_triton.cache_clear()
    try:
        assert [has_triton(kind) for kind in ("pooling", "loss", "pooling")] == [False] * 3
    finally:
        has_triton.cache_clear()
    first, second = caplog.messages
    assert first.startswith("Triton is not installed: the CUDA pooling kernels fall back to plain")
    assert "the CUDA loss kernels" in second
    assert second.endswith("install triton")
