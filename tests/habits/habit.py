"""What a habit of Keras users is: a small program, and what it is to give on each strategy.

The same program runs in plain Keras on one device and on each strategy. What it returns (models,
histories, arrays) is compared number by number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow import keras

from tfdist.strategies.base import DataOptions, make_feed

#: One device's numbers, for the call as it stands.
EQUAL = "equal"
#: One device's numbers on the batches that the strategy makes of shuffled arrays.
OWN_BATCHES = "equal by its own batches"
#: A state that each microbatch moves, which a line tells of: trained, and not the same numbers.
TOLD = "other numbers, told in a line"
#: What layers draw is drawn on each replica: trained, evaluated, and not the same numbers.
DRAWN = "other random numbers"
#: Begins the words of a refusal: one line, whose words follow.
REFUSED = "refused: "


@dataclass(frozen=True)
class Habit:
    """A program and its verdicts.

    Attributes:
        program: what a user would write, given a ``Here``.
        verdicts: strategy -> what it is to give there.
    """

    program: Callable[[Any], Any]
    verdicts: dict[str, str]


HABITS: dict[str, Habit] = {}
STRATEGIES = ("single", "mirrored", "horovod", "multi_worker")
#: Which have steps of their own: what these cannot is refused in one line, the rest is equal.
OF_THEIR_OWN = ("mesh", "pipeline", "parameter_server")


def habit(
    verdict: str = EQUAL, *, several: str | None = None, **of: str
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Makes a habit of a function.

    Args:
        verdict: on all strategies.
        several: on those with several replicas.
        of: on single ones.
    """

    def noted(program: Callable[[Any], Any]) -> Callable[[Any], Any]:
        verdicts = dict.fromkeys((*STRATEGIES, *OF_THEIR_OWN), verdict)
        if several is not None:
            verdicts |= dict.fromkeys(STRATEGIES[1:], several)
        if "mirrored" in of:  # multi_worker is one of TensorFlow's, too.
            verdicts["multi_worker"] = of["mirrored"]
        HABITS[program.__name__] = Habit(program, verdicts | of)
        return program

    return noted


class Here:
    """Where a habit runs: on a strategy, or without one in plain Keras.

    Args:
        strategy: None in plain Keras.
        folder: for files, one for each program and process.
        parts: in plain Keras, the processes whose batches of shuffled arrays are to be taken; 0
            takes Keras' own.
    """

    def __init__(self, strategy: Any, folder: Any, parts: int = 0):
        self.strategy = strategy
        self.folder = folder
        self._parts = parts

    def build(self, model_fn: Callable[[], Any]) -> Any:
        keras.backend.clear_session()
        keras.utils.set_random_seed(1)
        return model_fn() if self.strategy is None else self.strategy.build(model_fn)

    def fit(self, model: Any, x: Any, y: Any, *, as_feed: bool = False, **options: Any) -> Any:
        """Returns the history of a ``model.fit`` on shuffled arrays.

        Args:
            as_feed: whether a strategy's ``dataset`` is given them.
        """
        options["verbose"] = 0
        if self.strategy is not None and as_feed:
            size = options.pop("batch_size")
            return model.fit(self.strategy.dataset((x, y), global_batch_size=size), **options)
        if self._parts == 0:
            return model.fit(x, y, **options)
        held_out = int(len(x) * (1 - options.pop("validation_split", 0)))
        if held_out < len(x):
            options["validation_data"] = x[held_out:], y[held_out:]
        feed = make_feed(
            (x[:held_out], y[:held_out]),
            DataOptions(global_batch_size=options.pop("batch_size")),
            parts=self._parts,
        )
        batches = feed.on_one_device().epochs(0, options["epochs"])
        return model.fit(batches, steps_per_epoch=len(feed), **options)

    def save(self, model: Any, name: str) -> str:
        """Saves a model as a script would; returns the path, known to all processes."""
        if self.strategy is None:
            model.save(self.folder / name)
            return str(self.folder / name)
        path = self.shared(name)
        self.strategy.save(model, path)
        return path

    def shared(self, name: str) -> str:
        """Returns a path that is the same on all processes."""
        path = str(self.folder / name)
        return path if self.strategy is None else self.strategy.from_chief(path)


# What many of them train --------------------------------------------------------------------------

layers = keras.layers
# The last batch has a row, so that a replica has none.
ROWS, BATCH = 25, 8


def rows(features: int = 5, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(ROWS, features)).astype(np.float32)


def labels(classes: int = 3) -> np.ndarray:
    return np.random.default_rng(1).integers(0, classes, ROWS)


def tokens(length: int = 6, words: int = 9) -> np.ndarray:
    drawn = np.random.default_rng(2)
    return drawn.integers(1, words, (ROWS, length)) * (
        np.arange(length) < drawn.integers(1, length + 1, (ROWS, 1))
    )


def batched(*arrays: Any, batch: int = BATCH) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(arrays if len(arrays) > 1 else arrays[0]).batch(batch)


def classifier(*middle: Any, features: int = 5, **options: Any) -> keras.Model:
    """Returns a small compiled model with ``middle`` before its last layer."""
    given = middle or (layers.Dense(8, "tanh"),)
    inputs = [keras.Input((features,))]
    return compiled(keras.Sequential([*inputs, *given, layers.Dense(3, "softmax")]), **options)


def compiled(model: keras.Model, **options: Any) -> keras.Model:
    given = {
        "optimizer": keras.optimizers.SGD(0.1, momentum=0.9),
        "loss": "sparse_categorical_crossentropy",
        "metrics": ["accuracy"],
    }
    model.compile(**(given | options))
    return model


def trained(here: Here, model_fn: Callable[[], Any], x: Any = None, y: Any = None) -> Any:
    """Returns a model that has been trained as Keras' guides do it, and its numbers."""
    model = here.build(model_fn)
    data = batched(rows() if x is None else x, labels() if y is None else y)
    return model, model.fit(data, epochs=2, verbose=0)
