"""Experiment files and command lines that hardly anybody writes."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import yaml
from hypothesis import strategies as st
from omegaconf import OmegaConf

from scripts.robustness.fuzzing.isolation import PARSERS, Input
from scripts.robustness.fuzzing.mutations import SCALARS, TEXTS, VALUES, corrupt
from unet3d.config.compose import compose_config, list_config_groups, list_options
from unet3d.config.validate import list_known_keys
from unet3d.text import flatten_keys

EXPENSIVE = ("plan", "memory", "suggest", "search", "lr", "doctor", "view", "download")
"""Commands that compute for seconds, serve or connect: their config is read, and no more."""

HEADERS = (
    *("# @package _global_",) * 12,
    *("# @package hydra", "# @package model", "# @package _group_", "#@package _global_.hydra"),
    *("", "\ufeff# @package _global_", "# @package", "# @package a.b.c", "%YAML 1.2\n---"),
)

REFERENCES = (
    *("${seed}", "${data.root}", "${model}", "${.x}", "${..x}", "${oc.env:HOME}", "${now:%Y}"),
    *("${hydra:job.num}", "${hydra:runtime.cwd}", "${x}", "${", "$${seed}{x}", "${seed}${seed}"),
    *("${oc.create:{a: 1}}", "${oc.select:a}", "${a:${seed}}", "${model.*}", "${data[root]}"),
    *("${hydra.run.dir}", "\\${seed}", "${seed:}", "${ seed }"),
)

TARGETS = (
    *("os.system", "unet3d.cli.main.main", "torch.load", "torch.nn.ReLU", "torch.optim.SGD"),
    *("subprocess.Popen", "pathlib.Path", "unet3d.model.unet.UNet3D", "monai.losses.DiceLoss"),
    *("builtins.eval", "lightning.pytorch.Trainer", "torch.nn.Module.load_state_dict", "x", "a.b"),
    *("hydra.utils.instantiate", "torch.hub.load", "torch.nn.modules.conv.torch.hub.load"),
)

TEMPLATES = (
    *(
        "&a {body}",
        "*a",
        "<<: *a",
        "!!python/object/apply:os.system ['touch OWNED']",
        "!!set {{x}}",
    ),
    *(
        "!!binary aGk=",
        "!!timestamp 2001-01-01",
        "!x y",
        "? [1]\n: 2",
        "&b [*b]",
        "| \n  x",
        "0o17",
    ),
    *(
        "1_000",
        "12:30:45",
        ".inf",
        ".nan",
        "0b1",
        "1e3",
        "2001-01-01",
        "{{<<: {{x: 1}}}}",
        "[[[[]]]]",
    ),
)


@st.composite
def draw_text(draw: st.DrawFn, depth: int = 0) -> str:
    """Return a value in YAML's flow style."""
    match draw(st.integers(0, 11)):
        case 0:
            return json.dumps(draw(st.sampled_from(REFERENCES)))
        case 1:
            return "{_target_: " + draw(st.sampled_from(TARGETS)) + draw(_more(depth)) + "}"
        case 2:
            return draw(st.sampled_from(TEMPLATES)).format(body="{x: 1}")
        case 3 if depth < 3:
            return "[" + ", ".join(draw(st.lists(draw_text(depth + 1), max_size=3))) + "]"
        case 4 if depth < 3:
            return "{x: " + draw(draw_text(depth + 1)) + draw(_more(depth)) + "}"
        case 5:
            return json.dumps(draw(VALUES), default=str)
        case 6:
            return draw(st.sampled_from(TEXTS))
    return json.dumps(draw(SCALARS), default=str)


@st.composite
def _more(draw: st.DrawFn, depth: int) -> str:
    if depth > 2 or draw(st.booleans()):
        return ""
    key = draw(st.sampled_from(("x", "_partial_", "_args_", "_convert_", "_recursive_", "y")))
    return f", {key}: {draw(draw_text(depth + 1))}"


@st.composite
def draw_similar(draw: st.DrawFn, default: Any) -> Any:
    """Return a value of the type of an option's default: one that the option may well take."""
    match default:
        case bool():
            return draw(st.booleans())
        case int():
            near = (default, -default, default - 1, default + 1, 2 * default, 0, 1)
            return draw(st.sampled_from(near))
        case float():
            near = (default, -default, default / 10, 10 * default, 0.0, 0.5, 1.0, 1e-30)
            return draw(st.sampled_from(near))
        case str():
            return draw(st.sampled_from((default, default.upper(), f"{default}x", "auto", "none")))
        case [_, *_]:
            changed = list(default)
            number = draw(st.integers(0, len(changed) - 1))
            changed[number] = draw(draw_similar(changed[number]))
            return draw(st.sampled_from((changed, changed[1:], [*changed, *changed])))
    return draw(st.sampled_from((None, 0, 1, 0.5, True, "auto", [], [1], {})))


