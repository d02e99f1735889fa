"""An interrupted and resumed run ends like an undisturbed one, bit for bit."""

import time

import pytest

from tests.contract.helpers.runs import (
    add_faults,
    equal,
    read_curve,
    read_report,
    read_step,
    read_steps,
    read_weights,
    send_signals,
)

LONG = [*("data.layout.num_cases=8", "trainer.max_steps=7"), "logger=csv"]
"""Three steps in each epoch: the run ends within the third one."""

NORM = "model.norm=batch"
"""A network with buffers."""

SMALL_WITH_DROPOUT = ["model=attention_unet", "model.dropout=0.2"]
SMALL_WITH_DROPOUT += ["model.channels=[8,16]", "model.strides=[2]"]


def read_results(folder):
    """Return weights and buffers of both checkpoints, their steps, and the curves."""
    paths = [folder / "checkpoints" / f"{name}.ckpt" for name in ("last", "best")]
    curves = [read_curve(folder, name) for name in ("train/loss", "train/lr", "val/dice")]
    return [read_weights(path) for path in paths], [read_step(path) for path in paths], curves


def assert_same(results, expected):
    (weights, *rest), (expected_weights, *expected_rest) = results, expected
    assert rest == expected_rest
    assert all(equal(a, b) for a, b in zip(weights, expected_weights, strict=True))


@pytest.fixture(scope="module")
def known():
    """Return the results of undisturbed runs by their options."""
    return {}


@pytest.fixture
def undisturbed(unet3d, small, tmp_path_factory, known):
    """Return the results of a run that nothing interrupts; train it once."""

    def train_undisturbed(*options):
        if options not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            words = [*small, *LONG, *options, f"hydra.run.dir={folder}"]
            assert unet3d("train", *words).code == 0
            known[options] = read_results(folder)
        return known[options]

    return train_undisturbed


def test_a_killed_run_resumes_exactly_in_the_middle_of_an_epoch(
    start, train, small, tmp_path, undisturbed
):
    kill = send_signals(tmp_path, ("train_batch_start", 5, "SIGKILL"))
    options = [*LONG, NORM, "save_every_seconds=0", *kill]
    process = start("train", *small, *options, "hydra.run.dir=run")
    process.communicate()
    assert process.returncode == -9
    assert read_step(tmp_path / "run" / "checkpoints" / "last.ckpt") in (4, 5)
    assert train(*options, "resume=auto").code == 0
    assert_same(read_results(tmp_path / "run"), undisturbed(NORM))


def test_steps_that_a_killed_run_had_not_saved_are_in_the_curves_once(
    start, train, small, tmp_path, undisturbed
):
    moments = [("train_batch_start", 1, "SIGTERM"), ("train_batch_start", 5, "SIGKILL")]
    options = [*LONG, NORM, "logger=[tensorboard,csv]", *send_signals(tmp_path, *moments)]
    assert train(*options).code == 143
    start("train", *small, *options, "hydra.run.dir=run", "resume=auto").communicate()
    assert read_step(tmp_path / "run" / "checkpoints" / "last.ckpt") == 2
    time.sleep(1)  # TensorBoard reads event files by the second of their start
    assert train(*options, "resume=auto").code == 0
    assert read_steps(tmp_path / "run", "train/loss") == list(range(7))
    assert read_steps(tmp_path / "run", "memory/step_peak_resident_mib") == list(range(7))
    assert read_steps(tmp_path / "run", "val/dice") == [2, 5, 6]
    assert_same(read_results(tmp_path / "run"), undisturbed(NORM))


@pytest.mark.parametrize(
    "moment",
    [("train_batch_start", 2), ("validation_batch_end", 6)],
    ids=lambda moment: "-".join(map(str, moment)),
)
def test_a_run_resumes_exactly_after_sigterm(train, tmp_path, undisturbed, moment):
    options = [*LONG, NORM, *send_signals(tmp_path, (*moment, "SIGTERM"))]
    assert train(*options).code == 143
    assert train(*options, "resume=auto").code == 0
    assert_same(read_results(tmp_path / "run"), undisturbed(NORM))


def test_a_run_resumes_exactly_after_many_signals(train, tmp_path, undisturbed):
    moments = [("train_batch_start", step, "SIGTERM") for step in (0, 1, 3, 4)]
    options = [*LONG, NORM, *send_signals(tmp_path, *moments), "resume=auto"]
    assert [train(*options).code for _ in range(5)] == [143, 143, 143, 143, 0]
    assert_same(read_results(tmp_path / "run"), undisturbed(NORM))


@pytest.mark.parametrize(
    "options",
    [
        [NORM, "ema_decay=0.8"],
        ["data.num_workers=2", "augmentation=nnunet"],
        [*SMALL_WITH_DROPOUT, "scheduler=plateau", "scheduler.patience=0"],
        ["trainer.accumulate_grad_batches=2", "data.batch_size=1", "scheduler=one_cycle"],
    ],
    ids=["averaged_weights", "workers_augmentation", "dropout_plateau", "accumulation_one_cycle"],
)
def test_a_run_resumes_exactly_with_other_options(train, tmp_path, undisturbed, options):
    words = [*LONG, *options, *send_signals(tmp_path, ("train_batch_start", 3, "SIGTERM"))]
    assert train(*words).code == 143
    assert train(*words, "resume=auto").code == 0
    assert_same(read_results(tmp_path / "run"), undisturbed(*options))


