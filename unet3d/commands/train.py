"""`unet3d train`: train a network and report its results and its cost.

`build_training` shows what a run is made of, `train` what happens in it.
"""

import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

import torch

from unet3d.checkpoint_file import has_checkpoint
from unet3d.config.compose import ComposedConfig
from unet3d.data.dataset import build_layout, resolve_dataset
from unet3d.errors import DoesNotFitError, RunError
from unet3d.machine import resolve_precision
from unet3d.report.run_report import format_report_table
from unet3d.signals import SignalListener
from unet3d.step.build import build_network
from unet3d.training.callbacks.stopping import StoppingLimits
from unet3d.training.config import TrainConfig, parse_train_config
from unet3d.training.datamodule import VolumeDataModule
from unet3d.training.distributed import RankAgreement, find_device, leave_process_group
from unet3d.training.final_evaluation import evaluate_best_checkpoint
from unet3d.training.head_bias import initialize_head_bias
from unet3d.training.launch import ProcessRank, launch_ranks, read_process_rank
from unet3d.training.machine_checks import (
    avoid_wrong_gradients,
    check_machine,
    count_local_processes,
)
from unet3d.training.module import SegmentationModule, make_config_record, make_metadata
from unet3d.training.preflight import (
    choose_graphs,
    choose_leaner,
    choose_strategy,
    estimate_run_memory,
)
from unet3d.training.pretrained import find_pretrained
from unet3d.training.run import (
    TrainingRun,
    explain_errors,
    interrupt_if_asked,
    join_run,
    summarize_run,
    write_config,
)
from unet3d.training.run_folder import Log
from unet3d.training.run_reports import (
    GrowingReport,
    TrainingResult,
    build_report,
    is_complete,
    list_callbacks,
    make_result,
    reopen_report,
    report_early_end,
    try_write_report,
    write_page,
)
from unet3d.training.start import prepare_start
from unet3d.training.trainer import RunCallbacks, build_trainer, seed_run

ALREADY_FINISHED = (
    "this run is already finished; raise trainer.max_epochs, max_steps or max_time, or the "
    "patience of early stopping, to continue"
)


def main(composed: ComposedConfig, folder: Path) -> int:
    """Train in one process or several."""
    settings, composition = parse_train_config(composed), composed.composition
    process = read_process_rank(settings.trainer.launch)
    processes = count_local_processes(settings, process)
    if processes > 1:
        extra = ["memory.if_too_large=error"] if composition.sweeping else []
        return launch_ranks([*composition.overrides, *extra], folder, processes)
    with join_run(settings, folder, process, log=print) as signals:
        result = train(settings, folder, signals, process, log=print)
    return 1 if result.report.get("evaluation", {}).get("errors") else 0


