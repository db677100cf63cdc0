"""Habits: how models are made, and what they compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from habit import (
    BATCH,
    DRAWN,
    TOLD,
    Here,
    batched,
    classifier,
    compiled,
    habit,
    labels,
    layers,
    rows,
    tokens,
    trained,
)
from tensorflow import keras


@habit()
def sequential_with_an_input(here: Here) -> Any:
    return trained(here, classifier)


@habit()
def sequential_without_an_input(here: Here) -> Any:
    def model_fn() -> keras.Model:
        hidden = layers.Dense(8, "tanh")
        return compiled(keras.Sequential([hidden, layers.Dense(3, "softmax")]))

    return trained(here, model_fn)


@habit()
def sequential_by_add(here: Here) -> Any:
    def model_fn() -> keras.Model:
        model = keras.Sequential()
        model.add(layers.Dense(8, activation="relu", input_shape=(5,)))
        model.add(layers.Dense(3))
        model.add(layers.Activation("softmax"))
        return compiled(model, loss=keras.losses.SparseCategoricalCrossentropy())

    return trained(here, model_fn)


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = layers.Dense(8, "tanh")
        self.norm = layers.LayerNormalization()
        self.last = layers.Dense(3, "softmax")

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        return self.last(self.norm(self.hidden(inputs)))


@habit()
def subclassed(here: Here) -> Any:
    return trained(here, lambda: compiled(Subclassed()))


@habit()
def subclassed_and_built(here: Here) -> Any:
    def model_fn() -> keras.Model:
        model = Subclassed()
        model.build((None, 5))
        return compiled(model)

    return trained(here, model_fn)


@habit()
def several_inputs_and_outputs(here: Here) -> Any:
    def model_fn() -> keras.Model:
        one, other = keras.Input((5,), name="one"), keras.Input((4,), name="other")
        joined = layers.Dense(6, "tanh")(layers.concatenate([one, other]))
        outputs = [
            layers.Dense(3, "softmax", name="kind")(joined),
            layers.Dense(1, name="size")(joined),
        ]
        model = keras.Model([one, other], outputs)
        return compiled(
            model,
            loss={"kind": "sparse_categorical_crossentropy", "size": "mse"},
            loss_weights={"kind": 1.0, "size": 0.2},
            metrics={"kind": ["accuracy"], "size": [keras.metrics.MeanAbsoluteError()]},
        )

    model = here.build(model_fn)
    x, y = [rows(), rows(4, 3)], [labels(), rows(1, 4)]
    history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return model, history, model.predict(x, batch_size=8, verbose=0)


@habit()
def dictionaries(here: Here) -> Any:
    def model_fn() -> keras.Model:
        inputs = {name: keras.Input((5,), name=name) for name in ("one", "other")}
        joined = layers.Dense(6, "tanh")(inputs["one"] + inputs["other"])
        outputs = {name: layers.Dense(1, name=name)(joined) for name in ("a", "b")}
        return compiled(keras.Model(inputs, outputs), loss="mse", metrics=None)

    model = here.build(model_fn)
    x = {"one": rows(), "other": rows(seed=3)}
    data = batched(x, {"a": rows(1, 4), "b": rows(1, 5)})
    history = model.fit(data, epochs=2, verbose=0)
    return model, history, model.predict(x, verbose=0)


@habit()
def nested_models(here: Here) -> Any:
    def model_fn() -> keras.Model:
        base = keras.Sequential([keras.Input((5,)), layers.Dense(8, "tanh")], name="base")
        inputs = keras.Input((5,))
        model = keras.Model(inputs, layers.Dense(3, "softmax")(base(inputs)))
        return compiled(model)

    return trained(here, model_fn)


@habit()
def a_shared_layer(here: Here) -> Any:
    def model_fn() -> keras.Model:
        shared = layers.Dense(4, "tanh")
        one, other = keras.Input((5,)), keras.Input((5,))
        near = layers.Dot(axes=1, normalize=True)([shared(one), shared(other)])
        return compiled(
            keras.Model([one, other], layers.Dense(1, "sigmoid")(near)),
            loss="binary_crossentropy",
        )

    model = here.build(model_fn)
    data = batched((rows(), rows(seed=3)), labels(2))
    return model, model.fit(data, epochs=2, verbose=0)


@habit()
def residuals_and_operators(here: Here) -> Any:
    def model_fn() -> keras.Model:
        inputs = keras.Input((5,))
        hidden = layers.Dense(5, "relu")(inputs) + inputs * 0.5
        hidden = tf.math.tanh(tf.concat([hidden, tf.square(inputs)], axis=-1))
        return compiled(keras.Model(inputs, layers.Dense(3, "softmax")(hidden)))

    return trained(here, model_fn)


@habit()
def a_loss_that_a_layer_adds(here: Here) -> Any:
    class Sparse(layers.Layer):
        def call(self, inputs: tf.Tensor) -> tf.Tensor:
            self.add_loss(0.1 * tf.reduce_mean(tf.square(inputs)))
            return inputs

    return trained(here, lambda: classifier(layers.Dense(8, "tanh"), Sparse()))


@habit()
def the_only_loss_is_what_a_layer_adds(here: Here) -> Any:
    """As one number of a batch, and as one of each row, which Keras trains on the sum of."""

    class Adds(layers.Layer):
        def __init__(self, axes: Any):
            super().__init__()
            self.axes = axes

        def call(self, x: tf.Tensor) -> tf.Tensor:
            self.add_loss(tf.reduce_mean(tf.square(x), self.axes))
            return x

    def model_fn(axes: Any) -> keras.Model:
        inputs = keras.Input((5,))
        model = keras.Model(inputs, Adds(axes)(layers.Dense(3)(inputs)))
        model.compile(keras.optimizers.SGD(0.05))
        return model

    found = []
    for axes in (None, 1):
        model = here.build(lambda axes=axes: model_fn(axes))
        data = batched(rows())
        found += [model, model.fit(data, validation_data=data, epochs=2, verbose=0)]
    return found


@habit()
def the_only_losses_are_means_over_rows_in_a_list(here: Here) -> Any:
    """Of which Keras trains on the sum."""

    class Adds(layers.Layer):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            self.add_loss(tf.reduce_mean(tf.square(x), 0))
            return x

    def model_fn() -> keras.Model:
        inputs = keras.Input((5,))
        model = keras.Model(inputs, Adds()(layers.Dense(3)(inputs)))
        model.compile(keras.optimizers.SGD(0.05))
        return model

    model = here.build(model_fn)
    model.fit(batched(rows()), epochs=2, verbose=0)
    return model


@habit()
def a_loss_that_a_functional_model_adds(here: Here) -> Any:
    def model_fn() -> keras.Model:
        inputs = keras.Input((5,))
        code = layers.Dense(2, "tanh")(inputs)
        back = layers.Dense(5)(code)
        model = keras.Model(inputs, back)
        model.add_loss(tf.reduce_mean(tf.square(back - inputs)))
        model.compile(keras.optimizers.Adam(0.01))
        return model

    model = here.build(model_fn)
    return model, model.fit(batched(rows()), epochs=2, verbose=0)


@habit()
def a_metric_that_a_layer_adds(here: Here) -> Any:
    class Watched(layers.Layer):
        def call(self, inputs: tf.Tensor) -> tf.Tensor:
            self.add_metric(tf.reduce_mean(inputs, axis=1), name="activity")
            return inputs

    return trained(here, lambda: classifier(layers.Dense(8, "tanh"), Watched()))


# Layers of one's own ------------------------------------------------------------------------------


@habit()
def lambda_layers(here: Here) -> Any:
    return trained(
        here, lambda: classifier(layers.Lambda(lambda x: tf.sin(2 * x)), layers.Dense(8, "relu"))
    )


class Scale(layers.Layer):
    def __init__(self, start: float = 1.0, **options: Any):
        super().__init__(**options)
        self.start = start

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight("scale", (shape[-1],), initializer="ones")
        self.seen = self.add_weight("seen", (), initializer="zeros", trainable=False)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return self.start * self.scale * inputs

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"start": self.start}


class Centered(layers.Layer):
    """Takes off a running mean, kept as Keras' BatchNormalization keeps its own."""

    def build(self, shape: Any) -> None:
        self.center = self.add_weight(
            "center",
            (shape[-1],),
            initializer="zeros",
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.MEAN,
        )

    def call(self, x: tf.Tensor, training: Any = None) -> tf.Tensor:
        centered = x - self.center
        if training:
            self.center.assign(0.9 * self.center + 0.1 * tf.reduce_mean(x, 0))
        return centered


