"""The Triton kernels without a GPU: interpreted, and compiled for sm_90."""

import pytest


@pytest.mark.slow
def test_interpreted_kernels_equal_the_references(run_interpreted):
    run_interpreted("tests.pool.helpers.interpreted")
