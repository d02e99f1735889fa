"""Build an evaluation and its metrics from settings: match the files, name the classes."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from inspect import signature
from itertools import count
from pathlib import Path
from typing import Annotated, Any

from unet3d.config.compose import ComposedConfig
from unet3d.config.fields import (
    ANNOTATED,
    NAMES,
    PATHS,
    REGIONS,
    SKIP,
    OptionType,
    integer,
    mapping_of,
    number,
    one_or_list_of,
    read_settings,
    word_or,
)
from unet3d.config.instantiate import Factory
from unet3d.data.annotated import read_annotations
from unet3d.data.formats.hdf5 import split_array
from unet3d.data.formats.volumes import is_volume, list_files_by_name, split_suffix
from unet3d.data.layouts.dataset_json import LabelNames, find_label_names
from unet3d.data.layouts.pairs import compile_pattern
from unet3d.data.layouts.splits import read_groups
from unet3d.errors import UsageError
from unet3d.evaluation.evaluate import CasePair, Evaluation
from unet3d.files import TRAINING_FILES, find_run_checkpoint
from unet3d.metric.scores import SCORES, ClassMetric, LogitMetric
from unet3d.text import join_first

CLASSES = OptionType(
    "unique names, background first, as in classes=[background,liver]",
    lambda v: NAMES.accepts(v) and 1 < len(v) == len(set(NAMES.convert(v))),
    NAMES.convert,
)
LABELS = one_or_list_of(integer(), "an int, a list of ints, or null")
DISTANCES = mapping_of(number(">= 0"), "a distance of each class")
TOLERANCE = OptionType(
    "a distance in mm, or one of each class, 0 or more",
    lambda value: DISTANCES.accepts(value) or number(">= 0").accepts(value),
    lambda value: DISTANCES.convert(value) if isinstance(value, dict) else float(value),
)


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """What to compare, and which classes to score."""

    predictions: tuple[Path, ...]
    references: Path
    skip_missing_predictions: Annotated[bool, SKIP, "missing_predictions"]
    checkpoints: Annotated[tuple[Path, ...], word_or(None, PATHS, ()), "checkpoint"]
    output: Path | None  # None: no files are written
    images: Path | None
    classes: Annotated[tuple[str, ...] | None, CLASSES]  # names of the labels 0, 1, 2, ...
    regions: Annotated[Mapping[str, tuple[int, ...]] | None, REGIONS]
    annotated: Annotated[Any | None, ANNOTATED]  # None: all classes
    group_by: str | None  # pattern of case names, or a file; None: cases are independent
    ignore_labels: Annotated[tuple[int, ...] | None, LABELS, "ignore_label"]  # None: dataset.json's
    tolerance_mm: Annotated[float | Mapping[str, float], TOLERANCE]
    metrics: Mapping[str, Factory]  # by name
    draw_worst: Annotated[int, integer(">= 0")]
    workers: Annotated[int, integer(">= 1")]
    command: str  # the command line that asks for this

    def __post_init__(self):
        output, images = self.output, self.images
        if output is not None and any((output / name).exists() for name in TRAINING_FILES):
            raise UsageError(
                f"output: {output} holds a training run, whose report.html would be replaced: set "
                f"another folder, as in output={output / 'scores'}"
            )
        if images is not None and not images.exists():
            raise UsageError(f"images: {images} is neither a file nor a folder")


def read_config(composed: ComposedConfig) -> EvaluationConfig:
    """Read the config of `unet3d evaluate`."""
    command = composed.composition.format_command()
    return read_settings(EvaluationConfig, composed.config, command=command)


def build_evaluation(settings: EvaluationConfig) -> Evaluation:
    """Match the files and resolve the classes."""
    pairs, without_reference = match_files(settings.predictions, settings.references)
    references = [pair.name for pair in pairs]
    if settings.skip_missing_predictions:
        pairs = [pair for pair in pairs if pair.prediction]
    trained, *others = [load_run(path)["unet3d"] for path in settings.checkpoints] or [{}]
    for path, other in zip(settings.checkpoints[1:], others, strict=True):
        if describe_labels(other) != describe_labels(trained):
            raise UsageError(
                f"checkpoint: {path} was trained with other classes, regions, label values or "
                f"ignored labels than {settings.checkpoints[0]}: evaluate their predictions apart"
            )
    names, groups, roles = resolve_classes(settings, trained), None, None
    patterns = list_patterns(trained)
    cases = {pair.name: find_case_name(pair.name, patterns) for pair in pairs}
    if settings.annotated is not None:
        if names is None:
            raise UsageError("annotated needs classes= or regions= to name them")
        annotations = read_annotations("annotated", settings.annotated, list(names.classes))
        for finding in annotations.find_unmatched_patterns(references):
            raise UsageError(finding.message)
        find = annotations.find_unannotated
        pairs = [replace(pair, unknown=frozenset(find(pair.name))) for pair in pairs]
    elif names is not None:
        finders = [make_label_finder(run) for run in (trained, *others)]
        for n, pair in enumerate(pairs):  # whatever the classes are called here
            hidden = {label for find in finders for label in find(pair.name)}
            unknown = frozenset(c for c, own in names.classes.items() if hidden & {*own})
            pairs[n] = replace(pair, unknown=unknown)
    if (group_by := settings.group_by) is not None:
        groups = read_groups(group_by, list(cases), "group_by")
    elif group_by := trained.get("config", {}).get("data", {}).get("group_by"):
        try:
            found = read_groups(group_by, list(cases.values()), partial=True)
        except UsageError as error:
            raise UsageError(
                f"{error}: it says which cases of the run belong together; name it as group_by=, "
                "or set group_by='(.+)' if every case is a patient"
            ) from None
        if any(found[case] != case for case in cases.values()):
            groups = {name: found[case] for name, case in cases.items()}
    if settings.checkpoints:
        files = {pair.name: pair.prediction[0] for pair in pairs if pair.prediction}
        roles = group_cases_by_use(settings.checkpoints, cases, files, group_by)
    return Evaluation(
        pairs=pairs,
        predictions=", ".join(map(str, settings.predictions)),
        references=str(settings.references),
        without_reference=without_reference,
        output=settings.output,
        images=settings.images,
        draw_worst=settings.draw_worst,
        workers=settings.workers,
        names=names,
        ignore_labels=resolve_ignore_labels(settings, names),
        tolerance_mm=resolve_tolerance(settings.tolerance_mm, names),
        metrics=build_class_metrics(settings),
        groups=groups,
        roles=roles,
        command=settings.command,
    )


def describe_labels(trained: Mapping[str, Any]) -> list[Any]:
    """Return what a run says of labels, for comparison."""
    used = trained.get("preprocessing", {})
    said = trained.get("classes"), trained.get("regions")
    return [value or None for value in (*said, *map(used.get, ("label_values", "ignore_labels")))]


def make_label_finder(trained: Mapping[str, Any]) -> Callable[[str], list[int]]:
    """Return name of a volume -> labels that it does not annotate, as a run says."""
    if (recorded := trained.get("config", {}).get("data", {}).get("annotated")) is None:
        return lambda name: []
    annotations = read_annotations("annotated", recorded, trained["classes"][1:])
    values = trained.get("preprocessing", {}).get("label_values")
    labels = dict(zip(trained["classes"], values or count(), strict=False))
    find, patterns = annotations.find_unannotated, list_patterns(trained)
    return lambda name: [labels[c] for c in find(find_case_name(name, patterns))]


def list_patterns(trained: Mapping[str, Any]) -> list[str]:
    """Return the patterns of file names, endings aside, in which a run's `*` is the case."""
    data = trained.get("config", {}).get("data", {})
    images = data.get("images") or ()
    patterns = [images] if isinstance(images, str) else images
    names = (split_suffix(Path(p))[0] for p in (*patterns, data.get("labels")) if p)
    return [name for name in names if "*" in name]


