"""W&B and MLflow get each value once, also from runs that are killed; with the real packages."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.helpers.training import fit
from tests.lit.helpers.read_logs import read_mlflow, read_wandb
from tests.lit.test_resume import At, crash, send_sigterm
from unet3d.cli.train import build_training
from unet3d.errors import Interrupted
from unet3d.lit.callbacks.checkpoints import LastCheckpoint
from unet3d.lit.loggers.held_rows import HeldRows
from unet3d.lit.loggers.mlflow import RunMlflowLogger
from unet3d.lit.loggers.run_logger import RunFacts
from unet3d.stop_signals import SignalListener
from unet3d.workflows.training.run import resolve_start

READERS = {"wandb": read_wandb, "mlflow": read_mlflow}
SERVICES = [pytest.param(name, marks=pytest.mark.slow) for name in READERS]
LONG = [
    *("data.layout.num_cases=8", "trainer.max_steps=7", "data.num_workers=0", "resume=auto"),
    "memory.estimate=true",
]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


def train(settings, folder, *callbacks, killed=False):
    """Train from the folder's last checkpoint; a run that is killed ends nothing."""
    with SignalListener().listening() as signals:
        run = build_training(settings, folder, signals)
        run.trainer.callbacks[:0] = callbacks
        finished = False
        try:
            fit(run, resolve_start(run).checkpoint, signals)
            finished = True
        except (Interrupted, RuntimeError):
            pass
        assert not (killed and finished)
        if not killed:
            metrics = {"dice": 0.25} if finished else {}
            run.callbacks.dashboard.finish(metrics, run.trainer.global_step, finished=finished)
    if "wandb" in settings.loggers:
        end_wandb(folder)


def end_wandb(folder):
    """End W&B's run, as its own process does when ours is gone; wait for what it writes."""
    import wandb

    wandb.finish(exit_code=1)
    sizes, deadline = None, time.monotonic() + 30
    while time.monotonic() < deadline:
        previous, sizes = sizes, [f.stat().st_size for f in folder.glob("wandb/*/*.wandb")]
        if sizes == previous and sizes and min(sizes) > 7:
            return
        time.sleep(0.3)


def read_values(name, folder):
    """Return the values of what does not depend on time; no (step, name) is there twice."""
    ids, points = READERS[name](folder)
    assert len(ids) == 1
    places = [(step, name) for step, name, _ in points]
    assert len(set(places)) == len(places)
    timed = ("speed/", "memory/")
    values = {(s, n): v for s, n, v in points if not n.startswith((*timed, "cases/"))}
    assert {(s, n) for s, n in places if n.startswith("memory/estimated")}
    return values, sorted({s for s, n in places if n == "speed/step_seconds"})


@pytest.fixture(scope="module")
def expected(small, tmp_path_factory):
    """Return what an uninterrupted run logs, by service."""
    from unet3d.config.compose import compose_config
    from unet3d.config.settings.training import parse_training

    results = {}

    def get(name):
        if name not in results:
            folder = tmp_path_factory.mktemp(name)
            words = [*small, *LONG, f"logger={name}"]
            train(parse_training(compose_config(words, "train")), folder)
            results[name] = read_values(name, folder)
        return results[name]

    return get


MOMENTS = [("on_before_optimizer_step", 5), ("on_validation_start", 1)]


@pytest.mark.parametrize("name", SERVICES)
@pytest.mark.parametrize("moment", MOMENTS, ids=str)
def test_a_killed_and_resumed_run_has_neither_gap_nor_duplicate(
    composed, tmp_path, expected, monkeypatch, name, moment
):
    monkeypatch.setattr(LastCheckpoint, "on_exception", lambda *_: None)
    settings = composed(*LONG, f"logger={name}", "save_every_seconds=0")
    train(settings, tmp_path, At(*moment, crash), killed=True)
    train(settings, tmp_path)
    assert read_values(name, tmp_path) == expected(name)


@pytest.mark.parametrize("name", SERVICES)
def test_a_run_that_was_killed_before_its_first_checkpoint_is_another_run(
    composed, tmp_path, monkeypatch, name
):
    monkeypatch.setattr(LastCheckpoint, "on_exception", lambda *_: None)
    settings = composed(*LONG, f"logger={name}")
    train(settings, tmp_path, At("on_before_optimizer_step", 1, crash), killed=True)
    train(settings, tmp_path)
    _, points = READERS[name](tmp_path)
    assert [s for s, n, _ in points if n == "train/loss"] == list(range(7))


@pytest.mark.parametrize("name", SERVICES)
def test_a_stopped_and_resumed_run_has_neither_gap_nor_duplicate(
    composed, tmp_path, expected, name
):
    settings = composed(*LONG, f"logger={name}")
    train(settings, tmp_path, At("on_validation_start", 1, send_sigterm))
    train(settings, tmp_path)
    assert read_values(name, tmp_path) == expected(name)


