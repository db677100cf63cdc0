"""Models with steps of their own, as keras.io writes them: on replicas as on one device."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from one_device import TOLERANCE, assert_same_weights, equals_one_device, pair
from scenarios import scenario
from tensorflow import keras

import tfdist
from tfdist.errors import ModelError

layers = keras.layers
# Batches of 8: the last one has a row, so that a replica has none.
ROWS, BATCH = 25, 8


def rows(features: int = 5) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(ROWS, features)).astype(np.float32)


def labels() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 3, ROWS)


# Models ------------------------------------------------------------------------------------------


class Autoencoder(keras.Model):
    """keras.io's VAE without its noise: sub-models, no ``call``, trackers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = keras.Sequential(
            [
                keras.Input((5,)),
                layers.Dense(4, use_bias=False),  # The gradient of a bias would be rounding alone.
                layers.BatchNormalization(),
                layers.Dense(2),
            ]
        )
        self.decoder = keras.Sequential([keras.Input((2,)), layers.Dense(5)])
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.term_tracker = keras.metrics.Mean(name="code_size")

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_tracker, self.term_tracker]

    def train_step(self, data: Any) -> dict[str, Any]:
        data = data[0] if isinstance(data, tuple) else data
        with tf.GradientTape() as tape:
            code = self.encoder(data, training=True)
            difference = tf.reduce_mean(tf.square(data - self.decoder(code)))
            size = -0.5 * tf.reduce_mean(1 + code - tf.exp(code))
            loss = difference + size
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.loss_tracker.update_state(loss)
        self.term_tracker.update_state(size)
        return {"loss": self.loss_tracker.result(), "code_size": self.term_tracker.result()}


def autoencoder() -> keras.Model:
    model = Autoencoder()
    model.compile(optimizer=keras.optimizers.Adam(0.01))
    return model


class AsTensorFlowWritesIt(keras.Model):
    """TensorFlow's tutorial on custom training: parts of a loss that replicas add up."""

    def __init__(self, batch: int | None) -> None:
        super().__init__()
        self.dense = layers.Dense(3, "softmax", kernel_regularizer="l2")
        self.batch = batch

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data[:2]
        with tf.GradientTape() as tape:
            each = keras.losses.sparse_categorical_crossentropy(y, self(x, training=True))
            loss = tf.nn.compute_average_loss(each, global_batch_size=self.batch)
            loss += tf.nn.scale_regularization_loss(self.losses[0])
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


@scenario
def parts_of_a_loss_as_tensorflow_writes_them(strategy, folder):
    def model_fn(batch: int | None) -> keras.Model:
        model = AsTensorFlowWritesIt(batch)
        model.build((None, 5))
        model.compile(keras.optimizers.SGD(0.5))
        return model

    for batch in (None, BATCH):
        equals_one_device(strategy, lambda batch=batch: model_fn(batch), (rows(), labels()))
    told = tf.nn.compute_average_loss(tf.ones([4]), global_batch_size=8)
    assert float(told) == 0.5  # Outside of a step it is TensorFlow's.


class Gan(keras.Model):
    """Two optimizers, a loss object that is called, and numbers that are no metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.discriminator = keras.Sequential(
            [
                keras.Input((5,)),
                layers.Dense(6, "relu"),
                layers.BatchNormalization(),
                layers.Dense(1),
            ]
        )
        self.generator = keras.Sequential([keras.Input((5,)), layers.Dense(5)])

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.d_tracker = keras.metrics.Mean(name="d_mean")

    @property
    def metrics(self) -> list[Any]:
        return [self.d_tracker]

    def train_step(self, data: Any) -> dict[str, Any]:
        real = data[0] if isinstance(data, tuple) else data
        noise = tf.sin(7 * real)  # Drawn, it would be another one on each replica.
        fake = self.generator(noise, training=True)
        both = tf.concat([fake, real], axis=0)
        truth = tf.concat([tf.ones_like(fake[:, :1]), tf.zeros_like(real[:, :1])], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(truth, self.discriminator(both, training=True))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            judged = self.discriminator(self.generator(noise, training=True), training=True)
            g_loss = self.loss_fn(tf.zeros_like(judged), judged)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        self.d_tracker.update_state(d_loss)
        return {"d_loss": d_loss, "g_loss": g_loss, "d_so_far": self.d_tracker.result()}


def gan() -> keras.Model:
    model = Gan()
    model.compile(
        d_optimizer=keras.optimizers.Adam(0.01),
        g_optimizer=keras.optimizers.SGD(0.05, momentum=0.9),
        loss_fn=keras.losses.BinaryCrossentropy(from_logits=True),
    )
    return model


class Contrastive(keras.Model):
    """SimCLR's loss compares each row with all others of the batch."""

    gathers = True

    def train_step(self, data: Any) -> dict[str, Any]:
        data = data[0] if isinstance(data, tuple) else data
        with tf.GradientTape() as tape:
            one, other = self(data, training=True), self(tf.cos(data), training=True)
            if self.gathers:
                one, other = tfdist.all_gather(one), tfdist.all_gather(other)
            one, other = (tf.math.l2_normalize(view, axis=1) for view in (one, other))
            logits = tf.matmul(one, other, transpose_b=True) / 0.5
            own = tf.range(tf.shape(logits)[0])
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels=own, logits=logits)
            ) + tf.add_n(self.losses)
        self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
        return {"contrast": loss}