PLAIN_DEFAULTS = ("_self_", "x", "1", "[]", "/hydra/job_logging/default", "/hydra/config")


@st.composite
def draw_defaults(draw: st.DrawFn, groups: Sequence[str]) -> str:
    """Return a defaults list."""
    group = st.sampled_from((*groups, "hydra/launcher", "hydra/callbacks", "own", "experiment"))
    prefix = st.sampled_from(
        ("override /", "/", "optional /", "override ", "", "optional override /")
    )
    suffix = st.sampled_from(("", "", "", "@_global_", "@hydra.callbacks", "@x.y", "@", ":"))
    lines = []
    for _ in range(draw(st.integers(1, 3))):
        name = draw(group)
        known = list_options(name) if name in groups else []
        option = draw(st.sampled_from((*known, "y", "x", "null", "[y,y]", "${seed}", "~", "none")))
        entry = f"{draw(prefix)}{name}{draw(suffix)}: {option}"
        lines.append(draw(st.sampled_from((f"{{{entry}}}",) * 4 + PLAIN_DEFAULTS)))
    return f"defaults: [{', '.join(lines)}]"


@st.composite
def draw_plain_yaml(draw: st.DrawFn, defaults: Mapping[str, Any]) -> bytes:
    """Return an experiment as users write it, with values that its options may well take."""
    content: dict[str, Any] = {}
    for key in draw(st.lists(st.sampled_from(sorted(defaults)), min_size=1, max_size=4)):
        *parents, name = key.split(".")
        node = content
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = draw(draw_similar(defaults[key]))
    return f"{HEADERS[0]}\n{yaml.safe_dump(content)}".encode()


@st.composite
def draw_yaml(draw: st.DrawFn, keys: Sequence[str], groups: Sequence[str]) -> bytes:
    """Return a config file that sets some of these keys."""
    lines = [draw(st.sampled_from(HEADERS))]
    if draw(st.integers(0, 2)) == 0:
        lines.append(draw(draw_defaults(groups)))
    if draw(st.integers(0, 3)) == 0:
        lines.append("base: &a " + draw(draw_text()))
    for _ in range(draw(st.integers(1, 4))):
        key = draw(st.sampled_from((*keys, *keys, "hydra.run.dir", "allow_targets", "<<", "x.y")))
        value = draw(draw_text())
        *parents, name = key.split(".")
        if parents and draw(st.integers(0, 5)) == 0:
            lines.append(f"{key}: {value}")  # a dotted key
            continue
        indented = [f"{'  ' * n}{parent}:" for n, parent in enumerate(parents)]
        lines += [*indented, f"{'  ' * len(parents)}{name}: {value}"]
    content = "\n".join([*lines, ""]).encode("utf-8", "surrogatepass")
    return draw(corrupt(content)) if draw(st.integers(0, 9)) == 0 else content


@st.composite
def draw_experiments(draw: st.DrawFn, train: tuple[str, ...]) -> Input:
    """Choose an experiment with odd contents, and perhaps an option of another group."""
    command = draw(st.sampled_from(("train", "train", "train", "check", "lr", "memory", "plan")))
    groups = list_config_groups()
    keys = list_keys(command)
    is_plain = draw(st.booleans())
    experiment = draw_plain_yaml(read_defaults(command)) if is_plain else draw_yaml(keys, groups)
    files = {"conf/experiment/x.yaml": draw(experiment)}
    if not is_plain and draw(st.integers(0, 2)) == 0:
        group = draw(st.sampled_from((*groups, "hydra/launcher", "own")))
        files[f"conf/{group}/y.yaml"] = draw(draw_yaml(keys, groups))
    text = files["conf/experiment/x.yaml"].decode("utf-8", "replace")
    # What the command line sets would replace the experiment's values, except a few limits.
    own = [w for w in train[1:] if w.startswith(LIMITS) or f"{get_key(w)}:" not in text]
    parses_only = command in EXPENSIVE or draw(st.integers(0, 3)) > is_plain
    more = ("budget_gib=1",) if command == "plan" else ()
    words = (command, *own, *more, "experiment=x")
    return Input(kind="experiment", words=words, files=files, parses_only=parses_only)


@cache
def list_keys(command: str) -> list[str]:
    """Return the keys of a command; that which shows tracebacks is left out."""
    return [key for key in list_known_keys(command, (), "") if key != "debug"]


@cache
def read_defaults(command: str) -> dict[str, Any]:
    """Return the value of each option of a command; None if it must be given."""
    content: Any = OmegaConf.to_container(compose_config((), command).config)
    defaults = {k: None if v == "???" else v for k, v in flatten_keys(content)}
    return {key: value for key, value in defaults.items() if key not in UNTOUCHED}


UNTOUCHED = ("debug", "devices", "trainer.devices", "trainer.launch")
"""Options that show tracebacks or start processes."""

LIMITS = ("trainer.max_steps=", "hydra.run.dir=", "data=", "data.cache=", "data.patch_size=")


