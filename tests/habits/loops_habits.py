"""Habits: callbacks, files, and what is done between two fits."""

from __future__ import annotations

import contextlib
import csv
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from habit import Here, batched, classifier, compiled, habit, labels, layers, rows
from tensorflow import keras

import tfdist

callbacks = keras.callbacks


def fitted(here: Here, *given: Any, epochs: int = 3, **options: Any) -> Any:
    """Returns a model that was trained with callbacks and validation, and its history."""
    model = here.build(classifier)
    held_out = batched(rows(seed=8), labels())
    options = {"validation_data": held_out, "verbose": 0, "callbacks": list(given)} | options
    return model, model.fit(batched(rows(), labels()), epochs=epochs, **options)


@habit()
def model_checkpoint_of_the_best(here: Here) -> Any:
    path = here.shared("best.keras")
    keep = callbacks.ModelCheckpoint(path, monitor="val_loss", save_best_only=True)
    model, history = fitted(here, keep)
    here.shared("")  # All have come here: the file is there.
    return model, history, keras.models.load_model(path)


@habit()
def early_stopping_that_restores_the_best(here: Here) -> Any:
    stop = callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True, mode="max")
    model, history = fitted(here, stop, epochs=5)
    return model, history, stop.stopped_epoch


@habit()
def a_learning_rate_that_sinks_on_plateaus(here: Here) -> Any:
    sink = callbacks.ReduceLROnPlateau("val_loss", factor=0.3, patience=1, mode="max")
    return fitted(here, sink)


@habit()
def a_learning_rate_of_each_epoch(here: Here) -> Any:
    return fitted(here, callbacks.LearningRateScheduler(lambda epoch, rate: 0.5 * rate))


@habit()
def a_log_as_csv_and_for_tensorboard(here: Here) -> Any:
    path = Path(here.shared("log.csv"))
    tensorboard = callbacks.TensorBoard(str(path.parent / "tb"), profile_batch=0)
    found = fitted(here, callbacks.CSVLogger(path), tensorboard)
    here.shared("")
    with path.open() as lines:
        table = [
            [float(line[name]) for name in ("loss", "val_loss")] for line in csv.DictReader(lines)
        ]
    return *found, np.array(table)


@habit()
def callbacks_of_ones_own(here: Here) -> Any:
    seen = []

    class Watch(callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            assert logs["loss"] > 0  # On a rank, that of its rows so far.
            seen.append([batch, 1.0])

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.model.optimizer.learning_rate.assign(0.1 / (epoch + 1))

    told = callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append([epoch, 0.0]))
    model, history = fitted(here, Watch(), told, callbacks.TerminateOnNaN())
    return model, history, np.array(seen)


@habit(several="refused: go on from tfdist's own checkpoints")
def backup_and_restore(here: Here) -> Any:
    class Stop(callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                raise InterruptedError

    kept = here.shared("backup")
    with contextlib.suppress(InterruptedError):
        fitted(here, callbacks.BackupAndRestore(kept), Stop(), shuffle=False)
    return fitted(here, callbacks.BackupAndRestore(kept), shuffle=False)


@habit()
def from_a_later_epoch_on(here: Here) -> Any:
    halve = callbacks.LearningRateScheduler(lambda epoch: 0.1 / (1 + epoch))
    return fitted(here, halve, initial_epoch=1)


# Files --------------------------------------------------------------------------------------------


@habit()
def saved_as_keras_h5_and_saved_model(here: Here) -> Any:
    model, _ = fitted(here, epochs=1)
    paths = [here.save(model, name) for name in ("model.keras", "model.h5", "saved_model")]
    return model, [keras.models.load_model(path).predict(rows(), verbose=0) for path in paths]


@habit()
def weights_in_a_file(here: Here) -> Any:
    model, _ = fitted(here, epochs=1)
    path = here.shared("all.weights.h5")
    model.save_weights(path)
    here.shared("")
    again = here.build(classifier)
    again.load_weights(path)
    return again, again.fit(batched(rows(), labels()), verbose=0)


@habit()
def a_saved_model_is_trained_further(here: Here) -> Any:
    model, _ = fitted(here, epochs=1)
    path = here.save(model, "model.keras")
    again = here.build(lambda: keras.models.load_model(path))
    return again, again.fit(batched(rows(), labels()), epochs=2, verbose=0)


@habit()
def a_copy_of_a_model(here: Here) -> Any:
    def model_fn() -> keras.Model:
        first = classifier()
        model = keras.models.clone_model(first)
        model.set_weights(first.get_weights())
        return compiled(model)

    model = here.build(model_fn)
    history = model.fit(batched(rows(), labels()), verbose=0)
    as_text = keras.models.model_from_json(model.to_json())
    as_text.set_weights(model.get_weights())
    return model, history, as_text.predict(rows(), verbose=0)


@habit()
def a_model_of_another_models_layers(here: Here) -> Any:
    """Features of a trained model, read with a Functional model of its layers."""
    model, _ = fitted(here, epochs=1)
    features = keras.Model(model.inputs, model.layers[0].output)
    return features(rows()), model(rows(), training=False)


# Loops of one's own -------------------------------------------------------------------------------


@habit()
def a_loop_with_a_gradient_tape(here: Here) -> Any:
    def model_fn() -> keras.Model:
        model = keras.Sequential([keras.Input((5,)), layers.Dense(3)])
        model.compile(keras.optimizers.Adam(0.01))
        return model

    model = here.build(model_fn)
    data = batched(rows(), labels())
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def body(batch: Any) -> dict[str, tf.Tensor]:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        weights = model.trainable_variables
        model.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss, "rows": tfdist.reduce(tf.cast(tf.shape(x)[0], tf.float32), "sum")}

    if here.strategy is not None:
        feed = here.strategy.dataset((rows(), labels()), global_batch_size=8, training=False)
        history = here.strategy.run(body, feed, model=model, epochs=2, verbose=0).history
        return model, history["loss"], history["rows"]
    found = [[body(batch) for batch in data][-1] for _ in range(2)]
    return model, *([float(last[name]) for last in found] for name in ("loss", "rows"))
