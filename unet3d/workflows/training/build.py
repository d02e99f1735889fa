"""From a config to a run, in the order the data flows."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf, open_dict
from torch.utils.data import DataLoader

from unet3d.config.compose import ComposedConfig, list_config_groups
from unet3d.config.instantiate import (
    build_network,
    build_preprocessing,
    build_source,
    count_parameters,
    get_region_labels,
    instantiate,
    make_optimizer_factory,
    parse_fold,
    parse_regions,
    parse_seed,
    read_case_groups,
    resolve_dataset_facts,
    summarize_error,
    to_plain_dict,
    with_output_channels,
)
from unet3d.data.findings import Finding
from unet3d.data.layouts.groups import describe_groups
from unet3d.data.layouts.splits import split_cases
from unet3d.data.loading.datasets import get_classes
from unet3d.data.loading.loaders import TrainLoader, build_loaders
from unet3d.data.loading.worker_errors import explain_worker_error
from unet3d.data.preprocessing.cache import CachedVolume
from unet3d.data.preprocessing.statistics import summarize
from unet3d.errors import RunError, UsageError
from unet3d.inference.sliding_window import SlidingWindow
from unet3d.inference.write_labels import RegionsToLabels, argmax_labels
from unet3d.lit.callbacks.checkpoints import BestCheckpoint, LastCheckpoint, remove_leftovers
from unet3d.lit.callbacks.dashboard import Dashboard
from unet3d.lit.callbacks.images import CaseImages
from unet3d.lit.callbacks.preemption import Preemption, SignalListener
from unet3d.lit.callbacks.prefetch import Prefetch
from unet3d.lit.callbacks.progress import ProgressBar, ProgressLines
from unet3d.lit.callbacks.resume_state import ResumeState, get_logged_steps, purge_events_after
from unet3d.lit.callbacks.step_memory import StepMemory
from unet3d.lit.callbacks.step_timing import StepSpeed
from unet3d.lit.callbacks.stopping import StoppingLimits, parse_max_time
from unet3d.lit.callbacks.training_health import TrainingHealth
from unet3d.lit.distributed import Ddp, RankEnvironment, rank_zero_first
from unet3d.lit.fault_tolerant_io import FaultTolerantCheckpointIO
from unet3d.lit.lr_schedule import LRSchedule
from unet3d.lit.module import SegmentationModule
from unet3d.lit.precision import TrueHalfPrecision
from unet3d.lit.resume import (
    extract_weights,
    is_finished,
    load_checkpoint,
    load_pretrained,
    resolve_resume,
)
from unet3d.lit.warning_filters import silence_lightning
from unet3d.machine.device import Precision, resolve_device, resolve_precision
from unet3d.machine.distributed_env import Ranks
from unet3d.memory.estimate import MemoryEstimate
from unet3d.memory.peak import PeakMeter
from unet3d.metric.dice import Dice
from unet3d.metric.validation_hd95 import ValidationHD95
from unet3d.report.diagnosis import absent_classes
from unet3d.report.run_comparison import HIDDEN_KEYS
from unet3d.report.run_report import collect_versions
from unet3d.units import format_bytes
from unet3d.workflows.dataset_check import UsableCases
from unet3d.workflows.memory.estimate import UntraceableError, make_figure_title, trace_step
from unet3d.workflows.memory.oom_advice import check_memory, format_oom_report
from unet3d.workflows.memory.strategies import resolve_strategy
from unet3d.workflows.training.output_bias import initialize_output_bias
from unet3d.workflows.training.preflight import enforce_requirements, find_problems
from unet3d.workflows.training.remedies import suggest_remedies

OPTIONS = ("model", "pool", "checkpointing")
"""Groups whose options are told of every run."""

DEFAULT_EPOCHS = 20
"""The limit of a run whose config sets none of trainer.max_steps, max_epochs and max_time."""


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """Everything that a training needs, ready to start."""

    config: dict[str, Any]  # resolved, plain values
    folder: Path
    precision: Precision
    class_names: tuple[str, ...]
    training: list[CachedVolume]
    validation: list[CachedVolume]
    groups: dict[str, str] | None  # of each case, as data.group_by has them
    left_out: list[Finding]
    task: SegmentationModule
    train_loader: TrainLoader
    val_loader: DataLoader | None
    ranks: Ranks
    trainer: pl.Trainer
    limits: StoppingLimits
    position: ResumeState
    memory: StepMemory
    speed: StepSpeed
    dashboard: Dashboard
    health: TrainingHealth
    request: ComposedConfig
    prediction: MemoryEstimate | None
    foreseen: list[str]  # what to say of the prediction

    def out_of_memory(self, error: torch.OutOfMemoryError) -> str:
        """What to tell when memory ran out."""
        validating = self.trainer.validating or self.trainer.sanity_checking
        return format_oom_report(
            error,
            request=self.request,
            model=self.task.model,
            phase="validation" if validating else (self.memory.phase or "training step"),
            device=self.trainer.strategy.root_device,
            prediction=self.prediction,
            folder=self.folder,
        )

    def format_resume_overrides(self) -> str:
        """What to add to the command that began this run."""
        return f"resume=auto hydra.run.dir={self.folder}"

    def list_unwritten_checkpoints(self) -> list[str]:
        """Which checkpoints could not be written, and why."""
        kept = self.trainer.strategy.checkpoint_io
        return list(kept.missing.values()) if isinstance(kept, FaultTolerantCheckpointIO) else []

    def worker_fault(self, error: Exception) -> RunError | None:
        """What became of a loader's worker, if that is what the error is about."""
        loaders: list[Any] = [self.train_loader, self.val_loader]
        return explain_worker_error(
            error,
            [loader.dataset.making for loader in loaders if loader is not None],
            num_workers=self.train_loader.num_workers,
            kills_before=self.train_loader.oom_kills,
        )

    def finished(self, checkpoint: Path) -> bool:
        """Whether a checkpoint is at the end of this run already."""
        epochs = self.trainer.max_epochs or -1
        return is_finished(load_checkpoint(checkpoint), self.limits, self.position, epochs)