def contrastive() -> keras.Model:
    inputs = keras.Input((5,))
    hidden = layers.Dense(6, "tanh", kernel_regularizer="l2")(inputs)
    model = Contrastive(inputs, layers.Dense(4)(hidden))
    model.compile(optimizer=keras.optimizers.SGD(0.5))
    return model


class Distilled(keras.Model):
    """A frozen teacher, compiled metrics, and a test step."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        taught = self.teacher(x, training=False)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred, weights)
            loss += tf.reduce_mean(tf.square(taught - y_pred))
        self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
        results = self.compute_metrics(x, y, y_pred, weights)
        return {**results, "distance": tf.reduce_mean(tf.abs(taught - y_pred))}

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        y_pred = self(x, training=False)
        self.compute_loss(x, y, y_pred, weights)
        return self.compute_metrics(x, y, y_pred, weights)

    def predict_step(self, data: Any) -> Any:
        return 10 * self(keras.utils.unpack_x_y_sample_weight(data)[0], training=False)


def distilled() -> keras.Model:
    inputs = keras.Input((5,))
    model = Distilled(inputs, layers.Dense(3, "softmax")(layers.Dense(8, "tanh")(inputs)))
    model.teacher = keras.Sequential([keras.Input((5,)), layers.Dense(3, "softmax")])
    model.teacher.trainable = False
    model.compile(
        keras.optimizers.Adam(0.02), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


# What they do ------------------------------------------------------------------------------------


@scenario(long=True)
def an_autoencoder_of_submodels(strategy, folder):
    equals_one_device(strategy, autoencoder, (rows(),))


@scenario(long=True)
def two_optimizers(strategy, folder):
    equals_one_device(strategy, gan, (rows(),))


@scenario
def rows_that_are_compared(strategy, folder):
    equals_one_device(strategy, contrastive, (rows(),))
    outside = tf.constant([[1.0], [2.0]])
    assert tfdist.all_gather(outside) is outside


@scenario
def compiled_metrics_and_a_test_step(strategy, folder):
    data = (rows(), labels())
    model, reference = equals_one_device(strategy, distilled, data)
    held_out = strategy.dataset(data, global_batch_size=BATCH, training=False)
    found = model.evaluate(held_out, return_dict=True, verbose=0)
    expected = reference.evaluate(*data, batch_size=BATCH, return_dict=True, verbose=0)
    assert found == pytest.approx(expected, abs=TOLERANCE)
    predicted = model.predict(held_out, verbose=0)
    np.testing.assert_allclose(
        predicted, reference.predict(data[0], batch_size=BATCH, verbose=0), atol=1e-4
    )
    assert model.train_on_batch(*data, return_dict=True).keys() >= {"loss", "accuracy"}


class Asks(layers.Layer):
    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        if tf.size(inputs) > 0:  # Of every batch, however divided.
            return inputs * 2.0
        return inputs


@scenario
def one_batch_gives_the_numbers_of_a_step(strategy, folder):
    """Those that are no metrics, too; also where an evaluation has made metrics of that name."""

    class Own(keras.Model):
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data[:2]
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
            weights = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            return {"loss": loss, "twice": 2 * loss}

    def made() -> keras.Model:
        inputs = keras.Input((5,))
        model = Own(inputs, layers.Dense(1)(Asks()(inputs)))
        model.compile("sgd", "mse")
        return model

    x, y = rows()[:9], rows(1)[:9]
    model, one = pair(strategy, made)
    for _ in range(2):
        expected = one.train_on_batch(x, y, return_dict=True)
        assert model.train_on_batch(x, y, return_dict=True) == pytest.approx(expected, abs=1e-5)
        model.evaluate(x, y, verbose=0)
    np.testing.assert_allclose(model.train_on_batch(x, y), one.train_on_batch(x, y), atol=1e-5)


@scenario(long=True)
def all_optimizers_are_resumed(strategy, folder):
    folder = strategy.from_chief(str(folder))

    class Break(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                raise KeyboardInterrupt

    def fit(model: Any, *callbacks: Any) -> None:
        feed = strategy.dataset((rows(),), global_batch_size=BATCH, seed=2)
        model.fit(feed, epochs=2, callbacks=[*callbacks], verbose=0)

    whole, broken = strategy.build(gan), strategy.build(gan)
    resumed = strategy.build(gan)
    broken.set_weights(whole.get_weights())
    fit(whole)
    with contextlib.suppress(KeyboardInterrupt):
        fit(broken, tfdist.Checkpoints(folder), Break())
    fit(resumed, tfdist.Checkpoints(folder, resume=True))
    assert_same_weights(resumed, whole)


@scenario
def what_cannot_be_exact_is_refused(strategy, folder):
    def summed() -> keras.Model:
        model = distilled()
        loss = keras.losses.SparseCategoricalCrossentropy(reduction="sum")
        model.compile("sgd", loss)
        return model

    with pytest.raises(ModelError, match="a loss that is a sum over rows"):
        strategy.build(summed)


@scenario
def an_optimizer_from_elsewhere_is_refused(strategy, folder):
    with strategy.build(autoencoder).distribute_strategy.scope():
        elsewhere = keras.optimizers.SGD(0.1)

    class Elsewhere(keras.Sequential):
        def train_step(self, data: Any) -> dict[str, Any]:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self(data[0], training=True))
            elsewhere.minimize(loss, self.trainable_variables, tape=tape)
            return {"loss": loss}

    def model_fn() -> keras.Model:
        model = Elsewhere([keras.Input((5,)), layers.Dense(1)])
        model.compile("sgd")
        return model

    feed = strategy.dataset((rows(),), global_batch_size=BATCH)
    with pytest.raises(ModelError, match="must be an attribute of the model"):
        strategy.build(model_fn).fit(feed, verbose=0)


# The body of a loop ------------------------------------------------------------------------------


def plain() -> keras.Model:
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(6, use_bias=False),  # The gradient of a bias would be rounding alone.
            layers.BatchNormalization(),
            layers.Dense(3),
        ]
    )
    model.compile(keras.optimizers.Adam(0.02))
    return model


class Body:
    """A step over ``model`` whose loss also depends on a mean over the whole batch."""

    def __init__(self, model: Any):
        self.model = model
        self.times_traced = 0

    def __call__(self, batch: Any) -> dict[str, Any]:
        self.times_traced += 1
        x, y = batch
        with tf.GradientTape() as tape:
            logits = self.model(x, training=True)
            of_rows = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
            center = tfdist.reduce(tf.reduce_mean(logits, axis=0))
            loss = tf.reduce_mean(of_rows) + tf.reduce_sum(tf.square(center))
        gradients = tape.gradient(loss, self.model.trainable_variables)
        pairs = zip(gradients, self.model.trainable_variables, strict=True)
        self.model.optimizer.apply_gradients(pairs)
        rows_of_all = tfdist.reduce(tf.cast(tf.shape(x)[0], tf.float32), "sum")
        return {"loss": loss, "rows": rows_of_all}


def by_hand(feed: Any, epochs: int) -> tuple[Any, list[Any]]:
    """Returns the model of a loop on one device, and what its body returned in all steps."""
    model = plain()
    body = Body(model)
    return model, [body(batch) for batch in feed.on_one_device().epochs(0, epochs)]


@scenario
def the_body_of_a_hand_written_loop(strategy, folder):
    feed = strategy.dataset((rows(), labels()), global_batch_size=BATCH, seed=2)
    reference, told = by_hand(feed, epochs=2)
    model = strategy.build(plain)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        history = strategy.run(Body(model), feed, model=model, epochs=2, verbose=0).history
    assert "warning" not in said.getvalue()
    last = [told[feed.steps_per_epoch - 1], told[-1]]
    assert history["rows"] == [float(one["rows"]) for one in last] == [1.0, 1.0]
    expected = [float(one["loss"]) for one in last]
    np.testing.assert_allclose(history["loss"], expected, atol=TOLERANCE)
    assert_same_weights(model, reference)
    with pytest.raises(ModelError, match="must have a loss"):  # Its own fit is Keras' again.
        model.fit(feed, verbose=0)


@scenario(long=True)
def a_loop_is_resumed_and_traced_once(strategy, folder):
    folder = strategy.from_chief(str(folder))
    feed = strategy.dataset((rows(), labels()), global_batch_size=BATCH, seed=2)
    reference, _ = by_hand(feed, epochs=3)
    model = strategy.build(plain)
    body = Body(model)
    for epochs in (1, 2):
        kept = tfdist.Checkpoints(folder, resume=True)
        strategy.run(body, feed, model=model, epochs=epochs, callbacks=[kept], verbose=0)
        traced = traced if epochs == 2 else body.times_traced  # noqa: F821
    assert body.times_traced == traced
    anew = strategy.build(plain)
    kept = tfdist.Checkpoints(folder, resume=True)
    strategy.run(Body(anew), feed, model=anew, epochs=3, callbacks=[kept], verbose=0)
    assert_same_weights(anew, reference)


class NowAndThen(keras.Model):
    """Gives gradients to its optimizer in every other step."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.step = tf.Variable(0, trainable=False)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.step.assign_add(1)
        gradients = tape.gradient(loss, self.trainable_variables)
        pairs = list(zip(gradients, self.trainable_variables, strict=True))

        def update() -> None:
            self.optimizer.apply_gradients(pairs)

        tf.cond(self.step % 2 == 0, update, lambda: None)
        return {"loss": loss}


