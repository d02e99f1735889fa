"""What a stranger's config files may do: choose options and values, nothing else.

Each case is a folder with options, as it may come with a dataset or a paper. It is composed as the
commands do it, and refused in one line before anything of it is used.
"""

import time

import pytest

from unet3d.config.instantiate import read_factory
from unet3d.config.python_calls import compose_call
from unet3d.config.settings.search import parse_search
from unet3d.config.settings.training import parse_training
from unet3d.errors import UsageError


@pytest.fixture
def write(tmp_path):
    """Write options, by path without .yaml; return their folder."""

    def write_options(files):
        for name, text in files.items():
            path = tmp_path / "conf" / f"{name}.yaml"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text if isinstance(text, bytes) else f"{text}\n".encode())
        return tmp_path / "conf"

    return write_options


def compose(folder, *overrides, command="train"):
    return compose_call(command, ["experiment=x", *overrides], folder)[0].config


def make_experiment(text):
    return {"experiment/x": f"# @package _global_\n{text}"}


def expand(levels, leaf="1", reference="*{}", anchor="&{} "):
    """Return lists of ten references to the list before them."""
    lines = [f"k0: {anchor.format('k0')}[{','.join([leaf] * 10)}]"]
    for level in range(1, levels):
        parts = ",".join([reference.format(f"k{level - 1}")] * 10)
        lines.append(f"k{level}: {anchor.format(f'k{level}')}[{parts}]")
    return "\n".join(lines)


CALLBACK = "callbacks: {x: {_target_: pathlib.Path.mkdir, self: done}}"
GLOBAL = "# @package _global_"
SETS_HYDRA = r"sets hydra\.?\w*: only the command line"

HYDRA = {
    "hydra.callbacks": make_experiment(f"hydra: {{{CALLBACK}}}"),
    "hydra.run.dir": make_experiment("hydra: {run: {dir: elsewhere}}"),
    "variables": make_experiment("hydra: {job: {env_set: {CXX: evil}}}"),
    "logging": make_experiment(
        "hydra: {job_logging: {handlers: {x: {(): os.system, command: a}}}}"
    ),
    "a quoted name": make_experiment(f'"hydra": {{{CALLBACK}}}'),
    "an escaped name": make_experiment(f'"\\x68ydra": {{{CALLBACK}}}'),
    "a merge key": make_experiment(f"base: &b {{hydra: {{{CALLBACK}}}}}\n<<: *b"),
    "a merge key below": make_experiment(f"base: &b {{{CALLBACK}}}\nhydra: {{<<: *b}}"),
    "an alias": make_experiment(f"base: &b {{{CALLBACK}}}\nhydra: *b"),
    "a reference": make_experiment(f"base: {{{CALLBACK}}}\nhydra: ${{base}}"),
    "a package": {"experiment/x": f"# @package hydra\n{CALLBACK}"},
    "a package behind a space": {"experiment/x": f" # @package hydra\n{CALLBACK}"},
    "a package below": {"experiment/x": "# @package hydra.callbacks\nx: {_target_: a.b}"},
    "an option in its package": {
        **make_experiment("defaults: [/model@hydra.callbacks: y]"),
        "model/y": "x: {_target_: pathlib.Path.mkdir}",
    },
    "a file in the root": {
        **make_experiment("defaults: ['/y@_global_']"),
        "y": f"hydra: {{{CALLBACK}}}",
    },
    "a chain of options": {
        **make_experiment("defaults: [{override /loss: y}]"),
        "loss/y": f"{GLOBAL}\nhydra: {{{CALLBACK}}}",
    },
    "an own group": {
        **make_experiment("defaults: [/own/group: y]"),
        "own/group/y": f"{GLOBAL}\nhydra: {{{CALLBACK}}}",
    },
}
"""Hydra builds its callbacks, and configures logging, before any of our code runs."""


@pytest.mark.parametrize("kind", HYDRA)
def test_no_file_configures_hydra_however_it_is_written(write, kind, tmp_path):
    with pytest.raises(UsageError, match=SETS_HYDRA):
        compose(write(HYDRA[kind]))
    assert not (tmp_path / "done").exists()


@pytest.mark.parametrize("group", ["launcher", "sweeper", "callbacks"])
def test_no_file_chooses_hydras_own_options(write, group):
    files = {
        **make_experiment(f"defaults: [{{override /hydra/{group}: y}}]"),
        f"hydra/{group}/y": "_target_: pathlib.Path.mkdir",
    }
    with pytest.raises(UsageError, match=r"hydra|Hydra"):
        compose(write(files))
    with pytest.raises(UsageError, match=r"hydra"):  # nor does the file count if it is chosen
        compose(write({**files, **make_experiment("")}), f"hydra/{group}=y")


