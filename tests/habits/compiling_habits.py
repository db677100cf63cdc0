"""Habits: losses, metrics, optimizers, and what else a model is compiled with."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from habit import Here, batched, classifier, compiled, habit, labels, layers, rows, trained
from tensorflow import keras

from tfdist.keras.settings import set_policy


def one_hot() -> np.ndarray:
    return np.eye(3, dtype=np.float32)[labels()]


@habit()
def several_labels_of_a_row(here: Here) -> Any:
    def model_fn() -> keras.Model:
        model = keras.Sequential([keras.Input((5,)), layers.Dense(4, "sigmoid")])
        metrics = [keras.metrics.AUC(multi_label=True, num_labels=4), "binary_accuracy"]
        return compiled(model, loss="binary_crossentropy", metrics=metrics)

    return trained(here, model_fn, None, (rows(4, 2) > 0).astype(np.float32))


@habit()
def categorical_labels_and_many_metrics(here: Here) -> Any:
    loss = keras.losses.CategoricalCrossentropy(label_smoothing=0.1)

    def model_fn() -> keras.Model:
        more = keras.metrics.Precision(), keras.metrics.TopKCategoricalAccuracy(2)
        return classifier(loss=loss, metrics=["accuracy", *more])

    return trained(here, model_fn, None, one_hot())


@habit(mirrored="refused: metrics that a model is compiled with must be made in the function")
def metrics_that_are_made_elsewhere(here: Here) -> Any:
    recall = keras.metrics.AUC(name="auc")
    return trained(here, lambda: classifier(loss="mse", metrics=[recall]), None, one_hot())


@habit(mirrored="refused: must be made where it was built")
def metrics_of_a_later_compile(here: Here) -> Any:
    model = here.build(classifier)
    loss = keras.losses.SparseCategoricalCrossentropy()
    model.compile(keras.optimizers.SGD(0.1), loss, [keras.metrics.SparseCategoricalAccuracy()])
    return model, model.fit(batched(rows(), labels()), verbose=0)


@habit()
def a_loss_function_of_ones_own(here: Here) -> Any:
    def focal(y: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        of_class = tf.reduce_sum(y * y_pred, axis=-1)
        return -tf.square(1 - of_class) * tf.math.log(of_class + 1e-7)

    return trained(here, lambda: classifier(loss=focal), None, one_hot())


@habit()
def a_loss_class_of_ones_own(here: Here) -> Any:
    class Huberish(keras.losses.Loss):
        def call(self, y: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
            return tf.reduce_mean(tf.sqrt(1 + tf.square(y - y_pred)), axis=-1)

    return trained(here, lambda: classifier(loss=Huberish()), None, one_hot())


@habit()
def a_loss_that_returns_one_number(here: Here) -> Any:
    def rmsish(y: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.square(y - y_pred))

    return trained(here, lambda: classifier(loss=rmsish), None, one_hot())


@habit()
def metrics_of_ones_own(here: Here) -> Any:
    class Confidence(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="confidence")
            self.total = self.add_weight("total", initializer="zeros")
            self.count = self.add_weight("count", initializer="zeros")

        def update_state(self, y: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.total.assign_add(tf.reduce_sum(tf.reduce_max(y_pred, axis=-1)))
            self.count.assign_add(tf.cast(tf.shape(y_pred)[0], tf.float32))

        def result(self) -> tf.Tensor:
            return self.total / self.count

    def spread(y: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        return tf.math.reduce_std(y_pred, axis=-1)

    def of_a_batch(y: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.reduce_max(y_pred, axis=-1))

    return trained(here, lambda: classifier(metrics=[Confidence(), spread, of_a_batch]))


@habit()
def a_compute_loss_of_ones_own(here: Here) -> Any:
    class Own(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
            loss = super().compute_loss(x, y, y_pred, sample_weight)
            return loss + 0.1 * tf.reduce_mean(tf.square(y_pred))

    def model_fn() -> keras.Model:
        inputs = keras.Input((5,))
        return compiled(Own(inputs, layers.Dense(3, "softmax")(inputs)))

    return trained(here, model_fn)


@habit()
def compute_metrics_of_ones_own(here: Here) -> Any:
    class Own(keras.Model):
        def compute_metrics(self, x, y, y_pred, sample_weight):
            results = super().compute_metrics(x, y, y_pred, sample_weight)
            return {**results, "doubled": 2.0 * results["accuracy"]}

    def model_fn() -> keras.Model:
        inputs = keras.Input((5,))
        return compiled(Own(inputs, layers.Dense(3, "softmax")(inputs)))

    model, history = trained(here, model_fn)
    return model, {name: history.history[name] for name in ("loss", "accuracy")}


@habit()
def sample_weights(here: Here) -> Any:
    model = here.build(lambda: classifier(weighted_metrics=["accuracy"]))
    weights = np.random.default_rng(4).uniform(0, 2, len(labels())).astype(np.float32)
    data = batched(rows(), labels(), weights)
    return model, model.fit(data, epochs=2, verbose=0), model.evaluate(data, verbose=0)


@habit()
def class_weights(here: Here) -> Any:
    model = here.build(classifier)
    options = {"shuffle": False, "class_weight": {0: 1.0, 1: 3.0, 2: 0.5}, "verbose": 0}
    return model, model.fit(rows(), labels(), batch_size=8, epochs=2, **options)


# Optimizers ---------------------------------------------------------------------------------------


@habit()
def adamw_that_clips(here: Here) -> Any:
    return trained(
        here,
        lambda: classifier(optimizer=keras.optimizers.AdamW(0.01, weight_decay=0.1, clipnorm=0.1)),
    )


@habit()
def clipped_by_the_norm_of_all(here: Here) -> Any:
    optimizers = keras.optimizers
    return trained(
        here, lambda: classifier(optimizer=optimizers.RMSprop(0.01, global_clipnorm=0.2))
    )


@habit()
def an_average_of_the_weights(here: Here) -> Any:
    def model_fn() -> keras.Model:
        optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9)
        return classifier(optimizer=optimizer)

    model, history = trained(here, model_fn)
    return model, history


@habit()
def a_schedule_of_the_learning_rate(here: Here) -> Any:
    def model_fn() -> keras.Model:
        schedule = keras.optimizers.schedules.CosineDecay(0.2, decay_steps=8)
        return classifier(optimizer=keras.optimizers.Adam(schedule))

    return trained(here, model_fn)


@habit()
def a_legacy_optimizer(here: Here) -> Any:
    return trained(here, lambda: classifier(optimizer=keras.optimizers.legacy.Adam(0.01)))


# Precision, and how steps are run -----------------------------------------------------------------


def with_policy(here: Here, name: str) -> Any:
    set_policy(name)
    try:
        model, history = trained(here, classifier)
    finally:
        set_policy(None)
    # Rounding is that of the policy: what has been learned is compared, and no further digit.
    return [np.round(10 * weight) / 10 for weight in [history.history["loss"][-1]]], [
        weight.dtype.name for weight in model.weights
    ] == ["float32"] * len(model.weights)


@habit()
def mixed_float16(here: Here) -> Any:
    return with_policy(here, "mixed_float16")


@habit()
def mixed_bfloat16(here: Here) -> Any:
    return with_policy(here, "mixed_bfloat16")


@habit()
def a_model_of_float64(here: Here) -> Any:
    keras.backend.set_floatx("float64")
    try:
        model, history = trained(here, classifier, rows().astype(np.float64))
        assert model.weights[0].dtype == tf.float64
    finally:
        keras.backend.set_floatx("float32")
    return model, history


@habit(several="refused: without XLA")
def a_step_that_xla_compiles(here: Here) -> Any:
    return trained(here, lambda: classifier(jit_compile=True))


@habit()
def eager_steps(here: Here) -> Any:
    return trained(here, lambda: classifier(run_eagerly=True))


@habit()
def several_steps_of_an_execution(here: Here) -> Any:
    return trained(here, lambda: classifier(steps_per_execution=2))


# Compiled more than once --------------------------------------------------------------------------


@habit()
def frozen_then_fine_tuned(here: Here) -> Any:
    model = here.build(classifier)
    data = batched(rows(), labels())
    model.layers[0].trainable = False
    compiled(model, optimizer="sgd")
    first = model.fit(data, verbose=0)
    model.layers[0].trainable = True
    compiled(model, optimizer="sgd")
    return model, first, model.fit(data, verbose=0)


@habit()
def a_pretrained_part(here: Here) -> Any:
    """Keras' guide to transfer learning: a frozen base that runs with training=False."""

    def model_fn() -> keras.Model:
        base = keras.Sequential(
            [keras.Input((5,)), layers.Dense(6, "tanh"), layers.BatchNormalization()]
        )
        base.trainable = False
        inputs = keras.Input((5,))
        outputs = layers.Dense(3, "softmax")(base(inputs, training=False))
        return compiled(keras.Model(inputs, outputs))

    return trained(here, model_fn)


@habit()
def fitted_twice(here: Here) -> Any:
    model, _ = trained(here, classifier)
    return model, model.fit(batched(rows(seed=7), labels()), epochs=1, verbose=0)


@habit()
def weights_of_another_model(here: Here) -> Any:
    keras.utils.set_random_seed(9)
    given = [3 * weight for weight in classifier().get_weights()]
    model = here.build(classifier)
    model.set_weights(given)
    model.layers[-1].set_weights(given[2:])
    return model, model.fit(batched(rows(), labels()), verbose=0)
