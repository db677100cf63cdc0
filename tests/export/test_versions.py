"""Versions for TensorFlow Serving: loaded by TensorFlow alone they give Keras' answers."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

import tfdist
from tfdist.errors import ExportError, OptionError
from tfdist.export import versions
from tfdist.export.saved_model import signature_names
from tfdist.export.warmup import WARMUP, read_warmup

pytestmark = pytest.mark.timeout(180)
_RECORDS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("versions")
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (2 * _RECORDS, 4, 4, 1), np.uint8)
    labels = np.arange(2 * _RECORDS) % 3
    tfdist.records.write((images, labels), folder / "data", split="train=1,validation=1")
    x = keras.Input((4, 4, 1), name="pixels")
    flat = keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(x))
    model = keras.Model(x, keras.layers.Dense(3, "softmax", name="classes")(flat))
    model.compile("sgd", "sparse_categorical_crossentropy")
    model.save(folder / "model.keras")
    return folder


def test_each_version_is_loaded_and_answers_as_keras(folder):
    model = keras.models.load_model(folder / "model.keras")
    new, old = folder / "digits" / ".new-other", folder / "digits" / ".new-killed"
    for left in (new, old):
        left.mkdir(parents=True)
    os.utime(old, (0, 0))
    for number in (1, 2):
        found = tfdist.export.tf_serving(
            folder / "model.keras", folder / "digits", data=folder / "data"
        )
        assert (found.path, found.version) == (folder / "digits" / str(number), number)
        assert found.largest_difference <= 1e-5
        assert found.records == _RECORDS
        config = found.config.read_text()
        assert found.is_config_kept == (number == 2)
        found.config.write_text(f"{config}# mine")
    assert 'name: "digits"' in config
    assert f'base_path: "{folder / "digits"}"' in config
    assert config.endswith("# mine")
    left = {path.name for path in (folder / "digits").iterdir()}
    assert left == {"1", "2", "models.config", new.name}
    served = tf.saved_model.load(str(found.path)).signatures["serving_default"]
    requests = list(read_warmup(found.path / WARMUP))
    assert [len(inputs["x"]) for _, inputs in requests] == [1, 8, 11]
    rows = np.concatenate([inputs["x"] for _, inputs in requests])
    assert rows.dtype == np.uint8
    (answers,) = served(x=tf.constant(rows)).values()
    np.testing.assert_allclose(answers, model.predict(rows, verbose=0), atol=1e-5)
    every = np.concatenate(
        [x for x, _ in tfdist.records.read(folder / "data/validation", batch_size=8)]
    )
    assert sorted(map(bytes, rows)) == sorted(map(bytes, every))


class _Ratio(keras.Model):
    def __init__(self, *names):
        super().__init__()
        self.names = names

    def call(self, x):
        return x[self.names[0]] / x[self.names[1]]


@pytest.mark.parametrize(
    ("names", "served_as"),
    [
        (("native-country", "age"), ("native-country", "age")),
        (("sepal length (cm)", "class"), ("sepal_length__cm_", "class_")),
    ],
)
def test_inputs_whose_names_are_none_of_python(tmp_path, names, served_as, capsys):
    numbers = np.arange(1, 5, dtype=np.float32)
    columns = dict(zip(names, (numbers, numbers[::-1].copy()), strict=True))
    tfdist.records.write(columns, tmp_path / "data", split="train=1,validation=1")
    model = _Ratio(*names)
    model(columns)
    found = tfdist.export.tf_serving(model, tmp_path / "ratio", data=tmp_path / "data")
    served = tf.saved_model.load(str(found.path)).signatures["serving_default"]
    given = dict(zip(served_as, map(tf.constant, columns.values()), strict=True))
    (answers,) = served(**given).values()
    np.testing.assert_allclose(answers, numbers / numbers[::-1])
    requests = list(read_warmup(found.path / WARMUP))
    assert set(requests[0][1]) == set(served_as)
    assert ("'class' is class_" in capsys.readouterr().out) == ("class" in names)


@pytest.mark.parametrize(
    ("names", "own"),
    [
        (("a-b", "a_b", "c"), ("a-b", "a_b_2", "c")),
        (("A", "a"), ("A", "a_2")),
        (("A", "a", "a_2"), ("A", "a_3", "a_2")),
        (("a b", "a_b"), ("a_b_2", "a_b")),
        (("_x", "self", "größe", "é"), ("x_x", "self_", "gr__e", "x_")),
    ],
)
def test_names_that_a_signature_cannot_have(tmp_path, names, own):
    columns = {name: np.ones(4, np.float32) for name in names}
    schema = tfdist.records.write(columns, tmp_path / "data", split="train=1").schema
    assert signature_names(schema) == dict(zip(names, own, strict=True))


def test_the_file_of_requests_has_the_fields_of_the_prediction_log(folder, tmp_path):
    """By the numbers of prediction_log.proto, predict.proto and model.proto."""
    versions.write_warmup(tmp_path / WARMUP, "m", "s", [{"x": np.array([1.5], np.float32)}])
    (record,) = tf.data.TFRecordDataset(str(tmp_path / WARMUP)).as_numpy_iterator()
    tensor = tf.make_tensor_proto(np.array([1.5], np.float32)).SerializeToString()

    def field(number: int, content: bytes) -> bytes:
        return bytes([number << 3 | 2, len(content)]) + content

    spec = field(1, b"m") + field(3, b"s")
    request = field(1, spec) + field(2, field(1, b"x") + field(2, tensor))
    assert record == field(6, field(1, request))


def test_other_answers_are_not_written(folder, monkeypatch):
    def spoilt(model, schema, path):
        model.layers[-1].set_weights([2 * w + 1 for w in model.layers[-1].get_weights()])
        write(model, schema, path)
        model.layers[-1].set_weights([(w - 1) / 2 for w in model.layers[-1].get_weights()])

    write = versions.write
    monkeypatch.setattr(versions, "write", spoilt)
    with pytest.raises(ExportError, match="must be those of Keras to 1e-05, but found"):
        tfdist.export.tf_serving(folder / "model.keras", folder / "bad", data=folder / "data")
    assert list((folder / "bad").iterdir()) == []


@pytest.mark.parametrize(
    ("found", "expected", "differences"),
    [
        ([np.nan, 1.0], [1.0, np.nan], [np.inf, np.inf]),
        ([np.nan, np.inf, -np.inf, 1.0], [np.nan, np.inf, np.inf, np.inf], [0, 0, np.inf, np.inf]),
        ([3.0, 0.5], [2.0, 0.0], [0.5, 0.5]),
        (np.uint8([1, 255]), np.uint8([2, 255]), [0.5, 0]),
        ([True, False], [True, True], [0, np.inf]),
        (np.array([b"a", b"b"], object), np.array([b"a", b"c"], object), [0, np.inf]),
    ],
)
def test_what_is_no_number_differs_unless_it_is_equal(found, expected, differences):
    given = versions._difference(np.asarray(found), np.asarray(expected))
    assert given.tolist() == differences


@pytest.mark.parametrize(
    ("out", "data", "words"),
    [
        ("new", None, "must come with records"),
        ("no/new", "data", "a folder that does not exist"),
        ("1 new", "data", "a URL cannot have"),
        ("data", "data", "holds something else"),
        ("model.keras", "data", "which is a file"),
    ],
)
def test_a_mistake_is_told_before_anything_is_written(folder, monkeypatch, out, data, words):
    monkeypatch.chdir(folder)
    with pytest.raises(OptionError, match=words):
        tfdist.export.tf_serving("model.keras", out, data=data)
    assert not (folder / "new").exists()