@pytest.mark.parametrize("name", SERVICES)
def test_the_values_are_those_of_the_other_loggers(composed, tmp_path, name):
    from tests.lit.test_resume import read_csv

    settings = composed(*LONG, f"logger=[csv,{name}]")
    train(settings, tmp_path)
    _, curves = read_csv(tmp_path / "csv" / "metrics.csv")
    values, _ = read_values(name, tmp_path)
    for curve, points in curves.items():
        assert [float(v) for _, v in points] == [values[int(s), curve] for s, _ in points]
    assert values[7, "final/dice"] == 0.25


@pytest.mark.parametrize("name", SERVICES)
def test_a_process_that_is_killed_loses_nothing(small, tmp_path, name):
    folder = tmp_path / "run"
    words = [*small, *LONG, f"logger=[csv,{name}]", "trainer.max_steps=40", "save_every_seconds=0"]
    command = [sys.executable, "-W", "ignore", "-m", "unet3d.cli.main", "train", *words]
    command.append(f"hydra.run.dir={folder}")
    table = folder / "csv" / "metrics.csv"
    # W&B's process of the tests would outlive the ones that are killed.
    environment = {k: v for k, v in os.environ.items() if k != "WANDB_SERVICE"}
    for rows in (12, 25):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
        while process.poll() is None:
            if table.exists() and len(table.read_text().splitlines()) > rows:
                process.kill()
            time.sleep(0.01)
        assert process.returncode == -signal.SIGKILL
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    _, points = READERS[name](folder)
    assert sorted(s for s, n, _ in points if n == "train/loss") == list(range(40))
    places = [(s, n) for s, n, _ in points]
    assert len(set(places)) == len(places)


def test_rows_wait_for_the_next_one_and_are_sent_once(tmp_path):
    sent = []
    rows = HeldRows(tmp_path, lambda step, row: sent.append((step, row)))
    rows.run_id = "a"
    rows.add({"loss": 0.0}, 0)
    rows.add({"loss": 1.0}, 1)
    rows.flush()
    rows.add({"loss": 2.0}, 2)  # after the checkpoint: the resumed run logs it again
    assert sent == [(0, {"loss": 0.0})]
    resumed = HeldRows(tmp_path, lambda step, row: sent.append((step, row)))
    resumed.continue_from(2)
    assert resumed.run_id == "a"
    resumed.add({"dice": 0.5}, 1)
    resumed.add({"loss": 2.0}, 2)
    resumed.flush(all_rows=True)
    assert sent[1:] == [(1, {"loss": 1.0, "dice": 0.5}), (2, {"loss": 2.0})]


def test_steps_that_were_sent_before_the_checkpoint_was_lost_are_not_sent_again(tmp_path):
    sent = []
    rows = HeldRows(tmp_path, lambda step, row: sent.append(step))
    for step in range(4):
        rows.add({"loss": step}, step)
    rows.flush()
    resumed = HeldRows(tmp_path, lambda step, row: sent.append(step))
    resumed.continue_from(1)
    for step in range(1, 6):
        resumed.add({"loss": step}, step)
    resumed.flush(all_rows=True)
    assert sent == [0, 1, 2, 3, 4, 5]


def test_a_service_that_fails_gets_its_rows_later_and_does_not_end_the_run(tmp_path, capsys):
    sent, fails = [], True

    def send(step, row):
        if fails:
            raise ConnectionError("no route to host")
        sent.append(step)

    rows = HeldRows(tmp_path, send)
    for step in range(3):
        rows.add({"loss": step}, step)
        rows.flush()
    assert capsys.readouterr().err.count("no route to host; some metrics may be missing") == 1
    fails = False
    rows.flush(all_rows=True)
    assert sent == [0, 1, 2]


def test_a_new_run_in_the_folder_starts_at_its_first_step(tmp_path):
    rows = HeldRows(tmp_path, lambda step, row: None)
    rows.run_id = "a"
    rows.add({"loss": 1.0}, 5)
    rows.flush(all_rows=True)
    fresh = HeldRows(tmp_path, lambda step, row: None)
    fresh.continue_from(0)
    assert (fresh.run_id, fresh.next_step) == (None, 0)


@pytest.mark.slow
def test_mlflow_knows_the_rows_that_a_kill_left_unnoted(tmp_path):
    from mlflow.tracking import MlflowClient

    def open_logger(step):
        logger = RunMlflowLogger(tmp_path, experiment="shapes")
        logger.rows.continue_from(step)
        facts = RunFacts(config="", choices={}, final_metrics=(), device="cpu")
        logger.start(facts, step)
        return logger

    first = open_logger(0)
    for step in range(3):
        first.rows.add({"loss": float(step)}, step)
    first.rows.flush()
    noted = tmp_path / "mlflow" / "held.json"
    before = noted.read_text()
    first.rows.add({"loss": 3.0}, 3)
    first.rows.flush()
    noted.write_text(before)  # as if the process were killed before it wrote this
    resumed = open_logger(3)
    for step in (3, 4):
        resumed.rows.add({"loss": float(step)}, step)
    resumed.rows.flush(all_rows=True)
    client = MlflowClient(tracking_uri=resumed.tracking_uri)
    points = client.get_metric_history(resumed.rows.run_id, "loss")
    assert sorted(point.step for point in points) == [0, 1, 2, 3, 4]
