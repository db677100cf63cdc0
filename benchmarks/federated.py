"""Rounds of federated averaging: tfdist against TFF by hand, as tuned and as in TFF's tutorial.

All run in turn in one process, each on a worker of its own. The simulations of the same work by
Flower and by pfl-research run in environments of their own, made below .cache.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
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
from benchmarks.programs.convnet import convnet
from tfdist.strategies.federated.engine import import_tff

_TARGETS_TUNED = {"10 clients": 1.0, "50 clients": 2.0}
_TARGET_TUTORIAL, _TARGET_OTHERS = 2.5, 1.0
_RECORDS, _RATE = 32, 0.02
_TIMEOUT_S = 2400
_OTHERS = {  # Their programs, and what these need.
    "Flower": ("flower", ("flwr[simulation]==1.8.0", "tensorflow-cpu==2.18.1", "tf-keras==2.18.0")),
    "pfl-research": ("pfl", ("pfl[tf]==0.6.0", "tensorflow-cpu==2.21.0", "tf-keras==2.21.0")),
}
_ROUNDS_OF_OTHERS = 4


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
        x, y: what clients take their records from.
        starts, sizes: of the records of each client.
        cohort: clients of a round, drawn anew in each.
        turns: how often each kind is measured.
        rounds: in a turn.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray
    cohort: int
    batch_size: int = 16
    blocks: Sequence[Any] = ((16,), (32,))
    turns: int = 6
    rounds: int = 3

    def make_model(self) -> Any:
        """Returns a convnet, not compiled."""
        from tensorflow import keras

        return convnet(keras, self.x.shape[1:], self.blocks)

    @property
    def records(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """x and y of each client."""
        ends = self.starts + self.sizes
        return [(self.x[a:b], self.y[a:b]) for a, b in zip(self.starts, ends, strict=True)]


def _generated(records: int, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.random((records, *shape), dtype=np.float32), rng.integers(0, 10, records)


def _alike(number: int) -> Work:
    x, y = _generated(number * _RECORDS, (28, 28, 1))
    starts = np.arange(number) * _RECORDS
    sizes = np.full(number, _RECORDS)
    return Work(
        name=f"{number} clients",
        x=x,
        y=y,
        starts=starts,
        sizes=sizes,
        cohort=number,
    )


def _of_a_pool(name: str, sizes: np.ndarray, shape: tuple[int, ...], **options: Any) -> Work:
    """Returns a cohort of 50 clients, whose records are the first ones of the same images."""
    x, y = _generated(max(sizes), shape)
    starts = np.zeros_like(sizes)
    return Work(
        name=name,
        x=x,
        y=y,
        starts=starts,
        sizes=sizes,
        cohort=50,
        turns=3,
        rounds=1,
        **options,
    )


def _works() -> list[Work]:
    unequal = np.random.default_rng(0).lognormal(4.0, 0.8, 3400).clip(8, 400).astype(int)
    return [
        _alike(10),
        _alike(50),
        _of_a_pool(
            "50 of 1,000, CIFAR-10's shape",
            np.full(1000, 50),
            (32, 32, 3),
            batch_size=10,
            blocks=((32, 32), (64, 64), 128),
        ),
        _of_a_pool("50 of 3,400 unequal", unequal, (28, 28, 1)),
    ]


def _measure(quick: bool) -> list[dict]:
    rows = []
    for work in [_alike(3)] if quick else _works():
        rounds = {
            "tuned": _by_hand(work, tuned=True),
            "tutorial": _by_hand(work, tuned=False),
            "tfdist": _with_tfdist(work),
        }
        times: dict[str, list[float]] = {name: [] for name in rounds}
        count = 1 if quick else work.rounds
        for several in rounds.values():
            several(1)
        for _ in range(2 if quick else work.turns):
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
        for other in () if quick else _OTHERS:
            theirs = _seconds_of(other, work)
            # Not in turn with ours: their processes run in environments of their own.
            ours = [statistics.median(times["tfdist"])] * len(theirs)
            rows.append(_row(f"{named}, {other}", theirs, ours, _TARGET_OTHERS))
    return rows


def _seconds_of(other: str, work: Work) -> list[float]:
    """Returns the seconds of another simulation's rounds of the same work, the first left out."""
    program, packages = _OTHERS[other]
    python = apart.python_with(program, *packages)
    with tempfile.TemporaryDirectory() as folder:
        given, out, log = (Path(folder) / name for name in ("given.npz", "seconds.json", "log"))
        np.savez(
            given,
            x=work.x,
            y=work.y,
            starts=work.starts,
            sizes=work.sizes,
            blocks=json.dumps(work.blocks),
            cohort=work.cohort,
            batch_size=work.batch_size,
            learning_rate=_RATE,
            rounds=_ROUNDS_OF_OTHERS,
        )
        clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        with log.open("wb") as said:
            done = subprocess.run(
                [python, Path(__file__).parent / "programs" / f"{program}_rounds.py", given, out],
                env=clean,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=said,  # No pipe, which Ray's processes would hold.
                timeout=_TIMEOUT_S / 2,
                check=False,
            )
        if done.returncode:
            raise RuntimeError(log.read_text(errors="replace")[-2000:])
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

    from tfdist.strategies.federated.feed import Sampler

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
    # TFF ends its workers by SIGINT and waits; what is started in the background ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    Path(sys.argv[1]).write_text(json.dumps(_measure(json.loads(sys.argv[2]))))
    # TFF's own workers die with nobody: end what this process has started.
    import psutil

    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(0)
