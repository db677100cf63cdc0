"""``tfdist predict`` as a user runs it, with real processes."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
from PIL import Image
from tensorflow import keras

import tfdist
from tfdist.training.engine import model_path

pytestmark = pytest.mark.timeout(180)
_OF_PHOTOS = """
from tensorflow import keras

def model_fn():
    share = keras.initializers.Constant(1 / 128)
    light = keras.layers.Dense(1, "sigmoid", kernel_initializer=share)
    pool = keras.layers.GlobalAveragePooling2D()
    model = keras.Sequential([keras.Input((4, 4, 1)), pool, light])
    model.compile("sgd", "binary_crossentropy")
    return model
"""


@pytest.fixture
def trained(model_file, tmp_path):
    """The path of weights that the function of the model does not make, of a step of training."""
    model = model_path.load(f"{model_file}:mlp")()
    model.train_on_batch(np.ones((4, 8)), np.arange(4) % 3)
    model.save(tmp_path / "model.keras")
    return tmp_path / "model.keras"


@pytest.fixture
def predict(run_cli, shards, model_file, trained, tmp_path):
    def run(*options: object, weights: object = trained, model: str = "mlp"):
        where = ("--model", f"{model_file}:{model}", "--data", shards / "validation")
        return run_cli("predict", *where, "--weights", weights, *options, cwd=tmp_path)

    return run


@pytest.fixture
def expected(shards, trained):
    model = keras.models.load_model(trained)
    batches = tfdist.records.read(shards / "validation", batch_size=64)
    return model.predict(batches.map(lambda x, *_: x), verbose=0)


@pytest.mark.long
def test_two_ranks_predict_what_one_device_does(predict, expected, tmp_path):
    ranks = ("--strategy", "horovod", "--workers", "2")
    done = predict("--output", "found.npz", *ranks, "--global-batch-size", 7)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "predictions  found.npz" in done.stdout
    with np.load(tmp_path / "found.npz") as found:
        assert list(found) == ["predictions"]
        np.testing.assert_allclose(found["predictions"], expected, atol=1e-6)


def test_a_table_of_two_ranks_tells_the_class_of_each_record(predict, expected, shards, tmp_path):
    """Of outputs that are logits, as the loss of the model says."""
    ranks = ("--strategy", "horovod", "--workers", "2")
    done = predict("--output", "found.csv", *ranks, "--global-batch-size", 7)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "found.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["shard", "record", "class", "probability"]
    of_shards = tfdist.records.load_manifest(shards).splits["validation"].shards
    places = [(shard.file, str(number)) for shard in of_shards for number in range(shard.records)]
    assert [tuple(row[:2]) for row in rows] == places
    shares = np.exp(expected) / np.exp(expected).sum(axis=1, keepdims=True)
    assert [int(row[2]) for row in rows] == expected.argmax(axis=1).tolist()
    np.testing.assert_allclose([float(row[3]) for row in rows], shares.max(axis=1), rtol=1e-5)


def test_a_photo_without_a_label_is_named(run_cli, tmp_path):
    (tmp_path / "model.py").write_text(_OF_PHOTOS)
    for number, kind in enumerate(("dark", "light")):
        (tmp_path / "photos" / kind).mkdir(parents=True)
        Image.new("L", (6, 5 + number), 240 * number).save(tmp_path / "photos" / kind / "1.png")
    Image.new("RGB", (50, 40), (250, 250, 250)).save(tmp_path / "new.jpg")
    tfdist.records.write(tmp_path / "photos", tmp_path / "data", split="train=1", resize="4x4")
    model_path.load(f"{tmp_path / 'model.py'}:model_fn")().save(tmp_path / "model.keras")
    asked = ("--model", "model.py:model_fn", "--weights", "model.keras", "--strategy", "single")
    to = ("--data", "new.jpg", "--output", "found.jsonl")
    done = run_cli("predict", *asked, *to, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "Name them: --trained-on DIR" in done.stderr
    done = run_cli("predict", *asked, *to, "--trained-on", "data", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (row,) = map(json.loads, (tmp_path / "found.jsonl").read_text().splitlines())
    assert (row["file"], row["class"]) == ("new.jpg", "light")
    assert row["probability"] == pytest.approx(1 / (1 + np.exp(-250 / 128)), rel=1e-5)


def test_a_file_is_replaced_only_when_that_is_said(predict, expected, tmp_path):
    (tmp_path / "found.npy").write_text("mine")
    done = predict("--output", "found.npy", "--strategy", "single")
    assert done.returncode == 2
    assert "must be a new file, but found found.npy" in done.stderr
    assert (tmp_path / "found.npy").read_text() == "mine"
    done = predict("--output", "found.npy", "--strategy", "single", "--overwrite")
    assert done.returncode == 0, done.stderr
    found = np.load(tmp_path / "found.npy")
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [
        "found.npy",
        "model.keras",
    ]


def test_weights_of_another_model_are_one_line(predict, tmp_path):
    wider = keras.Sequential([keras.Input((8,)), keras.layers.Dense(17), keras.layers.Dense(3)])
    wider.save(tmp_path / "wider.keras")
    (tmp_path / "text.keras").write_text("no model")
    flipped = bytearray((tmp_path / "model.keras").read_bytes())
    flipped[len(flipped) // 2] ^= 8
    (tmp_path / "flipped.keras").write_bytes(flipped)
    for weights in ("wider.keras", "text.keras", "none.keras", "flipped.keras"):
        done = predict("--output", "found.npz", "--strategy", "single", weights=weights)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1, done.stderr
        assert "weights must be" in done.stderr
        assert not (tmp_path / "found.npz").exists()