def test_a_resumed_run_keeps_counting_the_validations_until_an_early_stop(train, tmp_path):
    signals = send_signals(tmp_path, ("train_batch_start", 3, "SIGTERM"))
    options = [*LONG, "trainer.max_steps=30", "optimizer.lr=1e-9", *signals]
    options += ["callbacks=[default,early_stopping,fault]", "callbacks.early_stopping.patience=2"]
    assert train(*options).code == 143
    assert train(*options, "resume=auto").code == 0
    assert read_report(tmp_path / "run")["steps"] == 9


def test_a_finished_run_says_so(train, tmp_path):
    assert train("logger=none").code == 0
    before = (tmp_path / "run" / "checkpoints" / "last.ckpt").read_bytes()
    ended = train("logger=none", "resume=auto")
    assert ended.code == 0
    assert "already finished" in ended.out
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").read_bytes() == before


def test_a_finished_run_keeps_its_table(train, tmp_path):
    assert train("logger=csv").code == 0
    (table,) = (tmp_path / "run").rglob("metrics.csv")
    before = table.read_text()
    assert "final/peak_mib" in before or "final/step_seconds" in before
    assert train("logger=csv", "resume=auto").code == 0
    assert table.read_text() == before


def test_a_finished_run_goes_on_to_a_higher_limit(train, tmp_path):
    assert train("trainer.max_steps=2", "logger=csv").code == 0
    before = read_curve(tmp_path / "run", "train/loss")
    assert train("trainer.max_steps=4", "logger=csv", "resume=auto").code == 0
    after = read_curve(tmp_path / "run", "train/loss")
    assert after[:2] == before
    assert [step for step, _ in after] == [0, 1, 2, 3]


def test_a_run_without_resume_renames_the_folder_of_an_earlier_one(train, tmp_path):
    assert train("logger=none", "fold=none").code == 0
    before = (tmp_path / "run" / "checkpoints" / "last.ckpt").read_bytes()
    ended = train("logger=none", "fold=none", "seed=1")
    assert "run.1" in ended.out
    assert (tmp_path / "run.1" / "checkpoints" / "last.ckpt").read_bytes() == before


def test_a_run_goes_on_in_a_new_folder(train, trained, tmp_path):
    options = ["trainer.max_steps=8", "logger=csv", f"resume={trained.folder}"]
    assert train(*options).code == 0
    assert [step for step, _ in read_curve(tmp_path / "run", "train/loss")] == [6, 7]
    assert read_step(trained.last) == 6


@pytest.mark.parametrize("change", ["seed=1", "fold=1", "optimizer.lr=1", "model.depth=2"])
def test_another_experiment_is_not_resumed(train, trained, tmp_path, change):
    ended = train("trainer.max_steps=8", f"resume={trained.folder}", change)
    assert ended.code == 2
    assert len(ended.err.splitlines()) == 1
    assert change.split("=")[0] in ended.err
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_corrupted_checkpoint_is_set_aside_for_the_previous_one(train, tmp_path, undisturbed):
    signals = send_signals(tmp_path, ("train_batch_start", 4, "SIGTERM"))
    options = [*LONG, NORM, "save_every_seconds=0", *signals, "resume=auto"]
    assert train(*options).code == 143
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    content = bytearray(last.read_bytes())
    content[len(content) // 2] ^= 1
    last.write_bytes(content)
    assert train(*options).code == 0
    assert (last.parent / "corrupted.ckpt").read_bytes() == content
    assert_same(read_results(tmp_path / "run"), undisturbed(NORM))


def test_a_run_that_was_not_evaluated_is_evaluated_when_it_is_resumed(train, tmp_path):
    assert train("logger=none").code == 0
    assert train("logger=none", "evaluation.enabled=true", "resume=auto").code == 0
    assert read_report(tmp_path / "run")["evaluation"]["best_of"] == 1


@pytest.mark.slow
def test_two_ranks_resume_exactly_and_stop_together(start, small, tmp_path):
    """The first run is what a kill leaves of it; the second one goes on and is stopped."""
    copies, sent = tmp_path / "copies", tmp_path / "sent"
    faults = add_faults(
        tmp_path,
        *("CopyCheckpoints", "SendSignals"),
        CopyCheckpoints={
            "last": str(tmp_path / "first/checkpoints/last.ckpt"),
            "to": str(copies),
        },
        SendSignals={"events": [["train_batch_start", 3, "SIGTERM"]], "sent": str(sent)},
    )
    options = [*small, *faults, NORM, "data.layout.num_cases=15", "trainer.max_steps=6"]
    options += ["trainer.devices=2", "save_every_seconds=0", "logger=none"]
    sent.write_text("SIGTERM\n")  # not in the first run
    first = start("train", *options, "hydra.run.dir=first")
    first.communicate()
    assert first.returncode == 0
    sent.unlink()
    second = start("train", *options, "hydra.run.dir=second", f"resume={copies / '2.ckpt'}")
    second.communicate()
    assert second.returncode == 143
    last = tmp_path / "second" / "checkpoints" / "last.ckpt"
    assert read_step(last) == read_step(copies / "4.ckpt") == 4
    assert equal(read_weights(last), read_weights(copies / "4.ckpt"))
