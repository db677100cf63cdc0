"""Rounds of federated averaging: tfdist against TFF by hand, as tuned and as in TFF's tutorial.

All run in turn in one process, each on a worker of its own. Flower's simulation of the same work
runs in an environment of its own, made below .cache.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import apart
from tfdist.strategies.federated.engine import import_tff
from tfdist.strategies.federated.sampling import Sampler

_TARGETS_TUNED = {"10 clients": 1.0, "50 clients": 2.0}
_TARGET_TUTORIAL, _TARGET_FLOWER = 2.5, 1.0
_RECORDS, _RATE = 32, 0.02
_TIMEOUT_S = 1200
_FLOWER = ("flwr[simulation]==1.8.0", "tensorflow-cpu==2.14.1")
_FLOWER_ROUNDS = 4


def run(quick: bool = False) -> list[dict]:
    """Returns rows: baseline and ours in rounds/s; ratio, target."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        subprocess.run(
            [sys.executable, "-m", "benchmarks.federated", str(out), json.dumps(quick)],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # TFF's workers may outlive this process and hold a pipe.
            timeout=_TIMEOUT_S,
            check=True,
        )
        return json.loads(out.read_text())


@dataclass(frozen=True, kw_only=True)
class Work:
    """Clients and what a round of them trains.

    Attributes:
        records: x and y of each client.
        cohort: clients of a round, drawn anew in each.
    """

    name: str
    records: Sequence[tuple[np.ndarray, np.ndarray]]
    cohort: int
    batch_size: int = 16
    make_model: Callable[[], Any]


def clients(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns x, float32 [number, 32, 28, 28, 1], and y, int64 [number, 32]."""
    rng = np.random.default_rng(0)
    x = rng.random((number, _RECORDS, 28, 28, 1), dtype=np.float32)
    return x, rng.integers(0, 10, (number, _RECORDS))


def _alike(number: int) -> Work:
    records = list(zip(*clients(number), strict=True))
    return Work(name=f"{number} clients", records=records, cohort=number, make_model=make_model)


def _of_a_pool(
    name: str, sizes: Sequence[int], shape: tuple[int, ...], batch_size: int, make: Any
) -> Work:
    """Returns a cohort of 50 clients, whose records are the first ones of the same images."""
    rng = np.random.default_rng(0)
    x = rng.random((max(sizes), *shape), dtype=np.float32)
    y = rng.integers(0, 10, len(x))
    records = [(x[:size], y[:size]) for size in sizes]
    return Work(name=name, records=records, cohort=50, batch_size=batch_size, make_model=make)


def _works() -> list[Work]:
    unequal = np.random.default_rng(0).lognormal(4.0, 0.8, 3400).clip(8, 400).astype(int)
    return [
        _alike(10),
        _alike(50),
        _of_a_pool("50 of 1,000, CIFAR-10's shape", [50] * 1000, (32, 32, 3), 10, make_larger),
        _of_a_pool("50 of 3,400 unequal", list(unequal), (28, 28, 1), 16, make_model),
    ]


def make_model() -> Any:
    """Returns a small convnet, not compiled."""
    return _convnet((28, 28, 1), (16,), (32,))


def make_larger() -> Any:
    """Returns a convnet for images of 32 x 32 in colours, not compiled."""
    return _convnet((32, 32, 3), (32, 32), (64, 64), 128)


def _convnet(shape: tuple[int, ...], *blocks: Any) -> Any:
    from tensorflow import keras

    layers = keras.layers
    model = keras.Sequential([keras.Input(shape)])
    for block in blocks:
        if isinstance(block, int):
            model.add(layers.Flatten())
            model.add(layers.Dense(block, activation="relu"))
            continue
        for filters in block:
            model.add(layers.Conv2D(filters, 3, activation="relu"))
        model.add(layers.MaxPool2D())
    model.add(layers.Flatten())
    model.add(layers.Dense(10))
    return model


def _measure(quick: bool) -> list[dict]:
    rows = []
    for work in [_alike(3)] if quick else _works():
        rounds = {
            "tuned": _by_hand(work, tuned=True),
            "tutorial": _by_hand(work, tuned=False),
            "tfdist": _with_tfdist(work),
        }
        times: dict[str, list[float]] = {name: [] for name in rounds}
        count = 1 if quick else 3
        for several in rounds.values():
            several(1)
        for _ in range(2 if quick else 12):
            for name, several in rounds.items():
                start = time.perf_counter()
                several(count)
                times[name].append((time.perf_counter() - start) / count)
        named = f"federated round, {work.name}"
        target = _TARGETS_TUNED.get(work.name, 1.0)
        rows.append(_row(f"{named}, tuned TFF", times["tuned"], times["tfdist"], target))
        rows.append(
            _row(f"{named}, TFF's tutorial", times["tutorial"], times["tfdist"], _TARGET_TUTORIAL)
        )
        if work.name in _TARGETS_TUNED:
            flower = _flower_seconds(*clients(work.cohort))
            # Not in turn with the others: Flower's processes run in an environment of their own.
            ours = [statistics.median(times["tfdist"])] * len(flower)
            rows.append(_row(f"{named}, Flower", flower, ours, _TARGET_FLOWER))
    return rows


def _flower_seconds(x: np.ndarray, y: np.ndarray) -> list[float]:
    """Returns the seconds of Flower's rounds of the same work, the first left out."""
    python = apart.python_with("flower", *_FLOWER)
    program = Path(__file__).parent / "programs" / "flower_rounds.py"
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder) / "given.npz", Path(folder) / "seconds.json"
        np.savez(given, x=x, y=y, batch_size=16, learning_rate=_RATE, rounds=_FLOWER_ROUNDS)
        clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        subprocess.run(
            [python, program, given, out],
            env=clean,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_TIMEOUT_S / 2,
            check=True,
        )
        return json.loads(out.read_text())


