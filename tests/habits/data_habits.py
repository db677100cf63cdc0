"""Habits: what fit, evaluate and predict are given."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import tensorflow as tf
from habit import (
    BATCH,
    OWN_BATCHES,
    ROWS,
    Here,
    batched,
    classifier,
    habit,
    labels,
    layers,
    rows,
)
from tensorflow import keras

IN_ORDER = {"batch_size": BATCH, "shuffle": False, "epochs": 2, "verbose": 0}


@habit()
def arrays_in_order(here: Here) -> Any:
    model = here.build(classifier)
    history = model.fit(rows(), labels(), **IN_ORDER)
    return model, history, model.evaluate(rows(), labels(), batch_size=5, verbose=0)


@habit(several=OWN_BATCHES)
def shuffled_arrays(here: Here) -> Any:
    model = here.build(classifier)
    return here.fit(model, rows(), labels(), batch_size=BATCH, epochs=2), model


@habit(several=OWN_BATCHES)
def an_autoencoder(here: Here) -> Any:
    model = here.build(lambda: classifier(layers.Dense(5), loss="mse", metrics=None, features=5))
    return here.fit(model, rows(), rows(3), batch_size=BATCH, epochs=2), model


@habit()
def lists_of_python(here: Here) -> Any:
    model = here.build(classifier)
    x, y = rows().tolist(), labels().tolist()
    history = model.fit(x, y, **IN_ORDER)
    return model, history, model.evaluate(x, y, verbose=0), model.predict(x, verbose=0)


@habit()
def tensors(here: Here) -> Any:
    model = here.build(classifier)
    x, y = tf.constant(rows()), tf.constant(labels())
    return model, model.fit(x, y, **IN_ORDER), model.predict(x, verbose=0)


@habit()
def a_data_frame(here: Here) -> Any:
    model = here.build(classifier)
    table = pd.DataFrame(rows(), columns=list("abcde"))
    history = model.fit(table, pd.Series(labels()), **IN_ORDER)
    return model, history, model.predict(table, verbose=0)


@habit()
def a_dictionary_of_columns(here: Here) -> Any:
    def model_fn() -> keras.Model:
        inputs = {name: keras.Input((1,), name=name) for name in "ab"}
        outputs = layers.Dense(3, "softmax")(layers.concatenate(list(inputs.values())))
        model = keras.Model(inputs, outputs)
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    model = here.build(model_fn)
    table = pd.DataFrame(rows(2), columns=list("ab"))
    return model, model.fit(dict(table), labels(), **IN_ORDER)


@habit()
def batches_of_a_dataset(here: Here) -> Any:
    model = here.build(classifier)
    data = batched(rows(), labels()).shuffle(4, seed=3).prefetch(2)
    return model, model.fit(data, epochs=2, verbose=0), model.evaluate(data, verbose=0)


@habit()
def a_dataset_that_repeats(here: Here) -> Any:
    model = here.build(classifier)
    data = batched(rows(), labels()).repeat()
    return model, model.fit(data, epochs=2, steps_per_epoch=5, verbose=0)


@habit()
def a_dataset_that_drops_its_rest(here: Here) -> Any:
    model = here.build(classifier)
    data = tf.data.Dataset.from_tensor_slices((rows(), labels())).cache()
    data = data.shuffle(ROWS, seed=1).batch(BATCH, drop_remainder=True)
    return model, model.fit(data, epochs=2, verbose=0)


def generate() -> Iterator[Any]:
    while True:
        for first in range(0, ROWS, BATCH):
            yield rows()[first : first + BATCH], labels()[first : first + BATCH]


@habit()
def a_generator(here: Here) -> Any:
    model = here.build(classifier)
    history = model.fit(generate(), epochs=2, steps_per_epoch=4, verbose=0)
    return model, history, model.evaluate(generate(), steps=2, verbose=0)


@habit()
def a_generator_of_all_that_is_held_out(here: Here) -> Any:
    model = here.build(classifier)
    held_out = itertools.repeat((rows(seed=8), labels()))
    given = {"validation_data": held_out, "validation_steps": 1}
    return model, model.fit(generate(), epochs=2, steps_per_epoch=4, verbose=0, **given)


class Batches(keras.utils.Sequence):
    def __len__(self) -> int:
        return -(-ROWS // BATCH)

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        part = slice(number * BATCH, (number + 1) * BATCH)
        return rows()[part], labels()[part]


@habit()
def a_sequence(here: Here) -> Any:
    model = here.build(classifier)
    history = model.fit(Batches(), epochs=2, verbose=0)
    ahead = {"workers": 2, "max_queue_size": 3, "verbose": 0}
    again = model.fit(Batches(), epochs=2, validation_data=Batches(), shuffle=False, **ahead)
    return model, history, again, model.predict(Batches(), **ahead)


@habit(several=OWN_BATCHES)
def a_validation_split(here: Here) -> Any:
    model = here.build(classifier)
    options = {"validation_split": 0.25, "batch_size": BATCH, "epochs": 2}
    return here.fit(model, rows(), labels(), **options), model


@habit()
def validation_data_of_all_kinds(here: Here) -> Any:
    model = here.build(classifier)
    held_out = rows(seed=8), labels()
    found = []
    for data, options in (
        (held_out, {}),
        (batched(*held_out), {}),
        (batched(*held_out).repeat(), {"validation_steps": 2}),
        (Batches(), {}),
    ):
        given = {"validation_data": data, **options}
        found.append(model.fit(batched(rows(), labels()), verbose=0, **given))
    return model, found


@habit()
def one_batch_at_a_time(here: Here) -> Any:
    model = here.build(classifier)
    found = [model.train_on_batch(x, y) for x, y in Batches()]
    found.append(model.test_on_batch(rows(), labels(), return_dict=True))
    return model, found, model.predict_on_batch(rows())


@habit(OWN_BATCHES)
def what_strategy_dataset_gives(here: Here) -> Any:
    model = here.build(classifier)
    return here.fit(model, rows(), labels(), batch_size=BATCH, epochs=2, as_feed=True), model
