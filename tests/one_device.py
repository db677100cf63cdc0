"""A model on a strategy and the same on one device, compared number by number."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import tiers
from tensorflow import keras

TOLERANCE = 1e-5
#: How far weights must move at least, so that no fit is compared that does nothing.
_MOVED = 100 * TOLERANCE


def pair(strategy: Any, model_fn: Callable[[], Any]) -> tuple[Any, Any]:
    """Returns the model on the strategy, and the same in plain Keras.

    That one runs eagerly: nothing is traced, which takes longer than its few steps.
    """
    keras.utils.set_random_seed(1)
    reference = model_fn()
    model = strategy.build(model_fn)
    model.set_weights(reference.get_weights())
    reference.run_eagerly = True
    return model, reference


def weights_of(model: Any) -> list[np.ndarray]:
    """Returns those of layers: Keras 2 counts trackers, which are each rank's own, among them."""
    of_metrics = {id(variable) for metric in model.metrics for variable in metric.variables}
    values, kept = iter(model.get_weights()), []
    for weight in model.weights:
        if not hasattr(weight, "numpy"):  # A vocabulary.
            list(itertools.islice(values, weight.num_tensors))
            continue
        value = next(values)
        if id(weight) not in of_metrics:
            kept.append(value)
    return kept


def assert_near(
    found: Iterable[Any], expected: Iterable[Any], tolerance: float = TOLERANCE
) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=tolerance)


def assert_same_weights(model: Any, reference: Any, tolerance: float = TOLERANCE) -> None:
    assert all(np.isfinite(weight).all() for weight in weights_of(reference))
    assert_near(weights_of(model), weights_of(reference), tolerance)


def assert_same_results(
    found: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float = TOLERANCE
) -> None:
    """Compares histories, or what ``evaluate`` returns; a strategy may tell more."""
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, atol=tolerance, err_msg=name)


def trains_as_one_device(
    strategy: Any,
    model: Any,
    reference: Any,
    records: Any,
    *,
    global_batch_size: int = 8,
    epochs: int = 2,
    tolerance: float = TOLERANCE,
    skip: tuple[str, ...] = (),
    record_fn: Callable[..., Any] | None = None,
) -> None:
    """Fits both models of a pair; compares all losses, metrics and weights.

    Args:
        strategy: of ``model``.
        model: on the strategy.
        reference: the same in plain Keras.
        records: what ``strategy.dataset`` takes.
        global_batch_size: of both.
        epochs: of both.
        tolerance: of each number.
        skip: losses and metrics that are not compared.
        record_fn: for ``strategy.dataset``.
    """
    start = weights_of(reference)
    feed = strategy.dataset(
        records, global_batch_size=global_batch_size, seed=2, record_fn=record_fn
    )
    # That takes a third of such a fit, for a warning. `make test` has tests of it alone.
    check_rows = not tiers.is_short()
    found = model.fit(feed, epochs=epochs, verbose=0, check_rows=check_rows).history
    batches = feed.on_one_device().epochs(0, epochs)
    steps = {"epochs": epochs, "steps_per_epoch": feed.steps_per_epoch}
    expected = reference.fit(batches, **steps, verbose=0).history
    compared = {name: values for name, values in expected.items() if name not in skip}
    assert_same_results(found, compared, tolerance)
    assert_same_weights(model, reference, tolerance)
    moved = zip(start, weights_of(reference), strict=True)
    assert max(np.max(np.abs(before - after)) for before, after in moved) > _MOVED


def equals_one_device(
    strategy: Any, model_fn: Callable[[], Any], records: Any, **options: Any
) -> tuple[Any, Any]:
    """Trains a pair as ``trains_as_one_device`` does, whose options it takes; returns it."""
    model, reference = pair(strategy, model_fn)
    trains_as_one_device(strategy, model, reference, records, **options)
    return model, reference


def each_replica_drops_its_own(strategy: Any) -> None:
    """Trains on one row for each of two replicas, which drop other units of it."""

    def model_fn() -> keras.Model:
        inputs = keras.Input((64,))
        dropped = keras.layers.Dropout(0.5)(inputs)
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Model(inputs, dense(dropped))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    model = strategy.build(model_fn)
    rows = np.ones((2, 64), np.float32), np.ones((2, 1), np.float32)
    model.fit(strategy.dataset(rows, global_batch_size=2), verbose=0)
    # A weight has moved by the rows, none, one or both, in which its input was not dropped.
    assert len(np.unique(model.get_weights()[0].round(6))) == 3
