"""Runs cases on one strategy and writes what differed from one device, as JSON.

Usage: python run_cases.py STRATEGY OPTIONS_JSON CASES_JSON OUT_JSON; under a launcher every rank
runs it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import conformance_cases as cases
import numpy as np

import tfdist

EPOCHS = 2


class Runner:
    """One strategy, with its models made once for all cases that train them."""

    def __init__(self, strategy: Any, folder: Path):
        self._strategy = strategy
        self._folder = folder
        self._pairs: dict[tuple[str, str], Pair] = {}

    def run(self, case: str) -> dict[str, float]:
        """Returns what -> largest difference from one device."""
        kind, model, *rest = case.split("-")
        return getattr(self, f"_{kind}")(model, *rest)

    def _dataset(self, data: Any, **options: Any) -> Any:
        return self._strategy.dataset(data, global_batch_size=cases.GLOBAL_BATCH_SIZE, **options)

    def _pair(self, model: str, optimizer: str = "adam") -> Pair:
        key = (model, optimizer)
        if key not in self._pairs:
            self._pairs[key] = Pair(self._strategy, model, optimizer)
        self._pairs[key].restart()
        return self._pairs[key]

    def _train(self, model: str, data: str, optimizer: str) -> dict[str, float]:
        pair = self._pair(model, optimizer)
        return pair.train(self._dataset(cases.arrays(model, *cases.DATA[data]), seed=3))

    def _class_weight(self, model: str) -> dict[str, float]:
        feed = self._dataset(cases.arrays(model, *cases.DATA["weights"]))
        return self._pair(model).train(feed, class_weight={0: 0.25, 1: 3.0})

    def _evaluate(self, model: str) -> dict[str, float]:
        pair = self._pair(model)
        x, y, weight = cases.arrays(model, 49, weighted=True)
        expected = pair.reference.evaluate(
            x, y, sample_weight=weight, batch_size=12, return_dict=True, verbose=0
        )
        feed = self._dataset((x, y, weight), training=False)
        found = pair.model.evaluate(feed, return_dict=True, verbose=0)
        few = self._dataset((_first(x, 1), y[:1], weight[:1]), training=False)
        expected_few = pair.reference.evaluate(
            _first(x, 1), y[:1], sample_weight=weight[:1], return_dict=True, verbose=0
        )
        found_few = pair.model.evaluate(few, return_dict=True, verbose=0)
        assert list(found) == list(expected), (list(found), list(expected))
        return {name: abs(found[name] - expected[name]) for name in expected} | {
            f"one record: {name}": abs(found_few[name] - expected_few[name]) for name in expected
        }

    def _predict(self, model: str) -> dict[str, float]:
        pair = self._pair(model)
        x, y = cases.arrays(model, 49, weighted=False)
        expected = pair.reference.predict(x, verbose=0)
        from_feed = pair.model.predict(self._dataset((x, y), training=False), verbose=0)
        from_arrays = pair.model.predict(x, batch_size=12, verbose=0)
        assert from_feed.shape == expected.shape, from_feed.shape
        assert from_arrays.shape == expected.shape, from_arrays.shape
        return {
            "dataset": _largest(from_feed, expected),
            "arrays": _largest(from_arrays, expected),
        }

    def _resume(self, model: str) -> dict[str, float]:
        """A fit broken within its second epoch, and gone on with by another model object."""
        from tensorflow import keras

        feed = self._dataset(cases.arrays(model, *cases.DATA["weights"]), seed=5)
        last = min(3, feed.callback_steps - 1)

        class Break(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                if self.epoch == 1 and batch == last:
                    raise KeyboardInterrupt

            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                self.epoch = epoch

        held_out = self._dataset(cases.arrays(model, 7, weighted=True, seed=1), training=False)
        folder = self._folder / "resume"
        unbroken = self._pair(model).model
        expected = unbroken.fit(feed, epochs=3, validation_data=held_out, verbose=0).history
        expected_weights = unbroken.get_weights()

        broken = Pair(self._strategy, model, "adam")
        keep = tfdist.Checkpoints(folder, every_steps=3)
        with contextlib.suppress(KeyboardInterrupt):
            broken.model.fit(feed, epochs=3, callbacks=[keep, Break()], verbose=0)
        resumed = Pair(self._strategy, model, "adam")
        go_on = tfdist.Checkpoints(folder, every_steps=3, resume=True)
        found = resumed.model.fit(
            feed, epochs=3, callbacks=[go_on], validation_data=held_out, verbose=0
        ).history
        assert [len(values) for values in found.values()] == [2] * len(expected), found
        return {"weights": _largest(resumed.model.get_weights(), expected_weights)} | {
            f"history: {name}": _largest(found[name], expected[name][1:])
            for name in expected
            if not name.endswith("seconds")
        }

    def _save(self, model: str) -> dict[str, float]:
        """The saved file is Keras' own: read by plain Keras, it predicts and goes on training."""
        from tensorflow import keras

        pair = self._pair(model)
        x, y = cases.arrays(model, 48, weighted=False)
        pair.train(self._dataset((x, y)))
        path = self._folder / "model.keras"
        self._strategy.save(pair.model, path)
        loaded = keras.models.load_model(path, compile=False)
        assert type(loaded).__module__.startswith("keras."), type(loaded)
        return {
            "weights": _largest(loaded.get_weights(), pair.model.get_weights()),
            "predictions": _largest(
                loaded.predict(x, verbose=0), pair.reference.predict(x, verbose=0)
            ),
        }


