"""A run is resumed as the same experiment, or refused without a change of any file."""

import json
import shutil

import pytest

from tests.contract.helpers.runs import read_step
from unet3d.__main__ import main
from unet3d.checkpoint_file import load_checkpoint
from unet3d.commands.train import build_training
from unet3d.training.same_experiment import (
    RESUMABLE_CHANGES,
    find_differences,
    is_below,
    list_compared,
)
from unet3d.training.start import prepare_start

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory, decathlon_folder):
    """Return a copy of a dataset that tests may change."""
    return shutil.copytree(decathlon_folder, tmp_path_factory.mktemp("own") / "data")


@pytest.fixture(scope="module")
def base(data, tmp_path_factory):
    return [
        *("data=decathlon", f"data.root={data}"),
        f"data.cache={tmp_path_factory.mktemp('cache')}",
        *("data.patch_size=[16,16,16]", "data.batch_size=4", "trainer.max_steps=2"),
        *("trainer.enable_progress_bar=false", "trainer.accelerator=cpu", "memory.estimate=false"),
        *("model.width=4", "model.depth=2", "logger=csv"),
        "callbacks.best_checkpoint.top_k=2",
    ]


@pytest.fixture(scope="module")
def finished(base, tmp_path_factory):
    """Return the folder of a finished and evaluated run."""
    folder = tmp_path_factory.mktemp("run") / "run"
    assert main(["train", *base, f"hydra.run.dir={folder}"]) == 0
    return folder


def read_all(folder):
    """Return the bytes and the time of every file, hidden ones too."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


CHANGES = """fold=1 optimizer=sgd checkpointing=offload data.batch_size=1 scheduler.power=2
+trainer.detect_anomaly=true precision=bf16 ema_decay=0.9 lr_factors={encoder:0.1}"""


def test_another_experiment_is_refused_key_by_key_and_changes_no_file(base, finished, capsys):
    before = read_all(finished)
    words = [f"hydra.run.dir={finished}", "resume=auto", *CHANGES.split()]
    assert main(["train", *base, *words]) == 2
    error = capsys.readouterr().err.strip()
    for text in (
        *("fold is 1 now, but was 0", "training case", "validation case", "data.batch_size is 1"),
        "optimizer._target_ is torch.optim.SGD now, but was torch.optim.AdamW",
        "blocks of the network is plain now, but was fused",
        *("scheduler.power is 2", "precision is bf16", "trainer.detect_anomaly is true"),
        *("ema_decay is 0.9", 'lr_factors is {"encoder": 0.1}'),
    ):
        assert text in error, error
    assert error.endswith("or use init_from= to start a new run from its weights")
    assert len(error.splitlines()) == 1
    assert read_all(finished) == before


def test_what_changes_no_weight_may_change(composed, base, finished):
    words = ["trainer.max_steps=3", "data.num_workers=1", "checkpointing=lean", "logger=none"]
    words += ["trainer.devices=auto", "trainer.accelerator=auto", "evaluation.enabled=false"]
    words += ["callbacks=[default,early_stopping]", "metrics=volume_error", "save_every_seconds=0"]
    run = build_training(composed(*words, "resume=auto", base=base), finished)
    before = read_all(finished)
    assert prepare_start(run).checkpoint == finished / "checkpoints" / "last.ckpt"
    assert read_all(finished) == before


PERMITTED = """trainer.max_steps=3 trainer.max_epochs=9 trainer.max_time=00:01:00:00
max_skipped_steps=1 init_from=OTHER/checkpoints/last.ckpt
+callbacks.early_stopping={_target_:lightning.pytorch.callbacks.EarlyStopping,monitor:val/dice}
logger=none metrics=lesions validation.hd95=false evaluation.tta=true debug=true
callbacks.case_images.cases=1 trainer.enable_progress_bar=true trainer.log_every_n_steps=2
trainer.num_sanity_val_steps=0 save_every_seconds=0 callbacks.best_checkpoint.top_k=1
callbacks.best_checkpoint.top_k=3 resume=OTHER
data.num_workers=1 memory.estimate=true checkpointing=lean inference.batch_size=2
allow_targets=[mine] trainer.accelerator=auto trainer.devices=auto trainer.launch=torchrun
trainer.timeout_seconds=60 trainer.cuda_graph=false
data.root=OTHER/data data.cache=OTHER/cache data.cache_format=blosc2 data.invalid_cases=skip
data.layout.root=OTHER/data data.splits=OTHER/splits.json
data.group_by=(.*) data.annotated={*:[ball,tube]}""".splitlines()


@pytest.mark.parametrize("changes", PERMITTED)
def test_a_run_goes_on_with_whatever_may_change(base, finished, tmp_path, monkeypatch, changes):
    other = shutil.copytree(finished, tmp_path / "other")
    state = load_checkpoint(other / "checkpoints" / "last.ckpt")["callbacks"]["ResumeState"]
    train, val = map(list, state["fixed_settings"]["cases"].values())
    (other / "splits.json").write_text(json.dumps([{"train": train, "val": val}]))
    (other / "data").symlink_to(next(w for w in base if "data.root" in w).partition("=")[2])
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    run = shutil.copytree(finished, tmp_path / "run")
    words = [f"hydra.run.dir={run}", "resume=auto", "trainer.max_steps=3"]
    words += ["evaluation.enabled=false", *changes.replace("OTHER", str(other)).split()]
    assert main(["train", *base, *words]) == 0
    assert read_step(run / "checkpoints" / "last.ckpt") == 3


def test_every_key_that_may_change_has_a_change_above():
    changed = [word.lstrip("+").partition("=")[0] for word in " ".join(PERMITTED).split()]
    keys = [key for key in RESUMABLE_CHANGES if not any(is_below(word, [key]) for word in changed)]
    assert keys == []


def test_a_dataset_may_move_but_not_change(base, finished, data, tmp_path, capsys):
    moved = shutil.copytree(data, tmp_path / "moved")
    words = [*base, f"data.root={moved}", f"hydra.run.dir={finished}", "resume=auto"]
    assert main(["train", *words]) == 0
    assert "this run is already finished" in capsys.readouterr().out
    labels = sorted((moved / "labelsTr").glob("*.nii.gz"))
    shutil.copy(labels[0], labels[1])
    before = read_all(finished)
    assert main(["train", *words]) == 2
    assert f"case {labels[1].name.split('.')[0]} has other contents" in capsys.readouterr().err
    assert read_all(finished) == before


def test_the_order_of_classes_and_regions_is_part_of_an_experiment():
    def compare(*names):
        regions = {name: [1] for name in names}
        metadata = {"classes": names, "config": {"data": {"regions": regions}}}
        return list_compared(metadata, {"cases": {}})

    assert find_differences(compare("x", "y"), compare("x", "y")) == []
    assert find_differences(compare("x", "y"), compare("y", "x")) == [
        'data.regions is [["y", [1]], ["x", [1]]] now, but was [["x", [1]], ["y", [1]]]',
        'classes is ["y", "x"] now, but was ["x", "y"]',
    ]
