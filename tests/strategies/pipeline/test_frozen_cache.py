"""Frozen layers that run once: the same training, and nothing kept that is not the record's own.

One stage: the process of the tests has one device. test_pipeline has a case on two.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import tensorflow as tf
from tensorflow import keras
from tiers import long

import tfdist
from tfdist.errors import ModelError, OptionError
from tfdist.records import write

NUM = 37
layers = keras.layers


class Counted(layers.Layer):
    """Counts the rows that it sees."""

    rows = 0

    def call(self, x: tf.Tensor) -> tf.Tensor:
        def count(x: np.ndarray) -> np.ndarray:
            Counted.rows += len(x)
            return x

        y = tf.numpy_function(count, [x], x.dtype)
        return tf.ensure_shape(y, x.shape)


def images(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(NUM, 6, 6, 2)).astype(np.float32), rng.integers(0, 3, NUM)


def image_model(*extra: Any, seed: int = 0) -> keras.Model:
    """A nested backbone with BatchNormalization, passed by a raw input."""
    keras.utils.set_random_seed(seed)
    backbone = keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            Counted(),
            layers.Conv2D(4, 3, activation="tanh", name="conv", kernel_regularizer="l2"),
            layers.BatchNormalization(momentum=0.5),
            *extra,
            layers.GlobalAveragePooling2D(),
        ],
        name="backbone",
    )
    inputs = keras.Input((6, 6, 2))
    x = layers.Concatenate()([backbone(inputs), layers.Flatten()(inputs)])
    x = layers.BatchNormalization()(layers.Dense(8, "tanh")(x))
    return compiled(keras.Model(inputs, layers.Dense(3)(x)))


def compiled(model: keras.Model) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), loss, metrics=["accuracy"])
    return model


def token_model() -> keras.Model:
    """A kept output with a mask that a layer after it reads."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((7,), dtype="int64")
    x = layers.Embedding(20, 8, mask_zero=True, name="backbone")(inputs)
    x = layers.GlobalAveragePooling1D()(layers.Dense(8, "tanh")(x))
    return compiled(keras.Model(inputs, layers.Dense(3)(x)))


def tokens() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.integers(0, 20, (NUM, 7)), rng.integers(0, 3, NUM)


def built(model_fn: Any = image_model, **options: Any) -> Any:
    settings = {"stages": 1, "microbatches": 2, "freeze_until": "backbone"} | options
    strategy = tfdist.strategy("pipeline", **settings)
    strategy.start()
    return SimpleNamespace(strategy=strategy, model=strategy.build(model_fn))


def fit(made: Any, source: Any, epochs: int = 3, **options: Any) -> dict:
    feed = made.strategy.dataset(source, global_batch_size=8, seed=2)
    return made.model.fit(feed, epochs=epochs, verbose=0, **options).history


@pytest.fixture(scope="module")
def without():
    """The model after a fit without the cache."""
    made = built()
    fit(made, images())
    return made.model


def rows_of(function: Any) -> int:
    before = Counted.rows
    function()
    return Counted.rows - before


def largest(one: keras.Model, other: keras.Model) -> float:
    pairs = zip(one.get_weights(), other.get_weights(), strict=True)
    return max(float(np.max(np.abs(a - b))) for a, b in pairs)


@pytest.mark.parametrize("kind", ["shards", *long("arrays", "dataset")])
def test_weights_and_history_are_those_without_the_cache(kind, tmp_path):
    source = images()
    if kind == "shards":
        write(source, tmp_path / "data", split="train=1", num_shards=3)
        source = tmp_path / "data"
    if kind == "dataset":
        source = tf.data.Dataset.from_tensor_slices(source)
    without, kept = built(), built(frozen_cache="memory")
    held_out = [
        made.strategy.dataset(images(1), global_batch_size=8, training=False)
        for made in (without, kept)
    ]
    expected = fit(without, source, validation_data=held_out[0])
    start = kept.model.get_layer("backbone").get_layer("conv").kernel.numpy()
    before = Counted.rows
    found = fit(kept, source, validation_data=held_out[1])
    run_rows = Counted.rows - before
    assert largest(without.model, kept.model) < 1e-6
    for name, values in expected.items():
        assert np.allclose(values, found[name], atol=1e-6), name
    # Once for the cache, and five times for its checks, of the data and of the held-out ones.
    assert run_rows <= 2 * 6 * NUM
    assert np.array_equal(start, kept.model.get_layer("backbone").get_layer("conv").kernel)
    x, _ = images(2)
    assert np.allclose(without.model.predict(x, verbose=0), kept.model.predict(x, verbose=0), 1e-5)