def build_training(
    request: ComposedConfig,
    folder: Path,
    signals: SignalListener | None = None,
    ranks: Ranks | None = None,
) -> TrainingRun:
    """Check the config and make everything it names."""
    cfg = request.config
    device = resolve_device(str(cfg.trainer.accelerator))
    used = resolve_precision(cfg.precision, device)

    augment = instantiate(cfg.augmentation)
    source = build_source(cfg)
    class_names, channels = resolve_dataset_facts(cfg, source.describe())
    splits = None if cfg.data.splits is None else Path(cfg.data.splits)
    cases = source.cases()  # with faulty ones, so that folds stay
    groups = read_case_groups(cfg, cases)
    parts = split_cases(cases, parse_fold(cfg), splits, groups)
    asked = request.choices.get("checkpointing")
    request = resolve_strategy(request, used, cuda=device == "cuda")
    cfg = request.config
    ranks = ranks or Ranks()
    found = find_problems(
        request,
        used,
        device=device,
        processes=ranks.per_node,
        folder=folder,
        channels=len(channels),
        augment=augment,
    )
    lacking = enforce_requirements(cfg, found)
    usable = UsableCases(cfg, source, channels)
    preparation = usable.run_excluding_bad(lambda cases: build_preprocessing(cfg, cases, channels))
    with rank_zero_first(ranks):
        training, validation = usable.prepare(parts, preparation)

    pl.seed_everything(parse_seed(cfg), verbose=False)
    set_tf32(parse_bool(cfg, "tf32"))
    model = build_network(request)
    instantiate(cfg.checkpointing).apply(model)
    if parse_bool(cfg, "compile"):
        model.compile()  # in place: names and checkpoints stay

    config, regions = to_plain_dict(cfg), parse_regions(cfg)
    decide = argmax_labels if regions is None else RegionsToLabels(get_region_labels(regions))
    infer = SlidingWindow(config["data"]["patch_size"], decide=decide, **config["inference"])
    metric, distances = Dice(class_names, regions), None
    spacing_mm = {volume.name: volume.spacing_mm(preparation) for volume in validation}
    if parse_bool(cfg, "validation.hd95"):
        distances = ValidationHD95(metric.judged, spacing_mm)
    task = SegmentationModule(
        model=model,
        loss=instantiate(cfg.loss),
        metric=metric,
        distances=distances,
        infer=infer,
        optimizer=make_optimizer_factory(cfg, used),
        card={
            "config": config | {"model": to_plain_dict(with_output_channels(cfg))["model"]},
            "classes": list(class_names),
            "channels": list(channels),
            "regions": None if regions is None else {k: list(v) for k, v in regions.items()},
            "preparation": preparation.to_dict(),
            "training": summarize([volume.statistics for volume in training]).to_dict(),
        },
        max_skipped_steps=cfg.max_skipped_steps,
    )
    train_loader, val_loader = build_loaders(
        training,
        validation,
        patch_size=config["data"]["patch_size"],
        batch_size=cfg.data.batch_size,
        patches_per_case=cfg.data.patches_per_case,
        foreground_fraction=cfg.data.foreground_fraction,
        augment=augment,
        num_workers=cfg.data.num_workers,
        device=torch.device(device, ranks.local) if device == "cuda" else torch.device(device),
        seed=cfg.seed,
        rank=ranks.rank,
        ranks=ranks.world,
    )
    began = initialize_output_bias(model, request, train_loader)
    prediction, foreseen = estimate_run_memory(request, used, device, validation)
    foreseen += [*began, *lacking]
    if asked == "auto":
        foreseen.insert(0, f"checkpointing=auto: {request.choices['checkpointing']}")
    elif asked != request.choices.get("checkpointing"):
        foreseen.insert(0, f"checkpointing={asked}: this network has no fused blocks, using none")
    predicted = None if prediction is None else prediction.peak
    memory, speed = StepMemory(PeakMeter(), predicted), StepSpeed(cfg.data.num_workers)
    dashboard = Dashboard(config, select_hparams(request), prediction, make_figure_title(request))
    limits = build_limits(cfg)
    absent = absent_classes(metric.judged, get_classes(training), get_classes(validation))
    health = TrainingHealth(limits, suggest_remedies(config, DEFAULT_EPOCHS), absent)
    position = ResumeState(train_loader, limits, seed=cfg.seed)
    last = LastCheckpoint(folder / "checkpoints", every_seconds=parse_save_interval(cfg))
    callbacks = [
        LRSchedule(instantiate(cfg.scheduler), limits),
        memory,
        speed,
        *([Prefetch(train_loader)] if device == "cuda" else []),
        CaseImages(
            class_names=class_names, orientation=preparation.orientation, spacing_mm=spacing_mm
        ),
        dashboard,
        health,
        limits,
        position,
        *([BestCheckpoint(folder / "checkpoints")] if validation else []),
        last,
        *([] if signals is None else [Preemption(signals, last)]),
        ProgressBar(limits) if cfg.trainer.enable_progress_bar else ProgressLines(limits),
    ]
    return TrainingRun(
        config=config,
        folder=folder,
        precision=used,
        class_names=class_names,
        training=training,
        validation=validation,
        groups=groups,
        left_out=usable.left_out,
        task=task,
        train_loader=train_loader,
        val_loader=val_loader,
        ranks=ranks,
        trainer=build_trainer(cfg, device, used, callbacks, folder, ranks),
        limits=limits,
        position=position,
        memory=memory,
        speed=speed,
        dashboard=dashboard,
        health=health,
        request=request,
        prediction=prediction,
        foreseen=foreseen,
    )


