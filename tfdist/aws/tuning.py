"""The request for a search of hyperparameters, made from that of one training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tfdist.aws import training
from tfdist.aws.config import Config
from tfdist.aws.container import pipe_channel
from tfdist.aws.sections import SCALES, RangeConfig, TuningConfig, among
from tfdist.errors import unknown_choice
from tfdist.runs.settings import SEARCHED

# Parts of a training that a search has at another place, or not at all. Its trainings would share
# one folder of checkpoints, and go on from each other's.
_LEFT_OUT = ("HyperParameters", "Tags", "ProfilerConfig", "CheckpointConfig")
_OF_CHECKPOINTS = ("checkpoint-dir", "checkpoint-every", "max-run-s")
# What train.py can be searched for.
_NUMBERS = ("lr", "warmup_epochs")
_OTHERS = ("epochs", "lr_scaling")
_ALGORITHM = ("TrainingImage", "TrainingInputMode", "MetricDefinitions")


def request(config: Config, wanted: TuningConfig, one: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the CreateHyperParameterTuningJob request, but for the job's name.

    Args:
        one: the request for one training, by ``training.request``.

    Raises:
        OptionError: a metric that no training has, or a range of what is none of its settings.
    """
    algorithm = one["AlgorithmSpecification"]
    metrics = [metric["Name"] for metric in algorithm["MetricDefinitions"]]
    channels = {channel["ChannelName"] for channel in one["InputDataConfig"]}
    if channels.isdisjoint(("validation", pipe_channel("validation", 0))):
        metrics = [name for name in metrics if not name.startswith("validation:")]
    if wanted.metric not in metrics:
        raise unknown_choice("tuning.metric", wanted.metric, metrics)
    ranges = dict(wanted.ranges)
    if config.training.entry_point == "train.py":
        if "class_weight" in ranges:
            each = ranges["class_weight"]
            weights = [training.class_weight(config, value) for value in each.values]
            ranges["class_weight"] = replace(each, values=weights)
        _check(config, ranges)
        ranges = {_sent(name): each for name, each in ranges.items()}
    values = one["HyperParameters"]
    left_out = {*ranges, *(_OF_CHECKPOINTS if config.training.entry_point == "train.py" else ())}
    return {
        "HyperParameterTuningJobConfig": {
            "Strategy": "Bayesian",
            "HyperParameterTuningJobObjective": {
                "Type": "Maximize" if wanted.larger_is_better else "Minimize",
                "MetricName": wanted.metric,
            },
            "ResourceLimits": {
                "MaxNumberOfTrainingJobs": wanted.max_jobs,
                "MaxParallelTrainingJobs": wanted.parallel_jobs,
            },
            "ParameterRanges": _ranges(ranges),
            "TrainingJobEarlyStoppingType": "Auto" if wanted.early_stopping else "Off",
        },
        "TrainingJobDefinition": {
            **{key: value for key, value in one.items() if key not in _LEFT_OUT},
            "AlgorithmSpecification": {key: algorithm[key] for key in _ALGORITHM},
            "StaticHyperParameters": {
                key: value for key, value in values.items() if key not in left_out
            },
        },
        **training.tags(config.security),
    }


def _sent(name: str) -> str:
    return name.replace("_", "-")


def _check(config: Config, ranges: Mapping[str, RangeConfig]) -> None:
    """Checks the ends of each range as train.py will."""
    values = training.hyperparameters(config)
    for name, each in ranges.items():
        among(
            "setting in tuning.ranges", name, tuple(dict.fromkeys((*_NUMBERS, *_OTHERS, *SEARCHED)))
        )
        for end in each.ends:
            training.check_hyperparameters(values | {_sent(name): end})


def _ranges(ranges: Mapping[str, RangeConfig]) -> dict[str, list[dict[str, Any]]]:
    made: dict[str, list[dict[str, Any]]] = {}
    for name, each in ranges.items():
        if each.values:
            # The toolkit reads each of them as JSON.
            row = {"Name": name, "Values": [json.dumps(value) for value in each.values]}
            made.setdefault("CategoricalParameterRanges", []).append(row)
            continue
        whole = all(isinstance(end, int) for end in each.ends) and name not in map(_sent, _NUMBERS)
        row = {"Name": name, "MinValue": str(each.min), "MaxValue": str(each.max)}
        row["ScalingType"] = SCALES[each.scale]
        kind = "IntegerParameterRanges" if whole else "ContinuousParameterRanges"
        made.setdefault(kind, []).append(row)
    return made
