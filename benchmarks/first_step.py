"""What the first step of a deep model takes, which is nearly all tracing.

Processor seconds of the process that traces, since others' work does not count in them; of the
first worker where there are several. One step of 8 rows of 32x32x3, programs in turn.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

from benchmarks.pairs import WORKERS, alone, command, environ, events
from tfdist.launch import mpi, tf_cluster
from tfdist.launch.supervisor import Job
from tfdist.strategies import REGISTRY

_MODEL, _SMALL = "ResNet50V2", "MobileNetV3Small"
# On mirrored alone: deeper, of layers that scale their inputs, and of many short ways.
_OTHERS = ("ResNet152V2", "EfficientNetB0", "DenseNet121")
_DATA_PARALLEL = ("single", "mirrored", "multi_worker", "horovod", "parameter_server")
# At most 1.5 times what plain tf.distribute takes, and twice what Keras does.
_OF_DISTRIBUTE, _OF_KERAS = 1 / 1.5, 1 / 2
_AGAINST = {
    "mirrored": ("MirroredStrategy", _OF_DISTRIBUTE),
    "multi_worker": ("MultiWorkerMirroredStrategy", _OF_DISTRIBUTE),
}


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Returns a row for each strategy and model: processor seconds by hand and with tfdist."""
    if quick:
        return [_row(strategy, _SMALL, rounds=1) for strategy in ("single", "mirrored")]
    strategies = (*_DATA_PARALLEL, "mesh", "pipeline")
    rows = [_row(strategy, _MODEL, rounds=2) for strategy in strategies]
    return rows + [_row("mirrored", model, rounds=1) for model in _OTHERS]


def _row(strategy: str, model: str, rounds: int) -> dict[str, Any]:
    by_hand, target = _AGAINST.get(strategy, ("keras", _OF_KERAS))
    pairs = [(_cpu_s(by_hand, model), _cpu_s(strategy, model)) for _ in range(rounds)]
    ratios = [baseline / ours for baseline, ours in pairs]
    baseline, ours = (statistics.median(side) for side in zip(*pairs, strict=True))
    return {
        "work": f"first step of {model}, {strategy}, CPU s",
        "baseline": round(baseline, 1),
        "ours": round(ours, 1),
        "ratio": round(statistics.median(ratios), 3),
        "target": round(target, 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


def _cpu_s(name: str, model: str) -> float:
    return events(_job(name, model), "first_step")[0]["cpu_s"]


def _job(name: str, model: str) -> Job:
    options = dict(REGISTRY[name].example) if name in REGISTRY else {}
    arguments = (name, model, json.dumps(options))
    if name in ("multi_worker", "MultiWorkerMirroredStrategy"):
        own = command("first_step", *arguments)
        return tf_cluster.job(own, workers=WORKERS, environ=environ())
    if name == "parameter_server":
        own = command("first_step", *arguments)
        return tf_cluster.job(own, workers=1, ps=1, environ=environ())
    if name == "horovod":
        return mpi.job(command("first_step", *arguments), workers=WORKERS, environ=environ())
    return alone("first_step", *arguments)