@habit(pipeline=TOLD)
def a_running_mean_of_ones_own(here: Here) -> Any:
    return trained(here, lambda: classifier(layers.Dense(8, "tanh"), Centered()))


class Plain(keras.Model):
    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred)
        self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
        return self.compute_metrics(x, y, y_pred, None)


@habit()
def a_running_mean_in_a_step_of_ones_own(here: Here) -> Any:
    def model_fn() -> keras.Model:
        inputs = keras.Input((5,))
        return compiled(Plain(inputs, layers.Dense(3, "softmax")(Centered()(inputs))))

    return trained(here, model_fn)


class Counted(layers.Layer):
    """Counts rows, in a variable as Keras makes one unless it is told more."""

    def build(self, shape: Any) -> None:
        self.rows = self.add_weight("rows", (), initializer="zeros", trainable=False)

    def call(self, x: tf.Tensor, training: Any = None) -> tf.Tensor:
        if training:
            self.rows.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
        return x


@habit(mirrored="refused: must say how replicas share it")
def a_state_that_no_replica_may_write(here: Here) -> Any:
    model, history = trained(here, lambda: classifier(Counted(), layers.Dense(8)))
    return [weight.numpy() for weight in model.trainable_weights], history


@habit()
def a_layer_of_ones_own_is_saved(here: Here) -> Any:
    model, history = trained(here, lambda: classifier(Scale(0.5), layers.Dense(8, "tanh")))
    path = here.save(model, "model.keras")
    again = keras.models.load_model(path, custom_objects={"Scale": Scale})
    return history, again, again.predict(rows(), verbose=0)


