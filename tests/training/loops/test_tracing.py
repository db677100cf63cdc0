"""What is said while a first step is traced."""

from __future__ import annotations

import time

import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.training.loops import tracing
from tfdist.training.loops.tracing import TracingNotice

keras = tf.keras
X = np.ones((4, 2), np.float32)


def slow_to_trace(seconds):
    @tf.autograph.experimental.do_not_convert
    def slow(x):
        if isinstance(x, tf.Tensor) and isinstance(x.graph, tf.__internal__.FuncGraph):
            time.sleep(seconds)
        return x

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1), keras.layers.Lambda(slow)])
    model.compile("sgd", "mse")
    return model


def fit_with(notice, model, x=X):
    with tracing.closing([notice]):
        model.fit(x, x[:, :1], batch_size=2, epochs=2, verbose=0, callbacks=[notice])


def test_a_long_first_step_says_that_it_traces_and_how_long_it_took():
    said = []
    notice = TracingNotice(first_line_s=0.1, say=said.append)
    model = slow_to_trace(0.5)
    fit_with(notice, model)
    *during, after = said
    assert len(during) >= 2
    assert all("tracing the first step of training" in line for line in during)
    assert "took" in after
    fit_with(notice, model)
    assert len(said) == len(during) + 1, "a second fit traces nothing"


def test_a_quick_first_step_says_nothing():
    said = []
    fit_with(TracingNotice(first_line_s=60, say=said.append), slow_to_trace(0))
    assert said == []


def test_a_step_that_fails_ends_what_is_said_of_it():
    said = []
    notice = TracingNotice(first_line_s=0.05, say=said.append)
    model = slow_to_trace(0)

    def broken(data):
        time.sleep(0.2)
        raise RuntimeError("broken")

    model.train_step = broken
    with pytest.raises(RuntimeError, match="broken"):
        fit_with(notice, model)
    lines = len(said)
    time.sleep(0.3)
    assert len(said) == lines


@pytest.mark.parametrize("verbose", [0, 2])
def test_a_fit_says_it_unless_it_is_to_be_silent(verbose, capsys, monkeypatch):
    monkeypatch.setattr(tracing, "_FIRST_LINE_S", 0.05)
    with tfdist.strategy("single") as strategy:
        model = strategy.build(lambda: slow_to_trace(0.3))
        feed = strategy.dataset((X, X[:, :1]), global_batch_size=2)
        model.fit(feed, verbose=verbose)
        model.predict(feed, verbose=verbose)
    printed = capsys.readouterr().out
    for loop in ("training", "prediction"):
        assert (f"tfdist: tracing the first step of {loop}" in printed) == (verbose != 0)
