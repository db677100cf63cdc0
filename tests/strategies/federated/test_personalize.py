"""Personalization: what plain Keras would give on each client, from the same weights each time."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfdist.errors import DataError, ModelError, OptionError
from tfdist.records import open_clients
from tfdist.strategies.federated.personalize import personalize


def spares_biases():
    optimizer = tf.keras.optimizers.AdamW(0.05, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


OPTIMIZERS = {
    "adamw": spares_biases,
    "sgd": lambda: tf.keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: tf.keras.optimizers.Adam(0.05),
    "old": lambda: tf.keras.optimizers.legacy.SGD(0.1, momentum=0.9),
    "old adagrad": lambda: tf.keras.optimizers.legacy.Adagrad(0.1),
}


def make_model(optimizer="adam", *, batch_norm=False):
    tf.keras.utils.set_random_seed(0)
    norm = [tf.keras.layers.BatchNormalization()] if batch_norm else []
    layers = [tf.keras.layers.Dense(8, "relu"), *norm, tf.keras.layers.Dense(3)]
    model = tf.keras.Sequential([tf.keras.Input((4,)), *layers])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(OPTIMIZERS[optimizer](), loss, metrics=["accuracy"])
    return model


def same_records(value, label, num_records=20):
    """Records that are all alike: it does not matter which ones are held out."""
    return np.full((num_records, 4), value, np.float32), np.full(num_records, label)


def run(model, clients, **options):
    known = {
        "epochs": 3,
        "batch_size": 10,
        "learning_rate": None,
        "held_out_share": 0.5,
        "num_clients": None,
        "seed": 0,
    }
    return personalize(model, open_clients(clients), **(known | options))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_is_what_keras_gives_and_every_client_starts_anew(optimizer):
    clients = {"a": same_records(1, 2), "b": same_records(-1, 0), "c": same_records(1, 2)}
    model = make_model(optimizer)
    model.fit(*same_records(0.5, 1), epochs=2, verbose=0)  # The compiled optimizer has a state.
    weights = model.get_weights()
    found = run(model, clients)
    for name, records in clients.items():
        keras = make_model(optimizer)
        keras.set_weights(weights)
        half = tuple(array[:10] for array in records)
        start = keras.evaluate(*half, verbose=0)
        keras.fit(*half, epochs=3, batch_size=10, shuffle=False, verbose=0)
        end = keras.evaluate(*half, verbose=0)
        row = found.ids.index(name)
        for number, metric in enumerate(("loss", "accuracy")):
            assert found.before[metric][row] == pytest.approx(start[number], abs=1e-5)
            assert found.after[metric][row] == pytest.approx(end[number], abs=1e-5)
    assert found.num_tuned.tolist() == found.num_held_out.tolist() == [10, 10, 10]
    assert found.after["loss"][0] == found.after["loss"][2]
    assert found.means("loss")[1] < found.means("loss")[0]


def test_a_saturated_output_is_judged_by_its_logits():
    tf.keras.utils.set_random_seed(0)
    large = tf.keras.initializers.RandomNormal(stddev=40)
    dense = tf.keras.layers.Dense(3, "softmax", kernel_initializer=large)
    model = tf.keras.Sequential([tf.keras.Input((4,)), dense])
    model.compile(tf.keras.optimizers.SGD(1e-3), "sparse_categorical_crossentropy")
    worst = int(np.argmin(model.predict(same_records(1, 0)[0], verbose=0)[0]))
    records = same_records(1, worst)
    expected = model.evaluate(*records, verbose=0)
    assert expected > 17  # Clipped probabilities allow 16.1.
    found = run(model, {"a": records})
    assert found.before["loss"][0] == pytest.approx(expected, rel=1e-5)
    assert found.after["loss"][0] < expected


def test_the_model_is_afterwards_what_it_was():
    model = make_model(batch_norm=True)
    model.fit(*same_records(0.5, 1), epochs=2, verbose=0)
    weights = model.get_weights()
    state = [variable.numpy() for variable in model.optimizer.variables]
    run(model, {"a": same_records(1, 2)})
    for before, after in zip(weights, model.get_weights(), strict=True):
        assert np.array_equal(before, after)
    for before, after in zip(state, model.optimizer.variables, strict=True):
        assert np.array_equal(before, after.numpy())


def test_an_interruption_restores_the_weights_too():
    model = make_model()
    weights = model.get_weights()

    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(model, {"a": same_records(1, 2)}, progress=interrupt)
    for before, after in zip(weights, model.get_weights(), strict=True):
        assert np.array_equal(before, after)


def test_sample_weights_count():
    x, y = same_records(1, 2)
    y[::2] = 0
    weighted = run(make_model(), {"a": (x, y, (y == 2).astype(np.float32))}, epochs=30)
    # Only the records of class 2 have a say: it is what the model learns.
    plain = run(make_model(), {"a": same_records(1, 2)}, epochs=30)
    assert weighted.after["loss"][0] < 0.7 * weighted.before["loss"][0]
    assert plain.after["accuracy"][0] == 1


def test_a_metric_with_a_number_for_each_class_is_refused():
    model = make_model()
    model.compile("sgd", "categorical_crossentropy", metrics=[tf.keras.metrics.F1Score()])
    weights = model.get_weights()
    x, y = same_records(1, 2)
    with pytest.raises(ModelError, match="'f1_score' with 3 numbers"):
        run(model, {"a": (x, np.eye(3, dtype=np.float32)[y])})
    for before, after in zip(weights, model.get_weights(), strict=True):
        assert np.array_equal(before, after)


def test_uneven_parts_chosen_clients_and_progress():
    seen = []
    clients = {str(n): same_records(n / 10, n % 3, 7 + n) for n in range(10)}
    found = run(
        make_model(),
        clients,
        held_out_share=0.2,
        batch_size=4,
        num_clients=4,
        progress=lambda *now: seen.append(now),
    )
    assert len(found.ids) == 4
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    for client, tuned, held in zip(found.ids, found.num_tuned, found.num_held_out, strict=True):
        assert tuned + held == 7 + int(client)
        assert held == round(0.2 * (7 + int(client)))
    again = run(make_model(), clients, held_out_share=0.2, batch_size=4, num_clients=4)
    assert again.ids == found.ids
    assert np.array_equal(again.after["loss"], found.after["loss"])
    assert run(make_model(), clients, num_clients=4, seed=1).ids != found.ids


def test_bad_clients_are_left_out_and_named():
    x, y = same_records(1, 2)
    bad = x.copy()
    bad[3, 1] = np.nan
    clients = {"good": (x, y), "nan": (bad, y), "single": (x[:1], y[:1]), "label": (x, y + 7)}
    found = run(make_model(), clients)
    assert found.ids == ("good",)
    text = str(found)
    assert "1 clients, 10 records to fine-tune on, 10 held out, 3 left out" in text
    assert "left out: client 'nan': all values must be finite" in text
    assert "left out: client 'single': a client must have a record to fine-tune on" in text
    assert "left out: client 'label': a label must be a class" in text
    with pytest.raises(DataError, match="all 1 were left out"):
        run(make_model(), {"nan": (bad, y)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs must be a whole number of at least 1"),
        ({"batch_size": 0}, "batch_size must be a whole number"),
        ({"num_clients": 0}, "num_clients must be a whole number"),
        ({"epochs": "1"}, "found '1'"),
        ({"seed": "1"}, "seed must be a whole number"),
        ({"held_out_share": "0.5"}, "between 0 and 1, but found '0.5'"),
        ({"learning_rate": "0.1"}, "positive number, but found '0.1'"),
        ({"held_out_share": 1.0}, "between 0 and 1"),
        ({"learning_rate": 0.0}, "positive number"),
    ],
)
def test_options_that_cannot_hold(options, message):
    with pytest.raises(OptionError, match=message):
        run(make_model(), {"a": same_records(1, 2)}, **options)