@pytest.mark.parametrize(
    "listed",
    ["'/hydra/job_logging/default'", "{'/./hydra/job_logging@hydra.job_logging': default}"],
)
def test_no_file_adds_hydras_own_options(write, listed):
    with pytest.raises(UsageError, match=r"experiment/x\.yaml lists .*: only the command line"):
        compose(write(make_experiment(f"defaults: [{listed}]")))


def test_a_linked_option_is_read_like_any_other(write, tmp_path):
    folder = write({"elsewhere": f"{GLOBAL}\nhydra: {{{CALLBACK}}}", "experiment/y": ""})
    (folder / "experiment" / "x.yaml").symlink_to(folder / "elsewhere.yaml")
    with pytest.raises(UsageError, match=SETS_HYDRA):
        compose(folder)


TRUST = {
    "a list": make_experiment("allow_targets: [pathlib]"),
    "a merge key": make_experiment("base: &b {allow_targets: [pathlib]}\n<<: *b"),
    "an option": {
        **make_experiment("defaults: [{override /loss: y}]"),
        "loss/y": f"{GLOBAL}\nallow_targets: [pathlib]",
    },
}


@pytest.mark.parametrize("kind", TRUST)
def test_no_file_grants_trust(write, kind):
    with pytest.raises(UsageError, match="sets allow_targets: only the command line"):
        compose(write(TRUST[kind]), "+loss.x._target_=pathlib.Path")


@pytest.mark.parametrize(
    "key", ["allow_targets", "++allow_targets", "+hydra/launcher", "logger.wandb.mode", " resume"]
)
def test_no_space_of_a_search_sets_what_the_command_line_alone_sets(write, tmp_path, key):
    folder = write(make_experiment(f"space: {{'{key}': ['[a]', '[b]']}}"))
    words = ["experiment=x", f"data.root={tmp_path}"]
    composed, _ = compose_call("search", words, folder)
    with pytest.raises(UsageError, match="cannot be searched: the command line alone sets"):
        parse_search(composed)


def test_trust_is_not_read_through_a_reference_into_a_file(write):
    folder = write(make_experiment("model: {trusted: [pathlib]}"))
    with pytest.raises(UsageError, match="allow_targets must be a list of packages"):
        compose(folder, "allow_targets=${model.trusted}")


TARGETS = {
    "a function": "loss: {_target_: os.system, command: touch done}",
    "a nested one": "model: {encoder: {_target_: subprocess.run, args: touch done}}",
    "one in a list": "loss: {x: [{_target_: os.system}]}",
    "a reference": "seed: os.system\nloss: {_target_: '${seed}'}",
    "a reference to a node": "model: {x: {_target_: os.system}}\nloss: {y: '${model.x}'}",
    "a callback that writes": "loss: {_target_: lightning.pytorch.callbacks.ModelCheckpoint}",
    "a logger that connects": "logger: {x: {_target_: lightning.pytorch.loggers.MLFlowLogger}}",
    "a second trainer": "loss: {x: {_target_: lightning.pytorch.Trainer}}",
    "a network that downloads": "model: {_target_: monai.networks.nets.EfficientNetBN}",
    "a loss that downloads": "loss: {_target_: monai.losses.PerceptualLoss}",
}


@pytest.mark.parametrize("kind", TARGETS)
def test_every_target_of_the_composed_config_is_checked(write, kind):
    with pytest.raises(UsageError, match=r"_target_ names .*may only name"):
        compose(write(make_experiment(TARGETS[kind])))


REFERENCES = {
    "the environment": "${oc.env:HOME}",
    "the environment within a text": "a ${oc.env:HOME} b",
    "spaces": "${ oc.env : HOME }",
    "a default": "${oc.env:A,${oc.env:HOME}}",
    "YAML in a text": "${oc.create:'{_target_: os.system}'}",
    "a decoded text": "${oc.decode:'[1,2]'}",
    "a name that is put together": "${${seed}:HOME}",
    "a name in two parts": "$${seed}{oc.env:HOME}",
}


@pytest.mark.parametrize("kind", REFERENCES)
def test_a_value_refers_to_other_values_only(write, kind):
    text = REFERENCES[kind].replace("'", "''")
    with pytest.raises(UsageError, match="a value may refer to another one"):
        compose(write(make_experiment(f"init_from: '{text}'")))


