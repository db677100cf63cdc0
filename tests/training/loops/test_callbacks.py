"""The callbacks of a job."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.errors import ModelError
from tfdist.strategies.single import Alone
from tfdist.training.checkpoints import callback_state
from tfdist.training.engine.binding import Binding
from tfdist.training.engine.elastic_collective import ElasticCollective
from tfdist.training.loops.callbacks import (
    JobCallbacks,
    OfTheChief,
    for_process,
    infinite_losses,
)

keras = tf.keras


class Heard(keras.callbacks.Callback):
    """Notes which batches it is told of."""

    def __init__(self):
        super().__init__()
        self.batches = []

    def on_train_batch_begin(self, batch, logs=None):
        self.batches.append(("train", batch))

    def on_test_batch_begin(self, batch, logs=None):
        self.batches.append(("test", batch))


def test_losses_that_are_no_finite_numbers():
    logs = {"loss": np.array([1.0, 2.0]), "val_loss": float("nan")}
    assert infinite_losses(logs) == ["val_loss"]
    assert infinite_losses({"loss": np.array([1.0, np.inf]), "mae": np.nan}) == ["loss"]


def test_those_that_watch_a_silent_fit_hear_of_its_batches():
    """Keras asks whether anyone wants to before they join."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    chain = JobCallbacks([], Binding(model, Alone()), model=model, epochs=1, steps=2)
    watcher = Heard()
    chain.watch_with([watcher])
    x, y = np.ones((4, 2)), np.ones((4, 1))
    model.fit(x, y, batch_size=2, validation_data=(x, y), callbacks=chain, verbose=0)
    assert watcher.batches == [("train", 0), ("train", 1), ("test", 0), ("test", 1)]
    later = Heard()
    chain.watch_with([later])
    model.fit(x, y, batch_size=2, callbacks=chain, verbose=0)
    assert later.batches == [("train", 0), ("train", 1)]
    assert len(watcher.batches) == 4


def test_the_best_model_is_known_on_all_ranks_of_an_elastic_job(monkeypatch, tmp_path):
    """A new chief would take its first epoch for the best, were it not told of those before."""
    monkeypatch.setattr(ElasticCollective, "__abstractmethods__", frozenset())
    best = keras.callbacks.ModelCheckpoint(str(tmp_path / "best.keras"), save_best_only=True)
    logs = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    uploads = type("Uploads", (keras.callbacks.ModelCheckpoint,), {})(str(tmp_path / "b.keras"))
    given = [tfdist.on_chief(each) for each in (best, logs, uploads)]
    found = for_process(given, ElasticCollective.__new__(ElasticCollective))
    assert found[0] is best
    assert all(isinstance(each, OfTheChief) for each in found[1:])


def test_a_new_chief_knows_the_best_of_the_one_before(tmp_path):
    """A ModelCheckpoint of a class of one's own runs on the chief alone."""
    saved = []

    class Uploads(keras.callbacks.ModelCheckpoint):
        def on_epoch_end(self, epoch, logs=None):
            before = self.best
            super().on_epoch_end(epoch, logs)
            saved.append(self.best != before)

    class Ranks:
        is_chief = False

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.save = lambda *args, **options: None  # As on a rank that is not the chief.
    ranks, best = Ranks(), Uploads(str(tmp_path / "best.keras"), "loss", save_best_only=True)
    rank = OfTheChief(best, ranks)
    rank.set_model(model)
    for epoch, loss in enumerate((0.5, 0.2)):
        rank.on_epoch_end(epoch, {"loss": loss})
    assert saved == []
    other = Uploads(str(tmp_path / "best.keras"), "loss", save_best_only=True)
    callback_state.restore([OfTheChief(other, ranks)], callback_state.written([rank]))
    assert other.best == best.best == 0.2
    ranks.is_chief = True
    for epoch, loss in enumerate((0.3, 0.1)):
        rank.on_epoch_end(epoch, {"loss": loss})
    assert saved == [False, True]


def test_a_fit_validates_on_what_it_is_given():
    """Keras 2 keeps the validation data of a fit that was broken off."""

    class Ends(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise KeyboardInterrupt

    def made():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
        return model

    x, y = np.ones((8, 2)), np.zeros((8, 1))
    with tfdist.strategy("single") as strategy:
        model = strategy.build(made)
        with pytest.raises(KeyboardInterrupt):
            model.fit(x, y, validation_data=(x, y + 100), callbacks=[Ends()], verbose=0)
        found = model.fit(x, y, validation_data=(x, y), verbose=0).history
        assert found["val_loss"] == pytest.approx([model.evaluate(x, y, verbose=0)])


def test_a_callback_of_the_other_keras_is_one_line():
    root = {"keras": "tf_keras", "tf_keras": "keras"}[keras.Model.__module__.partition(".")[0]]
    other = type("Early", (), {"__module__": f"{root}.src.callbacks.early"})
    own = type("Own", (other,), {})
    with pytest.raises(ModelError, match=r"a callback must be of tf\.keras, .* found Own of Keras"):
        for_process([own()], None)
