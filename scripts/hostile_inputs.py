"""What `scripts/hostile.py` feeds to the commands: good inputs, each spoiled in one way.

Only what must not be taken for good is here: a header with another valid spacing, or bytes read as
another type of the same size, are inputs that nobody can tell from good ones.
"""

import gzip
import io
import json
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import nibabel
import torch

Spoil = Callable[[Path, Random], None]

HEADER: dict[str, list[Any]] = {
    "sizeof_hdr": [0, 347, 540, 2**31 - 1],
    "dim": [
        *([n, 20, 18, 16, 1, 1, 1, 1] for n in (0, 1, 2, 8, -1, 255)),
        *([3, n, 18, 16, 1, 1, 1, 1] for n in (0, -5, 1, 19, 21, 40, 32767)),
        *([3, 20, 18, n, 1, 1, 1, 1] for n in (15, 17, 0)),
        *([4, 20, 18, 16, n, 1, 1, 1] for n in (0, 2, -1, 32767)),
        [5, 20, 18, 8, 1, 2, 1, 1],
        [3, 18, 20, 16, 1, 1, 1, 1],
        [7, 32767, 32767, 32767, 32767, 32767, 32767, 32767],
    ],
    "datatype": [0, 1, 128, 32, 1792, 999, -1, 2, 64, 256, 4, 1536],
    "pixdim": [
        *([1, n, 1, 1, 0, 0, 0, 0] for n in (float("nan"), float("inf"), 0, -1, 1e30)),
        [float("nan"), 1, 1, 1, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0],
    ],
    "vox_offset": [-352, -1, 0, 348, 351, 356, 416, 1e9, float("inf"), float("nan")],
    "scl_slope": [float("nan"), float("inf"), float("-inf"), 0],
    "scl_inter": [float("nan"), float("inf")],
    "sform_code": [0, -1, 99],
    "srow_x": [[float("nan")] * 4, [float("inf")] * 4, [0, 0, 0, 0], [1e30, 0, 0, 0], [0, 1, 0, 0]],
    "magic": [b"", b"ni1", b"n+2", b"xyz"],
}


@dataclass(frozen=True)
class Input:
    """A spoiled input and who meets it; `harmless`: taking it is right if what is read is right."""

    kind: str
    name: str
    verb: str
    spoil: Spoil
    words: tuple[str, ...] = ()
    harmless: bool = True
    instead_of: frozenset[str] = frozenset()  # keys that the usual words leave to it


def inputs(seed: int) -> Iterator[Input]:
    """All of them, the same for a seed."""
    draw = Random(seed)
    yield from _headers(draw)
    yield from _tails()
    yield from _files()
    yield from _listings()
    yield from _experiments()
    yield from _checkpoints()


def unzipped(path: Path, change: Callable[[bytearray], None]) -> None:
    """Change the bytes of a .nii.gz within it."""
    content = bytearray(gzip.decompress(path.read_bytes()))
    change(content)
    path.write_bytes(gzip.compress(bytes(content)))


VOLUMES = {
    "check": ("set/imagesTr/case_001.nii.gz", "set/labelsTr/case_001.nii.gz"),
    "train": ("set/imagesTr/case_002.nii.gz", "set/labelsTr/case_002.nii.gz"),
    "predict": ("scans/a.nii.gz",),
    "evaluate": ("predictions/case_001.nii.gz",),
}


