"""Which number of a model a file is judged by."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfdist.errors import DataError
from tfdist.export.models import open_model
from tfdist.export.parity import Judge
from tfdist.export.samples import Rows

RNG = np.random.default_rng(0)


class Ruined:
    """A file that answers with these outputs."""

    def __init__(self, outputs: dict[str, np.ndarray]):
        self._outputs = outputs

    def predict(self, x, progress):
        return self._outputs


def heads(**sizes: int) -> tf.keras.Model:
    given = tf.keras.Input((4,), name="x")
    return tf.keras.Model(
        given, {name: tf.keras.layers.Dense(size, name=name)(given) for name, size in sizes.items()}
    )


def test_the_loss_of_an_output_is_no_accuracy():
    model = heads(accel=2, other=1)
    model.compile("sgd", "mse")
    x = RNG.normal(size=(32, 4)).astype(np.float32)
    outputs = model.predict(x, verbose=0)
    judge = Judge(open_model(model), Rows({"x": x}, outputs, None))
    found = judge.compare(Ruined({name: rows + 1 for name, rows in outputs.items()}))
    assert (found.metric, found.file) == ("loss", pytest.approx(2, abs=1e-4))
    assert found.drop > 1


def test_what_weights_add_to_a_loss_does_not_count():
    given = tf.keras.Input((4,), name="x")
    regular = tf.keras.layers.Dense(1, name="d", activity_regularizer="l2", kernel_regularizer="l1")
    model = tf.keras.Model(given, regular(given))
    model.compile("sgd", "mse")
    x = RNG.normal(size=(100, 4)).astype(np.float32)
    outputs = model.predict(x, verbose=0)
    judge = Judge(open_model(model), Rows({"x": x}, outputs + 1, None))
    found = judge.compare(Ruined({"d": outputs + 3}))
    assert (found.metric, found.keras) == ("loss", pytest.approx(1))
    assert found.file == pytest.approx(4)


def test_the_worst_of_several_accuracies_counts():
    model = heads(digit=3, colour=3)
    crossentropy = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    names = ("digit", "colour")
    model.compile("sgd", dict.fromkeys(names, crossentropy), dict.fromkeys(names, "accuracy"))
    x = RNG.normal(size=(32, 4)).astype(np.float32)
    outputs = model.predict(x, verbose=0)
    y = {name: rows.argmax(-1) for name, rows in outputs.items()}
    judge = Judge(open_model(model), Rows({"x": x}, y, None))
    for name in names:
        found = judge.compare(Ruined(outputs | {name: -outputs[name]}))
        assert (found.metric, found.keras) == (f"{name}_accuracy", 1)
        assert found.drop > 0.5


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        (
            np.array([0, 7]),
            "a class that the model has an output for, here 0 to 2, but found label 7",
        ),
        (np.eye(3)[:2], "labels must be such as the model's loss and metrics take"),
        (np.array(["a", "b"]), "labels for a loss of Keras must be numbers"),
    ],
)
def test_labels_that_the_loss_does_not_take_are_told(labels, told):
    model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(3)])
    model.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    plain = open_model(model)
    x = np.ones((2, 4), np.float32)
    judge = Judge(plain, Rows(dict.fromkeys(plain.inputs, x), labels, None))
    with pytest.raises(DataError, match=told):
        judge.compare(Ruined(plain.named_outputs(model.predict(x, verbose=0))))