def get_key(word: str) -> str:
    """Return the last key of an override.

    >>> get_key("trainer.max_steps=1")
    'max_steps'
    """
    return word.partition("=")[0].rpartition(".")[2]


FLAGS = (
    *("--cfg", "job", "hydra", "all", "--info", "--resolve", "--package", "-m", "--multirun"),
    *("--config-dir", "conf", "--config-name", "x", "--shell-completion", "-sc", "install=bash"),
    *("--help", "--hydra-help", "--version", "-h", "--experimental-rerun", "-cd", "--", "-", "@x"),
    *("--config-dir=/nowhere", "--config-dir=run.ckpt", "--resume"),
)

GRAMMAR = (
    *("1,2", "[1,2", "{a:1", "'x", '"x', "range(3)", "choice(1,2)", "glob(*)", "interval(0,1)"),
    *("sort(3,1)", "int(x)", "str(1)", "a b", "a=b", "\\", "${seed}", "{a:{b:1}}", "[[],[]]", "'"),
    *("1e400", "-", "--", "+", "null", "???", "shuffle(1,2)", "json_str({})", "extend_list(1)"),
)

BASES: dict[str, tuple[str, ...]] = {
    "predict": ("checkpoint=run.ckpt", "input=scans", "output=out/labels", "device=cpu"),
    "evaluate": ("predictions=set/labelsTr", "references=set/labelsTr", "output=out/scores"),
    "export": ("checkpoint=run.ckpt", "output=out/net.pt2", "format=torch_export"),
    "compare": ("runs=[.]",),
    "download": ("task=Task04_Hippocampus", "root=out"),
    "plan": ("budget_gib=1",),
    "suggest": ("budget_gib=1",),
    "search": ("space={pool:[max,median]}",),
    "view": ("image=scans/a.nii.gz", "open_browser=false"),
}
"""What a command cannot do without."""


@st.composite
def draw_overrides(draw: st.DrawFn, train: tuple[str, ...]) -> Input:
    """Add odd words to the command line of any command."""
    command = draw(st.sampled_from(sorted(PARSERS)))
    keys = [*list_keys(command), *list_config_groups()]
    defaults = read_defaults(command)
    takes_train = command in ("train", "check", "lr", "memory", "plan", "search", "suggest")
    base = [*(train[1:] if takes_train else ()), *BASES.get(command, ())]
    word = draw_plain_word(defaults) if draw(st.booleans()) else draw_word(keys)
    more = [draw(word) for _ in range(draw(st.integers(1, 3)))]
    base = [word for word in base if draw(st.integers(0, 15))]
    words = [word.replace("\0", "") for word in (*base, *more)]
    if draw(st.integers(0, 9)) == 0:
        words = draw(st.permutations(words))
    is_big = not any(word.startswith("trainer.max_steps=1") for word in words)
    return Input(
        kind="override",
        words=(command, *words),
        parses_only=command in EXPENSIVE or is_big or draw(st.integers(0, 3)) > 0,
        writes=".",
        may_connect=command in ("download", "view"),
    )


@st.composite
def draw_plain_word(draw: st.DrawFn, defaults: Mapping[str, Any]) -> str:
    """Return an override with a value that its option may well take, or of a group's option."""
    key = draw(st.sampled_from(sorted([*defaults, *list_config_groups()])))
    if key not in defaults:
        return f"{key}={draw(st.sampled_from(list_options(key) or ['x']))}"
    return f"{key}={quote_value(draw(draw_similar(defaults[key])))}"


def quote_value(value: Any) -> str:
    """Return a value in the grammar of Hydra's overrides."""
    return json.dumps(value).replace('"', "'").replace(": ", ":")


@st.composite
def draw_word(draw: st.DrawFn, keys: Sequence[str]) -> str:
    """Return a word of a command line."""
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return draw(st.sampled_from(FLAGS))
    if kind == 1:
        return draw(st.one_of(st.text(max_size=12), st.sampled_from(TEXTS)))
    prefix = draw(st.sampled_from(("", "", "", "", "", "", "+", "++", "~", "+~")))
    key: Any = draw(st.sampled_from(keys))
    if draw(st.integers(0, 9)) == 0:
        key = draw(st.sampled_from((f"{key}.x", f"{key}@x", f"{key}[0]", key.upper(), f".{key}")))
    if draw(st.integers(0, 19)) == 0:
        key = draw(st.sampled_from(("hydra.run.dir", "hydra.launcher._target_", "hydra", "x")))
    value = draw(
        st.one_of(
            st.sampled_from(GRAMMAR),
            st.sampled_from(REFERENCES),
            SCALARS.map(str),
            VALUES.map(quote_value),
            st.sampled_from(TARGETS),
        )
    )
    return f"{prefix}{key}={value}" if draw(st.integers(0, 19)) else f"{prefix}{key}"