def find_case_name(name: str, patterns: Sequence[str]) -> str:
    """Return the case of a volume that is named by its whole file, as `predict` does.

    >>> find_case_name("sub-03_T1w", ["sub-*_T1w"]), find_case_name("other", ["sub-*_T1w"])
    ('03', 'other')
    """
    for pattern in patterns:
        if match := compile_pattern(pattern).fullmatch(name):
            return match["name"]
    return name


def match_files(predictions: Sequence[Path], references: Path) -> tuple[list[CasePair], list[str]]:
    """Match files by name, endings aside; also return the predictions without a reference."""
    for key, paths in {"predictions": predictions, "references": [references]}.items():
        for path in paths:
            if not split_array(path)[0].exists():
                raise UsageError(f"{key}: {path} is neither a file nor a folder")
    # Volumes of some formats are folders.
    are_files = {path.is_file() or is_volume(path) for path in (references, *predictions)}
    if len(are_files) > 1:
        raise UsageError("predictions and references must be folders, or two files")
    if True in are_files:
        name = split_suffix(references)[0]
        return [CasePair(name=name, prediction=predictions, reference=[references])], []
    predicted: dict[str, list[Path]] = {}
    for folder in predictions:
        for name, files in list_files_by_name(folder).items():
            predicted.setdefault(name, []).extend(files)
    expected = list_files_by_name(references)
    if not predicted.keys() & expected.keys():
        folders = ", ".join(map(str, predictions))
        ours, theirs = (join_first(sorted(names), 2) or "none" for names in (predicted, expected))
        raise UsageError(
            f"no volume in {folders} ({ours}) has the name of one in {references} ({theirs})"
        )
    pairs = [
        CasePair(name=name, prediction=predicted.get(name, []), reference=files)
        for name, files in sorted(expected.items())
    ]
    return pairs, sorted(predicted.keys() - expected.keys())


