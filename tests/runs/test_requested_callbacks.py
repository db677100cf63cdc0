"""What a training was asked for beside its model and data: one rank, in this process."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tfdist.errors import ModelError, OptionError
from tfdist.launch.jobs import Where
from tfdist.records.writing.writer import write
from tfdist.runs.folder import RunFolder
from tfdist.runs.settings import Settings, Start
from tfdist.runs.training import training_config
from tfdist.training.steps.learning_rate import with_learning_rate

_MODEL = """
from tensorflow import keras

TOLD = []


def model_fn(rate=0.1):
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(rate), loss, metrics=["accuracy"])
    return model


def faster():
    return model_fn(0.5)


def several():
    inputs = keras.Input((8,))
    model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(inputs))
    model.compile("sgd", "mse", metrics=[keras.metrics.Precision([0.3, 0.5], name="sure")])
    return model


class Tell(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        TOLD.append(epoch)


def callbacks():
    return Tell()


class Score(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        logs["score"] = 7.0 - epoch


def score():
    return Score()


class NoRate(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        logs.pop("learning_rate")  # As with a MultiOptimizer of Keras 3.


def no_rate():
    return NoRate()


def a_number():
    return [Tell(), 3]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wishes")
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 60)
    x = (rng.normal(size=(60, 8)) + y[:, None]).astype(np.float32)
    write((x, y), folder / "data", split="train=4,validation=1", num_shards=1)
    (folder / "own.py").write_text(_MODEL)
    return folder


@pytest.fixture
def train(folder, tmp_path):
    """Trains as one rank does; returns its folder."""
    from tfdist.runs import train_rank

    def run(output: str = "run", model: str = "model_fn", resume: bool = False, **asked) -> Path:
        settings = Settings(**{"epochs": 1, "global_batch_size": 16, **asked})
        config = training_config(
            Where(strategy="single", options={}),
            model=f"{folder / 'own.py'}:{model}",
            data=str(folder / "data"),
            output=tmp_path / output,
            settings=settings,
            resume=resume,
        )
        with RunFolder(tmp_path / output).taken(config, Start(resume=resume)):
            train_rank.train(config)
        return tmp_path / output

    return run


def weights(path: Path) -> list[np.ndarray]:
    return tf.keras.models.load_model(path).get_weights()


def assert_same(one: Path, other: Path) -> None:
    for a, b in zip(weights(one), weights(other), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def history(folder: Path) -> list[dict[str, str]]:
    timing = ("seconds", "samples_per_s", "data_wait")
    with (folder / "history.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if k not in timing} for row in csv.DictReader(file)]


def test_the_learning_rate_is_as_if_compiled(train):
    asked, compiled = train("asked", lr=0.5), train("compiled", model="faster")
    assert history(asked) == history(compiled)
    assert_same(asked / "model.keras", compiled / "model.keras")


def test_class_weights_are_those_of_keras(train, folder):
    """Of one batch an epoch, whose order does not matter."""
    found = train(class_weight="0=1,1=3,2=0.5", global_batch_size=48, epochs=2)
    from own import model_fn

    from tfdist.records import read

    x, y = next(iter(read(folder / "data" / "train", batch_size=48)))
    tf.keras.utils.set_random_seed(0)
    model = model_fn()
    model.fit(x, y, batch_size=48, epochs=2, class_weight={0: 1, 1: 3, 2: 0.5}, verbose=0)
    for a, b in zip(weights(found / "model.keras"), model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_the_best_model_is_that_of_its_epoch_resumed_or_not(train):
    """Of the largest loss, which the first epochs have, so that later ones do not replace it."""
    asked = {"save_best": "val_loss,mode=max", "early_stopping": "val_loss,mode=max,patience=2"}
    whole = train("whole", epochs=6, **asked)
    best = json.loads((whole / "metrics.json").read_text())["best"]
    rows = history(whole)
    losses = [float(row["val_loss"]) for row in rows]
    assert best == {"epoch": 1 + int(np.argmax(losses)), "val_loss": pytest.approx(max(losses))}
    assert len(rows) == best["epoch"] + 2 < 6
    short = train("short", epochs=best["epoch"])
    assert_same(whole / "best.keras", short / "model.keras")

    train("broken", epochs=2, **asked)
    resumed = train("broken", epochs=6, resume=True, **asked)
    assert history(resumed) == rows  # What was best is remembered, and when.
    assert_same(resumed / "best.keras", whole / "best.keras")
    assert json.loads((resumed / "metrics.json").read_text())["best"] == best
    again = train("broken", epochs=6, resume=True, **asked)  # Nothing is left to train.
    assert json.loads((again / "metrics.json").read_text())["best"] == best
    with pytest.raises(OptionError, match="--resume must have the save_best"):
        train("broken", epochs=6, resume=True)


def test_callbacks_of_the_file_of_the_model(train, folder, tmp_path):
    board = tmp_path / "board"
    train(epochs=2, callbacks=f"{folder / 'own.py'}:callbacks", tensorboard=str(board))
    assert list((board / "train").glob("events.*"))
    assert list((board / "validation").glob("events.*"))
    import own

    assert own.TOLD == [0, 1]  # The file was not run a second time.
    with pytest.raises(OptionError, match="must return a Keras callback, or a list of them"):
        train("no_list", callbacks=f"{folder / 'own.py'}:a_number")
    with pytest.raises(ModelError, match="the file of callbacks must exist"):
        train("no_file", callbacks="nowhere.py:callbacks")


def test_a_metric_of_several_values_has_a_number_for_each(train, folder, monkeypatch):
    run = train(model="several", callbacks=f"{folder / 'own.py'}:no_rate")
    summary = json.loads((run / "metrics.json").read_text())
    assert list(summary["train"]) == ["loss", "sure_0", "sure_1"]
    assert list(summary["validation"]) == ["loss", "sure_0", "sure_1"]
    assert summary["last_epoch"] == {}
    assert summary["learning_rate"] is None

    from tfdist.runs import predict_rank

    told = []
    monkeypatch.setattr(predict_rank, "emit_numbers", lambda event, name: told.append(event))
    config = json.loads((run / "config.json").read_text())
    data = str(folder / "data" / "validation")
    predict_rank.evaluate(config | {"weights": str(run / "model.keras"), "data": data})
    assert told[-1]["metrics"] == pytest.approx(summary["validation"])


def test_some_steps_are_traced(train, tmp_path):
    train(profile=str(tmp_path / "trace"))
    assert list(tmp_path.glob("trace/plugins/profile/*/*.xplane.pb"))


def test_a_dry_run_is_marked(train, folder):
    dry = train(epochs=2, limit_steps=2, lr=0.5)
    metrics = json.loads((dry / "metrics.json").read_text())
    assert metrics["limit_steps"] == 2
    with pytest.raises(OptionError, match="--resume must have the limit_steps"):
        train(epochs=3, lr=0.5, resume=True)
    with pytest.raises(OptionError, match="--resume must have the lr"):
        train(epochs=3, limit_steps=2, resume=True)


@pytest.mark.parametrize("option", ["early_stopping", "save_best"])
def test_a_number_that_there_is_not_ends_it_in_the_first_step(train, option, tmp_path):
    with pytest.raises(OptionError, match=rf"{option} watches .*Did you mean 'val_accuracy'"):
        train(**{option: "val_acurate,mode=max"})
    assert not (tmp_path / "run").exists()


def test_a_number_that_an_own_callback_adds_is_watched(train, folder):
    asked = {"save_best": "score,mode=max", "callbacks": f"{folder / 'own.py'}:score"}
    run = train(epochs=2, **asked, early_stopping="score,mode=min,patience=1")
    assert json.loads((run / "metrics.json").read_text())["best"] == {"epoch": 1, "score": 7.0}
    with pytest.raises(OptionError, match=r"early_stopping watches .*Did you mean 'score'"):
        train("other", **asked, early_stopping="scor,mode=min")


def test_no_validation_is_told_before_anything_is_made(folder):
    settings = Settings(save_best="val_loss")
    with pytest.raises(OptionError, match=r"there is no validation.*watch the training: loss"):
        settings.to_config({"train": str(folder / "data" / "train")})


@pytest.mark.parametrize(
    ("lr", "rule"),
    [
        (0, "a number above 0"),
        (-1.0, "a number above 0"),
        (float("nan"), "a number above 0"),
        ("fast", "a number, but found 'fast'"),
    ],
)
def test_a_rate_that_cannot_be(lr, rule, folder):
    with pytest.raises(OptionError, match=f"lr must be {rule}"):
        Settings(lr=lr).to_config({"train": str(folder / "data" / "train")})


def test_a_password_is_not_written_down(folder):
    settings = Settings(mlflow="http://me:secret@host:5000")
    with pytest.raises(OptionError, match="without a password") as raised:
        settings.to_config({"train": str(folder / "data" / "train")})
    assert "secret" not in str(raised.value)


def test_a_schedule_is_not_replaced():
    def scheduled():
        model = tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Dense(1)])
        model.compile(tf.keras.optimizers.SGD(tf.keras.optimizers.schedules.CosineDecay(1.0, 9)))
        return model

    with pytest.raises(OptionError, match="with a schedule"):
        with_learning_rate(scheduled, 0.1)()
