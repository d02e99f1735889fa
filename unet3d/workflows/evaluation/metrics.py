"""Build the metrics of the config group."""

from collections.abc import Mapping, Sequence
from inspect import signature

from unet3d.config.instantiate import Factory
from unet3d.errors import UsageError
from unet3d.metric.case_scores import LogitMetric
from unet3d.metric.scores import SCORES, ClassMetric


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
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise UsageError(f"metrics: two of them have the score {min(twice)}")
    return built


def select_class_metrics(metrics: Sequence[ClassMetric | LogitMetric]) -> list[ClassMetric]:
    """Return those that an evaluation of files can compute."""
    return [metric for metric in metrics if isinstance(metric, ClassMetric)]
