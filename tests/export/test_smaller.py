"""Pruning, clustering, quantization-aware training and distillation: ordinary models, measured."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.errors import DataError, ModelError, OptionError

pytestmark = pytest.mark.timeout(240)


def kernels(model):
    return {
        layer.name: layer.kernel.numpy()
        for layer in model.layers
        if isinstance(layer, (tf.keras.layers.Dense, tf.keras.layers.Conv2D))
    }


def check(model, report, given, x, tmp_path):
    """An ordinary model: it loads without anything but Keras, and the given one is as it was."""
    assert type(model) is type(given)
    assert [layer.name for layer in model.layers] == [layer.name for layer in given.layers]
    assert model.optimizer is not None
    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras")
    expected = model.predict(x, verbose=0)
    np.testing.assert_allclose(loaded.predict(x, verbose=0), expected, atol=1e-5)
    assert report.before.metric == report.after.metric == "accuracy"
    assert f"{report.after.gzip_bytes:,}" in str(report)


@pytest.fixture
def weights(trained):
    """What the given model held before; it is not changed."""
    before = trained.get_weights()
    yield before
    for was, now in zip(before, trained.get_weights(), strict=True):
        np.testing.assert_array_equal(was, now)


@pytest.mark.usefixtures("weights")
def test_prune(trained, digits, validation, tmp_path):
    model, report = tfdist.export.prune(trained, digits, sparsity=0.7, epochs=2)
    check(model, report, trained, validation[0], tmp_path)
    for name, kernel in kernels(model).items():
        assert np.mean(kernel == 0) == pytest.approx(0.7, abs=0.01), name
    assert report.before.zeros < 0.01
    assert 0.68 < report.after.zeros < 0.71
    assert report.after.bytes == pytest.approx(report.before.bytes, rel=0.01)
    assert report.after.gzip_bytes < 0.55 * report.before.gzip_bytes
    assert report.after.value > report.before.value - 0.03
    x, y = validation
    assert np.mean(model.predict(x, verbose=0).argmax(-1) == y) == pytest.approx(report.after.value)


@pytest.mark.usefixtures("weights")
def test_cluster(trained, digits, validation, tmp_path):
    model, report = tfdist.export.cluster(trained, digits, clusters=8, epochs=1)
    check(model, report, trained, validation[0], tmp_path)
    for name, kernel in kernels(model).items():
        assert len(np.unique(kernel)) <= 8, name
    assert report.after.gzip_bytes < 0.3 * report.before.gzip_bytes
    assert report.after.value > report.before.value - 0.03


def test_kernels_of_fewer_weights_than_clusters_are_trained_on_as_they_are():
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    layers = [tf.keras.Input((4,)), tf.keras.layers.Dense(8), tf.keras.layers.Dense(1)]
    given = tf.keras.Sequential(layers)
    given.compile("sgd", "mse")
    model, _ = tfdist.export.cluster(given, (x, x.sum(1)), epochs=1)
    wide, narrow = kernels(model).values()
    assert len(np.unique(wide)) <= 16
    assert len(np.unique(narrow)) == 8


@pytest.mark.usefixtures("weights")
def test_quantize_aware(trained, digits, validation, tmp_path):
    model, report = tfdist.export.quantize_aware(trained, digits, epochs=1)
    check(model, report, trained, validation[0], tmp_path)
    assert report.quantization == "int8"
    moved = [np.abs(a - b).max() for a, b in zip(*map(_weights, (model, trained)), strict=True)]
    assert max(moved) > 1e-3
    assert report.after.value > report.before.value - 0.02


@tf.keras.utils.register_keras_serializable("test_smaller")
class Two(tf.keras.layers.Layer):
    """Two layers whose kernels are of one shape; the first one is frozen after the build."""

    def build(self, shape):
        self.first, self.last = (tf.keras.layers.Dense(4) for _ in range(2))
        self.first.build(shape)
        self.last.build(shape)
        super().build(shape)

    def call(self, inputs):
        return self.last(self.first(inputs))


def test_quantize_aware_of_layers_of_layers():
    layers = tf.keras.layers
    inputs = tf.keras.Input((6, 4))
    attended = layers.MultiHeadAttention(2, 2)(inputs, inputs)
    two = Two()
    flat = layers.Flatten()(two(layers.TimeDistributed(layers.Dense(4))(attended)))
    given = tf.keras.Model(inputs, layers.Dense(3)(flat))
    two.first.trainable = False
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    given.compile(tf.keras.optimizers.SGD(1e-6), loss)
    x = np.random.default_rng(0).normal(size=(32, 6, 4)).astype(np.float32)
    model, _ = tfdist.export.quantize_aware(given, (x, np.arange(32) % 3), epochs=1)
    for was, now in zip(_weights(given), _weights(model), strict=True):
        np.testing.assert_allclose(was, now, atol=1e-3)
    frozen, trained = model.get_layer(two.name).first, model.get_layer(two.name).last
    np.testing.assert_array_equal(frozen.kernel, two.first.kernel)
    assert np.abs(trained.kernel.numpy() - two.last.kernel).max() > 0


def test_quantize_aware_trains_behind_what_a_normalization_adapted_to():
    x = np.random.default_rng(0).normal(1000, 300, (64, 4)).astype(np.float32)
    norm = tf.keras.layers.Normalization()
    norm.adapt(x)
    given = tf.keras.Sequential([tf.keras.Input((4,)), norm, tf.keras.layers.Dense(2)])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    given.compile(tf.keras.optimizers.SGD(0.01), loss)
    before = given.get_weights()[-2]
    model, _ = tfdist.export.quantize_aware(given, (x, np.arange(64) % 2), epochs=1)
    # Of inputs around 1000 the kernel would have moved by whole numbers.
    assert 0 < np.abs(model.get_weights()[-2] - before).max() < 0.5


def _weights(model):
    return model.get_weights()


@pytest.mark.long
@pytest.mark.usefixtures("weights")
def test_distill(trained, digits, validation):
    def student():
        tf.keras.utils.set_random_seed(0)
        layers = tf.keras.layers
        model = tf.keras.Sequential(
            [
                tf.keras.Input((8, 8, 1)),
                layers.Rescaling(1 / 16),
                layers.Flatten(),
                layers.Dense(16, "relu"),
                layers.Dense(10, "softmax"),  # Of probabilities; the teacher's are logits.
            ]
        )
        model.compile(
            tf.keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"]
        )
        return model

    model, report = tfdist.export.distill(trained, student, digits, epochs=12, teacher_share=1.0)
    assert report.after.weights == 64 * 16 + 16 + 16 * 10 + 10
    assert report.after.bytes < 0.05 * report.before.bytes
    # Of the teacher alone: no label was looked at.
    assert report.after.value > 0.85
    x, y = validation
    assert np.mean(model.predict(x, verbose=0).argmax(-1) == y) == pytest.approx(report.after.value)


@pytest.mark.parametrize(
    ("call", "options"),
    [
        (tfdist.export.prune, {"sparsity": 1.0}),
        (tfdist.export.prune, {"epochs": 0}),
        (tfdist.export.cluster, {"clusters": 1}),
    ],
)
def test_mistakes(call, options, trained, digits):
    with pytest.raises(OptionError):
        call(trained, digits, **options)


def test_records_without_labels(trained):
    records = (np.zeros((8, 8, 8, 1), np.float32),)
    for made in (tfdist.export.prune, lambda *given: tfdist.export.distill(trained, *given)):
        with pytest.raises(DataError, match="must have labels"):
            made(trained, records)


def test_models_that_cannot_be_made_smaller(trained, digits):
    plain = tf.keras.Sequential([tf.keras.Input((8, 8, 1)), tf.keras.layers.Dense(10)])
    with pytest.raises(ModelError, match="compile"):
        tfdist.export.prune(plain, digits)
    empty = tf.keras.Sequential([tf.keras.Input((8, 8, 1)), tf.keras.layers.Flatten()])
    empty.compile("sgd", "mse")
    with pytest.raises(ModelError, match="Dense or a convolution"):
        tfdist.export.cluster(empty, digits)
    student = tf.keras.Sequential([tf.keras.Input((8, 8, 1)), tf.keras.layers.Flatten()])
    student.compile("sgd", "mse")
    with pytest.raises(ModelError, match="same shape"):
        tfdist.export.distill(trained, student, digits)
    with pytest.raises(OptionError, match="temperature"):
        tfdist.export.distill(trained, student, digits, temperature=0)
