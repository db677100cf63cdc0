"""Metrics of a job: the sum of the processes' states, not a mean of their results."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfdist.keras import step_context
from tfdist.strategies.single import Alone
from tfdist.training.engine.metrics import MergedResults, state_of

keras = tf.keras
RNG = np.random.default_rng(0)


class Twice(Alone):
    """Two processes, of which the other has gathered ``others``."""

    num_processes = 2

    def __init__(self, others):
        self._others = others

    def merge(self, values):
        return [mine + other for mine, other in zip(values, self._others, strict=True)]


def updated(rows):
    """Returns a model whose metrics have seen ``rows``."""
    model = keras.Sequential([keras.Input((1,))])
    model.compile(
        "sgd",
        "binary_crossentropy",
        metrics=["mae", keras.metrics.AUC(20, name="auc"), keras.metrics.Precision(name="p")],
    )
    x, y = rows
    model.evaluate(x, y, batch_size=len(x), verbose=0)
    return model


def data(rows):
    return RNG.uniform(0.05, 0.95, (rows, 1)).astype(np.float32), RNG.integers(0, 2, (rows, 1))


def test_uneven_processes_give_the_result_of_one():
    many, few = data(19), data(3)
    whole = tuple(np.concatenate(parts) for parts in zip(many, few, strict=True))
    expected = updated(whole).get_metrics_result()
    others = [variable.numpy() for variable in state_of(updated(few))]
    model = updated(many)
    merged = MergedResults(model, Twice(others))
    before = [variable.numpy() for variable in state_of(model)]
    assert merged() == pytest.approx({k: float(v) for k, v in expected.items()}, abs=1e-6)
    for old, variable in zip(before, state_of(model), strict=True):
        np.testing.assert_array_equal(old, variable.numpy(), "asking must change nothing")


def test_within_a_step_results_are_this_process_own():
    model = updated(data(5))
    own = {name: float(value) for name, value in model.get_metrics_result().items()}
    merged = MergedResults(model, Twice([v.numpy() for v in state_of(updated(data(9)))]))
    with step_context.within(part=1.0):
        assert {name: float(value) for name, value in merged().items()} == own
    assert merged() != own


def test_steps_before_a_resumed_fit_are_counted_but_not_in_its_validation():
    first, second = data(6), data(4)
    whole = tuple(np.concatenate(parts) for parts in zip(first, second, strict=True))
    expected = {k: float(v) for k, v in updated(whole).get_metrics_result().items()}
    before = [np.ravel(variable.numpy()) for variable in state_of(updated(first))]
    model = updated(second)
    own = {name: float(value) for name, value in model.get_metrics_result().items()}
    results = MergedResults(model, Alone())
    with results.carrying(np.concatenate(before).astype(np.float64)):
        assert results() == pytest.approx(expected, abs=1e-6)
        with results.carrying(None):
            assert results() == pytest.approx(own, abs=1e-6)
        assert results() == pytest.approx(expected, abs=1e-6)
    assert results() == pytest.approx(own, abs=1e-6)
