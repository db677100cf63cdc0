"""A training step on a mesh against plain Keras on the same cores, and the time to the first one.

Rounds of both run in turn, in a process of their own: it needs logical CPUs.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

_MESHES = ((1, 1), (1, 2), (2, 1), (2, 2))
_TARGET_STEP, _TARGET_FIRST = 0.91, 0.25
_TIMEOUT_S = 1200


def run(quick: bool = False) -> list[dict]:
    """Returns rows: baseline and ours in steps/s, and 1/s to the first step; ratio, target."""
    rows = _in_a_process("benchmarks.mesh", json.dumps(quick))
    for batch, model in _MESHES[1:2] if quick else ((1, 2), (2, 2)):
        numbers = (str(number) for number in (batch, model, 2 if quick else 9))
        rows.append(_in_a_process("benchmarks.programs.pair_dtensor", *numbers))
    rows.append(_in_a_process("benchmarks.programs.floor_mesh", str(2 if quick else 9)))
    return rows


def _in_a_process(module: str, *arguments: str) -> Any:
    """Runs a module as a program and returns what it writes to its last argument."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        subprocess.run(
            [sys.executable, "-m", module, *arguments, str(out)],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"},
            stdin=subprocess.DEVNULL,
            timeout=_TIMEOUT_S,
            check=True,
        )
        return json.loads(out.read_text())


def _measure(quick: bool) -> list[dict]:
    import tfdist

    with tfdist.strategy("mesh", batch=2, model=2):
        pass  # Logical CPUs are made once, for the largest mesh.
    rows = []
    models = {"tiny MLP": _tiny} if quick else {"MLP": _mlp, "transformer": _transformer}
    for name, (model_fn, x, y) in ((name, make()) for name, make in models.items()):
        for batch, model in _MESHES[1:2] if quick else _MESHES:
            with tfdist.strategy("mesh", batch=batch, model=model) as strategy:
                work = f"mesh {batch}x{model}, {name}"
                rows += _compare(work, model_fn, strategy.build(model_fn), x, y, 3 if quick else 9)
    return rows


def _compare(
    work: str, model_fn: Callable, on_mesh: Any, x: np.ndarray, y: np.ndarray, rounds: int
) -> list[dict]:
    models = {"baseline": model_fn(), "ours": on_mesh}
    first: dict[str, float] = {}
    times: dict[str, list[float]] = {name: [] for name in models}
    for name, model in models.items():
        start = time.perf_counter()
        model.train_on_batch(x, y)
        first[name] = time.perf_counter() - start
    iterators = {name: forever(x, y) for name in models}
    functions = {name: model.make_train_function() for name, model in models.items()}
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(5):
                logs = function(iterators[name])
            float(logs["loss"])
            times[name].append((time.perf_counter() - start) / 5)
    pairs = list(zip(times["baseline"], times["ours"], strict=True))
    return [
        {
            "work": f"{work}, step",
            "baseline": round(1 / statistics.median(times["baseline"]), 2),
            "ours": round(1 / statistics.median(times["ours"]), 2),
            "ratio": round(statistics.median(b / o for b, o in pairs), 2),
            "target": _TARGET_STEP,
        },
        {
            "work": f"{work}, first step",
            "baseline": round(1 / first["baseline"], 3),
            "ours": round(1 / first["ours"], 3),
            "ratio": round(first["baseline"] / first["ours"], 2),
            "target": _TARGET_FIRST,
        },
    ]


def forever(x: np.ndarray, y: np.ndarray) -> Any:
    import tensorflow as tf

    return iter(tf.data.Dataset.from_tensors((x, y)).repeat().prefetch(2))


def _tiny() -> tuple[Callable, np.ndarray, np.ndarray]:
    return _dense(32, 64, 2, 32)


def _mlp() -> tuple[Callable, np.ndarray, np.ndarray]:
    return _dense(512, 2048, 3, 256)


def _dense(width: int, units: int, depth: int, rows: int) -> tuple:
    from tensorflow import keras

    def model_fn() -> Any:
        inputs = keras.Input((width,))
        x = inputs
        for _ in range(depth):
            x = keras.layers.Dense(units, "relu")(x)
        model = keras.Model(inputs, keras.layers.Dense(10)(x))
        model.compile("adam", "mse")
        return model

    rng = np.random.default_rng(0)
    return (
        model_fn,
        rng.normal(size=(rows, width)).astype(np.float32),
        rng.normal(size=(rows, 10)).astype(np.float32),
    )


def _transformer() -> tuple[Callable, np.ndarray, np.ndarray]:
    from tensorflow import keras

    layers, width, length, vocabulary = keras.layers, 256, 64, 1024

    def model_fn() -> Any:
        inputs = keras.Input((length,), dtype="int32")
        x = layers.Embedding(vocabulary, width)(inputs)
        for _ in range(2):
            y = layers.LayerNormalization()(x)
            y = layers.MultiHeadAttention(8, width // 8)(y, y, use_causal_mask=True)
            x = layers.Add()([x, y])
            y = layers.Dense(4 * width, "gelu")(layers.LayerNormalization()(x))
            x = layers.Add()([x, layers.Dense(width)(y)])
        model = keras.Model(inputs, layers.Dense(vocabulary)(x))
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    tokens = np.random.default_rng(0).integers(0, vocabulary, (16, length + 1))
    return model_fn, tokens[:, :-1], tokens[:, 1:]


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(_measure(json.loads(sys.argv[1]))))