def estimate_run_memory(
    request: ComposedConfig, used: Precision, device: str, validation: Sequence[CachedVolume]
) -> tuple[MemoryEstimate | None, list[str]]:
    """The predicted cost of a step, and what to say of it before the first one."""
    if not request.config.memory.estimate:
        return None, []
    cuda = device == "cuda"
    largest = max((v.shape for v in validation), key=prod, default=None)
    try:
        prediction = trace_step(request, used, cuda=cuda, volume=largest)
    except UntraceableError as reason:
        return None, [str(reason)]
    least, most = prediction.interval
    said = f"predicted: {format_bytes(least)} of tensors at the peak of a step"
    if cuda:
        said = f"predicted peak of a step: {format_bytes(least)} to {format_bytes(most)} allocated"
    return prediction, [said, *check_memory(prediction, request, torch.device(device))]


def select_hparams(request: ComposedConfig) -> dict[str, str | int | float]:
    """What tells runs apart: the main options, and what else the command line sets but for places.

    Few, since TensorBoard shows the first ones alone until more are ticked.
    """
    chosen = dict(request.choices)
    words = [word.lstrip("+~").partition("=")[0] for word in request.overrides]
    told: dict[str, Any] = {key: chosen[key] for key in OPTIONS if key in chosen}
    for key in ("precision", *sorted(words)):
        value = chosen[key] if key in chosen else OmegaConf.select(request.config, key)
        if key not in HIDDEN_KEYS and value is not None:
            told[key] = value if isinstance(value, int | float) else str(value)
    return told | {"precision": str(told["precision"])}


