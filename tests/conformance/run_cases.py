"""Runs cases on one strategy and writes what differed from one device, as JSON.

Usage: python run_cases.py STRATEGY OPTIONS_JSON CASES_JSON REFERENCE_NPZ BATCHES OUT_JSON; under a
launcher every rank runs it. REFERENCE_NPZ and BATCHES: see conformance_observed.read.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

sys.path.append(str(Path(__file__).parents[1]))

import conformance_cases as cases
import conformance_observed as observed
import numpy as np
import tiers

import tfdist
from tfdist.compat import import_tensorflow, is_keras
from tfdist.errors import TfdistError


class OnStrategy(observed.Side):
    def __init__(self, strategy: Any, folder: Path, *, moves_slots: bool):
        super().__init__()
        self.moves_slots = moves_slots
        self._strategy = strategy
        self._folder = folder
        # It traces each model once more, and finds the same everywhere.
        self._tries_rows = strategy.name == "mirrored" and not tiers.is_short()

    def build(self, model_fn: Any) -> Any:
        return self._strategy.build(model_fn)

    def _dataset(self, data: tuple, **options: Any) -> Any:
        options = {"global_batch_size": cases.GLOBAL_BATCH_SIZE} | options
        return self._strategy.dataset(data, **options)

    def fit(
        self, model: Any, data: tuple, *, epochs: int = observed.EPOCHS, **options: Any
    ) -> dict:
        feed = self._dataset(data, seed=cases.SHUFFLE_SEED)
        found = model.fit(feed, epochs=epochs, verbose=0, check_rows=self._tries_rows, **options)
        return found.history

    def evaluate(self, model: Any, data: tuple) -> dict[str, float]:
        return model.evaluate(self._dataset(data, training=False), return_dict=True, verbose=0)

    def predict(self, model: Any, data: tuple) -> dict[str, Any]:
        return {
            "dataset": model.predict(self._dataset(data, training=False), verbose=0),
            "arrays": model.predict(data[0], batch_size=12, verbose=0),
        }

    def save(self, model: Any, x: Any) -> observed.Observed:
        """The saved file is Keras' own: read by plain Keras, it predicts."""
        from tensorflow import keras

        path = self._folder / "model.keras"
        self._strategy.save(model, path)
        loaded = keras.models.load_model(path, compile=False)
        assert is_keras(type(loaded).__module__), type(loaded)
        weights = observed.flat(loaded.get_weights())
        return {"weights": weights, "predictions": loaded.predict(x, verbose=0)}

    def resume(self, name: str, data: tuple, validation_data: tuple) -> tuple[Any, dict]:
        """A fit broken within its second epoch, and gone on with by another model object."""
        from tensorflow import keras

        epochs, optimizer = observed.RESUMED_EPOCHS, cases.optimizer_of(name)
        feed = self._dataset(data, seed=cases.SHUFFLE_SEED)
        held_out = self._dataset(validation_data, training=False)
        last = min(3, feed.callback_steps - 1)

        class Break(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                if self.epoch == 1 and batch == last:
                    raise KeyboardInterrupt

            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                self.epoch = epoch

        def keep(**options: Any) -> tfdist.Checkpoints:
            return tfdist.Checkpoints(self._folder / "resume", every_steps=3, **options)

        with contextlib.suppress(KeyboardInterrupt):
            self.model(name, optimizer).fit(
                feed,
                epochs=epochs,
                callbacks=[keep(), Break()],
                verbose=0,
                check_rows=self._tries_rows,
            )
        resumed, _ = self.fresh(lambda: cases.build(name, optimizer))
        history = resumed.fit(
            feed,
            epochs=epochs,
            callbacks=[keep(resume=True)],
            validation_data=held_out,
            verbose=0,
            check_rows=self._tries_rows,
        ).history
        assert {len(values) for values in history.values()} == {2}, history
        return resumed, history

    def rescale(self, name: str, data: tuple) -> tuple[Any, dict]:
        """A fit of one epoch, and gone on with in larger batches by a model that knows nothing."""
        kept, optimizer = self._folder / "rescale", cases.optimizer_of(name)
        self.model(name, optimizer).fit(
            self._dataset(data, seed=cases.SHUFFLE_SEED),
            callbacks=[tfdist.Checkpoints(kept)],
            verbose=0,
            check_rows=self._tries_rows,
        )
        rescaled = self.model(name, optimizer)
        larger = {"global_batch_size": cases.RESCALED_BATCH_SIZE, "seed": cases.SHUFFLE_SEED}
        history = rescaled.fit(
            self._dataset(data, **larger),
            epochs=observed.RESUMED_EPOCHS,
            callbacks=[tfdist.Checkpoints(kept, resume=True)],
            verbose=0,
            check_rows=self._tries_rows,
        ).history
        assert {len(values) for values in history.values()} == {2}, history
        return rescaled, history


def differences(found: observed.Observed, expected: observed.Observed) -> dict[str, float]:
    """Returns what -> largest difference; a strategy may tell more than one device does."""
    told = [what for what in found if what in expected]
    assert told == list(expected), (list(found), list(expected))
    for what, array in expected.items():
        assert np.shape(found[what]) == array.shape, (what, np.shape(found[what]), array.shape)
    return {what: float(np.max(np.abs(found[what] - array))) for what, array in expected.items()}


def _attempt(side: observed.Side, case: str, expected: observed.Observed) -> dict[str, Any]:
    try:
        return {"differences": differences(observed.observe(side, case), expected)}
    except TfdistError as refusal:
        return {"refusal": str(refusal), "error": traceback.format_exc()}
    except Exception:
        return {"error": traceback.format_exc()}


def main(name: str, options: str, wanted: str, reference: str, batches: str, out: str) -> None:
    import_tensorflow()
    expected = observed.read(Path(reference), batches)
    with tfdist.strategy(name, **json.loads(options)) as strategy:
        folder = Path(strategy.from_chief(tempfile.mkdtemp(dir=Path(out).parent)))
        given = json.loads(options)
        moves_slots = "shard" in given or "optimizer" in given.get("offload", ())
        side = OnStrategy(strategy, folder, moves_slots=moves_slots)
        results = {case: _attempt(side, case, expected[case]) for case in json.loads(wanted)}
        if strategy.topology.is_chief:
            Path(out).write_text(json.dumps({"num_replicas": strategy.num_replicas, **results}))


if __name__ == "__main__":
    main(*sys.argv[1:])