@habit()
def functions_of_ones_own(here: Here) -> Any:
    """An activation, a regularizer, a constraint, an initializer."""

    def model_fn() -> keras.Model:
        hidden = layers.Dense(
            8,
            activation=lambda x: x * tf.sigmoid(1.5 * x),
            kernel_regularizer=lambda weights: 0.01 * tf.reduce_sum(tf.abs(weights)),
            kernel_constraint=keras.constraints.MaxNorm(1.0),
            bias_initializer=lambda shape, dtype=None: 0.1 * tf.ones(shape, dtype),
        )
        return classifier(hidden)

    return trained(here, model_fn)


@habit()
def a_function_that_xla_compiles(here: Here) -> Any:
    @tf.function(jit_compile=True)
    def gelu(x: tf.Tensor) -> tf.Tensor:
        return x * tf.sigmoid(1.702 * x)

    return trained(here, lambda: classifier(layers.Dense(8), layers.Lambda(gelu)))


@habit()
def a_fixed_batch_size(here: Here) -> Any:
    def model_fn() -> keras.Model:
        inputs = keras.Input((5,), batch_size=BATCH)
        return compiled(keras.Sequential([inputs, layers.Dense(3, "softmax")]))

    return trained(here, model_fn, rows()[:24], labels()[:24])


# Kinds of layers ----------------------------------------------------------------------------------


def images() -> np.ndarray:
    return np.random.default_rng(3).normal(size=(len(labels()), 6, 6, 2)).astype(np.float32)


