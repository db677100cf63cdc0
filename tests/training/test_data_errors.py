"""Data and models that do not fit each other or a strategy; see data_error_scenarios.py, too."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.errors import DataError

sys.path.append(str(Path(__file__).parents[1]))
from scenarios import Job

# The first scenario of a job waits for all, on a machine that may be busy.
pytestmark = pytest.mark.timeout(580)
layers = tf.keras.layers
_FILE = Path(__file__).with_name("data_error_scenarios.py")
_NAMES = tuple(re.findall(r"^@scenario\ndef (\w+)", _FILE.read_text(), re.MULTILINE))
_OF_ONE = ("one_batch_is_divided", "constants_follow_what_is_restored", "refusals_are_one_line")
_OF_WORKERS = (
    "one_batch_is_divided",
    "batches_come_in_the_order_of_the_arrays",
    "a_vocabulary_among_the_weights",
    "tables_and_scales",
    "a_table_of_the_training_is_that_of_its_resume",
    "a_loop_by_hand_is_heard_of",
    "refusals_are_one_line",
)
_RUN = {
    "single": _OF_ONE,
    "mirrored": _NAMES,
    "horovod": _NAMES,
    "multi_worker": _OF_WORKERS,
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    options = {
        "single": {},
        "mirrored": {"devices": 2},
        "horovod": {"stall_timeout_s": 20},
        "multi_worker": {"stall_timeout_s": 30},
    }
    return {
        name: Job(
            _FILE,
            tmp_path_factory.mktemp(name),
            name,
            options[name],
            ranks=2 if name in ("horovod", "multi_worker") else 1,
            only=only,
        )
        for name, only in _RUN.items()
    }


@pytest.mark.parametrize(
    ("strategy", "name"), [(strategy, name) for strategy, names in _RUN.items() for name in names]
)
def test_data_error(strategy, name, jobs):
    jobs[strategy].check(name)


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
