import pytest

from tests.config.helpers.configs import with_values
from unet3d.config.settings.compare import parse_compare
from unet3d.errors import UsageError


def test_compare_takes_folders_that_exist(tmp_path):
    def parse(runs):
        return parse_compare(with_values("compare", {"runs": runs}))

    assert parse([str(tmp_path)]).runs == (tmp_path,)
    with pytest.raises(UsageError, match=r"^no runs are given: unet3d compare RUN"):
        parse([])
    with pytest.raises(UsageError, match="none does not exist"):
        parse([str(tmp_path), str(tmp_path / "none")])
