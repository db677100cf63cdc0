"""What a strategy is given as a model."""

from __future__ import annotations

import pytest
import tensorflow as tf

import tfdist
from tfdist.errors import ModelError, OptionError
from tfdist.strategies import REGISTRY
from tfdist.training.loops import chief_only

keras = tf.keras


def model_fn(units: int = 1) -> keras.Model:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(units)])
    model.compile("sgd", "mse")
    return model


def of_units(units: int, *more: int, **named: int) -> keras.Model:
    return model_fn(units)


class Other(type("Model", (), {"__module__": "keras.src.models.model"})):  # As of `import keras`.
    def __call__(self, inputs: object) -> object:
        return inputs


@pytest.mark.parametrize("name", sorted({*REGISTRY} - {"single"}))
def test_a_strategy_that_was_not_entered_is_one_line(name):
    with pytest.raises(OptionError, match=f"'{name}' must be entered .* Write: with tfdist"):
        tfdist.strategy(name).build(model_fn)


def test_a_parameter_with_a_default_is_none_that_is_needed():
    with tfdist.strategy("single") as strategy:
        assert strategy.build(model_fn).output_shape == (None, 1)


def test_a_function_that_needs_arguments():
    with (
        tfdist.strategy("single") as strategy,
        pytest.raises(ModelError, match=r"of_units must be .* one that needs units"),
    ):
        strategy.build(of_units)
    with pytest.raises(ModelError, match=r"model\.py:callbacks must be .* one that needs units"):
        chief_only.called(of_units, "model.py:callbacks")


@pytest.mark.parametrize("given", [Other(), Other], ids=["model", "function"])
def test_a_model_of_the_keras_that_is_not_in_use(given):
    with (
        tfdist.strategy("single") as strategy,
        pytest.raises(ModelError, match=r"found Other of Keras 3 \(import keras\)\. Import one"),
    ):
        strategy.build(given)