def convnet(*norms: Any) -> keras.Model:
    parts = [keras.Input((6, 6, 2)), layers.Conv2D(4, 3, padding="same"), *norms]
    parts += [layers.ReLU(), layers.MaxPooling2D(), layers.Flatten(), layers.Dense(3, "softmax")]
    return compiled(keras.Sequential(parts), optimizer=keras.optimizers.SGD(0.05))


@habit()
def a_convnet_with_batch_normalization(here: Here) -> Any:
    return trained(here, lambda: convnet(layers.BatchNormalization()), images())


@habit()
def other_normalizations(here: Here) -> Any:
    def model_fn() -> keras.Model:
        norms = [
            layers.GroupNormalization(2),
            layers.LayerNormalization(),
            layers.UnitNormalization(),
        ]
        return convnet(*norms)

    return trained(here, model_fn, images())


@habit()
def spectral_normalization(here: Here) -> Any:
    return trained(here, lambda: classifier(layers.SpectralNormalization(layers.Dense(8, "tanh"))))


@habit(DRAWN)
def dropout(here: Here) -> Any:
    return trained(here, lambda: classifier(layers.Dense(8, "tanh"), layers.Dropout(0.5)))


def reader(*middle: Any, **options: Any) -> keras.Model:
    """A model of texts that are padded with zeros."""
    parts = [keras.Input((6,), dtype="int64"), layers.Embedding(9, 4, mask_zero=True), *middle]
    optimizer = keras.optimizers.Adam(0.01, epsilon=1e-3)
    model = keras.Sequential([*parts, layers.Dense(3, "softmax")])
    return compiled(model, optimizer=optimizer, **options)


@habit()
def an_embedding_whose_zeros_are_masked(here: Here) -> Any:
    return trained(here, lambda: reader(layers.GlobalAveragePooling1D()), tokens())


@habit()
def a_masked_lstm(here: Here) -> Any:
    return trained(here, lambda: reader(layers.LSTM(4)), tokens())


@habit()
def a_bidirectional_rnn(here: Here) -> Any:
    return trained(here, lambda: reader(layers.Bidirectional(layers.SimpleRNN(3))), tokens())


@habit()
def a_tagger_with_weights_of_each_time(here: Here) -> Any:
    def model_fn() -> keras.Model:
        return reader(layers.SimpleRNN(4, return_sequences=True), weighted_metrics=["accuracy"])

    model = here.build(model_fn)
    x = tokens()
    weights = (x % 3 + 1).astype(np.float32)
    data = batched(x, x % 3, weights)
    return model, model.fit(data, epochs=2, verbose=0)


@habit(several="refused: stateful recurrent layer")
def a_stateful_lstm(here: Here) -> Any:
    def model_fn() -> keras.Model:
        model = keras.Sequential(
            [
                keras.Input((3, 2), batch_size=8),
                layers.LSTM(4, stateful=True),
                layers.Dense(3, "softmax"),
            ]
        )
        return compiled(model)

    model = here.build(model_fn)
    x = np.random.default_rng(3).normal(size=(24, 3, 2)).astype(np.float32)
    history = model.fit(x, labels()[:24], batch_size=8, epochs=2, shuffle=False, verbose=0)
    model.reset_states()
    return model, history


@habit()
def a_transformer_block(here: Here) -> Any:
    def model_fn() -> keras.Model:
        inputs = keras.Input((6,), dtype="int64")
        words = layers.Embedding(9, 4)(inputs)
        seen = layers.MultiHeadAttention(2, 2)(words, words, use_causal_mask=True)
        words = layers.LayerNormalization()(words + seen)
        pooled = layers.GlobalMaxPooling1D()(words)
        optimizer = keras.optimizers.Adam(0.01, epsilon=1e-3)
        return compiled(
            keras.Model(inputs, layers.Dense(3, "softmax")(pooled)), optimizer=optimizer
        )

    return trained(here, model_fn, tokens())
