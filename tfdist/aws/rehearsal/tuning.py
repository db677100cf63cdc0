"""A search for hyperparameters on this machine: its two ends, and which is the better."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfdist.aws.rehearsal.agent import Storage
from tfdist.aws.rehearsal.training import Runner, run_training
from tfdist.errors import LaunchError


def run_tuning(
    name: str,
    request: dict[str, Any],
    folder: Path,
    storage: Storage,
    environ: Mapping[str, str],
    run: Runner,
) -> tuple[dict[str, Any], dict[str, float]]:
    """Carries out two trainings of a search: all ranges at their beginning, and at their end.

    Each gets what AWS's service and its toolkit add to the hyperparameters of a search.

    Returns:
        The properties of the search, as far as pipelines use them, and the metrics of the best.

    Raises:
        LaunchError: a training failed, or did not print the metric.
    """
    search, one = request["HyperParameterTuningJobConfig"], dict(request["TrainingJobDefinition"])
    fixed = one.pop("StaticHyperParameters")
    objective = search["HyperParameterTuningJobObjective"]
    metric, found = objective["MetricName"], {}
    for number, tried in enumerate(_ends(search["ParameterRanges"]), 1):
        job_name = f"{name}-{number:03}"
        added = {"_tuning_objective_metric": metric, "model_dir": f"None/{job_name}/model"}
        trial = {**one, "HyperParameters": {**fixed, **tried, **added}}
        place = folder / f"{number:03}"
        _, metrics = run_training(job_name, trial, place, storage, environ, run)
        if metric not in metrics:
            raise LaunchError(
                "a training of a search must print its metric", received=f"no {metric}"
            )
        found[job_name] = (metrics, tried)
    sign = 1 if objective["Type"] == "Maximize" else -1
    best = max(found, key=lambda each: sign * found[each][0][metric])
    metrics, tried = found[best]
    properties = {"BestTrainingJob": {"TrainingJobName": best, "TunedHyperParameters": tried}}
    return properties, metrics


def _ends(ranges: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, str]]:
    rows = [row for kind in ranges.values() for row in kind]
    keys = (("MinValue", 0), ("MaxValue", -1))
    return [
        {row["Name"]: row["Values"][at] if "Values" in row else row[key] for row in rows}
        for key, at in keys
    ]
