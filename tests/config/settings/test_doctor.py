from tests.config.helpers.configs import with_values
from unet3d.config.settings.doctor import parse_doctor


def test_doctor_takes_the_keys_of_a_run():
    settings = parse_doctor(with_values("doctor", {"data.batch_size": 7}))
    assert settings.training.data.batch_size == 7
    assert settings.output.format == "table"