def resolve_classes(settings: EvaluationConfig, trained: Mapping[str, Any]) -> LabelNames | None:
    """Return the classes of the settings, a dataset.json or a checkpoint; None: every label."""
    references, listed = settings.references, settings.classes
    folder = references if references.is_dir() else references.absolute().parent
    if listed is None:
        names = find_label_names(folder)
    else:
        names = name_labels(listed)
        with suppress(UsageError):  # classes= may correct a wrong dataset.json
            ignored = getattr(find_label_names(folder), "ignore_labels", ())
            unknown = (label for label in ignored if label not in range(len(listed)))
            names = replace(names, ignore_labels=tuple(unknown))
    if trained:
        known, regions = tuple(map(str, trained.get("classes", ()))), trained.get("regions")
        used = trained.get("preprocessing", {})
        values = used.get("label_values")
        if listed is not None and {*known} == {*listed} and known != listed:
            raise UsageError(f"classes: the checkpoint's order is {join_first(known, 20)}")
        if values is not None and listed is not None and len(listed) == len(values):
            names = name_labels(listed, values=values)
        elif (values is not None or regions or names is None) and listed is None:
            names = name_labels(known, regions, values=values)
        if names is not None:
            kept = {} if listed is None else names.known_labels or ()  # classes= come first
            names = names.ignore(used.get("ignore_labels", ()), kept)
    if settings.regions is None:
        return names
    return replace(names or LabelNames(classes={}, known_labels=None), classes=settings.regions)


def name_labels(
    names: Sequence[str],
    regions: Mapping[str, Sequence[int]] | None = None,
    ignore_labels: Sequence[int] = (),
    values: Sequence[int] | None = None,
) -> LabelNames:
    """Return the classes of labels with these names, background first, or regions instead."""
    values = values or range(len(names))
    classes = {name: [label] for label, name in zip(values, names, strict=True) if label > 0}
    return LabelNames(
        classes={name: tuple(labels) for name, labels in (regions or classes).items()},
        known_labels=frozenset(values),
        ignore_labels=tuple(ignore_labels),
    )


