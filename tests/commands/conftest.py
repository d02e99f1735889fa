"""Checkpoints of networks that were never trained."""

import pytest

from tests.commands.helpers.checkpoints import checkpoints


@pytest.fixture(scope="module")
def checkpoint(small, tmp_path_factory, request):
    """Return a function that makes checkpoints of the module's TINY network as a run saves them."""
    return checkpoints(tmp_path_factory.mktemp("runs"), [*small, *request.module.TINY])
