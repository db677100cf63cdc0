"""Models and options that a pipeline refuses, and what it says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tensorflow import keras

import tfdist
from tfdist.errors import ModelError, OptionError
from tfdist.strategies.pipeline.measure import Cost, Measured
from tfdist.strategies.pipeline.options import Options
from tfdist.strategies.pipeline.plan import find_named, freeze, make_plan
from tfdist.training.model.layer_calls import graph_of

layers = keras.layers


def options(**chosen: Any) -> Options:
    return Options(
        **{
            "stages": 2,
            "microbatches": 4,
            "schedule": "gpipe",
            "chunks_per_stage": None,
            "cut_after": None,
            "optimize": "speed",
            "balance": "estimated",
            "recompute": "none",
            "batch_norm": "synchronized",
            "freeze_until": None,
            "frozen_cache": None,
            "frozen_cache_dir": None,
        }
        | chosen
    )


def plan(model: keras.Model, **chosen: Any) -> Any:
    asked = options(**chosen)
    graph = graph_of(model, needed_by="it", otherwise="not")
    named = find_named(graph, asked)
    return make_plan(model, freeze(model, graph, named), asked, named)


def sequential(*given: Any, shape: tuple = (6,), **compiled: Any) -> keras.Model:
    model = keras.Sequential([keras.Input(shape), *given])
    model.compile("sgd", "mse", **compiled)
    return model


def test_an_optimizer_that_counts_its_traces():
    model = sequential(layers.Dense(4, "tanh"), layers.Dense(2))
    model.compile("nadam", "mse")
    with pytest.raises(ModelError, match=r"but found the optimizer Nadam\. Choose Adam"):
        plan(model)


def test_automatic_cuts_balance_operations_or_bytes():
    def model() -> keras.Model:  # Much computing first, many weights last.
        return sequential(
            layers.Conv2D(16, 5, padding="same"),
            layers.Conv2D(16, 5, padding="same"),
            layers.Flatten(),
            layers.Dense(200),
            shape=(32, 32, 1),
        )

    assert plan(model(), optimize="speed").cuts == (2,)
    assert plan(model(), optimize="memory").cuts == (3,)


class Subclassed(keras.Model):
    def call(self, inputs: Any) -> Any:
        return inputs


def with_added_loss() -> keras.Model:
    inputs = keras.Input((6,))
    hidden = layers.Dense(4)(inputs)
    model = keras.Model(inputs, layers.Dense(2)(hidden))
    model.add_loss(keras.backend.mean(hidden))
    model.compile("sgd", "mse")
    return model


class WithNorm(layers.Layer):
    def __init__(self, **options: Any):
        super().__init__(**options)
        self.norm = layers.BatchNormalization()

    def call(self, inputs: Any) -> Any:
        return self.norm(inputs)


def with_hidden_norm() -> keras.Model:
    return sequential(WithNorm(name="inner"), layers.Dense(2))


def with_own_step() -> keras.Model:
    class Own(keras.Model):
        def train_step(self, data: Any) -> Any:
            return super().train_step(data)

    inputs = keras.Input((6,))
    model = Own(inputs, layers.Dense(2)(layers.Dense(2)(inputs)))
    model.compile("sgd", "mse")
    return model


def masked() -> keras.Model:
    return sequential(layers.Masking(), layers.LSTM(3, return_sequences=True), shape=(5, 6))


def masked_norm() -> keras.Model:
    return sequential(layers.Masking(), layers.BatchNormalization(), layers.LSTM(3), shape=(5, 6))


def stateful() -> keras.Model:
    inputs = keras.Input(batch_shape=(4, 5, 6))
    return keras.Model(inputs, layers.Dense(2)(layers.LSTM(3, stateful=True)(inputs)))


@pytest.mark.parametrize(
    ("make", "chosen", "error", "part"),
    [
        (
            lambda: sequential(layers.Dense(2)),
            {},
            ModelError,
            "2 stages must have at least 2 layers",
        ),
        (
            lambda: sequential(*(layers.Dense(2) for _ in range(3))),
            {"schedule": "interleaved"},
            ModelError,
            "2 stages of 2 chunks each must have at least 4 layers",
        ),
        (Subclassed, {}, ModelError, "Functional or Sequential"),
        (with_own_step, {}, ModelError, "train_step"),
        (with_added_loss, {}, ModelError, "add_loss"),
        (with_hidden_norm, {}, ModelError, "inside 'inner'"),
        (masked, {}, ModelError, "mask"),
        (stateful, {}, ModelError, "stateful=False"),
        (masked_norm, {}, ModelError, "must not follow a mask"),
        (
            lambda: sequential(layers.Dense(2), layers.Dense(2), jit_compile=True),
            {},
            ModelError,
            "jit_compile",
        ),
        (
            lambda: sequential(layers.Dense(2), layers.BatchNormalization(name="norm")),
            {"schedule": "1f1b"},
            OptionError,
            "batch_norm='per_microbatch'",
        ),
        (
            lambda: sequential(layers.RandomFlip(name="flip"), layers.Flatten(), shape=(4, 4, 3)),
            {"recompute": "blocks"},
            OptionError,
            "flip",
        ),
        (
            lambda: sequential(layers.Dense(2, name="a"), layers.Dense(2, name="b")),
            {"cut_after": "c"},
            OptionError,
            "Choose one of a, b",
        ),
        (
            lambda: sequential(layers.Dense(2, name="a"), layers.Dense(2, name="b")),
            {"freeze_until": "c"},
            OptionError,
            "Choose one of a, b",
        ),
    ],
)
def test_models_that_cannot_be_a_pipeline(make, chosen, error, part):
    with pytest.raises(error) as caught:
        plan(make(), **chosen)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("chosen", "part"),
    [
        ({"balance": "guessed"}, "Choose one of estimated, measured"),
        ({"optimize": "money"}, "Choose one of speed, memory"),
        ({"batch_norm": "none"}, "Choose one of synchronized, per_microbatch"),
        ({"recompute": "yes"}, "recompute must be a known one"),
        ({"stages": 3, "cut_after": "a"}, "one layer fewer than there are parts, here 2"),
        ({"cut_after": 3}, "cut_after must name layers, but found 3"),
        ({"cut_after": [1]}, "cut_after must name layers, but found [1]"),
        (
            {"freeze_until": "a", "frozen_cache": "disk", "frozen_cache_dir": __file__},
            "frozen_cache_dir must be a folder, but found the file",
        ),
        ({"schedule": "interleaved", "microbatches": 3}, "Choose microbatches=4"),
    ],
)
def test_options_that_cannot_hold(chosen, part):
    with pytest.raises(OptionError) as caught:
        tfdist.strategy("pipeline", **chosen)
    assert part in str(caught.value)


def test_microbatches_divide_the_batch():
    strategy = tfdist.strategy("pipeline", microbatches=4)
    data = np.zeros((20, 6), np.float32), np.zeros(20)
    with pytest.raises(OptionError) as caught:
        strategy.dataset(data, global_batch_size=10)
    assert "Choose a global batch size of 8 or 12" in str(caught.value)
    assert len(strategy.dataset(data, global_batch_size=10, training=False)) == 2


def test_describe_needs_a_model_of_this_strategy():
    strategy = tfdist.strategy("pipeline")
    with pytest.raises(ModelError, match=r"that strategy\.build returned"):
        strategy.describe(sequential(layers.Dense(2)))


def test_measured_cuts_balance_what_was_measured():
    model = sequential(*(layers.Dense(6) for _ in range(4)))
    graph = graph_of(model, needed_by="it", otherwise="not")
    asked = options(balance="measured")
    costs = tuple(Cost(time_s, time_s, 0) for time_s in (5.0, 1.0, 1.0, 1.0))
    named = find_named(graph, asked)
    assert make_plan(model, graph, asked, named, Measured(8, costs)).cuts == (1,)
    kept = tuple(Cost(1.0, 1.0, number) for number in (0, 0, 0, 10**6))
    asked = options(balance="measured", optimize="memory")
    assert make_plan(model, graph, asked, named, Measured(8, kept)).cuts == (3,)