def load_run(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint, or of the best or else last one of a run folder."""
    from unet3d.checkpoint_file import load_checkpoint  # torch takes a second

    return load_checkpoint(find_run_checkpoint(path) or path)


def resolve_ignore_labels(settings: EvaluationConfig, names: LabelNames | None) -> tuple[int, ...]:
    """Return the labels to ignore, of the settings or else of a dataset.json."""
    if settings.ignore_labels is None:
        return () if names is None else names.ignore_labels
    for name, labels in ({} if names is None else names.classes).items():
        if ignored := set(labels).intersection(settings.ignore_labels):
            raise UsageError(
                f"ignore_label={min(ignored)} is a label of the class {name}: ignore another "
                "label, or leave the class out of classes= or regions="
            )
    return settings.ignore_labels


def build_metrics(
    factories: Mapping[str, Factory], regions: Mapping[str, Sequence[int]] | None
) -> list[ClassMetric | LogitMetric]:
    """Build each metric, with the regions if its class takes them."""
    built: list[ClassMetric | LogitMetric] = []
    for name, factory in factories.items():
        takes_regions = "regions" in signature(factory.target).parameters
        metric = factory(regions=regions) if takes_regions else factory()
        if not isinstance(metric, ClassMetric | LogitMetric):
            raise UsageError(
                f"metrics.{name}: {type(metric).__name__} is not a metric: it needs `scores` and a "
                "call with two masks, or start, update and finish"
            )
        built.append(metric)
    names = [*SCORES, *(score for m in select_class_metrics(built) for score in m.scores)]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UsageError(f"metrics: two of them have the score {min(twice)}")
    return built


def select_class_metrics(metrics: Sequence[ClassMetric | LogitMetric]) -> list[ClassMetric]:
    """Return those that an evaluation of files can compute."""
    return [metric for metric in metrics if isinstance(metric, ClassMetric)]


def build_class_metrics(settings: EvaluationConfig) -> list[ClassMetric]:
    """Build the metrics; refuse those that need more than labels."""
    metrics = build_metrics(settings.metrics, settings.regions)
    for name, metric in zip(settings.metrics, metrics, strict=True):
        if not isinstance(metric, ClassMetric):
            raise UsageError(
                f"metrics.{name} needs the probabilities of a network, which files of labels do "
                "not have: it is a metric of validation"
            )
    return select_class_metrics(metrics)


def resolve_tolerance(
    tolerance: float | Mapping[str, float], names: LabelNames | None
) -> float | Mapping[str, float]:
    """Return one distance in mm for all classes, or one for each."""
    if isinstance(tolerance, Mapping):
        if names is None:
            raise UsageError("tolerance_mm for each class needs classes= or regions= to name them")
        if tolerance.keys() != names.classes.keys():
            raise UsageError(
                f"tolerance_mm must name every class once: {join_first([*names.classes])}; "
                f"it names {join_first([*tolerance])}"
            )
    return tolerance


def group_cases_by_use(
    checkpoints: Sequence[Path],
    names: Mapping[str, str],
    files: Mapping[str, Path] | None = None,
    group_by: str | None = None,
) -> dict[str, list[str]]:
    """Return the volumes that trained a checkpoint, that chose it, and that did neither, by name.

    `names` has the name that each would have as a case of the run. Of a case whose file of labels
    is in the folder of a run, this run alone counts. Cases of a group are alike: another scan of a
    patient is not held out, nor a volume that `unet3d cut` made cases of, NAME_000, NAME_001, ...
    """
    listed = [list_cases_of_run(path) for path in checkpoints]
    known = {name for cases in listed for part in cases.values() for name in part}
    groups = {name: name for name in {*names.values(), *known}}
    if group_by is not None:
        groups = read_groups(group_by, list(groups), partial=True)
    used = [{part: {groups[c] for c in found} for part, found in cases.items()} for cases in listed]
    runs = list(zip(map(find_run_folder, checkpoints), used, strict=True))
    roles: dict[str, list[str]] = {"training": [], "validation": [], "held out": []}
    for name, case in names.items():
        file = (files or {}).get(name, Path("/"))
        own = [parts for folder, parts in runs if folder in file.resolve().parents] or used
        alike = {case, split_suffix(file)[0]}  # files may differ in their names
        alike |= {c for c in known if c[:-4] in alike - known and re.fullmatch(r"_\d{3}", c[-4:])}
        same = set(map(groups.get, alike))
        uses = (use for use in roles if any(same & parts.get(use, set()) for parts in own))
        roles[next(uses, "held out")].append(name)
    return roles


def find_run_folder(checkpoint: Path) -> Path:
    """Return the folder of a run, given that or a checkpoint of it."""
    return (checkpoint if checkpoint.is_dir() else checkpoint.parent.parent).resolve()


def list_cases_of_run(path: Path, later: Collection[Path] = ()) -> Mapping[str, set[str]]:
    """Return the cases of a checkpoint's run, and of those that it started from, by their use.

    `later` are the folders of runs that started from this one.
    """
    content, runs = load_run(path), {*later, find_run_folder(path)}
    try:
        listed = content["callbacks"]["ResumeState"]["fixed_settings"]["cases"]
    except KeyError as error:
        raise UsageError(
            f"checkpoint={path}: it does not list the cases of its run: leave out checkpoint=, "
            "then nothing is said about held-out cases"
        ) from error
    cases = {part: set(listed[part]) for part in ("training", "validation")}
    source = content.get("unet3d", {}).get("config", {}).get("init_from")
    # A folder may have been replaced by the run that started from it.
    if source is not None and Path(source).exists() and find_run_folder(Path(source)) not in runs:
        with suppress(UsageError):  # weights of another project
            for part, names in list_cases_of_run(Path(source), runs).items():
                cases[part] |= names
    return cases
