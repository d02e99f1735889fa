import pytest

from unet3d.config.user_configs import check_user_configs
from unet3d.errors import UsageError


@pytest.fixture
def experiment(tmp_path):
    """Write conf/experiment/x.yaml."""

    def written(text, name="x"):
        path = tmp_path / "conf" / "experiment" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# @package _global_\n{text}\n")
        return tmp_path / "conf"

    return written


BOMB = "a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 10)}]\n"
    for old, new in zip("abcdef", "bcdefg", strict=True)
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, "unfold to more than 10,000 values"),
        ("data: &a\n  patch_size: *a", "cannot be read as YAML: an alias stands for something"),
        ("seed: " + "[" * 5000 + "]" * 5000, "cannot be read as YAML"),
        ("data: [1, 2", "cannot be read as YAML"),
        ("\0", "cannot be read as YAML"),
        ("- 1", "must hold keys with values"),
        ("hydra: {callbacks: {x: {_target_: pathlib.Path.mkdir}}}", "sets hydra.callbacks"),
        ("hydra: {run: {dir: here}, job: {env_set: {CXX: evil}}}", "sets hydra.job"),
        ("hydra: x", "sets hydra:"),
        ("defaults: [x]", "names itself"),
        ("defaults: [{override /hydra/launcher: joblib}]", "sets override /hydra/launcher"),
        ("defaults: [{/model@hydra.callbacks: y}]", "sets /model@hydra.callbacks"),
        ("# @package hydra.callbacks\nx: 1", "@package hydra"),
    ],
)
def test_a_file_that_bursts_or_reaches_into_hydra_is_refused(experiment, text, said):
    folder = experiment(text)
    if "@package" in said:
        (folder / "experiment" / "x.yaml").write_text(text)
        said = r"sets hydra\.callbacks"
    with pytest.raises(UsageError, match=said):
        check_user_configs(folder, ["experiment=x"])


def test_options_that_others_name_are_looked_at_and_those_that_nobody_names_are_not(experiment):
    experiment("hydra: {callbacks: {}}", "evil")
    folder = experiment("defaults: [{override /experiment: evil}]", "names_it")
    (folder / "train.yaml").write_text("hydra: {job_logging: {}}")  # a verb's: ours
    check_user_configs(folder, ["data.root=train"])
    experiment("defaults: [{override /model: unet_nnunet}]", "unet_nnunet")
    check_user_configs(folder, ["experiment=unet_nnunet"])
    experiment("hydra: {run: {dir: here}}\nx: &a 1\ny: *a", "fine")
    check_user_configs(folder, ["experiment=fine", "seed=1"])
    for words in (["experiment=names_it"], ["-m", "experiment=fine,evil"]):
        with pytest.raises(UsageError, match=r"evil\.yaml sets hydra\.callbacks"):
            check_user_configs(folder, words)


def test_a_callback_in_an_experiment_does_not_run(unet3d, tmp_path, experiment, capsys):
    experiment("hydra: {callbacks: {x: {_target_: pathlib.Path.mkdir, self: done}}}")
    assert unet3d("experiment=x") == 2
    assert "sets hydra.callbacks" in capsys.readouterr().err
    assert not (tmp_path / "done").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data: {num_workers: many}", "data.num_workers must be int as in data.num_workers=0"),
        ("data: {foreground_fraction: .nan}", "data.foreground_fraction must be a number, got NaN"),
        (
            "evaluation: {draw_worst: 1.5}",
            "evaluation.draw_worst must be int as in evaluation.draw_worst=3",
        ),
        ("data: {patch: [8, 8, 8]}", "no key 'data.patch'"),
        ("optimizer: 3", "optimizer must be keys, got 3"),
        ("evaluation: [1]", "Cannot merge DictConfig with ListConfig"),
        ("model: {width: true}", "model.width must be int"),
        ("inference: {overlap: half}", "inference.overlap must be float"),
    ],
)
def test_values_of_an_experiment_are_of_the_options_kind(unet3d, experiment, capsys, text, said):
    experiment(text)
    assert unet3d("experiment=x") == 2
    assert said in capsys.readouterr().err
