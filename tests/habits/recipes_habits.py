"""Habits: recipes of keras.io with a step of their own. More stand in own_steps_scenarios.py."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from habit import Here, batched, compiled, habit, labels, layers, rows, trained
from tensorflow import keras

import tfdist


def dense(features: int, units: int, activation: str | None = None) -> keras.Model:
    return keras.Sequential([keras.Input((features,)), layers.Dense(units, activation)])


class Vae(keras.Model):
    """keras.io's, whose noise is a function of the row: drawn, each replica has its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = dense(5, 4, "tanh")
        self.decoder = dense(2, 5)
        self.trackers = [keras.metrics.Mean(name=name) for name in ("loss", "kl")]

    @property
    def metrics(self) -> list[Any]:
        return self.trackers

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            mean, spread = tf.split(self.encoder(data), 2, axis=1)
            code = mean + tf.exp(0.5 * spread) * tf.sin(9 * data[:, :2])
            back = self.decoder(code)
            kl = -0.5 * tf.reduce_mean(1 + spread - tf.square(mean) - tf.exp(spread))
            loss = tf.reduce_mean(tf.reduce_sum(tf.square(data - back), axis=1)) + kl
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        for tracker, value in zip(self.trackers, (loss, kl), strict=True):
            tracker.update_state(value)
        return {tracker.name: tracker.result() for tracker in self.trackers}


@habit()
def a_vae(here: Here) -> Any:
    def model_fn() -> keras.Model:
        model = Vae()
        model.compile(keras.optimizers.Adam(0.01))
        return model

    model = here.build(model_fn)
    return model, model.fit(batched(rows()), epochs=2, verbose=0)


class Gan(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.discriminator = dense(5, 1)
        self.generator = dense(5, 5)

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

    def train_step(self, real: Any) -> dict[str, Any]:
        noise = tf.sin(7 * real)
        fake = self.generator(noise)
        both = tf.concat([fake, real], axis=0)
        truth = tf.concat([tf.ones_like(fake[:, :1]), tf.zeros_like(real[:, :1])], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(truth, self.discriminator(both))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            judged = self.discriminator(self.generator(noise))
            g_loss = self.loss_fn(tf.zeros_like(judged), judged)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        return {"d_loss": d_loss, "g_loss": g_loss}


@habit()
def a_gan(here: Here) -> Any:
    def model_fn() -> keras.Model:
        model = Gan()
        model.compile(
            keras.optimizers.Adam(0.01),
            keras.optimizers.Adam(0.02),
            keras.losses.BinaryCrossentropy(from_logits=True),
        )
        return model

    model = here.build(model_fn)
    return model, model.fit(batched(rows()), epochs=2, verbose=0)


class Distiller(keras.Model):
    """keras.io's: a student, a teacher, and a compile of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = dense(5, 3), dense(5, 3)

    def compile(self, optimizer: Any, metrics: Any, student_loss: Any, distance: Any) -> None:
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss, self.distance = student_loss, distance

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        taught = self.teacher(x, training=False)
        with tf.GradientTape() as tape:
            said = self.student(x, training=True)
            loss = 0.3 * self.student_loss(y, said)
            loss += 0.7 * self.distance(tf.nn.softmax(taught / 3), tf.nn.softmax(said / 3))
        weights = self.student.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.compiled_metrics.update_state(y, said)
        return {metric.name: metric.result() for metric in self.metrics} | {"of_both": loss}

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        said = self.student(x, training=False)
        self.compiled_metrics.update_state(y, said)
        return {metric.name: metric.result() for metric in self.metrics}


@habit()
def a_distillation(here: Here) -> Any:
    def model_fn() -> keras.Model:
        model = Distiller()
        model.compile(
            keras.optimizers.Adam(0.01),
            [keras.metrics.SparseCategoricalAccuracy()],
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            keras.losses.KLDivergence(),
        )
        return model

    model = here.build(model_fn)
    data = batched(rows(), labels())
    return model, model.fit(data, epochs=2, verbose=0), model.evaluate(data, verbose=0)


class Contrastive(keras.Model):
    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            views = [tfdist.all_gather(self(view)) for view in (data, tf.cos(data))]
            one, other = (tf.math.l2_normalize(view, axis=1) for view in views)
            logits = tf.matmul(one, other, transpose_b=True) / 0.5
            truth = tf.range(tf.shape(logits)[0])
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(truth, logits)
            loss = tf.reduce_mean(losses)
        self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
        return {"contrast": loss}


@habit()
def a_contrastive_loss(here: Here) -> Any:
    def model_fn() -> keras.Model:
        inputs = keras.Input((5,))
        model = Contrastive(inputs, layers.Dense(4)(inputs))
        model.compile(keras.optimizers.SGD(0.5))
        return model

    model = here.build(model_fn)
    return model, model.fit(batched(rows()), epochs=2, verbose=0)


class Penalized(keras.Model):
    """Keras' guide: compiled_loss and compiled_metrics within a step of one's own."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compiled_loss(y, y_pred, regularization_losses=self.losses)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.compiled_metrics.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


@habit()
def compiled_loss_in_a_step_of_ones_own(here: Here) -> Any:
    def model_fn() -> keras.Model:
        inputs = keras.Input((5,))
        outputs = layers.Dense(3, "softmax", kernel_regularizer="l2")(inputs)
        return compiled(Penalized(inputs, outputs))

    return trained(here, model_fn)


class Accumulating(keras.Model):
    """Gradients of two batches, for one update."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.step = tf.Variable(0, trainable=False)
        zeros = [tf.zeros_like(variable) for variable in self.trainable_variables]
        self.kept = [tf.Variable(zero, trainable=False) for zero in zeros]

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.step.assign_add(1)
        for kept, gradient in zip(self.kept, gradients, strict=True):
            kept.assign_add(gradient)
        tf.cond(self.step % 2 == 0, self.update, lambda: None)
        return self.compute_metrics(x, y, y_pred, None)

    def update(self) -> None:
        self.optimizer.apply_gradients(zip(self.kept, self.trainable_variables, strict=True))
        for kept in self.kept:
            kept.assign(tf.zeros_like(kept))


@habit(mirrored="refused: outside of tf.cond")
def gradients_of_two_batches(here: Here) -> Any:
    def model_fn() -> keras.Model:
        inputs = keras.Input((5,))
        return compiled(Accumulating(inputs, layers.Dense(3, "softmax")(inputs)))

    return trained(here, model_fn, rows()[:24], labels()[:24])  # Shares are even.


@habit()
def triplets(here: Here) -> Any:
    """A model of one output whose loss compares three embeddings of a row."""

    def model_fn() -> keras.Model:
        embed = dense(5, 3, "tanh")
        three = [keras.Input((5,)) for _ in range(3)]
        anchor, near, far = (embed(each) for each in three)
        distances = [
            tf.reduce_sum(tf.square(anchor - other), axis=1, keepdims=True) for other in (near, far)
        ]
        model = keras.Model(three, layers.concatenate(distances))
        loss = lambda _, y_pred: tf.maximum(y_pred[:, 0] - y_pred[:, 1] + 0.5, 0)  # noqa: E731
        return compiled(model, loss=loss, metrics=None)

    model = here.build(model_fn)
    x = tuple(rows(seed=seed) for seed in range(3))
    return model, model.fit(batched(x, labels()), epochs=2, verbose=0)
