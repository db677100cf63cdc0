"""tfdist.predict: the same outputs as `tfdist predict`, from Python."""

from __future__ import annotations

import csv
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from tensorflow import keras

import tfdist
from tfdist.errors import DataError, ModelError, OptionError, TfdistError
from tfdist.runs import predict_rank, predicting
from tfdist.strategies.single import Single
from tfdist.training.engine import model_path

pytestmark = pytest.mark.timeout(180)
_MODEL = """
from tensorflow import keras

def model_fn():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3, name="scores")])
    model.compile("sgd", "mse")
    return model

def of_images():
    x = keras.Input((8,))
    model = keras.Model(x, keras.layers.Reshape((2, 4, 1), name="square")(x))
    model.compile("sgd", "mse")
    return model

def _of_tokens(*layers):
    x = keras.Input((None,), dtype="int32")
    model = keras.Sequential([x, keras.layers.Embedding(9, 2), *layers])
    model.compile("sgd", "mse")
    return model

def of_tokens():
    return _of_tokens(keras.layers.GlobalAveragePooling1D())

def for_each_token():
    return _of_tokens()

def two_outputs():
    x = keras.Input((8,))
    model = keras.Model(x, [keras.layers.Dense(n, name=f"of_{n}")(x) for n in (1, 2)])
    model.compile("sgd", "mse")
    return model
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("predicting")
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(41, 8)).astype(np.float32), rng.normal(size=(41, 3))
    tfdist.records.write(rows, folder / "data", split="train=1,test=1", num_shards=2)
    (folder / "model.py").write_text(_MODEL)
    model_path.load(f"{folder / 'model.py'}:model_fn")().save(folder / "model.keras")
    model_path.load(f"{folder / 'model.py'}:two_outputs")().save(folder / "two.keras")
    (folder / "text.keras").write_text("no model")
    return folder


@pytest.fixture
def asked(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return {"model": "model.py:model_fn", "weights": "model.keras", "data": "data/test"}


@pytest.mark.long
def test_two_ranks_predict_what_one_device_does(asked, folder):
    found = tfdist.predict(
        **asked, output="found.npz", strategy="horovod", workers=2, global_batch_size=6
    )
    rows = tfdist.records.read(folder / "data" / "test", batch_size=64).map(lambda x, *_: x)
    expected = keras.models.load_model(folder / "model.keras").predict(rows, verbose=0)
    assert found.output == Path("found.npz")
    assert found.outputs == {"predictions": (expected.shape, "float32")}
    (loaded,) = found.load().values()
    np.testing.assert_allclose(loaded, expected, atol=1e-6)


def test_a_table_of_two_ranks_has_each_record_in_its_row(asked, folder):
    """Of a table whose columns stand in another order, on shards that are gone afterwards."""
    rng = np.random.default_rng(0)
    names = [f"c{number}" for number in range(8)]
    rows = rng.normal(size=(23, 8)).round(3)
    for file, order, columns in (("old.csv", 1, names), ("new.csv", -1, names[::-1])):
        label = ["label"] * (order == 1)
        lines = [",".join([*columns, *label])]
        lines += [",".join([*map(str, row[::order]), *(["1.5"] * len(label))]) for row in rows]
        (folder / file).write_text("\n".join(lines))
    tfdist.records.write(folder / "old.csv", folder / "of_table", split="train=1")
    found = tfdist.predict(
        **{**asked, "model": "model.py:two_outputs", "weights": "two.keras", "data": "new.csv"},
        output="found.csv",
        strategy="horovod",
        workers=2,
        global_batch_size=6,
        trained_on="of_table",
    )
    model = keras.models.load_model(folder / "two.keras")
    one, two = model.predict(rows.astype(np.float32), verbose=0)
    with (folder / "found.csv").open(newline="") as file:
        header, *lines = csv.reader(file)
    assert header == ["row", "of_1", "of_2_0", "of_2_1"]
    assert [int(line[0]) for line in lines] == list(range(23))
    values = np.array([line[1:] for line in lines], float)
    np.testing.assert_allclose(values, np.concatenate([one, two], axis=1), atol=1e-6)
    with pytest.raises(OptionError, match="with pandas"):
        found.load()


def test_photos_and_a_table_that_shards_tell_of(asked, folder, monkeypatch):
    """The shards of the training are those that config.json beside the weights names."""
    started = {}

    def run(program, config, where, take, *, stop=None):
        started.update(config)
        assert os.path.isfile(f"{config['data']}/manifest.json")

    monkeypatch.setattr(predicting.ranks, "run", run)
    Image.fromarray(np.zeros((5, 4, 3), np.uint8)).save(folder / "photo.png")
    run_folder = folder / "run"
    run_folder.mkdir()
    (run_folder / "model.keras").write_bytes((folder / "model.keras").read_bytes())
    settings = dict.fromkeys(("model", "splits", "strategy", "output", "seed"), "")
    settings |= {"global_batch_size": 1, "data": "photos", "working_folder": str(folder)}
    (run_folder / "config.json").write_text(json.dumps(settings))
    images = (np.zeros((4, 8, 8, 1), np.uint8), np.arange(4))
    tfdist.records.write(images, folder / "photos", split="train=1")
    asked |= {"data": "photo.png", "weights": "run/model.keras", "output": "never.csv"}
    with pytest.raises(DataError, match=r"must be given what it was trained on, 'x'.*photo\.png"):
        tfdist.predict(**asked)  # Those are arrays.
    shutil.rmtree(folder / "photos")
    (folder / "raw" / "one").mkdir(parents=True)
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(folder / "raw" / "one" / "a.png")
    tfdist.records.write(folder / "raw", folder / "photos", split="train=1")
    tfdist.predict(**asked)
    assert started["trained_on"] == str(folder / "photos")
    assert not os.path.exists(started["data"])


@pytest.mark.parametrize(
    ("name", "takes"), [("of_tokens", True), ("for_each_token", True), ("of_tokens", False)]
)
def test_records_are_padded_as_in_the_training(asked, tmp_path, monkeypatch, capsys, name, takes):
    """But for outputs of several lengths in one array, and strategies that take one length."""
    monkeypatch.setattr(Single, "takes_lengths", takes)

    def run(program, config, where, take, *, stop=None):
        predict_rank.predict(config | {"strategy": "single", "options": {}})

    monkeypatch.setattr(predicting.ranks, "run", run)
    rows = iter([(np.full(6 if n == 5 else 2, 1 + n, np.int32), 0) for n in range(8)])
    tfdist.records.write(rows, tmp_path / "data", split="test=1")
    model = model_path.load(f"model.py:{name}")()
    model.save(tmp_path / "model.keras")
    settings = dict.fromkeys(("model", "data", "splits", "strategy", "output", "seed"), "")
    settings |= {"global_batch_size": 4, "pad_to": "batch"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    asked |= {"model": f"model.py:{name}", "weights": tmp_path / "model.keras"}
    asked |= {"data": tmp_path / "data" / "test", "output": tmp_path / "found.npy"}
    tfdist.predict(**asked, global_batch_size=4)
    found = np.load(tmp_path / "found.npy")
    has_own = name == "for_each_token" or not takes
    [(x, _)] = tfdist.records.read(asked["data"], batch_size=8)
    for rows, outputs in zip(np.split(x.numpy(), 2), np.split(found, 2), strict=True):
        length = 6 if has_own or rows[:, 2:].any() else 2
        expected = model.predict(rows[:, :length], verbose=0)
        np.testing.assert_allclose(outputs, expected, atol=1e-6)
    assert ("padded to one length" in capsys.readouterr().out) == has_own


def test_a_split_of_the_training_tells_its_shards(tmp_path):
    tfdist.records.write((np.zeros((4, 2)), np.arange(4)), tmp_path / "data", split="train=1")
    settings = dict.fromkeys(("model", "splits", "strategy", "output", "seed"), "")
    settings |= {"global_batch_size": 4, "data": "data/train", "working_folder": str(tmp_path)}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    weights = tmp_path / "model.keras"
    assert predicting.training_data(weights, None) == str(tmp_path / "data")
    assert predicting.training_data(weights, str(tmp_path / "data/train")) == str(tmp_path / "data")


def test_an_output_of_images_is_refused_for_a_table_before_weights_are_read(asked, folder):
    asked |= {"model": "model.py:of_images", "weights": "text.keras"}
    with pytest.raises(TfdistError, match=r"found output 'square', of 4 dimensions.*\.npz"):
        tfdist.predict(**asked, output="square.csv", strategy="single")
    assert not (folder / "square.csv").exists()


def test_several_outputs_for_one_array_are_refused_before_weights_are_read(asked, folder):
    asked |= {"model": "model.py:two_outputs", "weights": "text.keras"}
    with pytest.raises(TfdistError, match=r"must hold one output, but found 2: of_1, of_2"):
        tfdist.predict(**asked, output="found.npy", strategy="single")
    assert not (folder / "found.npy").exists()


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_complex_numbers_are_refused_for_a_file_that_has_none(suffix):
    spec = tf.TensorSpec((None, 2), tf.complex64)
    predict_rank._check_fits(Path("found.npz"), {"wave": spec})
    with pytest.raises(TfdistError, match=r"found output 'wave', of complex64.*\.npz"):
        predict_rank._check_fits(Path(f"found{suffix}"), {"wave": spec})


def test_outputs_of_any_name_are_written(folder):
    outputs = {"file": np.arange(6.0).reshape(2, 3), "allow_pickle": np.array([[b"a"], [b"bc"]])}
    predict_rank._write(folder / "found.npz", outputs)
    with np.load(folder / "found.npz", allow_pickle=False) as found:
        assert sorted(found.files) == sorted(outputs)
        for name, rows in outputs.items():
            np.testing.assert_array_equal(found[name], rows)
            assert found[name].dtype == rows.dtype


def test_a_predict_step_of_ones_own_may_give_one_output_of_several():
    class Own(keras.Model):
        def predict_step(self, data):
            return super().predict_step(data)[0]

    x = keras.Input((8,))
    outputs = [keras.layers.Dense(n, name=f"of_{n}")(x) for n in (1, 2)]
    known = predict_rank._known_outputs(keras.Model(x, outputs))
    assert [spec.shape.rank for spec in known] == [2, 2]
    assert predict_rank._known_outputs(Own(x, outputs)) == []


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"strategy": "mirrored", "options": {"device": 2}}, OptionError, "but found 'device'"),
        ({"model": "nowhere.py:model_fn"}, ModelError, "no file nowhere.py"),
        ({"weights": "nowhere.keras"}, OptionError, "nowhere.keras, which is none"),
        ({"output": "found.txt"}, OptionError, r"must end with .* \.jsonl or \.parquet"),
        ({"data": "none.jpg"}, DataError, r"a photo, .*none\.jpg, which does not exist"),
        ({"data": "model.py"}, DataError, "Name them: --trained-on DIR"),
        ({"data": "model.py", "trained_on": "data"}, DataError, r"a photo, .* found model\.py\."),
        ({"trained_on": "nowhere"}, DataError, "no folder nowhere"),
        ({"output": "model.py/found.npz"}, OptionError, "in a folder that exists"),
        ({"workers": 0}, OptionError, "workers must be"),
        ({"global_batch_size": 0}, OptionError, "global_batch_size must be"),
    ],
)
def test_mistakes_are_told_before_a_process_starts(changed, error, message, asked):
    with pytest.raises(error, match=message):
        tfdist.predict(**{**asked, "output": "never.npz", **changed})


def test_a_rank_that_calls_is_told_what_it_called(asked, monkeypatch):
    monkeypatch.setenv("TFDIST_RANK_PROGRAM", "1")
    with pytest.raises(OptionError, match=r"tfdist\.predict must be called by the program"):
        tfdist.predict(**asked, output="never.npz")