def build_trainer(
    cfg: DictConfig,
    device: str,
    used: Precision,
    callbacks: list[Any],
    folder: Path,
    ranks: Ranks,
) -> pl.Trainer:
    """Lightning's trainer, with limits that are checked here."""
    silence_lightning()
    node = cfg.trainer.copy()
    timeout = timedelta(seconds=node.timeout_seconds)
    with open_dict(node):
        del node.timeout_seconds, node.launch  # ours, not Lightning's
    node.devices = ranks.per_node
    for key in ("max_epochs", "accumulate_grad_batches", "check_val_every_n_epoch"):
        require_positive_int(f"trainer.{key}", node[key])
    if node.gradient_clip_val is not None and node.gradient_clip_val <= 0:
        raise UsageError(
            f"trainer.gradient_clip_val must be above 0 or null: {node.gradient_clip_val}"
        )
    if node.max_steps is None and node.max_epochs is None and node.max_time is None:
        node.max_epochs = DEFAULT_EPOCHS
    node.max_epochs = -1 if node.max_epochs is None else node.max_epochs
    node.max_steps, node.max_time = -1, None  # see Limits
    node.accelerator = device
    plugins: list[Any] = [FaultTolerantCheckpointIO()]
    choice: dict[str, Any] = {"precision": used.lightning}
    if used.used in ("16-true", "bf16-true"):
        plugins.append(TrueHalfPrecision(used.used))
        choice = {}
    if ranks.world > 1:
        plugins.append(RankEnvironment(ranks))
        strategy = Ddp(timeout=timeout, gradient_as_bucket_view=True)
        choice |= {"strategy": strategy, "num_nodes": ranks.nodes}
    else:
        node.sync_batchnorm = False
    logger = instantiate(cfg.logger, save_dir=folder)
    try:
        return instantiate(
            node,
            callbacks=callbacks,
            logger=logger,
            plugins=plugins,
            default_root_dir=folder,
            enable_model_summary=False,
            enable_checkpointing=False,  # there are callbacks for that
            use_distributed_sampler=False,
            **choice,
        )
    except MisconfigurationException as error:
        raise UsageError(f"trainer: {summarize_error(error)}") from error


def parse_bool(cfg: DictConfig, key: str) -> bool:
    """A key that is true or false."""
    value = OmegaConf.select(cfg, key)
    if not isinstance(value, bool):
        raise UsageError(f"{key} must be true or false, got {value!r}")
    return value


def set_tf32(tf32: bool) -> None:
    """Whether a GPU may round the factors of float32 products to TF32."""
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32


