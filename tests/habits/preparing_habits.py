"""Habits: layers that prepare data, with tables, with what they have adapted, or at random."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from habit import DRAWN, Here, batched, classifier, compiled, habit, labels, layers, rows, trained
from tensorflow import keras


def texts() -> np.ndarray:
    words = np.array(["red", "green", "blue", "a", "the", "sea"], dtype=object)
    drawn = np.random.default_rng(5)
    return np.array([" ".join(drawn.choice(words, 4)) for _ in labels()], dtype=object)


def of_texts(*parts: Any) -> keras.Model:
    inputs = keras.Input((), dtype=tf.string)
    outputs = inputs
    for part in (*parts, layers.Dense(3, "softmax")):
        outputs = part(outputs)
    return compiled(keras.Model(inputs, outputs))


@habit()
def a_vectorization_that_adapts_to_texts(here: Here) -> Any:
    def model_fn() -> keras.Model:
        words = layers.TextVectorization(max_tokens=8, output_sequence_length=4)
        words.adapt(texts())
        return of_texts(words, layers.Embedding(8, 4), layers.GlobalAveragePooling1D())

    return trained(here, model_fn, texts())


@habit()
def an_adapted_vectorization_is_saved_and_resumed(here: Here) -> Any:
    """With a checkpoint of the training, and in the saved model."""

    def model_fn() -> keras.Model:
        words = layers.TextVectorization(output_mode="multi_hot")
        words.adapt(texts())
        return of_texts(words)

    import tfdist

    data = batched(texts(), labels())
    callbacks = []
    if here.strategy is not None:
        callbacks = [tfdist.Checkpoints(here.shared("kept"), resume=True)]
    model = here.build(model_fn)
    model.fit(data, epochs=1, verbose=0, callbacks=callbacks)
    if here.strategy is not None:
        model = here.build(model_fn)
        callbacks = [tfdist.Checkpoints(here.shared("kept"), resume=True)]
    model.fit(data, epochs=2, initial_epoch=1, verbose=0, callbacks=callbacks)
    path = here.save(model, "model.keras")
    again = keras.models.load_model(path)
    return model.get_layer(index=-1).get_weights(), again.predict(tf.constant(list(texts())))


@habit()
def lookups_of_strings_and_of_integers(here: Here) -> Any:
    colors = np.array(["red", "green", "blue"])[labels()]

    def model_fn() -> keras.Model:
        color, number = keras.Input((1,), dtype=tf.string), keras.Input((1,), dtype="int64")
        by_name = layers.StringLookup(output_mode="one_hot")
        by_name.adapt(colors)
        by_number = layers.IntegerLookup(vocabulary=[3, 5, 7], output_mode="one_hot")
        joined = layers.concatenate([by_name(color), by_number(number)])
        model = keras.Model([color, number], layers.Dense(3, "softmax")(joined))
        return compiled(model)

    model = here.build(model_fn)
    x = (colors[:, None], (2 * labels() + 3)[:, None])
    return model, model.fit(batched(x, labels()), epochs=2, verbose=0)


@habit()
def a_normalization_that_adapts(here: Here) -> Any:
    def model_fn() -> keras.Model:
        norm = layers.Normalization()
        norm.adapt(5 + 2 * rows())
        return classifier(norm, layers.Dense(8, "tanh"))

    return trained(here, model_fn, 5 + 2 * rows())


@habit()
def buckets_hashes_and_crossings(here: Here) -> Any:
    def model_fn() -> keras.Model:
        age, city = keras.Input((1,)), keras.Input((1,), dtype=tf.string)
        buckets = layers.Discretization(num_bins=4, output_mode="one_hot")
        buckets.adapt(rows(1))
        hashed = layers.CategoryEncoding(6, output_mode="one_hot")(layers.Hashing(6)(city))
        joined = layers.concatenate([buckets(age), hashed])
        return compiled(keras.Model([age, city], layers.Dense(3, "softmax")(joined)))

    model = here.build(model_fn)
    cities = np.array(["Rome", "Oslo", "Lima"])[labels()][:, None]
    return model, model.fit(batched((rows(1), cities), labels()), epochs=2, verbose=0)


@habit()
def lookups_within_the_dataset(here: Here) -> Any:
    lookup = layers.StringLookup(vocabulary=["red", "green", "blue"], num_oov_indices=0)
    names = np.array(["red", "green", "blue"])[labels()]
    data = tf.data.Dataset.from_tensor_slices((rows(), names))
    data = data.map(lambda x, name: (x, lookup(name))).batch(8).prefetch(1)
    model = here.build(classifier)
    return model, model.fit(data, epochs=2, verbose=0)


def photos() -> np.ndarray:
    drawn = np.random.default_rng(3).integers(0, 255, (len(labels()), 8, 8, 3))
    return drawn.astype(np.uint8)


def of_photos(*parts: Any) -> keras.Model:
    given = [keras.Input((8, 8, 3)), *parts, layers.Flatten(), layers.Dense(3, "softmax")]
    return compiled(keras.Sequential(given), optimizer=keras.optimizers.SGD(0.01))


@habit()
def resized_and_rescaled_photos(here: Here) -> Any:
    parts = (layers.Resizing, 4, 4), (layers.CenterCrop, 3, 3), (layers.Rescaling, 1 / 255)
    return trained(here, lambda: of_photos(*(kind(*of) for kind, *of in parts)), photos())


@habit(several=DRAWN, pipeline=DRAWN, parameter_server=DRAWN)
def photos_that_are_changed_at_random(here: Here) -> Any:
    def model_fn() -> keras.Model:
        return of_photos(layers.Rescaling(1 / 255), layers.RandomFlip(), layers.RandomRotation(0.1))

    return trained(here, model_fn, photos())
