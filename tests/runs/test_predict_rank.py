"""What a rank makes of the outputs of a model before it writes them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from tensorflow import keras

from tfdist.errors import ModelError
from tfdist.runs.predict_rank import load, named_losses, named_outputs


def test_outputs_are_of_types_that_files_hold(tmp_path):
    words = np.array([b"cat", "b\u00e4r".encode()], object)
    outputs = {"half": np.array([[1.5, 0.1]], ml_dtypes.bfloat16), "word": words}
    np.savez(tmp_path / "found.npz", **named_outputs(None, outputs))
    with np.load(tmp_path / "found.npz", allow_pickle=False) as found:
        assert found["half"].dtype == np.float32
        np.testing.assert_array_equal(found["half"], [[1.5, 0.10009765625]])
        assert found["word"].tolist() == ["cat", "b\u00e4r"]


@pytest.mark.parametrize("file", ["model.keras", "all.weights.h5"])
def test_weights_that_a_model_has_no_place_for_are_told(tmp_path, file):
    def of(blocks):
        layers = [keras.layers.Dense(8) for _ in range(blocks)]
        model = keras.Sequential([keras.Input((8,)), *layers])
        model.compile("adam", "mse", metrics=["mae"])
        model.shown = keras.metrics.Mean()
        return model

    trained = of(3)
    trained.fit(np.ones((4, 8)), np.ones((4, 8)), verbose=0)
    path = str(tmp_path / file)
    trained.save(path) if file.endswith(".keras") else trained.save_weights(path)
    load(of(3), path)
    with pytest.raises(ModelError, match=r"must be those of model .* the model has no .*dense_1"):
        load(of(1), path)


def _of_one(y, predicted):
    assert predicted.shape[-1] == 1
    return predicted[:, 0]


def _of_three(y, predicted):
    assert predicted.shape[-1] == 3
    return predicted[:, 0]


@pytest.mark.parametrize("adapted", [None, 100.0])
def test_a_file_gives_the_buckets_that_a_layer_adapted_to(adapted, tmp_path):
    """Keras 2 restores variables, and goes on with the constants of the model at hand."""
    x = np.arange(8, dtype=np.float32)[:, None]

    def made(scale):
        buckets = keras.layers.Discretization(num_bins=4)
        if scale is not None:
            buckets.adapt(x * scale)
        return keras.Sequential([keras.Input((1,)), buckets, keras.layers.Embedding(4, 2)])

    given, model = made(1.0), made(adapted)
    given.save_weights(tmp_path / "given.weights.h5")
    load(model, str(tmp_path / "given.weights.h5"))
    np.testing.assert_array_equal(model(x), given(x))


@pytest.mark.parametrize("given", [list, dict])
def test_losses_in_a_list_are_of_the_outputs_that_keras_has_them_for(given):
    x, y = np.ones((4, 2)), np.ones((4, 1))
    inputs = keras.Input((2,))
    kind = keras.layers.Dense(3, "softmax", name="kind")(inputs)
    age = keras.layers.Dense(1, name="age")(inputs)
    model = keras.Model(inputs, {"kind": kind, "age": age} if given is dict else [age, kind])
    losses = [_of_one, _of_three]
    model.compile("sgd", losses)
    model.evaluate(x, {"kind": y, "age": y}, verbose=0)
    predicted = model.predict(x, verbose=0)
    found = named_losses(losses, predicted, list(named_outputs(model, predicted)))
    assert found == {"age": _of_one, "kind": _of_three}
