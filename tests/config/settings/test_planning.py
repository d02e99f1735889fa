import pytest

from tests.config.helpers.configs import with_values
from unet3d.config.settings.planning import parse_planning
from unet3d.errors import UsageError


def test_a_plan_is_for_mixed_precision_and_a_budget_in_gib():
    settings = parse_planning(with_values("plan", {}))
    assert settings.budget_gib == 8.0
    assert settings.name == "planned"
    assert settings.training.precision == "16"
    assert parse_planning(with_values("plan", {"budget_gib": "auto"})).budget_gib is None


def test_a_preset_has_nnunets_network_and_the_memory_that_it_needs():
    settings = parse_planning(with_values("plan", {"preset": "resenc_l", "budget_gib": None}))
    assert settings.budget_gib == 21.1
    assert settings.training.composition.choices["model"] == "unet_resenc"
    assert settings.training.composition.choices["pool"] == "strided"
    both = with_values("plan", {"preset": "resenc_l", "budget_gib": 12})
    assert parse_planning(both).budget_gib == 12


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("name", "../x", "name must consist of letters, digits, - and _, got '../x'"),
        ("name", "", "name must consist of letters, digits, - and _, got ''"),
        ("budget_gib", 0, "budget_gib must be auto or a number above 0, got 0"),
        ("budget_gib", None, "budget_gib must be given: GPU memory in GiB, or auto"),
        ("preset", "l", "preset must be one of resenc_m, resenc_l, resenc_xl, got 'l'"),
        ("overwrite", "yes!", "overwrite must be true or false, got 'yes!'"),
        ("measure_time", 1, "measure_time must be true or false, got 1"),
    ],
)
def test_a_wrong_value_is_refused(key, value, expected):
    with pytest.raises(UsageError) as caught:
        parse_planning(with_values("plan", {key: value}))
    assert str(caught.value) == expected