def _headers(draw: Random) -> Iterator[Input]:
    """Every value of every field meets check, and one other command, which is drawn."""
    for field, values in HEADER.items():
        for value in values:
            for verb in ("check", draw.choice(["train", "predict", "evaluate"])):
                if verb == "predict" and field in ("sform_code", "dim"):
                    verb = "evaluate"  # an image alone says nothing against another grid
                path = draw.choice(VOLUMES[verb])

                def spoil(root: Path, _: Random, path=path, field=field, value=value) -> None:
                    def change(content: bytearray) -> None:
                        header = nibabel.Nifti1Header(bytes(content[:348]), check=False)
                        header[field] = value
                        content[:348] = header.binaryblock

                    unzipped(root / path, change)

                if draw.random() < (1.0 if verb == "check" else 0.45):
                    yield Input("NIfTI header", f"{field}={value} in {path}", verb, spoil)
    for verb in ("check", "predict"):
        path = VOLUMES[verb][0]
        for name, change in {
            "only sizeof_hdr swapped": lambda c: c.__setitem__(slice(0, 4), c[:4][::-1]),
            "dim swapped": lambda c: c.__setitem__(slice(40, 56), _swapped(c[40:56])),
            "an extension without end": lambda c: c.__setitem__(slice(348, 352), b"\1\0\0\0"),
            "random header": lambda c: c.__setitem__(slice(4, 348), Random(7).randbytes(344)),
        }.items():
            yield Input(
                "NIfTI header", name, verb, lambda r, _, p=path, c=change: unzipped(r / p, c)
            )


def _swapped(content: bytes) -> bytes:
    return b"".join(content[i : i + 2][::-1] for i in range(0, len(content), 2))


def _tails() -> Iterator[Input]:
    def cut(share: float) -> Callable[[bytes], bytes]:
        return lambda b: b[: int(len(b) * share)]

    def flipped(at: float | int) -> Callable[[bytes], bytes]:
        def change(content: bytes) -> bytes:
            place = at if isinstance(at, int) else int(at * len(content))
            changed = bytearray(content)
            changed[place] ^= 0x10
            return bytes(changed)

        return change

    ways: dict[str, Callable[[bytes], bytes]] = {
        "cut at 10 %": cut(0.1),
        "cut at 99 %": cut(0.99),
        "without 1 byte": lambda b: b[:-1],
        "without its checksum": lambda b: b[:-8],
        "checksum flipped": flipped(-6),
        "length flipped": flipped(-2),
        "bit flipped at 50 %": flipped(0.5),
        "bit flipped at 90 %": flipped(0.9),
        "bit flipped near the end": flipped(-12),
        "garbage behind": lambda b: b + b"garbage",
        "a second volume behind": lambda b: b + gzip.compress(b"x" * 400),
        "empty": lambda b: b"",
        "no gzip": gzip.decompress,
        "gzip of gzip": gzip.compress,
    }
    for verb, paths in VOLUMES.items():
        for number, (name, change) in enumerate(ways.items()):
            path = paths[number % len(paths)]

            def spoil(root: Path, _: Random, path=path, change=change) -> None:
                (root / path).write_bytes(change((root / path).read_bytes()))

            if verb in ("check", "predict") or number % 2 == (verb == "train"):
                yield Input("gzip", f"{name}: {path}", verb, spoil)


def _files() -> Iterator[Input]:
    def other(make: Callable[[Path], Any]) -> Spoil:
        def spoil(root: Path, _: Random) -> None:
            for path in ("set/imagesTr/case_001.nii.gz", "scans/a.nii.gz"):
                (root / path).unlink()
                make(root / path)

        return spoil

    ways = {
        "a pipe": os.mkfifo,
        "a folder": Path.mkdir,
        "a link to /dev/zero": lambda p: p.symlink_to("/dev/zero"),
        "a link to itself": lambda p: p.symlink_to(p),
    }
    for name, make in ways.items():
        for verb in ("check", "predict"):
            yield Input("no file", f"{name} for a volume", verb, other(make))


