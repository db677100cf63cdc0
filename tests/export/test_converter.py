"""Models of many kinds: converted to the same model, or refused with the reason and the mend."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from tiers import long

import tfdist
from tfdist.errors import ExportError, ModelError
from tfdist.export.flatbuffer import operators
from tfdist.export.interpreter import TfliteModel

pytestmark = pytest.mark.timeout(240)
layers = tf.keras.layers


@pytest.fixture(autouse=True)
def seeded():
    tf.keras.utils.set_random_seed(0)


def sequential(*parts, shape=(12, 4)):
    return tf.keras.Sequential([tf.keras.Input(shape), *parts])


def rows(*shape):
    return np.random.default_rng(0).normal(size=(32, *shape)).astype(np.float32)


@pytest.mark.parametrize(
    ("recurrent", "quantize"),
    [("LSTM", "int8"), *long(("LSTM", "none"), ("both ways", "dynamic"), ("GRU", "int8"))],
)
def test_recurrent_layers_begin_each_record_anew(recurrent, quantize, tmp_path):
    made = {
        "LSTM": lambda: layers.LSTM(8),
        "GRU": lambda: layers.GRU(8),
        "both ways": lambda: layers.Bidirectional(layers.LSTM(8, return_sequences=True)),
    }
    model = sequential(made[recurrent](), layers.Dense(3), shape=(6, 4))
    path = tmp_path / "model.tflite"
    report = tfdist.export.tflite(
        model, path, quantize=quantize, data=(rows(6, 4),), max_drop=0.1, layers=False
    )
    assert report.best.parity.largest_difference < (1e-5 if quantize == "none" else 0.05)
    assert ("WHILE" in operators(path.read_bytes())) == (quantize != "int8")


def test_what_is_masked_stays_zero(tmp_path):
    lstm = layers.LSTM(3, return_sequences=True, zero_output_for_mask=True)
    model = sequential(layers.Masking(), lstm, shape=(6, 2))
    x = rows(6, 2)
    x[:, 3:] = 0
    path = tmp_path / "model.tflite"
    tfdist.export.tflite(model, path)
    (found,) = TfliteModel(path.read_bytes()).predict({model.input_names[0]: x}).values()
    np.testing.assert_allclose(found, model.predict(x, verbose=0), atol=1e-5)
    assert not found[:, 3:].any()


def test_a_state_that_outlives_a_record_is_refused(tmp_path):
    model = tf.keras.Sequential(
        [layers.LSTM(8, stateful=True, batch_input_shape=(1, 6, 4), name="memory")]
    )
    with pytest.raises(ExportError, match=r"'memory' with stateful=True.*Leave stateful out"):
        tfdist.export.tflite(model, tmp_path / "model.tflite")


@pytest.mark.long
def test_a_length_that_the_model_leaves_open_is_that_of_the_records(tmp_path):
    model = tf.keras.Sequential([tf.keras.Input((None, 4)), layers.LSTM(8), layers.Dense(3)])
    path = tmp_path / "model.tflite"
    with pytest.raises(ExportError, match=r"fixed shape.*\[None, 4\].*--data"):
        tfdist.export.tflite(model, path)
    tfdist.export.tflite(model, path, data=(rows(9, 4),))
    (given,) = tf.lite.Interpreter(str(path)).get_input_details()
    assert given["shape"].tolist() == [1, 9, 4]


class Inverse(layers.Layer):
    def call(self, x):
        return tf.linalg.inv(tf.matmul(x, x, transpose_b=True) + tf.eye(x.shape[1]))


class Doubled(layers.Layer):
    """Made of operators that TFLite has."""

    def call(self, x):
        return 2 * x + tf.reduce_mean(x, axis=-1, keepdims=True)


class Subclassed(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, x):
        return self.dense(x) * 2


def test_an_operator_that_tflite_has_not_got_is_named_with_its_layer(tmp_path):
    model = sequential(Inverse(name="solver"), layers.Dense(3))
    with pytest.raises(ExportError, match=r"MatrixInverse in layer 'solver'.*Write that layer"):
        tfdist.export.tflite(model, tmp_path / "model.tflite")
    assert list(tmp_path.iterdir()) == []


def test_layers_and_models_of_ones_own(tmp_path):
    path = tmp_path / "model.tflite"
    report = tfdist.export.tflite(sequential(Doubled()), path, data=(rows(12, 4),))
    assert report.best.parity.largest_difference < 1e-5
    model = Subclassed()
    with pytest.raises(ModelError, match="input shape"):
        tfdist.export.tflite(model, path)
    model(rows(4))
    report = tfdist.export.tflite(model, path, data=(rows(4),))
    assert report.best.parity.largest_difference < 1e-5


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_a_model_of_mixed_precision_is_exported_in_float32(policy, tmp_path):
    tf.keras.mixed_precision.set_global_policy(policy)
    try:
        inner = sequential(layers.Dense(4, "relu"))
        last = layers.Dense(3, name="last")
        model = sequential(inner, layers.BatchNormalization(), last, Doubled())
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    report = tfdist.export.tflite(model, tmp_path / "model.tflite", data=(rows(12, 4),))
    assert report.best.parity.largest_difference < 1e-5
    assert model.get_layer("last").dtype_policy.name == policy  # It stays as it is.


def test_several_inputs_and_outputs_are_found_by_name(tmp_path):
    """One input of bytes, one of words; the file's own order is another one than Keras'."""
    words = tf.keras.Input((6,), dtype="int32", name="words")
    image = tf.keras.Input((4, 4, 1), name="image")
    seen = layers.Flatten()(layers.Rescaling(1 / 255)(image))
    read = layers.GlobalAveragePooling1D()(layers.Embedding(20, 5)(words))
    both = layers.Concatenate()([seen, read])
    outputs = {"topic": layers.Dense(3)(both), "age": layers.Dense(1)(both)}
    model = tf.keras.Model({"words": words, "image": image}, outputs)
    rng = np.random.default_rng(0)
    x = {
        "image": rng.integers(0, 256, (40, 4, 4, 1)).astype(np.uint8),
        "words": rng.integers(0, 20, (40, 6)),
    }
    y = {"topic": rng.integers(0, 3, 40), "age": rng.normal(size=(40, 1))}
    loss = {"topic": tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True), "age": "mse"}
    model.compile("adam", loss)
    for quantize, limit in (("none", 1e-5), ("int8", 0.1)):
        path = tmp_path / f"{quantize}.tflite"
        report = tfdist.export.tflite(model, path, quantize=quantize, data=(x, y), max_drop=0.2)
        parity = report.best.parity
        assert parity.largest_difference < limit
        assert parity.metric == "loss"
        assert parity.keras == pytest.approx(model.evaluate(x, y, verbose=0)[0], rel=1e-4)
        assert parity.drop == pytest.approx((parity.file - parity.keras) / parity.keras)


def test_a_normalization_layer_is_in_the_file_with_what_it_adapted_to(tmp_path):
    x = rows(5) * 7 + 30
    adapted = layers.Normalization()
    adapted.adapt(x)
    model = sequential(adapted, layers.Dense(2), shape=(5,))
    report = tfdist.export.tflite(model, tmp_path / "model.tflite", data=(x,))
    assert report.best.parity.largest_difference < 1e-5
    assert report.best.parity.metric == "outputs"


@pytest.mark.parametrize("name", ["model.h5", "saved_model"])
def test_files_of_other_formats(name, tmp_path):
    model = sequential(layers.Dense(3), shape=(4,))
    model.save(tmp_path / name)
    report = tfdist.export.tflite(
        tmp_path / name, tmp_path / "model.tflite", data=(rows(4),), trust=name == "saved_model"
    )
    assert report.best.parity.largest_difference < 1e-5


def test_a_saved_model_without_its_weights_is_one_line(tmp_path):
    sequential(layers.Dense(3), shape=(4,)).save(tmp_path / "saved_model")
    for path in (tmp_path / "saved_model" / "variables").glob("*.data-*"):
        path.unlink()
    with pytest.raises(ModelError, match="must be a model that Keras can load"):
        tfdist.export.tflite(tmp_path / "saved_model", tmp_path / "model.tflite", trust=True)


def test_a_file_with_a_layer_of_ones_own_says_how_to_load_it(tmp_path):
    sequential(Doubled()).save(tmp_path / "model.keras")
    with pytest.raises(ModelError, match=r"Load it in Python.*tfdist.export.tflite"):
        tfdist.export.tflite(tmp_path / "model.keras", tmp_path / "model.tflite")


def test_equal_vectors_are_shared_and_constants_stay_aligned(tmp_path):
    """Zero points of a wide layer are all 0; kernels read 16 bytes at a time."""
    from tensorflow.lite.python import schema_py_generated as schema

    model = sequential(layers.Conv1D(256, 3), layers.Conv1D(256, 1))
    path = tmp_path / "model.tflite"
    tfdist.export.tflite(
        model, path, quantize="int8", data=(rows(12, 4),), layers=False, max_drop=1
    )
    content = path.read_bytes()
    root = schema.Model.GetRootAsModel(bytearray(content), 0)
    zero_points = set()
    for number in range(root.Subgraphs(0).TensorsLength()):
        quantization = root.Subgraphs(0).Tensors(number).Quantization()
        if quantization is not None and quantization.ZeroPointLength() == 256:
            points = quantization.ZeroPointAsNumpy()
            assert not points.any()
            zero_points.add(points.__array_interface__["data"][0])
    assert len(zero_points) == 1
    start = np.frombuffer(root._tab.Bytes, np.uint8).__array_interface__["data"][0]
    for number in range(root.BuffersLength()):
        if root.Buffers(number).DataLength():
            address = root.Buffers(number).DataAsNumpy().__array_interface__["data"][0]
            assert (address - start) % 16 == 0
