"""Strategy 'mesh' and DTensor by hand: ``pair_dtensor.py BATCH MODEL ROUNDS OUT_JSON``.

The same MLP, layout and data. DTensor's weights are compared with plain Keras' first: compiled, it
trains plausibly and wrongly on some meshes, and is then measured as it is right, eagerly.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.experimental import dtensor

import tfdist
from benchmarks.mesh import forever

WIDTHS, ROWS = (512, 2048, 2048, 10), 256
_STEPS, _RIGHT = 5, 1e-5


def model_fn() -> keras.Model:
    inputs = x = keras.Input((WIDTHS[0],))
    for width in WIDTHS[1:-1]:
        x = keras.layers.Dense(width, "relu")(x)
    model = keras.Model(inputs, keras.layers.Dense(WIDTHS[-1])(x))
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    return model


class ByHand:
    """The MLP on DTensor: columns, rows, and the output whole."""

    def __init__(self, mesh: dtensor.Mesh, start: list[np.ndarray], *, compiled: bool):
        self._mesh = mesh
        axes = [("U", "model"), ("model",), ("model", "U"), ("U",), ("U", "U"), ("U",)]
        self._weights = [
            dtensor.DVariable(self.laid_out(value, *on))
            for value, on in zip(start, axes, strict=True)
        ]
        self._optimizer = keras.optimizers.SGD(0.01, momentum=0.9, mesh=mesh)
        self._step = tf.function(self._train) if compiled else self._train

    def laid_out(self, value: np.ndarray, *axes: str) -> tf.Tensor:
        sharding = [dtensor.UNSHARDED if axis == "U" else axis for axis in axes]
        whole = dtensor.Layout.replicated(self._mesh, rank=len(axes))
        tensor = dtensor.copy_to_mesh(tf.constant(value), whole)
        return dtensor.relayout(tensor, dtensor.Layout(sharding, self._mesh))

    def _train(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            for index in range(0, len(self._weights), 2):
                kernel, bias = self._weights[index : index + 2]
                x = tf.matmul(x, kernel) + bias
                x = x if index == len(self._weights) - 2 else tf.nn.relu(x)
            loss = tf.reduce_mean(tf.square(x - y))
        gradients = tape.gradient(loss, self._weights)
        self._optimizer.apply_gradients(zip(gradients, self._weights, strict=True))
        return loss

    def steps(self, x: tf.Tensor, y: tf.Tensor, count: int) -> None:
        with dtensor.default_mesh(self._mesh):
            for _ in range(count):
                loss = self._step(x, y)
            dtensor.unpack(loss)[0].numpy()

    def weights(self) -> list[np.ndarray]:
        whole = (
            dtensor.relayout(v.read_value(), dtensor.Layout.replicated(self._mesh, len(v.shape)))
            for v in self._weights
        )
        return [dtensor.unpack(tensor)[0].numpy() for tensor in whole]


def largest(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    return max(float(np.max(np.abs(x - y))) for x, y in zip(a, b, strict=True))


def timed(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) / _STEPS


def main(batch: int, model: int, rounds: int, out: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(ROWS, n)).astype(np.float32) for n in (WIDTHS[0], WIDTHS[-1]))
    with tfdist.strategy("mesh", batch=batch, model=model) as strategy:
        on_mesh = strategy.build(model_fn)
        reference = model_fn()
        start = reference.get_weights()
        on_mesh.set_weights(start)
        for _ in range(_STEPS):
            reference.train_on_batch(x, y)
            on_mesh.train_on_batch(x, y)
        names = [f"CPU:{i}" for i in range(batch * model)]
        mesh = dtensor.create_mesh([("batch", batch), ("model", model)], devices=names)
        off = {}
        for how in ("compiled", "eager"):
            by_hand = ByHand(mesh, start, compiled=how == "compiled")
            given = by_hand.laid_out(x, "batch", "U"), by_hand.laid_out(y, "batch", "U")
            by_hand.steps(*given, _STEPS)
            off[how] = largest(by_hand.weights(), reference.get_weights())
            if off[how] <= _RIGHT:
                break
        ours_off = largest(on_mesh.get_weights(), reference.get_weights())
        assert ours_off <= _RIGHT, ours_off
        assert off[how] <= _RIGHT, off
        iterator, function = forever(x, y), on_mesh.make_train_function()

        def steps() -> None:
            for _ in range(_STEPS):
                logs = function(iterator)
            float(logs["loss"])

        pairs = [
            (timed(lambda: by_hand.steps(*given, _STEPS)), timed(steps)) for _ in range(rounds)
        ]
    wrong = f"; compiled its weights are off by {off['compiled']:.0e}" if how == "eager" else ""
    baseline, ours = (1 / statistics.median(times) for times in zip(*pairs, strict=True))
    row = {
        "work": f"mesh {batch}x{model}, MLP, step, DTensor by hand ({how}{wrong})",
        "baseline": round(baseline, 2),
        "ours": round(ours, 2),
        "ratio": round(statistics.median(b / o for b, o in pairs), 2),
        "target": None,
    }
    out.write_text(json.dumps(row))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), Path(sys.argv[4]))
