"""What a case looks at, on whatever trains the model: plain Keras on one device, or a strategy.

``run_reference.py`` observes one device once for all strategies; ``run_cases.py`` observes a
strategy and compares.
"""

from __future__ import annotations

import abc
from pathlib import Path
from typing import Any

import conformance_cases as cases
import numpy as np

EPOCHS = 2
RESUMED_EPOCHS = 3
#: How a strategy forms its steps -> processes that read; None: a step is all records, a round.
BATCHES = {"one_process": 1, "two_processes": 2, "a_round": None}
#: Cases that train nothing.
UNTRAINED = ("evaluate-", "predict-")

Observed = dict[str, np.ndarray]


class Side(abc.ABC):
    """One of the two sides that a case compares. Models are made once for all their cases.

    Attributes:
        moves_slots: whether the slots of a model that has been trained are in parts, so that none
            can be made as if it had not been.
    """

    moves_slots = False

    def __init__(self) -> None:
        self._models: dict[tuple[str, str], tuple[Any, list[np.ndarray]]] = {}

    @abc.abstractmethod
    def build(self, model_fn: Any) -> Any:
        """Returns the model of ``model_fn``, to be trained here."""

    @abc.abstractmethod
    def fit(self, model: Any, data: tuple, *, epochs: int = EPOCHS, **options: Any) -> dict:
        """Trains on ``data`` and returns the history; options as those of ``Model.fit``."""

    @abc.abstractmethod
    def evaluate(self, model: Any, data: tuple) -> dict[str, float]:
        """Returns loss and metrics on ``data``."""

    @abc.abstractmethod
    def predict(self, model: Any, data: tuple) -> dict[str, Any]:
        """Returns way of giving the data -> predictions for all of it."""

    @abc.abstractmethod
    def save(self, model: Any, x: Any) -> Observed:
        """Returns weights and predictions of the model as its file has them."""

    @abc.abstractmethod
    def resume(self, name: str, data: tuple, validation_data: tuple) -> tuple[Any, dict]:
        """Returns the model after RESUMED_EPOCHS, and the history from the second epoch on."""

    @abc.abstractmethod
    def rescale(self, name: str, data: tuple) -> tuple[Any, dict]:
        """Returns what ``resume`` does; from the second epoch on RESCALED_BATCH_SIZE holds."""

    def model(self, name: str, optimizer: str) -> Any:
        """Returns the model as if it had never been trained."""
        key = (name, optimizer)
        if key not in self._models or self.moves_slots:
            self._models[key] = self.fresh(lambda: cases.build(name, optimizer))
        model, start = self._models[key]
        model.set_weights(start)
        for variable in model.optimizer.variables:
            if "learning_rate" not in variable.name:
                variable.assign(np.zeros(variable.shape, variable.numpy().dtype))
        return model

    def fresh(self, model_fn: Any) -> tuple[Any, list[np.ndarray]]:
        """Returns a new model and its first weights, which are the same on both sides."""
        from tensorflow import keras

        keras.utils.set_random_seed(7)
        start = model_fn().get_weights()
        model = self.build(model_fn)
        model.set_weights(start)
        return model, start


def observe(side: Side, case: str) -> Observed:
    kind, model, *rest = case.split("-")
    return globals()[f"_{kind}"](side, model, *rest)


def _train(side: Side, model: str, data: str, optimizer: str, **options: Any) -> Observed:
    trained = side.model(model, optimizer)
    history = side.fit(trained, cases.arrays(model, *cases.DATA[data]), **options)
    return _weights(trained) | _history(history)


def _class_weight(side: Side, model: str, data: str, optimizer: str) -> Observed:
    return _train(side, model, data, optimizer, class_weight={0: 0.25, 1: 3.0, 2: 1.0})


def _train_step(side: Side, model: str) -> Observed:
    trained, _ = side.fresh(cases.build_with_own_step)
    return _weights(trained) | _history(side.fit(trained, cases.arrays(model, 53)))


def _evaluate(side: Side, model: str) -> Observed:
    judged = side.model(model, cases.optimizer_of(model))
    data = cases.arrays(model, 49, "of records")
    one = _map(data, lambda array: array[:1])
    return {name: np.array(value) for name, value in side.evaluate(judged, data).items()} | {
        f"one record: {name}": np.array(value) for name, value in side.evaluate(judged, one).items()
    }


def _predict(side: Side, model: str) -> Observed:
    """49 records: ranks and replicas have unequal parts, and the order shows in each row."""
    predictor = side.model(model, cases.optimizer_of(model))
    found = {}
    for way, outputs in side.predict(predictor, cases.arrays(model, 49)).items():
        if not isinstance(outputs, dict):
            outputs = dict(enumerate(outputs if isinstance(outputs, list) else [outputs]))
        found |= {f"{way}: output {name}": array for name, array in outputs.items()}
    return found


def _resume(side: Side, model: str) -> Observed:
    data = cases.arrays(model, *cases.DATA["weights"])
    held_out = cases.arrays(model, 7, "of records", seed=1)
    resumed, history = side.resume(model, data, held_out)
    return _weights(resumed) | _history(history)


def _rescale(side: Side, model: str) -> Observed:
    rescaled, history = side.rescale(model, cases.arrays(model, *cases.DATA["weights"]))
    return _weights(rescaled) | _history(history)


def _save(side: Side, model: str) -> Observed:
    trained = side.model(model, cases.optimizer_of(model))
    # As those of ``_resume``: the step that it has traced is used again.
    data = cases.arrays(model, *cases.DATA["weights"])
    side.fit(trained, data)
    return side.save(trained, data[0])


def _weights(model: Any) -> Observed:
    """A metric that a model keeps is among its weights, but no part of what is trained."""
    of_metrics = {id(v) for metric in model.metrics for v in metric.variables}
    pairs = zip(model.weights, model.get_weights(), strict=True)
    return {"weights": flat([value for weight, value in pairs if id(weight) not in of_metrics])}


def _history(history: dict) -> Observed:
    return {f"history: {name}": np.array(values) for name, values in history.items()}


def flat(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.ravel(array) for array in arrays])


def _map(structure: Any, function: Any) -> Any:
    import tensorflow as tf

    return tf.nest.map_structure(function, structure)


# The file of what one device does ---------------------------------------------------------------


def write(path: Path, observed: dict[str, dict[str, Observed]]) -> None:
    """Writes batches -> case -> what -> array."""
    arrays = {
        f"{batches}/{case}/{what}": array
        for batches, of_cases in observed.items()
        for case, of_case in of_cases.items()
        for what, array in of_case.items()
    }
    np.savez(path, **arrays)


def read(path: Path, batches: str) -> dict[str, Observed]:
    """Returns case -> what -> array, for steps that are formed as ``batches`` says."""
    observed: dict[str, Observed] = {}
    with np.load(path) as file:
        for key in file.files:
            formed, case, what = key.split("/")
            if formed == batches:
                observed.setdefault(case, {})[what] = file[key]
    return observed
