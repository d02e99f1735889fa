"""The Triton kernels of the loss without a GPU."""

import pytest


@pytest.mark.slow
def test_interpreted_kernels_equal_plain_pytorch(run_interpreted):
    run_interpreted("tests.loss.helpers.interpreted")
