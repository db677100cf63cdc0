"""What a strategy is given as a model."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.errors import ModelError, OptionError
from tfdist.export.models import whole_copy
from tfdist.strategies import REGISTRY
from tfdist.strategies.base import clone
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


def _spares_words(model):
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=1.0)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


def _spares_variables(model):
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=1.0)
    optimizer.exclude_from_weight_decay(var_list=[model.layers[0].bias])
    return optimizer


OPTIMIZERS = {
    "words": _spares_words,
    "variables": _spares_variables,
    "old": lambda _: keras.optimizers.legacy.Adam(0.1),
    "scaled": lambda model: keras.mixed_precision.LossScaleOptimizer(_spares_words(model)),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_copy_goes_on_where_the_model_is(kind):
    x, y = np.ones((4, 2), np.float32), np.zeros((4, 1), np.float32)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, bias_initializer="ones")])
    model.compile(OPTIMIZERS[kind](model), "mse")
    copy = clone(model)  # Of what has taken no step.
    for each in (model, copy):
        each.fit(x, y, verbose=0)
    again = clone(model)
    for each in (model, copy, again):
        each.fit(x, y, verbose=0)
    for trained in (copy, again):
        assert trained.optimizer.iterations.numpy() == 2
        for one, other in zip(model.get_weights(), trained.get_weights(), strict=True):
            np.testing.assert_allclose(other, one, atol=1e-6)


def test_a_copy_whose_optimizer_cannot_go_on_is_told(capsys):
    model = keras.Sequential([keras.Input((2,)), *map(keras.layers.Dense, (2, 1))])
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    model.layers[0].trainable = False
    model.compile(model.optimizer, "mse")
    assert len(clone(model).trainable_variables) == 2
    assert "Adam begins anew, as it was built for other weights" in capsys.readouterr().err


@keras.utils.register_keras_serializable("test_base")
class Two(keras.layers.Layer):
    """Two layers whose kernels are of one shape."""

    def build(self, shape):
        self.first, self.last = (keras.layers.Dense(2) for _ in range(2))
        self.first.build(shape)
        self.last.build(shape)
        super().build(shape)

    def call(self, inputs):
        return self.last(self.first(inputs))


@pytest.mark.parametrize("copied", [clone, whole_copy])
def test_what_is_frozen_within_a_layer_is_so_in_a_copy(copied):
    inputs = keras.Input((2,))
    frozen = keras.Sequential([Two(), Two()])
    model = keras.Model(inputs, Two()(frozen(inputs)))
    model.compile("sgd", "mse")
    frozen.layers[0].trainable = False
    frozen.layers[1].first.trainable = False
    model.layers[2].first.trainable = False
    copy = copied(model)
    given = np.ones((1, 2), np.float32)
    np.testing.assert_array_equal(model(given), copy(given))
    for ours, theirs in zip(model.trainable_weights, copy.trainable_weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert len(model.trainable_weights) == 4


def test_a_layer_that_is_frozen_without_compiling_is_trained_as_keras_does():
    with tfdist.strategy("single") as strategy:
        model = strategy.build(model_fn)
        model.layers[0].trainable = False
        before = model.get_weights()[0]
        model.fit(strategy.dataset((before.T, before[:1]), global_batch_size=1), verbose=0)
    assert np.abs(model.get_weights()[0] - before).max() > 0
    assert not model.layers[0].trainable
