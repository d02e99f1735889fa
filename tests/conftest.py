"""Shared by all tests: the CPU runs on the threads it is given, and nothing is random."""

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
