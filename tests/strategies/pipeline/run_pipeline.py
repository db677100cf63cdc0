"""Trains each case as a pipeline and on one device, and writes the differences as JSON.

Usage: python run_pipeline.py OUT_JSON. A process of its own, since it makes logical CPUs.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import pipeline_models as models

import tfdist
from tfdist.compat import import_tensorflow

EPOCHS = 2


class Reference:
    """What plain Keras does with the model of a kind of cases, which differ in the pipeline."""

    def __init__(self, case: str, feed: Any, held_out: Any):
        from tensorflow import keras

        keras.utils.set_random_seed(1)
        model = models.build(case)
        if models.kind(case) == "frozen":
            for layer in model.layers[:3]:
                layer.trainable = False
            model.compile(model.optimizer, model.loss, metrics=["accuracy"])
        self.start = model.get_weights()
        model.run_eagerly = True  # Nothing is traced, which takes longer than these steps.
        self.history = model.fit(
            feed.on_one_device().epochs(0, EPOCHS),
            epochs=EPOCHS,
            steps_per_epoch=len(feed),
            validation_data=held_out.epochs(0, 1),
            verbose=0,
        ).history
        self.weights = model.get_weights()
        self.predictions = _flat(model.predict(models.arrays(case)[0], verbose=0))


REFERENCES: dict[str, Reference] = {}


def compare(case: str) -> dict[str, Any]:
    """Returns what -> largest difference from plain Keras, and the devices of the weights."""
    from tensorflow import keras

    from tfdist.keras.layers import variables_in

    options = {"stages": 2, "microbatches": 3} | models.CASES[case]
    kind = models.kind(case)
    keras.backend.set_floatx("float64" if case == "float64" else "float32")
    with tfdist.strategy("pipeline", **options) as strategy:
        data, size = models.arrays(case), models.GLOBAL_BATCH_SIZE
        feed = strategy.dataset(data, global_batch_size=size)
        held_out = strategy.dataset(data, global_batch_size=size, training=False)
        if kind not in REFERENCES:
            REFERENCES[kind] = Reference(case, feed, held_out)
        expected = REFERENCES[kind]
        model = strategy.build(lambda: models.build(case))
        model.set_weights(expected.start)
        found = model.fit(feed, epochs=EPOCHS, validation_data=held_out, verbose=0).history
        predictions = zip(
            _flat(model.predict(held_out, verbose=0)), expected.predictions, strict=True
        )
        return {
            "devices": sorted({w.device.rpartition("/")[2] for w in variables_in(model)}),
            "differences": {
                "weights": max(map(_largest, model.get_weights(), expected.weights)),
                "predictions": max(_largest(*pair) for pair in predictions),
                **{
                    name: _largest(found[name], expected.history[name]) for name in expected.history
                },
            },
        }


def _flat(outputs: Any) -> list[np.ndarray]:
    return list(outputs.values()) if isinstance(outputs, dict) else [outputs]


def _largest(found: Any, expected: Any) -> float:
    return float(np.max(np.abs(np.subtract(found, expected))))


def _attempt(case: str) -> dict[str, Any]:
    try:
        return compare(case)
    except Exception:
        return {"error": traceback.format_exc()}


if __name__ == "__main__":
    tf = import_tensorflow()
    from tfdist.strategies.mirrored import make_logical_cpus

    make_logical_cpus(4)  # Once for all cases: the largest number of stages.
    tf.config.list_logical_devices()  # They are made by first use.
    chosen = sys.argv[2:] or models.CASES
    results = {}
    for case in chosen:
        results[case] = _attempt(case)
        print(case, results[case], flush=True)
    Path(sys.argv[1]).write_text(json.dumps(results))
