"""A user's own config files are trusted like scripts; common mistakes in them are one line."""

import pytest

from unet3d.config.keys import compose_api_config
from unet3d.errors import UsageError
from unet3d.training.config import parse_train_config


@pytest.fixture
def compose(tmp_path):
    """Compose `unet3d train` with an experiment of this text."""

    def write_and_compose(text, *overrides):
        path = tmp_path / "conf" / "experiment" / "x.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# @package _global_\n{text}\n")
        return compose_api_config("train", ["experiment=x", *overrides], tmp_path / "conf").config

    return write_and_compose


def test_an_option_may_configure_hydra_loggers_and_the_trainer(compose, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_SCANS", "/scans")
    text = (
        "defaults: [{override /logger: mlflow}]\n"
        "logger: {mlflow: {tracking_uri: 'http://server:5000'}}\n"
        "trainer: {profiler: simple}\n"
        "data: {root: '${oc.env:MY_SCANS}'}\n"
        "allow_targets: [mine]\n"
        f"hydra: {{run: {{dir: {tmp_path}/runs}}}}"
    )
    config = compose(text)
    assert config.logger.mlflow.tracking_uri == "http://server:5000"
    assert config.data.root == "/scans"
    composed = compose_api_config("train", ["experiment=x"], tmp_path / "conf")
    assert composed.composition.folder == tmp_path / "runs"
    assert parse_train_config(composed).trainer.factory.arguments["profiler"] == "simple"


def test_an_experiment_may_choose_several_options_of_a_group(compose, tmp_path):
    text = "defaults: [{override /callbacks: [default, mine]}, {override /logger: [csv]}]"
    folder = tmp_path / "conf" / "callbacks"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("mine: {_target_: lightning.pytorch.callbacks.Timer}")
    assert compose(text).callbacks.keys() >= {"best_checkpoint", "mine"}
    assert list(compose(text, "callbacks=default", "logger=[csv]").logger) == ["csv"]
    assert "mine" not in compose(text, "callbacks=default").callbacks
    composed = compose_api_config("train", ["experiment=x"], tmp_path / "conf")
    assert composed.composition.choices["callbacks"] == "[default,mine]"


def test_a_mapping_for_what_may_be_another_value_can_be_replaced(compose):
    text = "data: {label_values: {background: 0, organ: 5}}"
    assert compose(text, "data.label_values=auto").data.label_values == "auto"
    with pytest.raises(UsageError, match=r"'~data\.label_values' '\+data\.label_values=\[0,5]'"):
        compose(text, "data.label_values=[0,5]")
    words = "~data.label_values", "+data.label_values=[0,5]"
    assert compose(text, *words).data.label_values == [0, 5]
    with pytest.raises(UsageError, match=r"data\.layout must be a mapping of keys"):
        compose(text, "data.layout=pairs")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: [1, 2", r"x\.yaml\", line 2, column 7 expected ',' or '\]'"),
        ("defaults: [{override /model: nothing}]", r"no option model=nothing\. Options: atten"),
        ("optimizer: {lr: high}", r"^optimizer\.lr must be a number, as in optimizer\.lr=0\.003"),
        ("evaluation: [1]", r"'experiment/x': .*Cannot merge DictConfig with ListConfig$"),
    ],
)
def test_a_mistake_in_a_file_is_one_line_that_says_where(compose, text, message):
    with pytest.raises(UsageError, match=message) as caught:
        compose(text)
    assert "\n" not in str(caught.value)


def test_a_reference_to_nothing_names_its_key_in_a_file_and_on_the_command_line(
    compose, unet3d, capsys
):
    compose("optimizer: {lr: '${optimizer.rate}'}")
    for word in ("experiment=x", "optimizer.lr=${optimizer.rate}"):
        assert unet3d(word) == 2
        line = "unet3d: optimizer.lr: Interpolation key 'optimizer.rate' not found\n"
        assert capsys.readouterr().err == line
