"""Trains the models of conformance_models.py on one device and on strategies; writes what differs.

Usage: python run_proof.py ROWS_JSON OUT_JSON; rows: [strategy, options, names of models, floatx].
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import conformance_models
import numpy as np
import tensorflow as tf
from tensorflow import keras

import tfdist
from tfdist.strategies.mirrored import make_logical_cpus
from tfdist.training.layers import eager_variables


def train(model: Any, proof: Any, start: list[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Returns the loss of each step and the weights after the last one."""
    model.set_weights(start)
    eager_variables.make_slots(model)
    losses = []
    for step in range(conformance_models.STEPS):
        first = step * proof.global_batch_size % len(proof.x)
        rows = slice(first, first + proof.global_batch_size)
        losses.append(model.train_on_batch(proof.x[rows], proof.y[rows]))
    return np.array(losses), model.get_weights()


def largest(a: Any, b: Any) -> float:
    return max(float(np.max(np.abs(x - y))) for x, y in zip(a, b, strict=True))


class References:
    """What plain Keras makes of a model, trained once for all strategies."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], tuple] = {}

    def of(self, name: str) -> tuple:
        key = (name, keras.backend.floatx())
        if key not in self._known:
            proof = conformance_models.PROOF_MODELS[name]()
            keras.utils.set_random_seed(0)
            model = proof.model_fn()
            start = model.get_weights()
            self._known[key] = (proof, start, *train(model, proof, start))
        return self._known[key]


def compare(strategy: Any, references: References, name: str) -> dict[str, float]:
    proof, start, losses, weights = references.of(name)
    found_losses, found_weights = train(strategy.build(proof.model_fn), proof, start)
    return {
        "loss": float(np.max(np.abs(found_losses - losses))),
        "weights": largest(found_weights, weights),
        "moved": largest(weights, start),
    }


def main(rows: str, out: str) -> None:
    make_logical_cpus(4)  # For the largest row: they are made once in a process, by first use.
    tf.config.list_logical_devices()
    references = References()
    results = []
    for strategy_name, options, names, floatx in json.loads(rows):
        keras.backend.set_floatx(floatx)
        with tfdist.strategy(strategy_name, **options) as strategy:
            for name in names:
                try:
                    results.append(compare(strategy, references, name))
                except Exception:
                    results.append({"error": traceback.format_exc()})
    Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
