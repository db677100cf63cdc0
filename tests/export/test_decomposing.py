"""A classifier as small models, each for some of its classes."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

import tfdist
from tfdist.errors import DataError, ModelError, OptionError
from tfdist.export.smaller import decomposing, tuning
from tfdist.export.smaller.narrowing import chain_of, narrowed

pytestmark = pytest.mark.timeout(240)
layers = keras.layers
RNG = np.random.default_rng(0)


@pytest.mark.long
def test_digits_in_two_groups(trained, digits, validation, tmp_path):
    before = trained.get_weights()
    found = tfdist.decompose(trained, digits, groups=[[8, 0, 2, 4, 6], [1, 3, 5, 7, 9]], epochs=4)
    for was, now in zip(before, trained.get_weights(), strict=True):
        np.testing.assert_array_equal(was, now)

    total = sum(part.weights for part in found.parts)
    assert total == pytest.approx(trained.count_params(), rel=0.1)
    assert all(part.bytes < 0.6 * found.comparison.before.bytes for part in found.parts)
    assert found.comparison.after.value > found.comparison.before.value - 0.03
    assert "8, 0, 2, 4, 6" in str(found)

    x, y = validation
    outputs = found.joined.predict(x, verbose=0)
    assert outputs.shape == trained.predict(x, verbose=0).shape
    assert np.mean(outputs.argmax(-1) == y) == pytest.approx(found.comparison.after.value)
    # Joined they are what each says by itself, in the order of the classes.
    logits = np.empty_like(outputs)
    for part in found.parts:
        logits[:, part.classes] = part.model.predict(x, verbose=0)
    both = np.argsort(logits, -1), np.argsort(outputs, -1)
    assert np.mean(both[0] == both[1]) > 0.99

    found.joined.save(tmp_path / "joined.keras")
    loaded = keras.models.load_model(tmp_path / "joined.keras")
    np.testing.assert_allclose(loaded.predict(x, verbose=0), outputs, atol=1e-6)
    report = tfdist.export.tflite(found.parts[0].model, tmp_path / "part.tflite", data=digits)
    assert report is not None
    assert (tmp_path / "part.tflite").stat().st_size == found.parts[0].bytes


def chain(*more) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Rescaling(0.5),
            layers.Conv2D(6, 3, use_bias=False, name="conv"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.DepthwiseConv2D(3, name="depth"),
            layers.MaxPooling2D(),
            *more,
            layers.Flatten(),
            layers.Dense(5, "tanh", name="hidden"),
            layers.LayerNormalization(),
            layers.Dense(3, name="head"),
        ]
    )


def test_channels_without_weight_can_go_unseen():
    """A channel of zeros gives nothing on: without it the model computes the same."""
    keras.utils.set_random_seed(0)
    model = chain()
    model.build((None, 8, 8, 3))
    for layer in model.layers:  # Statistics that are not those of the start.
        layer.set_weights([RNG.uniform(0.5, 1.5, w.shape) for w in layer.get_weights()])
    kernel, *bias = model.get_layer("depth").get_weights()
    kernel[:, :, [1, 4]], bias[0][[1, 4]] = 0, 0
    model.get_layer("depth").set_weights([kernel, *bias])
    kept = {"conv": np.array([0, 2, 3, 5]), "head": np.array([2, 0])}
    smaller = narrowed(model, chain_of(model), kept, "smaller")
    x = RNG.normal(size=(4, 8, 8, 3)).astype(np.float32)
    expected = model.predict(x, verbose=0)[:, [2, 0]]
    np.testing.assert_allclose(smaller.predict(x, verbose=0), expected, rtol=1e-5)
    assert smaller.count_params() < model.count_params()


def branched() -> keras.Model:
    inputs = keras.Input((4,))
    x = layers.Dense(4, name="first")(inputs)
    return keras.Model(inputs, layers.Dense(2)(layers.Add(name="sum")([x, inputs])))


def compiled(model: keras.Model) -> keras.Model:
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (branched, "layer 'sum' of 'model.*', which stands at a branch"),
        (lambda: chain(layers.Reshape((2, 2, -1), name="other")), r"layer 'other' \(Reshape\)"),
        (lambda: chain(layers.Conv2DTranspose(6, 3)), r"\(Conv2DTranspose\)"),
        (
            lambda: keras.Sequential([keras.Input((4,)), layers.Dense(4), layers.Dense(2, "tanh")]),
            "must end in a Dense with a unit for each class",
        ),
    ],
)
def test_models_that_are_no_chain_to_classes(model, told):
    data = RNG.normal(size=(8, 4)).astype(np.float32), np.zeros(8, np.int64)
    tf.keras.backend.clear_session()
    with pytest.raises(ModelError, match=told):
        tfdist.decompose(compiled(model()), data)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"groups": 1}, "groups must be 2 to 3, the number of classes, but found 1"),
        ({"groups": 4}, "but found 4"),
        ({"groups": [[0, 1], [1, 2]]}, "lists or more that have each class 0 to 2 once"),
        ({"groups": [[0, 1, 2], []]}, "each class"),
        ({"groups": [[0, 1, 2]]}, "two lists or more"),
        ({"groups": [[0.9, 1], [2]]}, "each class"),
        ({"groups": "ab"}, "each class"),
        ({"keep": 0}, "keep must be a share above 0"),
        ({"epochs": 0}, "epochs"),
    ],
)
def test_options_that_cannot_hold(options, told):
    data = np.zeros((8, 8, 8, 3), np.float32), np.zeros(8, np.int64)
    with pytest.raises(OptionError, match=told):
        tfdist.decompose(compiled(chain()), data, **options)


@pytest.mark.parametrize(
    ("labels", "shape", "told"),
    [
        (
            [0, 1],
            (8, 8, 3),
            "each class of the model must have a record, but found none of class 2",
        ),
        ([1, 2, 3], (8, 8, 3), "here 0 to 2, but found label 3"),
        ([0, 1, 2], (4, 8, 3), r"must have shape \[8, 8, 3\]"),
    ],
)
def test_data_that_do_not_fit(labels, shape, told):
    data = np.zeros((12, *shape), np.float32), np.resize(labels, 12)
    with pytest.raises(DataError, match=told):
        tfdist.decompose(compiled(chain()), data, groups=np.int64(2))


def test_records_without_labels():
    with pytest.raises(DataError, match="must have labels"):
        tfdist.decompose(compiled(chain()), np.zeros((12, 8, 8, 3), np.float32))


def test_rare_classes_are_looked_for_in_all_records(monkeypatch):
    monkeypatch.setattr(decomposing, "_LOOKED_AT", 500)
    y = np.zeros(3000, np.int64)
    y[-3:] = 1, 2, 1
    data = np.zeros((3000, 8, 8, 3), np.float32), y
    feed = tuning.training_feed(data, global_batch_size=500, seed=0)
    _, seen = decomposing._some(feed, 3)
    assert 500 < len(seen) < 600
    assert np.bincount(seen)[1:].tolist() == [2, 1]