class Pair:
    """A model on the strategy and the same model on one device: plain Keras."""

    def __init__(self, strategy: Any, name: str, optimizer: str):
        from tensorflow import keras

        keras.utils.set_random_seed(7)
        self.reference = cases.build(name, optimizer)
        self.model = strategy.build(lambda: cases.build(name, optimizer))
        self.model.set_weights(self.reference.get_weights())
        self._start = self.reference.get_weights()

    def restart(self) -> None:
        for model in (self.reference, self.model):
            model.set_weights(self._start)
            for variable in model.optimizer.variables:
                if "learning_rate" not in variable.name:
                    variable.assign(np.zeros(variable.shape, variable.dtype.as_numpy_dtype))

    def train(self, feed: Any, **options: Any) -> dict[str, float]:
        found = self.model.fit(feed, epochs=EPOCHS, verbose=0, **options).history
        class_weight = options.get("class_weight")
        expected = self.reference.fit(
            feed.weighted_by_class(class_weight).on_one_device().epochs(0, EPOCHS),
            epochs=EPOCHS,
            steps_per_epoch=feed.steps_per_epoch,
            verbose=0,
        ).history
        return {
            "weights": _largest(self.model.get_weights(), self.reference.get_weights()),
            **{f"history: {name}": _largest(found[name], expected[name]) for name in expected},
        }


def _first(x: Any, rows: int) -> Any:
    return {name: array[:rows] for name, array in x.items()} if isinstance(x, dict) else x[:rows]


def _largest(found: Any, expected: Any) -> float:
    if isinstance(found, list) and isinstance(found[0], np.ndarray):
        return max(_largest(a, b) for a, b in zip(found, expected, strict=True))
    return float(np.max(np.abs(np.subtract(found, expected))))


def _attempt(run: Callable[[str], dict[str, float]], case: str) -> dict[str, Any]:
    try:
        return {"differences": run(case)}
    except Exception:
        return {"error": traceback.format_exc()}


def main(name: str, options: str, wanted: str, out: str) -> None:
    with tfdist.strategy(name, **json.loads(options)) as strategy:
        folder = Path(strategy.from_chief(tempfile.mkdtemp(dir=Path(out).parent)))
        runner = Runner(strategy, folder)
        results = {case: _attempt(runner.run, case) for case in json.loads(wanted)}
        if strategy.topology.is_chief:
            Path(out).write_text(json.dumps({"num_replicas": strategy.num_replicas, **results}))


if __name__ == "__main__":
    main(*sys.argv[1:])
