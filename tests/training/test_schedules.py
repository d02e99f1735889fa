import pytest

from unet3d.errors import UsageError
from unet3d.training.schedules import Cosine, Poly


def test_poly_decays_from_1_to_0():
    assert [round(Poly(1.0, warmup=0)(f), 3) for f in (0, 0.25, 1)] == [1, 0.75, 0]


def test_cosine_is_one_half_in_the_middle():
    assert [round(Cosine(warmup=0)(f), 3) for f in (0, 0.5, 1)] == [1, 0.5, 0]


def test_a_warmup_starts_low_but_not_at_zero():
    schedule = Cosine(warmup=0.5)
    assert 0 < schedule(0) < 0.01
    assert schedule(0.5) == pytest.approx(0.5)


@pytest.mark.parametrize("bad", [{"power": 0}, {"warmup": 1.0}, {"warmup": -0.1}])
def test_invalid_schedule_parameters_are_rejected(bad):
    with pytest.raises(UsageError):
        Poly(**bad)