def _listings() -> Iterator[Input]:
    def listing(change: Callable[[dict], Any]) -> Spoil:
        def spoil(root: Path, _: Random) -> None:
            path = root / "set" / "dataset.json"
            content = json.loads(path.read_text())
            changed = change(content)
            path.write_text(json.dumps(content if changed is None else changed))

        return spoil

    def entry(key: str, value: Any) -> Callable[[dict], Any]:
        return lambda c: c["training"][0].__setitem__(key, value)

    def put(key: str, value: Any) -> Callable[[dict], Any]:
        return lambda c: c.__setitem__(key, value)

    names = {"0": "background", "1": "a", "2": "b"}
    ways: dict[str, Callable[[dict], Any]] = {
        "a list": lambda c: [c],
        "no labels": lambda c: c.pop("labels") and None,
        "no training": lambda c: c.pop("training") and None,
        **{f"labels {v!r}"[:40]: put("labels", v) for v in (5, None, [], "x", {"1": "a"})},
        "two classes of one name": put("labels", {**names, "2": "a"}),
        "a class with a slash": put("labels", {**names, "2": "a/b\n"}),
        "a surrogate in a name": put("labels", {**names, "2": "\ud800"}),
        "an escape code in a name": put("labels", {**names, "2": "\x1b[2J"}),
        "a class too few": put("labels", {"0": "background", "1": "a"}),
        **{f"modality {v!r}"[:40]: put("modality", v) for v in (7, {}, {"1": "MRI"}, [["0"]])},
        **{f"training {v!r}"[:40]: put("training", v) for v in (5, {}, [1, None], [[[]]], "abc")},
        **{
            f"image {v!r}"[:40]: entry("image", v)
            for v in (
                *(5, None, "", ".", "..", "../../../../etc/passwd", "/dev/zero", "a\0b.nii.gz"),
                *("x" * 5000 + ".nii.gz", "\ud800.nii.gz", ["a"], "imagesTr"),
            )
        },
        "an image listed twice": lambda c: c["training"].append(c["training"][0]),
        "numTraining NaN": put("numTraining", float("nan")),
    }
    for name, change in ways.items():
        yield Input("dataset.json", name, "check", listing(change))
    for name in ("two classes of one name", "labels 5", "training 5", "a class too few"):
        yield Input("dataset.json", name, "train", listing(ways[name]))

    def text(content: bytes) -> Spoil:
        return lambda root, _: _none((root / "set" / "dataset.json").write_bytes(content))

    for name, content in {
        "empty": b"",
        "cut off": b'{"labels": {"0": "back',
        "nested 100,000 deep": b"[" * 100_000,
        "nested 100,000 deep within": b'{"labels": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
        "a number of 10,000 digits": b'{"labels": ' + b"9" * 10_000 + b"}",
        "UTF-16": '{"labels": 1}'.encode("utf-16"),
        "zeros": bytes(1000),
    }.items():
        yield Input("dataset.json", name, "check", text(content))


def _none(_: object) -> None:
    pass


EVIL = "unet3d.cli.train.Path.touch"

