"""The policy around the making of a model."""

from __future__ import annotations

import pytest
import tensorflow as tf
from tensorflow import keras

from tfdist.keras.loss_scale import loss_scale_state
from tfdist.training.model.precision import in_full, policy


def made() -> str:
    return keras.layers.Dense(1).dtype_policy.name


def test_the_policy_holds_inside_and_is_given_back():
    with policy("mixed_bfloat16"):
        assert made() == "mixed_bfloat16"
    assert made() == "float32"
    with pytest.raises(ZeroDivisionError), policy("mixed_float16"):
        raise ZeroDivisionError
    assert made() == "float32"


def test_what_the_user_has_set_stays():
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        with policy(None):
            assert made() == "mixed_bfloat16"
        with policy("float32"):
            assert made() == "float32"
        assert made() == "mixed_bfloat16"
    finally:
        keras.mixed_precision.set_global_policy(None)


def test_rows_are_counted_in_full():
    assert float(in_full(tf.constant(257, tf.bfloat16)) * 0) == 0
    assert in_full(tf.constant(1, tf.float16)).dtype == tf.float32
    assert in_full(tf.constant(1, tf.float64)).dtype == tf.float64


def test_the_state_of_a_loss_scale():
    scaled = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD())
    assert [float(variable) for variable in loss_scale_state(scaled)] == [2.0**15, 0]
    fixed = keras.mixed_precision.LossScaleOptimizer(
        keras.optimizers.SGD(), dynamic=False, initial_scale=8
    )
    assert loss_scale_state(fixed) == []
    assert loss_scale_state(keras.optimizers.SGD()) == []