class Counts(keras.Model):
    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - tf.cast(y, tf.float32)))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        rows = tf.cast(tf.math.count_nonzero(tf.ones_like(x[:, 0])), tf.int16)
        means = tf.reduce_mean(x, 0)
        return {"loss": loss, "rows": rows, "means": means, "step": self.optimizer.iterations}


@scenario
def numbers_that_stay_a_replicas_own_are_named(strategy, folder):
    def model_fn():
        inputs = keras.Input((5,))
        model = Counts(inputs, layers.Dense(1)(inputs))
        model.compile("sgd")
        return model

    model = strategy.build(model_fn)
    feed = strategy.dataset((rows(), labels()[:, None]), global_batch_size=BATCH)
    seen = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: told.append(logs))
    told: list[dict[str, Any]] = []
    with contextlib.redirect_stdout(io.StringIO()) as said:
        model.fit(feed, verbose=0, epochs=2, callbacks=[seen])
    words = "'rows' (int16 []) of a step of one's own is shown as the first replica"
    assert said.getvalue().count(words) == strategy.topology.is_chief
    assert all(f"'{name}'" not in said.getvalue() for name in ("step", "loss", "means"))
    shown = [(int(logs["rows"]), np.array(logs["means"])) for logs in told]
    of_first = strategy.from_chief(shown)
    np.testing.assert_array_equal([count for count, _ in shown], [count for count, _ in of_first])
    sizes = np.diff([*range(0, ROWS, BATCH), ROWS])
    means = np.array([means for _, means in shown[-len(sizes) :]])
    np.testing.assert_allclose(sizes @ means / ROWS, rows().mean(0), atol=1e-6)