EXPERIMENTS = {
    "syntax": "data: [1, 2",
    "a tab": "data:\n\tpatch_size: 1",
    "a list": "- 1\n- 2",
    "a word": "hello",
    "zeros": "\0\0\0",
    "an alias bomb": "x: &a [1,1,1,1,1,1,1,1,1]\n"
    + "".join(
        f"{c}: &{c} [{','.join([f'*{b}'] * 9)}]\n"
        for b, c in zip("abcdefgh", "bcdefghi", strict=True)
    )
    + "seed: *i\n",
    "an alias of itself": "data: &a\n  patch_size: *a",
    "nested 5,000 deep": "seed: " + "[" * 5000 + "]" * 5000,
    "a python object": "seed: !!python/object/apply:os.system ['touch OWNED']",
    "an unknown key": "dta: {patch_size: [8, 8, 8]}",
    "an unknown key within": "data: {patch: [8, 8, 8]}",
    "an unknown option": "defaults: [{override /model: none_such}]",
    "a default of itself": "defaults: [x]",
    "data is a number": "data: 5",
    "data is null": "data: null",
    "model is a list": "model: [1]",
    "model is empty": "model: null",
    "trainer is a word": "trainer: fast",
    "optimizer is a number": "optimizer: 3",
    "patch_size is a dict": "data: {patch_size: {a: 1}}",
    "patch_size is a word": "data: {patch_size: large}",
    "patch_size is fractions": "data: {patch_size: [8.5, 8, 8]}",
    "patch_size is immense": "data: {patch_size: [1000000, 1000000, 1000000]}",
    "patch_size is NaN": "data: {patch_size: [.nan, 8, 8]}",
    "batch_size is immense": "data: {batch_size: 1000000000000}",
    "batch_size is a fraction": "data: {batch_size: 1.5}",
    "batch_size is a word": "data: {batch_size: two}",
    "num_workers is a word": "data: {num_workers: many}",
    "root is a number": "data: {root: 5}",
    "root is a list": "data: {root: [a]}",
    "width is immense": "model: {channels: [100000000, 100000000]}",
    "width is a word": "model: {width: wide}",
    "lr is NaN": "optimizer: {lr: .nan}",
    "lr is a word": "optimizer: {lr: high}",
    "seed is a fraction": "seed: 1.5",
    "seed is a dict": "seed: {a: 1}",
    "precision is a list": "precision: [16]",
    "fold is true": "fold: true",
    "fold is a dict": "fold: {a: 1}",
    "max_steps is a fraction": "trainer: {max_steps: 1.5}",
    "an interpolation of nothing": "seed: ${no.such.key}",
    "an interpolation of itself": "seed: ${seed}",
    "an unknown resolver": "seed: ${evil:1}",
    "memory is false": "memory: false",
    "inference is a word": "inference: {overlap: half}",
    "evaluation is a list": "evaluation: [1]",
    "allow_targets is a word": "allow_targets: torch",
    "model is os.system": "model: {_target_: os.system, command: touch OWNED}",
    "model is torch.hub.load": "model: {_target_: torch.hub.load}",
    "a method as a target": f"model: {{_target_: {EVIL}, self: OWNED}}",
    "a target within a target": "model: {encoder: {_target_: subprocess.run, args: touch OWNED}}",
    "a target behind an interpolation": "seed: {_target_: os.mkdir, path: OWNED}\n"
    "pool: {tau: '${seed}'}",
    "a target that is a number": "loss: {_target_: 5}",
    "a target that is empty": "loss: {_target_: ''}",
    "a module as a target": "loss: {_target_: torch.nn}",
    "a callback of Hydra": "hydra: {callbacks: {x: {_target_: pathlib.Path.mkdir, self: OWNED}}}",
    "Hydra's logging": "hydra: {job_logging: {handlers: {x: {(): pathlib.Path, y: 1}}}}",
    "Hydra's environment": "hydra: {job: {env_set: {CXX: touch OWNED}}}",
    "Hydra's launcher": "hydra: {launcher: {_target_: os.system}}",
}


def _experiments() -> Iterator[Input]:
    for name, content in EXPERIMENTS.items():

        def spoil(root: Path, _: Random, content=content) -> None:
            path = root / "conf" / "experiment" / "x.yaml"
            path.parent.mkdir(parents=True)
            path.write_text(f"# @package _global_\n{content}\n")

        keys = frozenset(re.findall(r"\w+(?=:)", content))
        yield Input("experiment", name, "train", spoil, ("experiment=x",), False, keys)


