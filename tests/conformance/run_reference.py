"""Runs cases with plain Keras on one device and writes what it observes; once for all rows.

Usage: python run_reference.py CASES_JSON OUT_NPZ; CASES_JSON has batches, see
conformance_observed.BATCHES, -> cases.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import conformance_cases as cases
import conformance_observed as observed
import numpy as np
import tensorflow as tf

from tfdist.keras.version import IS_KERAS_3
from tfdist.strategies.base import DataOptions, make_feed
from tfdist.training.layers import eager_variables


class OneDevice(observed.Side):
    """Plain Keras, on the global batches that a strategy divides.

    Args:
        batches: of ``observed.BATCHES``; can be changed between cases.
    """

    def __init__(self) -> None:
        super().__init__()
        self.batches = "one_process"

    def build(self, model_fn: Any) -> Any:
        return model_fn()

    def fit(
        self, model: Any, data: tuple, *, epochs: int = observed.EPOCHS, **options: Any
    ) -> dict:
        data = _weighted(data, options.pop("class_weight", {}))
        return self._fit(model, data, range(epochs), cases.GLOBAL_BATCH_SIZE, **options)

    def _fit(self, model: Any, data: tuple, epochs: range, rows: int, **options: Any) -> dict:
        """Trains on batches of ``rows``, or of all records where a step is a round."""
        parts = observed.BATCHES[self.batches]
        size = rows if parts else len(_first(data))
        asked = DataOptions(global_batch_size=size, seed=cases.SHUFFLE_SEED)
        feed = make_feed(data, asked, parts=parts or 1)
        eager_variables.make_slots(model)
        eager_variables.make_known_metrics(model, feed.records.element_spec)
        return model.fit(
            feed.on_one_device().epochs(epochs.start, epochs.stop),
            initial_epoch=epochs.start,
            epochs=epochs.stop,
            steps_per_epoch=feed.steps_per_epoch,
            shuffle=False,
            verbose=0,
            **options,
        ).history

    def evaluate(self, model: Any, data: tuple) -> dict[str, float]:
        x, y, weight = data
        return model.evaluate(x, y, 12, sample_weight=weight, return_dict=True, verbose=0)

    def predict(self, model: Any, data: tuple) -> dict[str, Any]:
        outputs = model.predict(data[0], verbose=0)
        return {"dataset": outputs, "arrays": outputs}

    def save(self, model: Any, x: Any) -> observed.Observed:
        weights = observed.flat(model.get_weights())
        return {"weights": weights, "predictions": model.predict(x, verbose=0)}

    def resume(self, name: str, data: tuple, validation_data: tuple) -> tuple[Any, dict]:
        """Nothing breaks here: a resumed fit must be as if nothing had."""
        model = self.model(name, cases.optimizer_of(name))
        epochs = observed.RESUMED_EPOCHS
        history = self.fit(model, data, epochs=epochs, validation_data=validation_data)
        return model, {name: values[1:] for name, values in history.items()}

    def rescale(self, name: str, data: tuple) -> tuple[Any, dict]:
        model = self.model(name, cases.optimizer_of(name))
        self._fit(model, data, range(1), cases.GLOBAL_BATCH_SIZE)
        later = range(1, observed.RESUMED_EPOCHS)
        return model, self._fit(model, data, later, cases.RESCALED_BATCH_SIZE)


def _weighted(data: tuple, class_weight: dict[int, float]) -> tuple:
    """Keras takes no class weights beside the sample weights of batches whose size varies."""
    if not class_weight:
        return data
    x, y, *weight = data
    of_class = [class_weight.get(label, 1.0) for label in range(cases.NUM_CLASSES)]
    return x, y, np.prod([np.take(of_class, y), *weight], axis=0)


def _first(data: Any) -> Any:
    while isinstance(data, (tuple, dict)):
        data = next(iter(data.values())) if isinstance(data, dict) else data[0]
    return data


def main(wanted: str, out: str) -> None:
    # Nothing is traced: two thirds of the time, and of Keras 2 the same numbers.
    tf.config.run_functions_eagerly(not IS_KERAS_3)
    one_device = OneDevice()
    results: dict[str, dict[str, observed.Observed]] = {}
    known: dict[str, observed.Observed] = {}  # Without steps: alike however those are formed.
    for batches, its_own in json.loads(wanted).items():
        one_device.batches = batches
        of_cases = results[batches] = {}
        for case in its_own:
            of_cases[case] = known.get(case) or observed.observe(one_device, case)
            if case.startswith(observed.UNTRAINED):
                known[case] = of_cases[case]
    observed.write(Path(out), results)


if __name__ == "__main__":
    main(*sys.argv[1:])