def _row(work: str, baseline: list[float], ours: list[float], target: float) -> dict:
    ratios = [b / o for b, o in zip(baseline, ours, strict=True)]
    return {
        "work": work,
        "baseline": round(1 / statistics.median(baseline), 2),
        "ours": round(1 / statistics.median(ours), 2),
        "ratio": round(statistics.median(ratios), 2),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "target": target,
    }


def _by_hand(work: Work, *, tuned: bool) -> Callable[[int], None]:
    import tensorflow as tf
    from tensorflow import keras

    tff = import_tff()
    datasets = [
        tf.data.Dataset.from_tensor_slices(OrderedDict(x=x, y=y))
        .shuffle(len(x))
        .batch(work.batch_size)
        for x, y in work.records
    ]

    def model_fn() -> Any:
        return tff.learning.models.from_keras_model(
            work.make_model(),
            input_spec=datasets[0].element_spec,
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=[keras.metrics.SparseCategoricalAccuracy()],
        )

    loops = tff.learning.LoopImplementation
    context = tff.backends.native.create_sync_local_cpp_execution_context()
    stack = tff.framework.get_context_stack()
    with stack.install(context):
        process = tff.learning.algorithms.build_weighted_fed_avg(
            model_fn,
            client_optimizer_fn=tff.learning.optimizers.build_sgdm(_RATE),
            server_optimizer_fn=tff.learning.optimizers.build_sgdm(1.0),
            loop_implementation=loops.DATASET_ITERATOR if tuned else loops.DATASET_REDUCE,
        )
        state = [process.initialize()]
    sampler, done = Sampler(clients_per_round=work.cohort), itertools.count()

    def several(count: int) -> None:
        with stack.install(context):
            for _ in range(count):
                chosen = sampler.cohort(range(len(datasets)), next(done)).asked
                state[0] = process.next(state[0], [datasets[client] for client in chosen]).state

    return several


def _with_tfdist(work: Work) -> Callable[[int], None]:
    from tensorflow import keras

    import tfdist

    def model_fn() -> Any:
        model = work.make_model()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(_RATE), loss, metrics=["accuracy"])
        return model

    strategy = tfdist.strategy(
        "federated", clients_per_round=work.cohort, local_batch_size=work.batch_size
    )
    strategy.start()
    model = strategy.build(model_fn)
    feed = strategy.dataset({f"client-{i}": given for i, given in enumerate(work.records)})
    done = [0]

    def several(count: int) -> None:
        model.fit(feed, epochs=done[0] + count, initial_epoch=done[0], verbose=0)
        done[0] += count

    return several


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(_measure(json.loads(sys.argv[2]))))
    # TFF's own workers die with nobody: end what this process has started.
    import psutil

    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(0)
