"""A training that begins with the weights of a file; what does not fit is named."""

from __future__ import annotations

import zipfile

import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.errors import ModelError, OptionError
from tfdist.runs.predict_rank import load
from tfdist.training.checkpoints.init_weights import check, with_weights

keras = tf.keras


def model_fn(units=3, more=(), rate=0.25):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units), *more])
    model.compile(keras.optimizers.SGD(rate), "mse", metrics=["mae"])
    return model


@pytest.fixture(params=["model.keras", "own.weights.h5"])
def file(request, tmp_path):
    path = tmp_path / request.param
    model = model_fn()
    model.fit(np.ones((8, 4)), np.ones((8, 3)), verbose=0)
    if path.suffix == ".keras":
        model.save(path)
    else:
        model.save_weights(path)
    return str(path), model.get_weights()


def test_a_model_begins_with_them_and_with_its_own_optimizer(file):
    path, weights = file
    check(path)
    with tfdist.strategy("single") as strategy:
        model = strategy.build(with_weights(lambda: model_fn(rate=0.5), path))
        for found, weight in zip(model.get_weights(), weights, strict=True):
            np.testing.assert_array_equal(found, weight)
        assert float(model.optimizer.learning_rate) == 0.5
        assert int(model.optimizer.iterations) == 0


@pytest.mark.parametrize("kind", [keras.optimizers.SGD, keras.optimizers.Adam])
def test_an_optimizer_beside_the_compiled_one_begins_anew_too(tmp_path, kind):
    def with_another(rate=0.25):
        model = model_fn()
        model.of_head = kind(rate)
        return model

    model = with_another(0.5)
    ones = [(tf.ones_like(weight), weight) for weight in model.trainable_variables]
    model.of_head.apply_gradients(ones)
    model.save(tmp_path / "model.keras")
    begun = with_weights(with_another, str(tmp_path / "model.keras"))()
    np.testing.assert_array_equal(begun.get_weights()[0], model.get_weights()[0])
    assert float(begun.of_head.learning_rate) == 0.25
    assert int(begun.of_head.iterations) == 0


@pytest.mark.parametrize("name", ["model.keras", "own.weights.h5"])
def test_a_model_within_it_may_have_been_trained_by_itself(tmp_path, name):
    def around(inner):
        inputs = keras.Input((4,))
        model = keras.Model(inputs, keras.layers.Dense(2)(inner(inputs)))
        model.compile("sgd", "mse")
        return model

    trained = model_fn()
    trained.fit(np.ones((8, 4)), np.ones((8, 3)), verbose=0)
    whole = around(trained)
    (whole.save if name == "model.keras" else whole.save_weights)(tmp_path / name)

    def with_inner(*more):
        layers = [keras.Input((4,)), keras.layers.Dense(3), *more]
        return around(keras.Sequential(layers))

    begun = with_weights(with_inner, str(tmp_path / name))()
    for found, weight in zip(begun.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(found, weight)
    deeper = with_inner(keras.layers.Dense(3))
    (deeper.save if name == "model.keras" else deeper.save_weights)(tmp_path / f"more-{name}")
    with pytest.raises(OptionError, match=r"the model has no layers/\w+/layers/dense_1/vars/0"):
        with_weights(with_inner, str(tmp_path / f"more-{name}"))()


@pytest.mark.parametrize(
    "other",
    [
        lambda: model_fn(units=2),
        lambda: model_fn(more=[keras.layers.Dense(2)]),
        lambda: keras.Sequential([keras.Input((4,)), keras.layers.Flatten()]),
    ],
    ids=["another shape", "a layer more", "a layer less"],
)
def test_weights_of_another_model(file, other):
    with pytest.raises(OptionError, match="init_weights must hold the weights of model"):
        with_weights(other, file[0])()


def test_weights_behind_a_password(tmp_path):
    path = tmp_path / "model.keras"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model.weights.h5", b"any")
    content = path.read_bytes()
    at = content.index(b"PK\1\2") + 8  # Of the directory: that the file is encrypted.
    path.write_bytes(content[:at] + b"\1" + content[at + 1 :])
    with pytest.raises(OptionError, match=r"no others, but found an error .* is encrypted"):
        with_weights(model_fn, str(path))()
    with pytest.raises(ModelError, match=r"must be those of model .* is encrypted"):
        load(model_fn(), str(path))


def test_a_model_without_weights(file):
    with pytest.raises(ModelError, match="must be built"):
        with_weights(lambda: keras.Sequential([keras.layers.Dense(3)]), file[0])()


def test_no_such_file(tmp_path):
    with pytest.raises(OptionError, match="but found no file"):
        check(str(tmp_path / "none.keras"))
    (tmp_path / "ckpt.index").touch()
    with pytest.raises(OptionError, match=r"must be a \.keras or \.weights\.h5 file"):
        check(str(tmp_path / "ckpt.index"))
