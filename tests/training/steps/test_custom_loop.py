"""``strategy.run``: what is the same on one device, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

import tfdist
from tfdist.errors import ModelError, OptionError
from tfdist.strategies.single import Alone
from tfdist.training.assemble import assemble
from tfdist.training.engine.binding import Binding, Engine
from tfdist.training.model.scaling import Scaling
from tfdist.training.steps.custom_loop import run

X, Y = np.ones((8, 3), np.float32), np.zeros((8, 1), np.float32)


def new_model() -> keras.Model:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.1))
    return model


def body_of(model):
    def body(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        model.optimizer.minimize(loss, model.trainable_variables, tape=tape)
        return {"loss": tfdist.reduce(loss)}

    return body


def test_one_device_runs_the_body_as_it_is():
    expected = new_model()
    body = body_of(expected)
    batches = [(X[start : start + 4], Y[start : start + 4]) for start in (0, 4, 0, 4)]
    told = [float(body(batch)["loss"]) for batch in batches]
    with tfdist.strategy("single") as strategy:
        model = strategy.build(new_model)
        data = strategy.dataset((X, Y), global_batch_size=4, training=False)
        history = strategy.run(body_of(model), data, model=model, epochs=2, verbose=0)
    assert history.history["loss"] == pytest.approx([told[1], told[3]], abs=1e-6)
    for ours, theirs in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("eagerly", [False, True])
def test_a_body_may_ask_if(eagerly):
    def doubled(batch):
        x, y = batch
        loss = tf.reduce_mean(tf.square(model(x) - y))
        if loss > 0:
            loss = 2.0 * loss
        return {"loss": loss}

    with tfdist.strategy("single") as strategy:
        model = strategy.build(new_model)
        model.run_eagerly = eagerly
        data = strategy.dataset((X, Y), global_batch_size=4)
        history = strategy.run(doubled, data, model=model, verbose=0)
    assert history.history["loss"] == [18.0]


def test_a_body_takes_a_batch():
    with tfdist.strategy("single") as strategy:
        model = strategy.build(new_model)
        data = strategy.dataset((X, Y), global_batch_size=4)
        with pytest.raises(OptionError, match=r"one parameter, the batch, but found .*\(x, y\)"):
            strategy.run(lambda x, y: {}, data, model=model)
        with pytest.raises(OptionError, match="one parameter, the batch, but found str"):
            strategy.run("body", data, model=model)
        with pytest.raises(ModelError, match=r"strategy\.run must be given a model that"):
            strategy.run(body_of(model), data, model=new_model())


def test_a_body_tells_no_gradients_of_parts():
    with tfdist.strategy("single") as strategy:
        model = strategy.build(new_model)
        data = strategy.dataset((X, Y), global_batch_size=4)
        noise = [tfdist.NoiseScale()]
        with pytest.raises(ModelError, match=r"gradients of parts .* found the body of a loop"):
            strategy.run(body_of(model), data, model=model, verbose=0, callbacks=noise)


def test_engines_that_divide_the_model_refuse():
    model = assemble(
        Binding(new_model(), Alone()),
        engine=Engine(knows="stages"),
        scaling=Scaling(None, 0, num_replicas=1),
        strategy_name="pipeline",
        dataset=lambda *_, **__: None,
    )
    with pytest.raises(ModelError, match="must run where each replica holds the whole model"):
        run(body_of(model), (X, Y), model, "pipeline")


def test_reduce_knows_its_ways():
    assert float(tfdist.reduce(2.0)) == 2.0
    with pytest.raises(OptionError, match="way to reduce must be a known one, but found 'max'"):
        tfdist.reduce(2.0, "max")