class Extremes(keras.Model):
    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = tf.reduce_mean(tf.square(y_pred - tf.cast(y, tf.float32)))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        found = {"loss": loss, "of_gradient": tf.linalg.global_norm(gradients)}
        return found | {
            "sum": tf.reduce_sum(tf.square(y_pred)),
            "sums": tf.reduce_sum(x, 0),
            "shares": tf.reduce_mean(x, 0),
            "highest": tf.reduce_max(y_pred),
            "lowest": tf.reduce_min(y_pred),
        }


@scenario
def sums_and_extremes_are_those_of_the_batch(strategy, folder):
    def model_fn():
        inputs = keras.Input((5,))
        model = Extremes(inputs, layers.Dense(1)(inputs))
        model.compile(keras.optimizers.SGD(0.1))
        return model

    with contextlib.redirect_stdout(io.StringIO()) as said:
        data = rows(), labels()[:, None]
        equals_one_device(strategy, model_fn, data, skip=("of_gradient",))
    lines = [line for line in said.getvalue().splitlines() if "warning" in line]
    assert len(lines) == strategy.topology.is_chief, lines
    for line in lines:
        assert "'of_gradient' (float32 []) of a step of one's own is shown as a mean" in line
        assert line.count("(float32") == 1


class MakesOthers(keras.Model):
    """Takes the gradient of a batch, and makes another one of it."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        weights = self.trainable_variables

        def gradients_of(reduce: Any) -> list[Any]:
            with tf.GradientTape() as tape:
                noise = tf.random.normal(tf.shape(x)) if "draws" in self.how else 0.0
                y_pred = self(x + noise, training=True)
                loss = reduce(tf.square(y_pred - tf.cast(y, tf.float32)))
            return tape.gradient(loss, weights)

        reduce = tf.reduce_sum if "sums" in self.how else tf.reduce_mean
        gradients = [gradient / 2 for gradient in gradients_of(reduce)]
        if "clips" in self.how:
            gradients, _ = tf.clip_by_global_norm(gradients, 0.01)
        if "sharpens" in self.how:  # As sharpness-aware minimization does.
            norm = tf.linalg.global_norm(gradients)
            steps = [0.1 * gradient / norm for gradient in gradients]
            for weight, step in zip(weights, steps, strict=True):
                weight.assign_add(step)
            gradients = gradients_of(reduce)
            for weight, step in zip(weights, steps, strict=True):
                weight.assign_sub(step)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.compiled_metrics.update_state(y, self(x, training=True))
        return {metric.name: metric.result() for metric in self.metrics}


@scenario
def a_gradient_that_is_none_of_the_batch_is_told_once(strategy, folder):
    by_trial = "the gradient of train_step is no mean over the rows"
    for how, told in {
        "takes it": None,
        "draws": None,
        "clips": by_trial,
        "sums": by_trial,
        "sharpens": by_trial,
        "draws and clips": "makes of its gradients what is no mean over the rows",
        "draws and sums": "the loss of a train_step of one's own is no mean over the rows",
    }.items():

        def model_fn(how=how):
            inputs = keras.Input((5,))
            model = MakesOthers(inputs, layers.Dense(1)(inputs))
            model.how = how
            model.compile("sgd", metrics=["mae"])
            return model

        feed = strategy.dataset((rows(), labels()[:, None]), global_batch_size=BATCH)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            strategy.build(model_fn).fit(feed, verbose=0)
        lines = [line for line in said.getvalue().splitlines() if "no mean over the rows" in line]
        assert len(lines) == (told is not None and strategy.topology.is_chief), (how, lines)
        assert all(told in line for line in lines), (how, lines)


@scenario
def gradients_that_may_be_of_other_batches(strategy, folder):
    def model_fn():
        inputs = keras.Input((5,))
        model = NowAndThen(inputs, layers.Dense(1)(inputs))
        model.compile("sgd", "mse")
        return model

    said = io.StringIO()
    is_refused = strategy.name != "horovod"
    model = strategy.build(model_fn)
    feed = strategy.dataset((rows(), labels()), global_batch_size=BATCH)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(said))
        if is_refused:
            stack.enter_context(pytest.raises(ModelError, match="own step and accumulate_steps"))
        model.fit(feed, verbose=0)
    warns = "those that it has kept of others count by the rows" in said.getvalue()
    assert warns == (not is_refused and strategy.topology.is_chief)


class ByRow(Counts):
    def train_step(self, data: Any) -> dict[str, Any]:
        return super().train_step(data) | {"each": tf.reduce_sum(data[0], 1)}


@scenario("horovod", "multi_worker", long=True)
def numbers_of_each_row_have_no_place_in_logs(strategy, folder):
    def model_fn():
        inputs = keras.Input((5,))
        model = ByRow(inputs, layers.Dense(1)(inputs))
        model.compile("sgd")
        return model

    model = strategy.build(model_fn)
    feed = strategy.dataset((rows(), labels()[:, None]), global_batch_size=BATCH)
    with pytest.raises(ModelError, match=r"one shape on all processes.*'each' \[None\]"):
        model.fit(feed, verbose=0)
