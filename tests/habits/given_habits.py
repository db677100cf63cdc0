"""Habits: data in the forms that people have it, and fits that are called in unusual ways."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import tensorflow as tf
from habit import BATCH, ROWS, Here, batched, classifier, compiled, habit, labels, layers, rows
from tensorflow import keras

IN_ORDER = {"batch_size": BATCH, "shuffle": False, "epochs": 2, "verbose": 0}


def two_heads() -> keras.Model:
    inputs = keras.Input((5,), name="x")
    outputs = {
        "kind": layers.Dense(3, "softmax", name="kind")(inputs),
        "size": layers.Dense(1, name="size")(inputs),
    }
    model = keras.Model(inputs, outputs)
    model.compile(
        "sgd",
        loss={"kind": "sparse_categorical_crossentropy", "size": "mse"},
        loss_weights={"kind": 1.0, "size": 0.3},
        metrics={"kind": ["accuracy"], "size": ["mae"]},
        weighted_metrics={"kind": ["accuracy"]},
    )
    return model


@habit()
def labels_and_weights_of_each_output(here: Here) -> Any:
    model = here.build(two_heads)
    y = {"kind": labels(), "size": rows()[:, :1]}
    weights = {"kind": np.linspace(0, 2, ROWS), "size": np.linspace(2, 0, ROWS)}
    history = model.fit(rows(), y, sample_weight=weights, **IN_ORDER)
    return (
        model,
        history,
        model.evaluate(rows(), y, sample_weight=weights, verbose=0),
        model.predict(rows(), verbose=0),
    )


@habit()
def a_dataset_with_weights_of_each_output(here: Here) -> Any:
    model = here.build(two_heads)
    y = {"kind": labels(), "size": rows()[:, :1]}
    weights = {"kind": np.linspace(0, 2, ROWS), "size": np.linspace(2, 0, ROWS)}
    data = tf.data.Dataset.from_tensor_slices((rows(), y, weights)).batch(BATCH)
    return model, model.fit(data, epochs=2, validation_data=data, verbose=0)


@habit()
def metrics_in_lists_of_lists(here: Here) -> Any:
    def model_fn() -> keras.Model:
        inputs = keras.Input((5,))
        model = keras.Model(
            inputs,
            [layers.Dense(3, "softmax", name="a")(inputs), layers.Dense(1, name="b")(inputs)],
        )
        model.compile(
            "sgd",
            ["sparse_categorical_crossentropy", "mse"],
            metrics=[["accuracy"], ["mae", "mse"]],
            weighted_metrics=[[], ["mae"]],
        )
        return model

    model = here.build(model_fn)
    return model, model.fit(rows(), [labels(), rows()[:, 0]], **IN_ORDER)


@habit()
def class_weights_beside_a_generator(here: Here) -> Any:
    def generate() -> Any:
        while True:
            for first in range(0, ROWS, BATCH):
                yield rows()[first : first + BATCH], labels()[first : first + BATCH]

    model = here.build(classifier)
    return model, model.fit(
        generate(), steps_per_epoch=4, epochs=2, class_weight={0: 1.0, 1: 3.0, 2: 0.5}, verbose=0
    )


@habit(several="refused: by batch_size, but found the option steps_per_epoch")
def arrays_with_steps_per_epoch(here: Here) -> Any:
    model = here.build(classifier)
    return model, model.fit(rows(), labels(), steps_per_epoch=2, **IN_ORDER)


@habit()
def a_later_first_epoch_of_arrays(here: Here) -> Any:
    model = here.build(classifier)
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.1 / (epoch + 1))
    return model, model.fit(
        rows(),
        labels(),
        batch_size=BATCH,
        shuffle=False,
        initial_epoch=2,
        epochs=4,
        callbacks=[schedule],
        verbose=0,
    )


@habit()
def trainable_toggled_between_fits(here: Here) -> Any:
    model = here.build(lambda: classifier(layers.Dense(6, "relu"), layers.BatchNormalization()))
    found = [model.fit(batched(rows(), labels()), verbose=0)]
    model.layers[0].trainable = False
    model.compile(
        keras.optimizers.SGD(0.05), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    found.append(model.fit(batched(rows(), labels()), verbose=0))
    model.layers[0].trainable = True
    model.compile(
        keras.optimizers.SGD(0.05), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    found.append(model.fit(batched(rows(), labels()), verbose=0))
    return model, found


@habit(
    several="refused: must train for the epochs that it is told, but found Own.fit, which begins"
)
def a_fit_of_ones_own_that_chooses_epochs(here: Here) -> Any:
    class Own(keras.Sequential):
        def fit(self, x: Any = None, y: Any = None, **options: Any) -> Any:
            return super().fit(x, y, **{**options, "epochs": 2})

    model = here.build(lambda: compiled(Own([keras.Input((5,)), layers.Dense(3, "softmax")])))
    return model, model.fit(rows(), labels(), batch_size=BATCH, shuffle=False, verbose=0)


@habit(several="refused: must take what Keras' fit takes")
def a_fit_of_ones_own_class(here: Here) -> Any:
    class Own(keras.Sequential):
        def fit(self, x: Any, y: Any, **options: Any) -> Any:
            return super().fit(x, y, **{**options, "epochs": 2})

    model = here.build(lambda: compiled(Own([keras.Input((5,)), layers.Dense(3, "softmax")])))
    return model, model.fit(rows(), labels(), batch_size=BATCH, shuffle=False, verbose=0)


@habit()
def a_data_frame_of_one_input_each(here: Here) -> Any:
    def model_fn() -> keras.Model:
        inputs = {
            n: keras.Input((1,), name=n, dtype=d)
            for n, d in (("age", "float32"), ("city", "string"))
        }
        city = layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot")(inputs["city"])
        out = layers.Dense(1, "sigmoid")(layers.concatenate([inputs["age"], city]))
        model = keras.Model(inputs, out)
        model.compile("sgd", "binary_crossentropy", metrics=["accuracy"])
        return model

    model = here.build(model_fn)
    table = pd.DataFrame({"age": rows()[:, 0], "city": np.array(["a", "b", "c"])[labels()]})
    y = (table["age"] > 0).astype(int)
    x = {name: np.array(values)[:, None] for name, values in table.items()}
    x["city"] = x["city"].astype(str)
    return model, model.fit(x, y.to_numpy(), **IN_ORDER), model.predict(x, verbose=0)


@habit()
def booleans_as_labels(here: Here) -> Any:
    model = here.build(
        lambda: compiled(
            keras.Sequential([keras.Input((5,)), layers.Dense(1, "sigmoid")]),
            loss="binary_crossentropy",
        )
    )
    return model, model.fit(rows(), labels() > 0, **IN_ORDER)


@habit()
def small_integers_and_doubles(here: Here) -> Any:
    model = here.build(classifier)
    return (
        model,
        model.fit((rows() * 10).astype(np.int8), labels().astype(np.uint8)[:, None], **IN_ORDER),
        model.fit(rows().astype(np.float64), labels().astype(np.float64), **IN_ORDER),
        model.fit(rows().astype(np.float16), labels(), **IN_ORDER),
    )


@habit(several="refused: arrays must be dense")
def ragged_words(here: Here) -> Any:
    def model_fn() -> keras.Model:
        inputs = keras.Input((None,), ragged=True, dtype="int64")
        hidden = layers.GlobalAveragePooling1D()(layers.Embedding(9, 4)(inputs))
        return compiled(keras.Model(inputs, layers.Dense(3, "softmax")(hidden)))

    model = here.build(model_fn)
    words = tf.ragged.constant([[n % 9] * (1 + n % 4) for n in range(ROWS)], dtype=tf.int64)
    return model, model.fit(words, labels(), **IN_ORDER)


@habit(several="refused: a dataset must give dense tensors")
def sparse_columns(here: Here) -> Any:
    def model_fn() -> keras.Model:
        inputs = keras.Input((5,), sparse=True)
        return compiled(keras.Model(inputs, layers.Dense(3, "softmax")(inputs)))

    model = here.build(model_fn)
    data = tf.data.Dataset.from_tensor_slices(
        (tf.sparse.from_dense(rows() * (rows() > 0)), labels())
    ).batch(BATCH)
    return model, model.fit(data, epochs=2, verbose=0)


@habit()
def weights_shared_between_models(here: Here) -> Any:
    def model_fn() -> keras.Model:
        inputs = keras.Input((5,))
        code = layers.Dense(3, "tanh", name="code")(inputs)
        model = keras.Model(inputs, layers.Dense(5)(code))
        model.compile("sgd", "mse")
        return model

    model = here.build(model_fn)
    history = model.fit(rows(), rows(), **IN_ORDER)
    encoder = keras.Model(model.input, model.get_layer("code").output)
    return model, history, encoder.predict(rows(), verbose=0)


@habit()
def validation_of_some_epochs(here: Here) -> Any:
    model = here.build(classifier)
    return model, model.fit(
        rows(),
        labels(),
        validation_data=(rows(seed=5), labels(), np.linspace(0, 1, ROWS)),
        validation_freq=2,
        batch_size=BATCH,
        shuffle=False,
        epochs=4,
        verbose=0,
    )


@habit()
def batches_of_padded_words(here: Here) -> Any:
    def model_fn() -> keras.Model:
        inputs = keras.Input((None,), dtype="int64")
        hidden = layers.GRU(4)(layers.Embedding(9, 4, mask_zero=True)(inputs))
        return compiled(keras.Model(inputs, layers.Dense(3, "softmax")(hidden)))

    model = here.build(model_fn)
    words = tf.data.Dataset.from_tensor_slices(
        tf.ragged.constant([[1 + n % 8] * (1 + n % 4) for n in range(ROWS)], dtype=tf.int64)
    ).map(lambda x: x)
    data = tf.data.Dataset.zip((words, tf.data.Dataset.from_tensor_slices(labels()))).padded_batch(
        BATCH, ([None], [])
    )
    return model, model.fit(data, epochs=2, verbose=0)