class Runs:
    """What a pickle calls when it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("OWNED",)


def _checkpoints() -> Iterator[Input]:
    path = "run.ckpt"

    def raw(change: Callable[[bytes], bytes]) -> Spoil:
        return lambda root, _: _none((root / path).write_bytes(change((root / path).read_bytes())))

    def content(change: Callable[[dict], Any]) -> Spoil:
        def spoil(root: Path, _: Random) -> None:
            found = torch.load(root / path, weights_only=True)
            changed = change(found)
            torch.save(found if changed is None else changed, root / path)

        return spoil

    def at(*keys: str, value: Any) -> Callable[[dict], Any]:
        def change(found: dict) -> None:
            for key in keys[:-1]:
                found = found[key]
            found[keys[-1]] = value

        return change

    def first_weight(change: Callable[[torch.Tensor], Any]) -> Callable[[dict], Any]:
        def apply(found: dict) -> None:
            weights = found["state_dict"]
            name = next(iter(weights))
            weights[name] = change(weights[name])

        return apply

    cut: dict[str, Spoil] = {
        f"cut at {share:.0%}": raw(lambda b, share=share: b[: int(len(b) * share)])
        for share in (0, 0.1, 0.5, 0.99)
    }
    ways: dict[str, Spoil] = {
        **cut,
        "a text": raw(lambda b: b"hello"),
        "a zip of something else": lambda root, _: _zip(root / path),
        "a pickle that runs code": lambda root, _: _none(
            (root / path).write_bytes(pickle.dumps(Runs()))
        ),
        "code within": content(lambda c: c.__setitem__("unet3d", Runs())),
        "a list": content(lambda c: [1]),
        "no card": content(lambda c: c.pop("unet3d") and None),
        "no weights": content(lambda c: c.pop("state_dict") and None),
        "empty card": content(at("unet3d", value={})),
        "weights NaN": content(first_weight(lambda w: w * float("nan"))),
        "a weight of another shape": content(first_weight(lambda w: w[:1])),
        "a weight that is a word": content(first_weight(lambda w: "x")),
        "a weight of other numbers": content(first_weight(lambda w: w.to(torch.complex64))),
    }
    card = {
        ("config",): [None, 5, []],
        ("config", "model"): [
            *(None, 5, "x", [], {}),
            *({"_target_": name} for name in ("os.mkdir", "torch.load", EVIL, "torch.nn.ReLU")),
            {"_target_": "torch.nn.modules.module.torch.hub.load", "repo_or_dir": "x"},
        ],
        ("config", "model", "width"): [-1, "wide", 10**6, 3.5],
        ("config", "model", "depth"): [10**6],
        ("config", "model", "channels"): [[10**8, 10**8], [1] * 10**5],
        ("config", "pool"): [None, {"_target_": "os.mkdir", "path": "OWNED"}],
        ("config", "data"): [None, {}],
        ("config", "data", "num_classes"): [None, 0, 10**9],
        ("config", "data", "patch_size"): [None, "x", [8], [0, 8, 8], [8.5, 8, 8], [10**6] * 3],
        ("config", "data", "regions"): [5, {"a": [1]}],
        ("config", "precision"): [7],
        ("classes",): [5, [], ["a"], ["a", "b", "b"]],
        ("channels",): [5, [], ["a", "b"]],
        ("preparation",): [None, {}, {"num_classes": 3, "evil": 1}],
        ("preparation", "orientation"): [5, "XYZ"],
        ("preparation", "spacing_mm"): [[0, 1, 1], "x", [1e-9, 1e-9, 1e-9], [float("nan")] * 3],
        ("preparation", "normalize"): [["ct"], 5],
        ("preparation", "num_classes"): ["x"],
        ("largest_component",): [5],
    }
    for keys, values in card.items():
        for value in values:
            name = f"{'.'.join(keys)} = {value!r}"[:60]
            ways[name] = content(at("unet3d", *keys, value=value))
    for name, spoil in ways.items():
        yield Input("checkpoint", name, "predict", spoil)
    for name in ("cut at 50%", "a pickle that runs code", "a list", "no weights", "weights NaN"):
        yield Input(
            "checkpoint",
            f"resume: {name}",
            "train",
            ways[name],
            (f"resume={path}", "trainer.max_steps=2"),
        )
        yield Input("checkpoint", f"init_from: {name}", "train", ways[name], (f"init_from={path}",))
    for number in range(12):
        verb, words = [("predict", ()), ("train", (f"resume={path}", "trainer.max_steps=2"))][
            number % 4 == 3
        ]
        yield Input("bit flip", f"in a checkpoint's tensor, {number}", verb, _flipped(path), words)


def _flipped(path: str) -> Spoil:
    """One bit in a record that holds a tensor's numbers."""

    def spoil(root: Path, draw: Random) -> None:
        content = bytearray((root / path).read_bytes())
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            records = [r for r in archive.infolist() if "/data/" in r.filename and r.file_size > 64]
        record = draw.choice(records)
        start = content.index(record.filename.encode(), record.header_offset)
        start += len(record.filename)
        extra = int.from_bytes(
            content[record.header_offset + 28 : record.header_offset + 30], "little"
        )
        place = start + extra + draw.randrange(record.file_size)
        content[place] ^= 1 << draw.randrange(8)
        (root / path).write_bytes(content)

    return spoil


def _zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "hello")
