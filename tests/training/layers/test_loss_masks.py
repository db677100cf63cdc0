"""Labels and weights of several outputs meet the losses that Keras gives them."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

from tfdist.training.layers import loss_masks, losses

layers = keras.layers
_LEAVES_OUT = keras.losses.SparseCategoricalCrossentropy(ignore_class=0)
MASK, KIND = np.array([0, 1, 2, 1]), np.array([0, 0, 1, 2])


def _model(outputs, loss, **options):
    """Outputs in an order that is not that of their names."""
    inputs = keras.Input((2,))
    made = {name: layers.Dense(3, "softmax", name=name)(inputs) for name in ("mask", "kind")}
    structured = dict(made) if outputs == "dict" else list(made.values())
    model = keras.Model(inputs, structured)
    model.compile("sgd", loss, **options)
    return model


@pytest.mark.parametrize("outputs", ["dict", "list"])
@pytest.mark.parametrize("by_name", [True, False])
def test_one_of_two_outputs_leaves_out_a_class(outputs, by_name):
    named = {"mask": _LEAVES_OUT, "kind": "sparse_categorical_crossentropy"}
    if by_name:
        loss, y = named, {"mask": MASK, "kind": KIND}
    else:  # Keras lays a dict flat by its names.
        order = ["kind", "mask"] if outputs == "dict" else ["mask", "kind"]
        loss, y = [named[n] for n in order], [{"mask": MASK, "kind": KIND}[n] for n in order]
    model = _model(outputs, loss)
    x = tf.random.stateless_normal([4, 2], [1, 2])
    y_pred, labels = model(x), tf.nest.map_structure(tf.constant, y)
    masks, counted = loss_masks.found(model, labels, y_pred)
    names = losses.names_of_outputs(model, y_pred)
    of_mask = names.index("mask")
    np.testing.assert_array_equal(masks[of_mask], MASK != 0)
    assert masks[1 - of_mask] is None
    found = counted if by_name else dict(zip(order, counted, strict=True))
    np.testing.assert_array_equal(found["mask"], [1, 1, 2, 1])
    np.testing.assert_array_equal(found["kind"], KIND)
    # What a share of all rows makes of it is what Keras does.
    share = tf.constant([4, 4], tf.int64)
    sums = loss_masks.counted(masks, y_pred, lambda tensor, _: tensor)
    weights = loss_masks.as_weights(model, masks, y_pred, None, share, sums)
    expected = model.compute_loss(x, labels, y_pred)
    given = model.compute_loss(x, counted, y_pred, weights)
    np.testing.assert_allclose(given, expected, rtol=1e-6)


def test_a_class_of_ones_own_names_its_outputs_as_keras_does():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(3, "softmax")

        def call(self, x):
            return self.dense(x)

    model = Own()
    model.compile("sgd", {"output_1": _LEAVES_OUT})
    y_pred = model(tf.ones([4, 2]))
    assert losses.by_output(model, y_pred) == [_LEAVES_OUT]
    masks, _ = loss_masks.found(model, tf.constant(MASK), y_pred)
    np.testing.assert_array_equal(masks[0], MASK != 0)


def test_outputs_in_a_list_within_a_dict():
    inputs = keras.Input((2,))
    kinds = [layers.Dense(3, "softmax")(inputs) for _ in range(2)]
    model = keras.Model(inputs, {"kinds": kinds, "mask": layers.Dense(3)(inputs)})
    model.compile("sgd", _LEAVES_OUT)
    labels = {"kinds": [KIND, KIND], "mask": MASK}
    masks, counted = loss_masks.found(model, labels, model(tf.ones([4, 2])))
    for mask, y in zip(masks, [KIND, KIND, MASK], strict=True):
        np.testing.assert_array_equal(mask, y != 0)
    np.testing.assert_array_equal(counted["kinds"], [[1, 1, 1, 2]] * 2)
    np.testing.assert_array_equal(counted["mask"], [1, 1, 2, 1])


def _two_outputs(**options):
    inputs = keras.Input((2,))
    made = [layers.Dense(3, "softmax", name=name)(inputs) for name in ("mask", "kind")]
    model = keras.Model(inputs, made)
    model.compile("sgd", _LEAVES_OUT, **options)
    return model


def _in_two_shares(model, x, y, weight):
    """Returns the loss of the whole, and the sum of the losses of its first row and the others."""
    rows = [slice(0, 1), slice(1, None)]  # The first has no label that counts.
    batch = (x, y) if weight is None else (x, y, weight)
    parts = [tf.nest.map_structure(lambda t, r=r: t[r], batch) for r in rows]
    parts = [keras.utils.unpack_x_y_sample_weight(part) for part in parts]
    found = [loss_masks.found(model, y, model(x)) for x, y, _ in parts]
    each = [loss_masks.counted(masks, model(x), lambda t, _: t) for masks, _ in found]
    pairs = zip(*each, strict=True)
    counted = [None if first is None else first + others for first, others in pairs]
    total = 0.0
    for (part, _, weights), (masks, labels) in zip(parts, found, strict=True):
        share = tf.constant([len(part), len(x)], tf.int64)
        y_pred = model(part)
        weights = loss_masks.as_weights(model, masks, y_pred, weights, share, counted)
        loss = model.compute_loss(part, labels, loss_masks.without_masks(y_pred), weights)
        total += loss * len(part) / len(x)
    return model.compute_loss(x, y, model(x), weight), total


@pytest.mark.parametrize("y", [MASK, {"mask": MASK}, {"kind": KIND}], ids=["one", "mask", "kind"])
@pytest.mark.parametrize("is_weighed", [False, True])
def test_labels_of_several_outputs_and_weights_of_some(y, is_weighed):
    """One tensor is that of all outputs; an output without a name has no loss, or no weights."""
    model, x = _two_outputs(), tf.random.stateless_normal([4, 2], [1, 2])
    weight = {"mask": tf.constant([1.0, 2.0, 3.0, 0.5])} if is_weighed else None
    labels = tf.nest.map_structure(tf.constant, y)
    expected, found = _in_two_shares(model, x, labels, weight)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_name_that_no_output_has_is_left_for_keras_to_refuse():
    model, x = _two_outputs(), tf.ones([4, 2])
    _, labels = loss_masks.found(model, {"mask": MASK, "other": KIND}, model(x))
    assert set(labels) == {"mask", "other"}
