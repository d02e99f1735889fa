from pathlib import Path

import pytest

from tests.config.helpers.configs import with_values
from unet3d.config.settings.memory import VARIABLE_SETTINGS, parse_memory, parse_suggest
from unet3d.errors import UsageError


def test_the_peak_is_shown_as_a_table_unless_something_else_is_asked_for():
    settings = parse_memory(with_values("memory", {}))
    assert (settings.view, settings.output.format, settings.output.path) == ("peak", "table", None)
    assert settings.vary is None
    assert settings.volume is None


@pytest.mark.parametrize("vary", VARIABLE_SETTINGS)
def test_every_setting_that_can_vary_is_known(vary):
    assert parse_memory(with_values("memory", {"vary": vary})).vary == vary


def test_a_figure_goes_to_a_file():
    values = {"view": "layers", "format": "png", "output": "layers.png"}
    assert parse_memory(with_values("memory", values)).output.path == Path("layers.png")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"view": "all"}, "view must be one of peak, layers, timeline, got 'all'"),
        ({"format": "csv"}, "format must be one of table, json, png, got 'csv'"),
        ({"volume": [8]}, "volume must be three ints >= 1, got [8]"),
        ({"measure": "yes please"}, "measure must be true or false, got 'yes please'"),
        ({"vary": "width"}, "vary must be one of resolution, batch, "),
        ({"view": "layers", "format": "png"}, "format=png needs output=FILE.png"),
        ({"view": "timeline"}, "view=timeline is a figure: add format=png output=FILE.png"),
        ({"format": "png", "output": "a.png"}, "format=png draws view=timeline or view=layers"),
    ],
)
def test_a_wrong_value_of_memory_is_refused(values, expected):
    with pytest.raises(UsageError) as caught:
        parse_memory(with_values("memory", values))
    assert str(caught.value).startswith(expected)


def test_suggest_tries_what_the_config_lists():
    settings = parse_suggest(with_values("suggest", {}))
    assert settings.budget_gib == 8.0
    assert settings.precisions == ("bf16", "32", "16-true")
    assert settings.strategies is None
    assert settings.patches == (1.0, 0.75, 0.5, 0.35)
    values = {"strategies": ["lean"], "patches": 0.5, "budget_gib": "auto"}
    settings = parse_suggest(with_values("suggest", values))
    assert settings.strategies == ("lean",)
    assert settings.patches == (0.5,)
    assert settings.budget_gib is None


@pytest.mark.parametrize(
    ("key", "values", "expected"),
    [
        (
            "budget_gib",
            [0, -8, "all", True, None, float("inf")],
            "budget_gib must be auto or a number above 0",
        ),
        ("precisions", [["bf16", 17]], "precisions must be one of 32, 16, bf16, "),
        ("precisions", ["bf16"], "precisions must be a list"),
        ("strategies", ["lean"], "strategies must be a list"),
        ("patches", [0, [1, 5], ["half"], [True]], "patches must be fractions of data.patch_size"),
        ("top", [0], "top must be an int >= 1"),
        ("format", ["png"], "format must be one of table, json"),
    ],
)
def test_a_wrong_value_of_suggest_is_refused(key, values, expected):
    for value in values:
        with pytest.raises(UsageError) as caught:
            parse_suggest(with_values("suggest", {key: value}))
        assert str(caught.value).startswith(expected)
