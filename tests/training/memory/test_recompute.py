"""Which layers are computed again, and that they draw and change nothing anew."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from tfdist.errors import ModelError, OptionError
from tfdist.strategies.single import Alone
from tfdist.training.engine.binding import Binding
from tfdist.training.memory.recompute import Recomputation

layers = keras.layers


def bound(model):
    return Binding(model, Alone())


def compiled(*inner: Any, shape: tuple = (8,)) -> keras.Model:
    model = keras.Sequential([keras.Input(shape), *inner])
    model.compile("sgd", "mse")
    return model


def blocks(*inner: Any, names: Any = None, shape: tuple = (8,)) -> list[str]:
    return Recomputation(bound(compiled(*inner, shape=shape)), names).blocks


def gradients(model: keras.Model, recomputation: Recomputation, x: Any) -> Any:
    """Returns the outputs in training and the gradients of their sum."""

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape, recomputation.of(0, 0):
            y = model(x, training=True)
        return y, tape.gradient(y, model.trainable_variables)

    return step()


def test_a_row_of_layers_is_cut_into_about_as_many_blocks_as_they_have_layers():
    found = blocks(*(layers.Dense(8, name=f"d{n}") for n in range(9)))
    assert found == ["d0 to d2", "d3 to d5"], "the last one is needed at once"


def test_nested_models_and_layers_of_layers_are_blocks():
    def inner(name: str) -> keras.Model:
        hidden = [layers.Dense(8, name=f"{name}{n}") for n in range(3)]
        return keras.Sequential([keras.Input((8,)), *hidden], name=name)

    found = blocks(layers.Dense(8, name="in"), *map(inner, "abcd"), layers.Dense(1, name="out"))
    assert found == [f"{n}/{n}0 to {n}/{n}2" for n in "abcd"]


def test_one_large_part_is_no_block():
    large = keras.Sequential(
        [keras.Input((8,)), *(layers.Dense(8, name=f"l{n}") for n in range(8))], name="large"
    )
    small = keras.Sequential([keras.Input((8,)), layers.Dense(1, name="s")], name="small")
    found = blocks(large, small)
    assert len(found) == 2
    assert found[0].startswith("large/l0 to large/l")


def test_named_layers_are_blocks_and_no_others():
    given = [layers.Dense(8, name=f"d{n}") for n in range(5)]
    assert blocks(*given, names=["d1", "d3"]) == ["d1", "d3"]
    with pytest.raises(OptionError, match=r"Did you mean 'd4'.*blocks, d0"):
        blocks(*[layers.Dense(8, name=f"d{n}") for n in range(5)], names=["dd4"])


def test_augmentation_is_never_done_twice():
    found = blocks(
        layers.RandomFlip(name="flip"),
        layers.Conv2D(2, 3, name="conv"),
        layers.Flatten(name="flat"),
        layers.Dense(4, name="a"),
        layers.Dense(4, name="b"),
        layers.Dense(4, name="c"),
        names=["flip", "conv", "a"],
        shape=(8, 8, 1),
    )
    assert found == ["conv", "a"]


def test_what_has_no_gradients_is_not_done_twice():
    def model() -> keras.Model:
        words = layers.TextVectorization(
            vocabulary=["a", "b"], output_sequence_length=3, name="words"
        )
        inner = [layers.Embedding(4, 2, name="e"), layers.Flatten(), layers.Dense(1)]
        made = keras.Sequential([keras.Input((), dtype="string"), words, *inner])
        made.compile("sgd", "mse")
        return made

    x, made, like = tf.constant(["a b", "b"]), model(), model()
    like.set_weights(made.get_weights())
    recomputation = Recomputation(bound(made), ["words", "e"])
    assert recomputation.blocks == ["e"]
    y, found = gradients(made, recomputation, x)
    with tf.GradientTape() as tape:
        expected = like(x, training=True)
    np.testing.assert_array_equal(y, expected)
    for one, other in zip(found, tape.gradient(expected, like.trainable_variables), strict=True):
        np.testing.assert_array_equal(tf.convert_to_tensor(one), tf.convert_to_tensor(other))


def test_the_same_units_drop_out_both_times():
    """The gradient of the weights of a sum is the sum of what has passed: the mask shows in it."""
    scale = layers.EinsumDense("...x,x->...x", output_shape=(400,), kernel_initializer="ones")
    model = compiled(layers.Dropout(0.5, name="drop"), scale, shape=(400,))
    recomputation = Recomputation(bound(model), ["drop", scale.name])
    x = np.ones((3, 400), np.float32)
    y, (gradient,) = gradients(model, recomputation, x)
    np.testing.assert_array_equal(np.sum(y, 0), gradient)
    assert 0.4 < np.mean(y.numpy() == 0) < 0.6


def test_layers_that_draw_by_themselves_are_refused():
    class Noise(layers.Layer):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            return x + tf.random.normal(tf.shape(x))

    model = compiled(layers.Dense(8, name="a"), Noise(name="noise"), layers.Dense(1))
    with pytest.raises(OptionError, match=r"the same random numbers each time.*random_normal"):
        gradients(model, Recomputation(bound(model), ["a", "noise"]), np.ones((2, 8), np.float32))


def test_a_nested_model_that_is_fixed_to_inference():
    # An RNN takes its state where its call takes ``training``.
    nested = [
        layers.Bidirectional(layers.LSTM(3)),
        layers.BatchNormalization(),
        layers.Dropout(0.5),
    ]
    base = keras.Sequential([keras.Input((4, 8)), *nested], name="base")
    for fixed in ({"training": False}, ()):
        inputs = keras.Input((4, 8))
        x = base(inputs, **fixed) if fixed else base(inputs, False)
        model = keras.Model(inputs, layers.Dense(1)(x))
        model.compile("sgd", "mse")
        rows = np.random.default_rng(0).normal(size=(3, 4, 8)).astype(np.float32)
        y, _ = gradients(model, Recomputation(bound(model), ["base"]), rows)
        np.testing.assert_allclose(y, model(rows, training=False), atol=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        lambda calls, x: calls.assign_add([1.0, 1.0]),
        lambda calls, x: calls[0].assign(1.0),
        lambda calls, x: calls.scatter_add(tf.IndexedSlices([1.0], [0])),
        lambda calls, x: tf.cond(
            tf.reduce_any(x > 0), lambda: calls.assign_add([1.0, 1.0]), lambda: calls + 0.0
        ),
    ],
)
def test_layers_that_change_variables_are_refused(change):
    class Counts(layers.Layer):
        def build(self, shape: Any) -> None:
            self.calls = self.add_weight("calls", [2], initializer="zeros", trainable=False)

        def call(self, x: tf.Tensor) -> tf.Tensor:
            change(self.calls, x)
            return x

    model = compiled(layers.Dense(8, name="a"), Counts(name="counts"), layers.Dense(1))
    with pytest.raises(ModelError, match=r"must not change variables.*in counts"):
        gradients(model, Recomputation(bound(model), ["a", "counts"]), np.ones((2, 8), np.float32))


def test_operations_are_in_the_graph_twice_and_wait_for_the_way_back():
    def products(names: list[str]) -> tuple[int, int]:
        """Returns how many there are, and how many wait for more than their inputs."""
        model = compiled(*(layers.Dense(8, name=f"d{n}", use_bias=False) for n in range(4)))
        recomputation = Recomputation(bound(model), names)

        @tf.function(input_signature=[tf.TensorSpec([2, 8])])
        def step(x: tf.Tensor) -> Any:
            with tf.GradientTape() as tape, recomputation.of(0, 0):
                y = model(x, training=True)
            return tape.gradient(y, model.trainable_variables)

        made = [
            op for op in step.get_concrete_function().graph.get_operations() if op.type == "MatMul"
        ]
        return len(made), sum(any(i.op.control_inputs for i in op.inputs) for op in made)

    kept, again = products([]), products(["d1", "d2"])
    assert again[0] == kept[0] + 2
    assert kept[1] == 0
    assert again[1] >= 2


def test_evaluation_and_prediction_are_those_of_keras():
    model = compiled(layers.Dropout(0.5), layers.Dense(3))
    x = np.ones((2, 8), np.float32)
    before = model.predict(x, verbose=0)
    Recomputation(bound(model), None)
    np.testing.assert_array_equal(model.predict(x, verbose=0), before)
