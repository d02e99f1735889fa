import pytest

from unet3d.config.user_configs import check_user_configs
from unet3d.errors import UsageError


@pytest.fixture
def write_experiment(tmp_path):
    """Write conf/experiment/x.yaml in the working folder; return conf."""

    def write(text, name="x"):
        path = tmp_path / "conf" / "experiment" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# @package _global_\n{text}\n")
        return tmp_path / "conf"

    return write


BOMB = "a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 10)}]\n"
    for old, new in zip("abcdef", "bcdefg", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "expand to more than 10,000 values"),
        ("data: &a\n  patch_size: *a", "cannot be read as YAML: an alias refers to a value that"),
        ("seed: " + "[" * 5000 + "]" * 5000, "cannot be read as YAML"),
        ("data: [1, 2", "cannot be read as YAML"),
        ("\0", "cannot be read as YAML"),
        ("- 1", "must hold keys with values"),
        ("hydra: {callbacks: {x: {_target_: pathlib.Path.mkdir}}}", "sets hydra.callbacks"),
        ("hydra: {run: {dir: out}, job: {env_set: {CXX: evil}}}", "sets hydra.job"),
        ("hydra: x", "sets hydra:"),
        ("defaults: [x]", "lists itself"),
        ("defaults: [{override /hydra/launcher: joblib}]", "sets override /hydra/launcher"),
        ("defaults: [{/model@hydra.callbacks: y}]", "sets /model@hydra.callbacks"),
    ],
)
def test_a_file_that_explodes_or_configures_hydra_is_refused(write_experiment, text, message):
    with pytest.raises(UsageError, match=message):
        check_user_configs(write_experiment(text), ["experiment=x"])


def test_a_file_cannot_put_itself_into_hydras_package(write_experiment):
    folder = write_experiment("")
    (folder / "experiment" / "x.yaml").write_text("# @package hydra.callbacks\nx: 1")
    with pytest.raises(UsageError, match=r"sets hydra\.callbacks"):
        check_user_configs(folder, ["experiment=x"])


def test_a_file_that_is_not_text_is_refused(write_experiment):
    folder = write_experiment("")
    (folder / "experiment" / "x.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"x\.yaml is not a text file"):
        check_user_configs(folder, ["experiment=x"])


@pytest.mark.parametrize("words", [["experiment=evil"], ["-m", "experiment=fine,evil"]])
def test_every_option_of_a_sweep_is_checked(write_experiment, words):
    write_experiment("seed: 1", "fine")
    folder = write_experiment("hydra: {callbacks: {}}", "evil")
    with pytest.raises(UsageError, match=r"evil\.yaml sets hydra\.callbacks"):
        check_user_configs(folder, words)


def test_an_option_that_another_one_selects_is_checked(write_experiment):
    write_experiment("hydra: {callbacks: {}}", "evil")
    folder = write_experiment("defaults: [{override /experiment: evil}]", "selects_evil")
    with pytest.raises(UsageError, match=r"evil\.yaml sets hydra\.callbacks"):
        check_user_configs(folder, ["experiment=selects_evil"])


def test_an_option_that_nobody_selects_is_not_checked(write_experiment):
    folder = write_experiment("hydra: {callbacks: {}}", "evil")
    (folder / "train.yaml").write_text("hydra: {job_logging: {}}")  # a command's config: ours
    check_user_configs(folder, ["experiment=x", "data.root=train"])


def test_aliases_run_folders_and_our_options_are_accepted(write_experiment):
    write_experiment("defaults: [{override /model: unet_nnunet}]", "unet_nnunet")
    folder = write_experiment("hydra: {run: {dir: out}}\nx: &a 1\ny: *a", "fine")
    check_user_configs(folder, ["experiment=fine", "seed=1"])
    check_user_configs(folder, ["experiment=unet_nnunet"])


def test_a_callback_in_an_experiment_does_not_run(unet3d, tmp_path, write_experiment, capsys):
    write_experiment("hydra: {callbacks: {x: {_target_: pathlib.Path.mkdir, self: done}}}")
    assert unet3d("experiment=x") == 2
    assert "sets hydra.callbacks" in capsys.readouterr().err
    assert not (tmp_path / "done").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: {num_workers: many}", "data.num_workers must be an int as in data.num_workers=0"),
        ("evaluation: [1]", "Cannot merge DictConfig with ListConfig"),
    ],
)
def test_values_of_an_experiment_have_the_type_of_the_option(
    unet3d, write_experiment, capsys, text, message
):
    write_experiment(text)
    assert unet3d("experiment=x") == 2
    assert message in capsys.readouterr().err
