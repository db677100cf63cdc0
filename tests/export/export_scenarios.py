"""Exports of models on a strategy, live and from the file that the strategy saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from scenarios import scenario

import tfdist
from tfdist.export.interpreter import TfliteModel


def _data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 400)
    return (rng.normal(size=(400, 8)) + y[:, None]).astype(np.float32), y


def _model() -> Any:
    from tensorflow import keras

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(32, "relu"), keras.layers.Dense(32, "relu"), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


@scenario
def live_and_saved(strategy: Any, folder: Path) -> None:
    data = _data()
    model = strategy.build(_model)
    before = model.get_weights()[0]
    model.fit(strategy.dataset(data, global_batch_size=40), epochs=3, verbose=0)
    assert np.abs(model.get_weights()[0] - before).max() > 0.01
    strategy.save(model, folder / "model.keras")
    expected = model.predict(data[0], verbose=0)
    for number, given in enumerate((model, folder / "model.keras")):
        path = folder / f"{number}.tflite"
        report = tfdist.export.tflite(given, path, data=data)
        assert report.best.parity.largest_difference < 1e-5
        assert _answers(path, data[0]) == expected.argmax(-1).tolist()
    rounded = tfdist.export.tflite(
        model, folder / "int8.tflite", quantize="int8", data=data, layers=False
    )
    assert rounded.best.parity.drop <= 0.01
    # The live model goes on training afterwards.
    model.fit(strategy.dataset(data, global_batch_size=40), epochs=1, verbose=0)


def _answers(path: Path, x: np.ndarray) -> list[int]:
    (scores,) = TfliteModel(path.read_bytes()).predict({_input(path): x}).values()
    return scores.argmax(-1).tolist()


def _input(path: Path) -> str:
    from tfdist.export.flatbuffer import input_order

    (name,) = input_order(path.read_bytes())
    return name


@scenario("keras_3")
def a_model_of_keras_3(strategy: Any, folder: Path) -> None:
    """Weights and statistics of layers, which it keeps in lists; a SavedModel too."""
    import tensorflow as tf
    from tensorflow import keras

    layers = keras.layers

    def model_fn() -> keras.Model:
        inputs = keras.Input((8,), name="given")
        x = layers.BatchNormalization()(layers.Dense(8, "relu", name="first")(inputs))
        model = keras.Model(inputs, layers.Dense(3, name="last")(layers.Dropout(0.5)(x)))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])
        return model

    x, y = _data()
    model = strategy.build(model_fn)
    model.fit(strategy.dataset((x, y), global_batch_size=40), verbose=0)
    report = tfdist.export.tflite(model, folder / "model.tflite", data=(x, y))
    evaluated = model.evaluate(x, y, batch_size=400, verbose=0, return_dict=True)
    np.testing.assert_allclose(report.best.parity.keras, evaluated["accuracy"])
    expected = model.predict(x, batch_size=400, verbose=0)
    (found,) = TfliteModel((folder / "model.tflite").read_bytes()).predict({"given": x}).values()
    np.testing.assert_allclose(found, expected, atol=1e-5)
    model.export(str(folder / "served"), verbose=False)
    served = tf.saved_model.load(str(folder / "served"))
    np.testing.assert_allclose(served.serve(x), expected, atol=1e-5)


@scenario("keras_3")
def words_and_statistics_of_keras_3(strategy: Any, folder: Path) -> None:
    """What layers have adapted to is in copies; Keras counts no vocabulary among the weights."""
    import tensorflow as tf
    from tensorflow import keras

    from tfdist.export.models import open_model
    from tfdist.strategies.base import clone

    texts, numbers = tf.constant(["a b", "b c", "b"]), tf.constant([[1.0], [5.0], [6.0]])
    words = keras.layers.TextVectorization(output_mode="tf_idf", max_tokens=8)
    norm = keras.layers.Normalization()
    words.adapt(texts)
    norm.adapt(numbers)
    inputs = [keras.Input((), dtype="string"), keras.Input((1,))]
    both = keras.layers.Concatenate()([words(inputs[0]), norm(inputs[1])])
    model = keras.Model(inputs, keras.layers.Dense(2)(both))
    model.compile("sgd", "mse")
    expected = model([texts, numbers])
    for copy in (open_model(model).keras, clone(model)):
        assert copy is not model
        np.testing.assert_array_equal(copy([texts, numbers]), expected)


@scenario("keras_3", long=True)
def layers_of_mixed_precision_of_keras_3(strategy: Any, folder: Path) -> None:
    from tensorflow import keras

    data = _data()
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    model = strategy.build(_model)
    keras.mixed_precision.set_global_policy("float32")
    model.fit(strategy.dataset(data, global_batch_size=40), verbose=0)
    report = tfdist.export.tflite(model, folder / "int8.tflite", quantize="int8", data=data)
    named = {error.layer for error in report.best.layers}
    assert {layer.name for layer in model.layers} <= named
    path = folder / "float32.tflite"
    tfdist.export.tflite(model, path, data=data)
    predicted = model.predict(data[0], verbose=0).argmax(-1)
    assert np.mean(predicted == _answers(path, data[0])) > 0.97
