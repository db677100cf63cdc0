"""A fit whose ranks are killed on purpose: ``elastic_fit.py FOLDER [rank=R,step=S ...]``.

Rank R kills itself after the S-th step that it takes, or after batch B of the prediction at the
end (``rank=R,predict=B``). Whoever is the chief at the end trains the
same model on one device, on the same global batches, and writes what it found to FOLDER.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import psutil

import tfdist
from tfdist.compat import import_tensorflow

tf = import_tensorflow()
keras = tf.keras
EPOCHS, BATCH, RECORDS = 3, 8, 75
WORKERS, LEARNING_RATE = int(os.environ.get("WORKERS", "2")), 0.01
rng = np.random.default_rng(0)
X = rng.normal(size=(RECORDS, 6)).astype(np.float32)
Y = (X.sum(axis=1) > 0).astype(np.int32)


def trace(what: str) -> None:
    """Notes in the file TRACE, where there is one, what this process is about to do."""
    if "TRACE" in os.environ:
        with open(os.environ["TRACE"], "a") as file:
            file.write(f"{what}\n")


def trace_meetings() -> None:
    from tfdist.strategies.horovod import elastic

    await_rank, tell_met = elastic.Driver.await_rank, elastic.Driver.tell_met

    def traced_await(self) -> None:
        trace("ask")
        await_rank(self)
        trace("connect")

    def traced_met(self, connected: dict) -> None:
        trace("met")
        tell_met(self, connected)

    elastic.Driver.await_rank, elastic.Driver.tell_met = traced_await, traced_met


def listeners_of_job() -> list[str]:
    """Returns the addresses at which something of this job listens."""
    launcher = next(p for p in psutil.Process().parents() if "launch" in p.cmdline()[2:4])
    return [
        connection.laddr.ip
        for process in launcher.children(recursive=True)
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    ]


class Rows(keras.metrics.Metric):
    """Counts the records of an epoch."""

    def __init__(self, name: str = "rows", **options):
        super().__init__(name=name, **options)
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(tf.cast(tf.shape(y_true)[0], tf.float32))

    def result(self):
        return tf.convert_to_tensor(self.count)


class Steps(keras.layers.Layer):
    """Counts steps in a variable of TensorFlow, which Keras 3 does not know of."""

    def __init__(self, **options):
        super().__init__(**options)
        self.count = tf.Variable(0.0, trainable=False, name="count")

    def call(self, inputs, training=False):
        if training:
            self.count.assign_add(1.0)
        return inputs * (1 + self.count / 100)

    def save_own_variables(self, store):
        store["count"] = self.count.numpy()

    def load_own_variables(self, store):
        self.count.assign(store["count"])


def model_fn():
    model = keras.Sequential(
        [
            keras.Input((6,)),
            Steps(),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(2),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(LEARNING_RATE), loss, metrics=["accuracy", Rows()])
    return model


class Story(keras.callbacks.Callback):
    """Kills this rank where it is told to; notes what callbacks are told, and when."""

    def __init__(self, folder: Path, strategy, kills: list[str]):
        super().__init__()
        self._strategy = strategy
        self._folder = folder
        self._kills = kills
        self._steps = 0
        self.told: list[list] = []
        self.listening: list[str] = []

    def on_train_begin(self, logs=None):
        self.told.append(["train"])

    def on_predict_batch_end(self, batch, logs=None):
        rank = self._strategy.topology.rank
        if f"rank={rank},predict={batch + 1}" in self._kills:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_begin(self, epoch, logs=None):
        self.told.append(["epoch", epoch])

    def on_train_batch_end(self, batch, logs=None):
        rank = self._strategy.topology.rank
        size = self._strategy.topology.world_size
        self.told.append(["step", batch, rank, size, time.time()])
        trace("step")
        if not self.listening and size > 1:
            self.listening = listeners_of_job()
        self._steps += 1
        if f"rank={rank},step={self._steps}" in self._kills:
            (self._folder / f"killed.{rank}").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        if os.environ.get("AWAIT_ANOTHER") and size == 1:
            deadline = time.monotonic() + 200
            while not self._strategy._driver.has_news and time.monotonic() < deadline:
                time.sleep(0.1)


def main(folder: Path, kills: list[str]) -> None:
    options = json.loads(os.environ.get("OPTIONS", "{}"))
    with tfdist.strategy("horovod", commit_every_steps=3, **options) as strategy:
        keras.utils.set_random_seed(1)
        model = strategy.build(model_fn)
        start = model.get_weights()
        feed = strategy.dataset((X, Y), global_batch_size=BATCH, seed=5)
        validation = strategy.dataset((X[:20], Y[:20]), global_batch_size=BATCH, training=False)
        story = Story(folder, strategy, kills)
        history = model.fit(
            feed,
            epochs=EPOCHS,
            validation_data=validation,
            callbacks=[
                story,
                keras.callbacks.CSVLogger(folder / "log.csv"),
                tfdist.Checkpoints(folder / "checkpoints", every_steps=4),
            ],
            verbose=2,
        )
        strategy.save(model, folder / "model.keras")
        weights = strategy.from_chief(model.get_weights())
        for mine, chiefs in zip(model.get_weights(), weights, strict=True):
            np.testing.assert_array_equal(mine, chiefs)
        assert history.history == strategy.from_chief(history.history)
        predicted = model.predict(X, batch_size=BATCH, callbacks=[story], verbose=0)
        if strategy.topology.is_chief:
            found = compare(strategy, model, feed, start, history, predicted)
            found |= {"told": story.told, "ranks": strategy.topology.world_size}
            found["listening"] = story.listening
            (folder / "found.json").write_text(json.dumps(found))


def compare(strategy, model, feed, start, history, predicted) -> dict:
    alone = model_fn()
    alone.set_weights(start)
    if strategy.scaling.rule == "linear":
        alone.optimizer.learning_rate = LEARNING_RATE * WORKERS
    batches = dataclasses.replace(feed, parts=WORKERS, part=0).on_one_device()
    expected = alone.fit(
        batches.epochs(0, EPOCHS),
        epochs=EPOCHS,
        steps_per_epoch=feed.steps_per_epoch,
        validation_data=(X[:20], Y[:20]),
        verbose=0,
    ).history
    pairs = zip(model.get_weights(), alone.get_weights(), strict=True)
    return {
        "weights": max(float(np.abs(ours - theirs).max()) for ours, theirs in pairs),
        "predictions": float(np.abs(predicted - alone.predict(X, verbose=0)).max()),
        "history": {name: np.asarray(v).tolist() for name, v in history.history.items()},
        "expected": {name: np.asarray(v).tolist() for name, v in expected.items()},
        "epochs": history.epoch,
        "steps": feed.steps_per_epoch,
    }


if __name__ == "__main__":
    trace("start")
    if "TRACE" in os.environ:
        trace_meetings()
    main(Path(sys.argv[1]), sys.argv[2:])
