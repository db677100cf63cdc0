"""Data and models that do not fit each other or a strategy; see data_error_scenarios.py, too."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from scenario_plugin import Job

import tfdist
from tfdist.errors import DataError

layers = tf.keras.layers
SCENARIOS = "data_error_scenarios.py"
JOBS = {
    "single": Job("single", only_named=True),
    "mirrored": Job("mirrored", {"devices": 2}),
    "horovod": Job("horovod", {"stall_timeout_s": 100}, ranks=2),
    "multi_worker": Job("multi_worker", {"stall_timeout_s": 100}, ranks=2, only_named=True),
}


def test_data_error(scenario):
    scenario.check()


def compiled(inputs, outputs) -> tf.keras.Model:
    model = tf.keras.Model(inputs, outputs)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss)
    return model


def one_input() -> tf.keras.Model:
    inputs = tf.keras.Input((4,), name="a")
    return compiled(inputs, layers.Dense(3)(inputs))


def two_inputs() -> tf.keras.Model:
    a, b = tf.keras.Input((4,), name="a"), tf.keras.Input((2,), name="b")
    return compiled([a, b], layers.Dense(3)(layers.Concatenate()([a, b])))


def zeros(*shape: int) -> np.ndarray:
    return np.zeros((8, *shape), np.float32)


@pytest.mark.parametrize(
    ("model_fn", "x", "words"),
    [
        (one_input, zeros(5), ["'a'", "[4]", "[5]"]),
        (one_input, {"c": zeros(4)}, ["inputs a of the model", "c"]),
        (one_input, (zeros(4), zeros(2)), ["here 1", "2 features"]),
        (two_inputs, {"a": zeros(4)}, ["a, b"]),
        (two_inputs, {"a": zeros(2), "b": zeros(4)}, ["'a'", "[4]", "[2]"]),
        (two_inputs, zeros(4), ["here 2", "1 features"]),
    ],
)
def test_inputs_that_do_not_fit_are_named(model_fn, x, words):
    strategy = tfdist.strategy("single")
    model = strategy.build(model_fn)
    data = strategy.dataset((x, np.zeros(8, np.int64)), global_batch_size=4)
    for loop in (model.fit, model.evaluate, model.predict):
        with pytest.raises(DataError) as caught:
            loop(data, verbose=0)
        for word in words:
            assert word in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "batched", "words"),
    [((4, 4), False, "say batched=True"), ((4,), True, "say batched=False")],
)
def test_a_wrong_answer_about_batches_is_thought_of(shape, batched, words):
    strategy = tfdist.strategy("single")
    model = strategy.build(one_input)
    elements = tf.data.Dataset.from_tensor_slices((zeros(*shape), zeros(4)))
    feed = strategy.dataset(elements, global_batch_size=4, batched=batched)
    with pytest.raises(DataError, match=words):
        model.fit(feed, verbose=0)


@pytest.mark.parametrize("x", [zeros(4), zeros(4, 1), {"a": zeros(4)}])
def test_inputs_that_keras_can_take_are_left_to_it(x):
    strategy = tfdist.strategy("single")
    model = strategy.build(one_input)
    model.fit(strategy.dataset((x, np.zeros(8, np.int64)), global_batch_size=4), verbose=0)


@pytest.mark.parametrize(
    ("loss", "labels", "words"),
    [
        ("categorical_crossentropy", zeros(1), ["shape [3]", "shape [1]", "and the loss categ"]),
        (tf.keras.losses.BinaryCrossentropy(), zeros(2), ["shape [2]", "binary_crossentropy"]),
    ],
)
def test_a_loss_that_does_not_fit_the_labels_is_named(loss, labels, words):
    strategy = tfdist.strategy("single")
    model = strategy.build(one_input)
    model.compile("sgd", loss)
    data = strategy.dataset((zeros(4), labels), global_batch_size=4)
    for loop in (model.fit, model.evaluate):
        with pytest.raises(DataError) as caught:
            loop(data, verbose=0)
        for word in words:
            assert word in str(caught.value)


def test_what_an_own_loss_refuses_is_left_to_it():
    def own(y, y_pred):
        return tf.keras.losses.categorical_crossentropy(y, y_pred)

    strategy = tfdist.strategy("single")
    model = strategy.build(one_input)
    model.compile("sgd", own)
    with pytest.raises(ValueError, match="incompatible"):
        model.fit(strategy.dataset((zeros(4), zeros(1)), global_batch_size=4), verbose=0)


def test_a_label_without_an_output_is_named():
    strategy = tfdist.strategy("single")
    model = strategy.build(one_input)
    data = strategy.dataset((zeros(4), np.full(8, 7)), global_batch_size=4)
    with pytest.raises(DataError, match=r"0 to 2, but found label 7"):
        model.fit(data, verbose=0)


def test_several_labels_a_record_are_counted():
    strategy = tfdist.strategy("single")
    model = strategy.build(one_input)
    data = strategy.dataset((zeros(4), np.zeros((8, 2), np.int64)), global_batch_size=4)
    with pytest.raises(DataError, match="found 8 labels for 4 rows"):
        model.fit(data, verbose=0)


def looked_up() -> tf.keras.Model:
    inputs = tf.keras.Input((4,), dtype="int64")
    return compiled(inputs, layers.Dense(3)(layers.Embedding(8, 2, name="words")(inputs)[:, 0]))


def gathered() -> tf.keras.Model:
    inputs = tf.keras.Input((4,), dtype="int64")
    return compiled(inputs, layers.Dense(3)(tf.gather(tf.eye(8), inputs)[:, 0]))


@pytest.mark.parametrize(
    ("model_fn", "words"),
    [
        (looked_up, r"layer 'words' .* 0 to 7, but found id -3\. .*input_dim"),
        (gathered, r"by operation '.*[Gg]ather.*' must .* 0 to 7, but found index -3\. Mend"),
    ],
)
def test_an_id_without_a_row_is_named(model_fn, words):
    strategy = tfdist.strategy("single")
    model = strategy.build(model_fn)
    x, y = np.full((8, 4), -3), np.zeros(8, np.int64)
    data = strategy.dataset((x, y), global_batch_size=4)
    for call in (
        lambda: model.fit(data, verbose=0),
        lambda: model.predict(data, verbose=0),
        lambda: model.fit(x, y, verbose=0),
        lambda: model.predict_on_batch(x),
    ):
        with pytest.raises(DataError, match=words):
            call()


def test_images_of_several_sizes_are_to_be_resized():
    def image_model() -> tf.keras.Model:
        inputs = tf.keras.Input((None, None, 3))
        return compiled(inputs, layers.Dense(3)(layers.GlobalAveragePooling2D()(inputs)))

    strategy = tfdist.strategy("single")
    labels = tf.data.Dataset.range(8)
    images = labels.map(lambda n: (tf.zeros([4 + n % 2, 4, 3]), n % 3))
    with pytest.raises(DataError, match=r"one shape in all records.*tf\.image\.resize"):
        strategy.build(image_model).fit(strategy.dataset(images, global_batch_size=4), verbose=0)


def test_rows_of_several_lengths_are_to_be_padded():
    def any_length() -> tf.keras.Model:
        inputs = tf.keras.Input((None,))
        rows = layers.Reshape((-1, 1))(inputs)
        return compiled(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(rows)))

    strategy = tfdist.strategy("single")
    records = tf.data.Dataset.range(8).map(lambda n: (tf.zeros([2 + n % 2]), n % 3))
    model, padded = strategy.build(any_length), records.padded_batch(4)
    feed = strategy.dataset(records, global_batch_size=4)
    for read in (
        lambda: model.fit(records.batch(4), verbose=0),
        lambda: model.fit(padded, validation_data=records.batch(4), verbose=0),
        lambda: model.evaluate(records.batch(4), verbose=0),
        lambda: model.predict(records.batch(4), verbose=0),
        lambda: list(feed.epochs(0, 1)),
        lambda: list(feed.epochs(0, 1).as_numpy_iterator()),
    ):
        with pytest.raises(
            DataError, match=r"one shape in all records.*\[[23]\] and \[[23]\].*padded_batch"
        ):
            read()
    model.fit(padded, validation_data=padded, verbose=0)
    assert len(list(strategy.dataset(padded, global_batch_size=4).epochs(0, 1))) == 2