def test_epochs_do_not_run_frozen_layers():
    made = built(frozen_cache="memory")
    source = images()
    feed = made.strategy.dataset(source, global_batch_size=8)
    first = rows_of(lambda: made.model.fit(feed, epochs=1, verbose=0))
    assert first > 0
    assert rows_of(lambda: made.model.fit(feed, epochs=5, verbose=0)) == 0


@pytest.mark.long
def test_masks_are_kept():
    without, kept = built(token_model), built(token_model, frozen_cache="memory")
    fit(without, tokens())
    fit(kept, tokens())
    assert largest(without.model, kept.model) < 1e-6


@pytest.mark.long
def test_other_weights_are_another_cache():
    source = images()
    made_both = []
    for options in ({}, {"frozen_cache": "memory"}):
        made = built(**options)
        feed = made.strategy.dataset(source, global_batch_size=8)
        made.model.fit(feed, epochs=1, verbose=0)
        made.model.set_weights(image_model(seed=5).get_weights())
        made.model.fit(feed, epochs=1, verbose=0)
        made_both.append(made.model)
    assert largest(*made_both) < 1e-6


@pytest.mark.long
def test_a_checkpoint_is_restored_before_the_cache_is_filled(without, tmp_path):
    fit(built(), images(), 2, callbacks=[tfdist.Checkpoints(tmp_path)])
    resumed = built(lambda: image_model(seed=9), frozen_cache="memory")
    fit(resumed, images(), 3, callbacks=[tfdist.Checkpoints(tmp_path, resume=True)])
    assert largest(without, resumed.model) < 1e-6


def disk(folder: Any, model_fn: Any = image_model, source: Any = None) -> int:
    """Trains with a cache in ``folder``; returns the rows that frozen layers have seen."""
    made = built(model_fn, frozen_cache="disk", frozen_cache_dir=folder)
    return rows_of(lambda: fit(made, source or images(), epochs=1))


def test_a_folder_serves_the_next_process_and_nobody_else(without, tmp_path):
    filled = disk(tmp_path / "cache")
    (folder,) = (tmp_path / "cache").iterdir()
    assert sorted(path.name for path in folder.iterdir())[-1] == "table.json"
    again = built(frozen_cache="disk", frozen_cache_dir=tmp_path / "cache")
    # Checks alone: with 37 records, all of them are checked.
    assert rows_of(lambda: fit(again, images())) <= filled
    assert largest(without, again.model) < 1e-6
    assert len(list((tmp_path / "cache").iterdir())) == 1
    disk(tmp_path / "cache", lambda: image_model(seed=5))
    assert len(list((tmp_path / "cache").iterdir())) == 2
    disk(tmp_path / "cache", source=images(4))
    assert len(list((tmp_path / "cache").iterdir())) == 3


@pytest.mark.long
@pytest.mark.parametrize("damage", ["shorter", *long("without description", "other numbers")])
def test_a_damaged_folder_is_filled_anew(without, tmp_path, damage):
    disk(tmp_path)
    (folder,) = tmp_path.iterdir()
    file = folder / "0.npy"
    if damage == "shorter":
        file.write_bytes(file.read_bytes()[:-8])
    elif damage == "without description":
        (folder / "table.json").unlink()
    else:
        np.save(file, np.load(file) + 1)
    made = built(frozen_cache="disk", frozen_cache_dir=tmp_path)
    fit(made, images())
    assert largest(without, made.model) < 1e-6
    assert list(tmp_path.iterdir()) == [folder]