def build_training(
    settings: TrainConfig,
    folder: Path,
    signals: SignalListener | None = None,
    process: ProcessRank | None = None,
    callbacks: Sequence[Any] = (),
) -> TrainingRun:
    """Build what a run consists of, in the order in which data flows; `callbacks` come last."""
    process = process or ProcessRank()
    device = find_device(settings, process)
    precision = resolve_precision(settings.step.precision, device.type)

    # The dataset's channels and classes.
    layout = build_layout(settings.data)
    dataset = resolve_dataset(settings.data, layout)
    step, notes = choose_strategy(settings.step.with_dataset(dataset), precision, device)
    source, is_resumed = settings.init_from, has_checkpoint(folder / "checkpoints")
    if source is not None and not is_resumed:
        source = find_pretrained(source)
    settings = replace(settings, step=step, init_from=source)
    data = VolumeDataModule(settings, layout, dataset, device=device, process=process)

    # Network, loss, optimizer, callbacks and trainer: invalid options fail before data is read.
    seed_run(settings)
    config = make_config_record(settings)
    limits = StoppingLimits(
        RankAgreement(process.world_size),
        max_steps=settings.trainer.max_steps,
        max_seconds=settings.trainer.max_seconds,
    )
    graphs, graph_notes = choose_graphs(step, device, process)
    network = build_network(step)
    shape = len(dataset.channels), *step.data.patch_size
    precision = avoid_wrong_gradients(precision, network, shape, device.type)
    module = SegmentationModule(data, precision, network, limits=limits, graphs=graphs)
    run_callbacks = RunCallbacks(
        data, precision, module, limits, config=config, folder=folder, signals=signals
    )
    ordered, uses_graphs = [*run_callbacks.ordered, *callbacks], graphs is not None
    trainer = build_trainer(data, precision, ordered, folder, uses_graphs=uses_graphs)
    warnings = check_machine(data, precision, network, folder)

    # The cases, and what depends on them.
    data.prepare()
    if data.val_loader is None:
        trainer.limit_val_batches = 0
    elif settings.trainer.check_val_every_n_epoch == "auto":
        interval = data.choose_validation_interval()
        trainer.check_val_every_n_epoch = interval
        if interval > 1:
            notes.append(
                f"validation every {interval} epochs, because of its many windows "
                "(trainer.check_val_every_n_epoch= sets another number)"
            )
    notes += data.check_patch_size() + data.check_accumulation()
    module.metadata = make_metadata(config, data)
    bias_notes = initialize_head_bias(data, network)
    estimate, memory_notes = estimate_run_memory(data, precision, module)
    run_callbacks.set_estimate(estimate)
    return TrainingRun(
        settings=settings,
        config=config,
        folder=folder,
        precision=precision,
        module=module,
        data=data,
        trainer=trainer,
        callbacks=run_callbacks,
        estimate=estimate,
        notes=[*notes, *graph_notes, *memory_notes, *bias_notes, *warnings],
    )


def train(
    settings: TrainConfig,
    folder: Path,
    signals: SignalListener,
    process: ProcessRank | None = None,
    callbacks: Sequence[Any] = (),
    *,
    log: Log,
) -> TrainingResult:
    """Start or resume, train up to the limits, evaluate, and write the report.

    Where checkpointing=auto runs out of memory, go on with a leaner strategy.
    """
    is_auto, report = settings.step.strategy == "auto", None
    while report is None:
        run = build_training(settings, folder, signals, process, callbacks)
        start = prepare_start(run)
        log("\n".join([summarize_run(run), *start.messages]))
        if start.is_finished:
            report = reopen_report(run, start.steps)
            if is_complete(run):
                log(f"{start.checkpoint}: {ALREADY_FINISHED}")
                return make_result(run, report)
            break
        write_config(run)
        list_callbacks(run).append(GrowingReport(run))
        checkpoint = None if start.checkpoint is None else str(start.checkpoint.absolute())
        try:
            with explain_errors(run, start.checkpoint, signals):
                run.trainer.fit(run.module, run.data, ckpt_path=checkpoint, weights_only=True)
                interrupt_if_asked(run, signals)
        except BaseException as error:
            report_early_end(run, error, log)
            if not isinstance(error, DoesNotFitError):
                raise
            settings = choose_leaner(run, error, log, is_auto=is_auto)
        else:
            report = build_report(run, steps=run.trainer.global_step, finished=True)
        if report is None:
            del run
            gc.collect()  # what the failed step holds: autograd's graph, and the GPU's cache
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    leave_process_group()  # the other ranks do not wait for the evaluation
    if not run.is_main:
        return make_result(run, report)
    problems = [*run.list_unwritten_checkpoints(), *try_write_report(run, report)]
    failure = run.callbacks.training_warnings.find_failure(report["steps"], report["skipped_steps"])
    if failure is not None:
        report["error"] = failure
        problems.append(failure)
    elif settings.evaluation.enabled and not problems:
        known = report["warnings"]
        report |= evaluate_best_checkpoint(run, log=log)
        report["warnings"] = known + [line for line in report["warnings"] if line not in known]
    problems += try_write_report(run, report)
    result = make_result(run, report)
    run.callbacks.dashboard.finish(result.metrics, report["steps"], finished=True)
    log("\n" + format_report_table(report))
    write_page(run, report, log)
    if problems:
        raise RunError("; ".join(dict.fromkeys(problems)))
    if not settings.composition.sweeping:
        log(f"next: unet3d predict checkpoint={quote(str(folder))} input=SCANS output=predictions")
    return result