def build_limits(cfg: DictConfig) -> StoppingLimits:
    """Those that are not Lightning's."""
    require_positive_int("trainer.max_steps", cfg.trainer.max_steps)
    return StoppingLimits(
        max_steps=cfg.trainer.max_steps, max_seconds=parse_max_time(cfg.trainer.max_time)
    )


def parse_save_interval(cfg: DictConfig) -> float:
    """Two writings of last.ckpt."""
    if not isinstance(cfg.save_every_seconds, int | float) or cfg.save_every_seconds < 0:
        raise UsageError(f"save_every_seconds must be 0 or more, got {cfg.save_every_seconds!r}")
    return float(cfg.save_every_seconds)


def require_positive_int(name: str, value: Any) -> None:
    """Refuse what is neither null nor an int above 0."""
    if value is not None and (not isinstance(value, int) or value < 1):
        raise UsageError(f"{name} must be an int >= 1, got {value!r}")


def resolve_start(run: TrainingRun) -> tuple[Path | None, list[str]]:
    """The checkpoint to go on from, if any, and what to tell of resume= and init_from=."""
    resume, init = run.config["resume"], run.config["init_from"]
    if init is not None and resume not in (None, "auto"):
        raise UsageError(
            "resume= goes on with a run and init= begins a new one from its weights: give one"
        )
    if run.ranks.rank == 0:
        remove_leftovers(run.folder / "checkpoints")
    checkpoint, said = resolve_resume(resume, run.folder / "checkpoints")
    if checkpoint is not None:
        content = load_checkpoint(checkpoint)
        extract_weights(checkpoint, content)
        logged = get_logged_steps(run.position, content, checkpoint)
        purge_events_after(run.trainer, logged)
        return checkpoint, said
    purge_events_after(run.trainer, 0)
    if init is not None:
        return None, [load_pretrained(run.task.model, Path(init))]
    return None, []


def summarize_run(run: TrainingRun) -> str:
    """The first lines of a run: what is trained, on what, in which precision."""
    network = run.task.model
    training = describe_groups([volume.name for volume in run.training], run.groups)
    validation = describe_groups([volume.name for volume in run.validation], run.groups)
    asked = f", precision {run.precision.used}"
    if run.precision.asked != run.precision.used:
        asked += f" ({run.precision.asked} was asked for: {run.precision.why})"
    beside = ""
    if run.ranks.world > 1:
        batch = run.config["data"]["batch_size"] * run.ranks.world
        beside = f", one of {run.ranks.world} ranks that share batches of {batch}"
    return (
        f"{type(network).__name__}, {count_parameters(network):,} parameters{asked}, "
        f"on {run.trainer.strategy.root_device}{beside}\n"
        f"{training} to train on, {validation} to validate on; "
        f"classes {', '.join(run.class_names)}\n"
        + "".join(f"left out: {finding.message()}\n" for finding in run.left_out)
        + "".join(f"{line}\n" for line in (*run.foreseen, *run.health.absent))
        + f"run: {run.folder}"
    )


def build_report(run: TrainingRun, *, done: bool, fault: str | None = None) -> dict[str, Any]:
    """What report.json says."""
    device = run.trainer.strategy.root_device
    metrics = {k: float(v) for k, v in run.trainer.callback_metrics.items()}
    return {
        "finished": done,
        **({} if fault is None else {"fault": fault}),
        "folder": str(run.folder),
        "steps": run.trainer.global_step,
        "skipped_steps": run.task.finite.skipped,
        "parameters": count_parameters(run.task.model),
        "left_out": [finding.message() for finding in run.left_out],
        "warnings": run.health.warnings(done=done),
        "metrics": {k: v for k, v in metrics.items() if k.startswith(("val/", "train/"))},
        "memory": run.memory.summary(),
        "speed": run.speed.summary(),
        "precision": {"asked": run.precision.asked, "used": run.precision.used},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "versions": collect_versions(),
        "choices": {k: v for k, v in run.request.choices.items() if k in list_config_groups()},
        "config": run.config,
    }