def test_an_interrupted_fill_leaves_nothing(tmp_path, monkeypatch):
    from tfdist.strategies.pipeline import frozen_cache

    def interrupted(*args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(frozen_cache, "track", interrupted)
    with pytest.raises(KeyboardInterrupt):
        disk(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_fill_left_goes(tmp_path):
    disk(tmp_path)
    (folder,) = tmp_path.iterdir()
    left = tmp_path / f".{folder.name}-{'0' * 32}"
    folder.rename(left)
    for path in (*left.iterdir(), left):
        os.utime(path, (0, 0))
    disk(tmp_path)
    assert list(tmp_path.iterdir()) == [folder]


def text_model() -> keras.Model:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((), dtype="string")
    words = layers.TextVectorization(output_sequence_length=4, vocabulary=["one", "two"])
    x = layers.Embedding(8, 4, trainable=False, name="kept")(words(inputs))
    return compiled(keras.Model(inputs, layers.Dense(3)(layers.Flatten()(x))))


@pytest.mark.long
def test_texts_are_told_from_others_by_what_they_say(tmp_path, capsys):
    def texts(word: str) -> tuple[np.ndarray, np.ndarray]:
        return np.array([f"one {word}", "two"] * 16, dtype=object), np.arange(32) % 3

    for word in ("two", "two", "one"):
        made = built(
            text_model, freeze_until="kept", frozen_cache="disk", frozen_cache_dir=tmp_path
        )
        fit(made, texts(word), epochs=1)
    assert len(list(tmp_path.iterdir())) == 2
    assert capsys.readouterr().out.count("are read from") == 1


class Noise(layers.Layer):
    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x + tf.random.normal(tf.shape(x))


class OfBatch(layers.Layer):
    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x - tf.reduce_mean(x, axis=0)


class WithLoss(layers.Layer):
    def call(self, x: tf.Tensor) -> tf.Tensor:
        self.add_loss(tf.reduce_mean(x))
        return x


@pytest.mark.parametrize(
    ("layer", "error", "part"),
    [
        (lambda: layers.Dropout(0.5, name="drop"), OptionError, "drop"),
        (Noise, OptionError, "when they ran again"),
        (OfBatch, OptionError, "among other rows"),
        (WithLoss, ModelError, "activity loss"),
    ],
)
def test_layers_that_depend_on_more_than_the_record(layer, error, part):
    with pytest.raises(error) as caught:
        fit(built(lambda: image_model(layer()), frozen_cache="memory"), images())
    assert part in str(caught.value)


@pytest.mark.long
def test_dropout_in_inference_is_kept():
    def model_fn() -> keras.Model:
        keras.utils.set_random_seed(0)
        inputs = keras.Input((6, 6, 2))
        x = layers.Dropout(0.5, name="backbone")(layers.Conv2D(3, 3)(inputs), training=False)
        return compiled(keras.Model(inputs, layers.Dense(3)(layers.Flatten()(x))))

    without, kept = built(model_fn), built(model_fn, frozen_cache="memory")
    fit(without, images())
    fit(kept, images())
    assert largest(without.model, kept.model) < 1e-6


def test_map_fn_and_arrays_are_refused():
    made = built(frozen_cache="memory")
    feed = made.strategy.dataset(images(), global_batch_size=8, map_fn=lambda x, y: (x, y))
    with pytest.raises(OptionError, match="map_fn"):
        made.model.fit(feed, verbose=0)
    x, y = images()
    with pytest.raises(OptionError, match=r"strategy\.dataset"):
        made.model.fit(x=x, y=y, verbose=0)


def test_a_cache_that_does_not_fit(monkeypatch):
    made = built(frozen_cache="memory")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=9000))
    with pytest.raises(OptionError) as caught:
        fit(made, images())
    assert "37 records of 0.3 kB" in str(caught.value)
    assert "frozen_cache='disk'" in str(caught.value)


@pytest.mark.long
def test_frozen_weights_that_change_in_a_fit():
    class Change(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            self.model.set_weights([weight + 1 for weight in self.model.get_weights()])

    with pytest.raises(ModelError, match="changed during fit"):
        fit(built(frozen_cache="memory"), images(), callbacks=Change())


def test_size_is_told(capsys):
    made = built(frozen_cache="memory")
    feed = made.strategy.dataset(images(), global_batch_size=8)
    made.model.fit(feed, verbose=2)
    assert "up to 'backbone' in memory: 37 records of 0.3 kB, 0.0 MB" in capsys.readouterr().out
    assert "up to 'backbone' are frozen; their outputs are kept: memory" in str(
        made.strategy.describe(made.model)
    )


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"frozen_cache": "tape"}, "Choose one of memory, disk"),
        ({"frozen_cache": "memory", "freeze_until": None}, "without freeze_until"),
        ({"frozen_cache": "disk"}, "come together"),
        ({"frozen_cache": "memory", "frozen_cache_dir": "x"}, "come together"),
        ({"frozen_cache": "disk", "frozen_cache_dir": "no/such/x"}, "no folder no/such"),
        ({"frozen_cache": "memory", "stages": 9}, "must have a layer that is not frozen"),
        (
            {"frozen_cache": "memory", "stages": 2, "cut_after": "backbone/conv"},
            "first cut after 'backbone/conv'",
        ),
    ],
)
def test_options_that_do_not_go_together(options, part):
    from tfdist.strategies.pipeline.plan import find_named
    from tfdist.training.model.layer_calls import graph_of

    def find() -> None:
        asked = {"microbatches": 2, "freeze_until": "backbone"} | options
        strategy = tfdist.strategy("pipeline", **asked)
        find_named(graph_of(image_model(), needed_by="it", otherwise="not"), strategy._options)

    with pytest.raises(OptionError) as caught:
        find()
    assert part in str(caught.value)