CREATED = "{oc.create:{_target_: unet3d.atomic_write.write_text, path: evil, text: evil}}"


@pytest.mark.parametrize("evil", [CREATED, "{oc.env:HOME}"])
def test_what_a_reference_stands_for_is_not_resolved_again(write, evil, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = f'data: {{group_by: "$"}}\nloss: {{evil: "${{data.group_by}}{evil}"}}'
    config = compose(write(make_experiment(text)), "data.root=.")
    assert config.loss.evil.startswith("${")
    with pytest.raises(UsageError, match=r"loss\.evil is '\$\{oc\..*': it must not hold \$\{"):
        read_factory(config, "loss")()
    assert not (tmp_path / "evil").exists()


def test_references_times_and_hydras_own_values_are_fine(write):
    text = "init_from: a/${data.root}/${now:%Y}\nseed: ${hydra:job.num}"
    assert compose(write(make_experiment(text))).data.root


ODD = "'${{model.k{}.-0}}'"

HUGE = {
    "aliases": expand(7),
    "references": expand(7, reference="'${{model.{}}}'", anchor="").replace("\nk", "\n  k"),
    "references in a text": "\n".join(
        ["k0: xxxxxxxxxxxxxxxx", *(f"k{n}: '{f'${{model.k{n - 1}}}' * 10}'" for n in range(1, 9))]
    ),
    "references by odd indices": "k0: [[1,1,1,1,1,1,1,1,1,1]]\n"
    + "\n".join(f"k{n}: [[{','.join([ODD.format(n - 1)] * 10)}]]" for n in range(1, 7)),
    "a loop of aliases": "k0: &a [*a]",
    "a loop of references": "k0: '${model.k1}'\nk1: '${model.k0}'",
    "depth": "k0: " + "[" * 60 + "]" * 60,
    "more depth": "k0: " + "[" * 9000 + "]" * 9000,
    "mappings in each other": "k0: " + "{a: " * 500 + "1" + "}" * 500,
    "a chain of references": "\n".join(
        ["k0: 1", *(f"k{n}: '${{model.k{n - 1}}}'" for n in range(1, 99))]
    ),
    "a long chain of references": "\n".join(
        [*(f"k{n}: '${{model.k{n + 1}}}'" for n in range(2000)), "k2000: 1"]
    ),
    "many values": "k0: [" + "1," * 30_000 + "]",
    "many bytes": "k0: " + "x" * 300_000,
}


@pytest.mark.parametrize("kind", HUGE)
def test_what_grows_when_it_is_read_is_refused_at_once(write, kind):
    body = HUGE[kind].replace("\n", "\n  ").replace("\n    ", "\n  ")
    start = time.monotonic()
    with pytest.raises(UsageError) as raised:
        compose(write(make_experiment(f"model:\n  {body}")))
    assert "\n" not in str(raised.value)
    assert time.monotonic() - start < 10


BROKEN = {
    "a list": "- 1",
    "a number": "5",
    "half a list": "data: [1, 2",
    "a tab": "data:\n\tseed: 1",
    "a NUL byte": b"seed: 1\0",
    "another encoding": b"\xff\xfe\x00s",
    "a tag that calls": "seed: !!python/object/apply:os.system ['touch done']",
    "a key that is a list": "? [1, 2]\n: 3",
    "two documents": "seed: 1\n---\nseed: 2",
    "the same key twice": "seed: 1\nseed: 2",
    "itself": "defaults: [x]",
    "itself by its group": "defaults: [/experiment: x]",
    "a list in the defaults": "defaults: [[x]]",
    "a number in the defaults": "defaults: [1]",
    "no option": "defaults: [{override /model: nothing}]",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_file_that_is_no_mapping_of_keys_is_refused(write, kind, tmp_path):
    with pytest.raises(UsageError) as raised:
        compose(write({"experiment/x": BROKEN[kind]}))
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "done").exists()


def test_a_file_that_is_not_text_is_named(write):
    with pytest.raises(UsageError, match=r"x\.yaml is not a text file"):
        compose(write({"experiment/x": b"\xff\xfe"}))


def test_aliases_and_our_options_are_accepted(write):
    text = "defaults: [{override /model: unet_nnunet}]\nseed: &a 1\nfold: *a"
    config = compose(write(make_experiment(text)))
    assert (config.seed, config.fold) == (1, 1)


@pytest.mark.parametrize(
    "override",
    [
        "+hydra.callbacks.x._target_=pathlib.Path.mkdir",
        "hydra.job_logging.handlers.console.class=os.system",
        "+hydra.job.env_set.CXX=evil",
        "hydra/job_logging=other",
        "hydra.searchpath=[pkg://evil]",
        "hydra.launcher._target_=os.system",
        "hydra={callbacks:{x:{_target_:os.system}}}",
    ],
)
def test_no_override_makes_hydra_call_code(write, override):
    with pytest.raises(UsageError, match="cannot be set"):
        compose(write(make_experiment("")), override)


def test_a_sweep_checks_each_of_its_jobs(unet3d, write, tmp_path, capsys):
    write({"experiment/fine": f"{GLOBAL}\nseed: 1"})
    logging = "hydra: {job_logging: {handlers: {x: {(): pathlib.Path, y: 1}}}}"
    write({"experiment/evil": f"{GLOBAL}\n{logging}"})
    words = ["-m", "experiment=fine,evil", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    assert unet3d(*words, "loss.dice=none") == 2
    assert "sets hydra.job_logging" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--config-name", "--config-path", "-cn", "-cp"])
def test_a_folder_cannot_replace_our_commands(unet3d, write, capsys, flag):
    write({"mine": f"hydra: {{{CALLBACK}}}"})
    assert unet3d(flag, "mine") == 2
    assert "--config-dir adds options" in capsys.readouterr().err


def test_a_callback_in_an_experiment_does_not_run(unet3d, tmp_path, write, capsys):
    write(make_experiment(f"hydra: {{{CALLBACK}}}"))
    for words in (["experiment=x"], ["experiment=x", "--cfg", "job"], ["experiment=x", "--help"]):
        assert unet3d(*words) == 2
        assert "x.yaml sets hydra.callbacks" in capsys.readouterr().err
        assert not (tmp_path / "done").exists()


@pytest.mark.parametrize("text", ["- 1", "pool: [2001-13-45, 1]", "pool: ["])
def test_a_space_of_a_search_that_is_no_yaml_of_keys_is_named(tmp_path, text):
    (tmp_path / "space.yaml").write_text(text)
    composed = compose_call("search", ["data.root=.", f"space={tmp_path}/space.yaml"])[0]
    with pytest.raises(UsageError, match=r"space\.yaml cannot be read as YAML|space must be keys"):
        parse_search(composed)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: {num_workers: many}", "data.num_workers must be an int as in data.num_workers=0"),
        ("evaluation: [1]", "Cannot merge DictConfig with ListConfig"),
    ],
)
def test_values_of_an_experiment_have_the_type_of_the_option(unet3d, write, capsys, text, message):
    write(make_experiment(text))
    assert unet3d("experiment=x") == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("defaults: [{override /logger: mlflow}]\nlogger: {mlflow: {tracking_uri: a:b}}", "sends"),
        ("defaults: [{override /logger: wandb}]\nlogger: {wandb: {mode: online}}", "sends"),
        ("defaults: [{override /logger: wandb}]\nlogger: {wandb: {entity: them}}", "sends"),
        ("logger: {tensorboard: {name: ../../x}}", "is not in the run folder"),
        ("logger: {tensorboard: {version: /tmp/x}}", "is not in the run folder"),
        ("logger: {tensorboard: {name: $HOME}}", "is not in the run folder"),
        ("logger: {tensorboard: {name: '%TEMP%'}}", "is not in the run folder"),
    ],
)
def test_no_file_lets_a_logger_send_a_run_or_write_elsewhere(write, text, message):
    with pytest.raises(UsageError, match=f"{message}.*: only the command line"):
        compose(write(make_experiment(text)))


def test_the_command_line_lets_a_logger_send_a_run(write):
    folder = write(make_experiment("defaults: [{override /logger: mlflow}]"))
    uri = "sqlite:////tmp/x.db"
    assert compose(folder, f"logger.mlflow.tracking_uri={uri}").logger.mlflow.tracking_uri == uri


@pytest.mark.parametrize(
    "argument",
    ["strategy: ddp_spawn", "num_nodes: 2", "profiler: pytorch", "model_registry: a/b"],
)
def test_a_config_cannot_start_processes_connect_or_write_files_through_the_trainer(
    write, argument
):
    folder = write(make_experiment(f"trainer: {{{argument}}}"))
    composed = compose_call("train", ["experiment=x", "data.root=."], folder)[0]
    with pytest.raises(UsageError, match=rf"trainer\.{argument.split(':')[0]} cannot be set"):
        parse_training(composed)
