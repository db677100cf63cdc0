"""From a trained model to evaluation.json and to answers of a serving container."""

from __future__ import annotations

import io
import json
import shutil
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from sklearn import metrics

from tfdist.aws import evaluation, saved_model
from tfdist.aws.rehearsal import serving
from tfdist.errors import DataError, ModelError, OptionError
from tfdist.export.saved_model import write as write_saved_model
from tfdist.records import load_manifest, write
from tfdist.records.reading.stored import Stored

NUM = 60
RNG = np.random.default_rng(0)


def model_of(outputs, loss, activation=None):
    inputs = tf.keras.Input((4,))
    model = tf.keras.Sequential([inputs, tf.keras.layers.Dense(outputs, activation)])
    model.compile("sgd", loss)
    return model


def saved(folder, model, x, y):
    """Writes shards, and a model as a training job leaves it; returns where each lies."""
    # All records in one split, in shards whose order the evaluation must not depend on.
    manifest = write((x, y), folder / "shards", split="test=1", num_shards=3)
    (folder / "model" / "tfdist").mkdir(parents=True)
    write_saved_model(model, manifest.schema, folder / "model" / "1")
    about = saved_model.describe(model, manifest)
    (folder / "model" / "tfdist" / "model.json").write_text(json.dumps(about))
    place = folder / "shards"
    return folder / "model", Stored(manifest=place, split="test", folder=place)


@pytest.fixture(scope="module")
def multiclass(tmp_path_factory):
    folder = tmp_path_factory.mktemp("multiclass")
    x, y = RNG.normal(size=(NUM, 4)).astype(np.float32), RNG.integers(0, 3, NUM)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = model_of(3, loss)
    return (*saved(folder, model, x, y), model, x, y)


def test_several_classes(multiclass):
    folder, stored, model, x, y = multiclass
    (report,) = evaluation.evaluate(folder, stored).values()
    guesses = model.predict(x, verbose=0).argmax(axis=-1)
    assert report["accuracy"]["value"] == pytest.approx(metrics.accuracy_score(y, guesses))
    f1 = metrics.f1_score(y, guesses, average="weighted", zero_division=0)
    assert report["weighted_f1"] == {"value": pytest.approx(f1), "standard_deviation": "NaN"}
    assert sum(sum(row.values()) for row in report["confusion_matrix"].values()) == NUM
    assert report["confusion_matrix"]["2"]["1"] == int(((y == 2) & (guesses == 1)).sum())


class Own(tf.keras.Model):
    """Which knows no shape of its outputs before Keras calls it with symbolic tensors."""

    def __init__(self):
        super().__init__()
        self.out = tf.keras.layers.Dense(3)

    def call(self, x):
        return self.out(x)


def test_a_model_of_a_class_of_its_own(tmp_path):
    x, y = RNG.normal(size=(NUM, 4)).astype(np.float32), RNG.integers(0, 3, NUM)
    model = Own()
    model.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.build((None, 4))
    (report,) = evaluation.evaluate(*saved(tmp_path, model, x, y)).values()
    guesses = model.predict(x, verbose=0).argmax(axis=-1)
    assert report["accuracy"]["value"] == pytest.approx(metrics.accuracy_score(y, guesses))


@pytest.mark.parametrize("loss", ["hinge", tf.keras.losses.SquaredHinge()], ids=["name", "loss"])
def test_two_classes_on_the_sides_of_0(tmp_path, loss):
    x, y = RNG.normal(size=(NUM, 4)).astype(np.float32), RNG.integers(0, 2, NUM)
    model = model_of(1, loss, "tanh")
    report = evaluation.evaluate(*saved(tmp_path, model, x, y))
    guesses = model.predict(x, verbose=0)[:, 0] > 0
    found = report["binary_classification_metrics"]["accuracy"]["value"]
    assert found == pytest.approx(metrics.accuracy_score(y, guesses))


@pytest.mark.parametrize("given", [lambda loss: loss, lambda loss: [loss]], ids=["loss", "list"])
@pytest.mark.parametrize("from_logits", [False, True])
def test_two_classes_of_one_output(tmp_path, from_logits, given):
    x, y = RNG.normal(size=(NUM, 4)).astype(np.float32), RNG.integers(0, 2, NUM)
    loss = tf.keras.losses.BinaryCrossentropy(from_logits=from_logits)
    model = model_of(1, given(loss), None if from_logits else "sigmoid")
    report = evaluation.evaluate(*saved(tmp_path, model, x, y))
    scores = model.predict(x, verbose=0)[:, 0]
    guesses = scores > (0.0 if from_logits else 0.5)
    found = report["binary_classification_metrics"]
    assert found["accuracy"]["value"] == pytest.approx(metrics.accuracy_score(y, guesses))
    assert found["auc"]["value"] == pytest.approx(metrics.roc_auc_score(y, scores))
    assert found["false_positive_rate"]["value"] == pytest.approx(guesses[y == 0].mean())


def test_each_score_counts_sample_weights():
    labels, scores, weights = np.array([0, 0, 1]), np.array([0.9, 0.1, 0.9]), np.array([9, 1, 1])
    found = evaluation._binary(labels, scores, 0.5, weights)
    assert found["false_positive_rate"]["value"] == pytest.approx(0.9)
    assert found["confusion_matrix"]["0"] == {"0": 1, "1": 9}


def test_what_one_class_does_not_tell_is_left_out(capsys):
    known = evaluation._known(evaluation._binary(np.ones(2), np.ones(2), 0.5, None))
    assert known["accuracy"]["value"] == 1
    assert not {"false_positive_rate", "auc"} & set(known)
    assert "false_positive_rate cannot be told of these records" in capsys.readouterr().out


def test_a_model_that_gives_nan_is_refused(tmp_path):
    x, y = RNG.normal(size=(NUM, 4)).astype(np.float32), RNG.integers(0, 3, NUM)
    model = model_of(3, tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.set_weights([weight * np.nan for weight in model.get_weights()])
    with pytest.raises(ModelError, match="found NaN for 60 of 60 records"):
        evaluation.evaluate(*saved(tmp_path, model, x, y))


def test_an_embedding_trained_on_classes_tells_none(tmp_path):
    x, y = RNG.normal(size=(NUM, 4)).astype(np.float32), RNG.integers(0, 3, NUM)
    with pytest.raises(ModelError, match="one class or one number a record"):
        evaluation.evaluate(*saved(tmp_path, model_of(8, "mse"), x, y))


@pytest.mark.parametrize("whole", [False, True], ids=["fractions", "whole numbers"])
def test_a_number(tmp_path, whole):
    x = RNG.normal(size=(NUM, 4)).astype(np.float32)
    y = (np.round(x.sum(axis=1) * 5) + 50).astype(np.int64) if whole else x.sum(axis=1)
    model = model_of(1, "mse")
    report = evaluation.evaluate(*saved(tmp_path, model, x, y))["regression_metrics"]
    guesses = model.predict(x, verbose=0)[:, 0]
    assert report["mae"]["value"] == pytest.approx(np.abs(y - guesses).mean(), rel=1e-5)
    assert report["rmse"]["value"] == pytest.approx(report["mse"]["value"] ** 0.5)


def test_other_models_are_refused(tmp_path):
    x, y = RNG.normal(size=(NUM, 4)).astype(np.float32), np.zeros((NUM, 4), np.float32)
    with pytest.raises(ModelError, match="a script of your own"):
        evaluation.evaluate(*saved(tmp_path, model_of(4, "mse"), x, y))


def arguments(folder, archive):
    shards = folder.parent / "shards"
    pairs = {"model": archive, "manifest": shards, "data": shards, "output": archive / "out"}
    return [text for key, value in pairs.items() for text in (f"--{key}", str(value))]


def test_the_script_reads_the_archive_and_writes_the_report(multiclass, tmp_path, capsys):
    folder = multiclass[0]
    with tarfile.open(tmp_path / "model.tar.gz", "w:gz") as packed:
        packed.add(folder, arcname=".")
    evaluation.main(arguments(folder, tmp_path))
    report = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert 0 <= report["multiclass_classification_metrics"]["accuracy"]["value"] <= 1
    assert "tfdist accuracy=" in capsys.readouterr().out


def test_what_is_missing_or_damaged_is_named(multiclass, tmp_path):
    folder, stored, *_ = multiclass
    with pytest.raises(DataError, match=r"a folder with model\.tar\.gz"):
        evaluation.main(arguments(folder, tmp_path))
    shutil.copytree(stored.folder, tmp_path / "shards")
    path = next((tmp_path / "shards").glob("*.tfrecord"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    damaged = Stored(manifest=tmp_path / "shards", split="test", folder=tmp_path / "shards")
    with pytest.raises(DataError, match=path.name):
        evaluation.evaluate(folder, damaged)
    with pytest.raises(OptionError, match="required"):
        evaluation.main([])


# Serving ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    shutil.copytree(Path(__file__).parents[2] / "sagemaker", folder / "code")
    return serving.handlers(folder)


def asked(inference, folder, body, kind, accept="application/json"):
    context = SimpleNamespace(request_content_type=kind, accept_header=accept)
    response = serving.Served(folder).answer(inference.input_handler(io.BytesIO(body), context))
    return inference.output_handler(response, context)


def test_json(inference, multiclass):
    folder, _, model, x, _ = multiclass
    body = json.dumps({"instances": x[:3].tolist()}).encode()
    answer, kind = asked(inference, folder, body, "application/json; charset=utf-8")
    assert kind == "application/json"
    expected = model.predict(x[:3], verbose=0)
    np.testing.assert_allclose(json.loads(answer)["predictions"], expected, rtol=1e-5)


def test_a_line_for_each_instance(inference, multiclass):
    folder, _, model, x, _ = multiclass
    body = "".join(json.dumps(row) + "\n" for row in x[:3].tolist()).encode()
    answer, kind = asked(
        inference, folder, body, "application/jsonlines", accept="application/jsonlines"
    )
    assert kind == "application/jsonlines"
    rows = [json.loads(line) for line in answer.splitlines()]
    np.testing.assert_allclose(rows, model.predict(x[:3], verbose=0), rtol=1e-5)
    # What Unicode calls a line's end may stand within a string.
    context = SimpleNamespace(request_content_type="application/jsonlines", accept_header=None)
    body = '{"text": "one\u2028two"}\r\n{"text": "three\u0085"}\n'.encode()
    sent = json.loads(inference.input_handler(io.BytesIO(body), context))
    assert sent["instances"] == [{"text": "one\u2028two"}, {"text": "three\u0085"}]


def test_batch_transform_of_records(inference, multiclass):
    """A shard as it is stored: the records are decoded by the model's own signature."""
    folder, stored, model, x, _ = multiclass
    shard = load_manifest(stored.manifest).splits["test"].shards[0]
    body = (stored.folder / shard.file).read_bytes()
    answer, _ = asked(inference, folder, body, "application/x-tfrecord", "application/jsonlines")
    rows = np.array([json.loads(line) for line in answer.splitlines()])
    assert len(rows) == shard.records
    every = model.predict(x, verbose=0)
    for row in rows:
        assert np.abs(every - row).max(axis=1).min() < 1e-5


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "in the middle of one"),
        (lambda data: data + b"12345", "in the middle of one"),
        (lambda data: b"?" + data[1:], "length at byte 0"),
        (lambda data: data[:30] + bytes([data[30] ^ 1]) + data[31:], "record at byte 0"),
    ],
)
def test_damaged_records_are_refused(inference, multiclass, damage, message):
    stored = multiclass[1]
    shard = load_manifest(stored.manifest).splits["test"].shards[0]
    data = (stored.folder / shard.file).read_bytes()
    context = SimpleNamespace(request_content_type="application/x-tfrecord")
    with pytest.raises(ValueError, match=message):
        inference.input_handler(io.BytesIO(damage(data)), context)


def test_other_content_and_errors_of_the_server(inference):
    context = SimpleNamespace(request_content_type="text/csv", accept_header=None)
    with pytest.raises(ValueError, match="text/csv"):
        inference.input_handler(io.BytesIO(b"1,2"), context)
    response = SimpleNamespace(status_code=400, content=b"no such signature")
    with pytest.raises(ValueError, match="no such signature"):
        inference.output_handler(response, context)


def test_several_outputs_become_rows(inference):
    response = SimpleNamespace(status_code=200, content=b'{"outputs": {"a": [1, 2], "b": [3, 4]}}')
    context = SimpleNamespace(accept_header="application/jsonlines")
    body, _ = inference.output_handler(response, context)
    assert body == '{"a": 1, "b": 3}\n{"a": 2, "b": 4}\n'


def test_checksums_are_the_same_without_the_package(inference, monkeypatch, tmp_path):
    """As in a container without a network."""
    monkeypatch.setitem(sys.modules, "crc32c", None)
    (tmp_path / "code").mkdir()
    shutil.copy(inference.__file__, tmp_path / "code")
    alone = serving.handlers(tmp_path).crc32c
    assert alone is not inference.crc32c
    for data in (b"", b"123456789", RNG.bytes(1000)):
        assert alone(data) == inference.crc32c(data)


@pytest.mark.parametrize("layout", [".", "digits"], ids=["1/", "NAME/1/"])
def test_awss_container_finds_both_layouts(multiclass, tmp_path, layout):
    folder, _, model, x, _ = multiclass
    shutil.copytree(folder / "1", tmp_path / layout / "1")
    served = serving.Served(tmp_path)
    assert serving.find_models(tmp_path) == [tmp_path / layout]
    (rows,) = json.loads(served.answer(json.dumps({"instances": x[:3].tolist()})).content).values()
    np.testing.assert_allclose(rows, model.predict(x[:3], verbose=0), rtol=1e-5)


def test_a_model_in_no_numbered_folder_is_not_found(multiclass, tmp_path):
    shutil.copytree(multiclass[0] / "1", tmp_path / "model")
    with pytest.raises(ModelError, match="in a folder that is a number, but found model"):
        serving.Served(tmp_path)


def test_several_inputs_and_outputs_as_tensorflow_serving_answers_them(tmp_path):
    a, b = tf.keras.Input((1,), name="a"), tf.keras.Input((1,), name="b")
    model = tf.keras.Model([a, b], {"sum": a + b, "double": 2 * a})
    columns = {"a": np.ones((2, 1), np.float32), "b": np.arange(2, dtype=np.float32)[:, None]}
    manifest = write(columns, tmp_path / "shards", split="test=1")
    write_saved_model(model, manifest.schema, tmp_path / "1")
    served = serving.Served(tmp_path)
    rows = [{"a": [1.0], "b": [0.0]}, {"a": [1.0], "b": [1.0]}]
    expected = [{"sum": [1.0], "double": [2.0]}, {"sum": [2.0], "double": [2.0]}]
    answer = json.loads(served.answer(json.dumps({"instances": rows})).content)
    assert answer == {"predictions": expected}
    by_column = {name: [row[name] for row in rows] for name in "ab"}
    answer = json.loads(served.answer(json.dumps({"inputs": by_column})).content)
    assert answer == {"outputs": {key: [row[key] for row in expected] for key in expected[0]}}


def test_requests_hold_whole_records(multiclass):
    stored = multiclass[1]
    shard = load_manifest(stored.manifest).splits["test"].shards[0]
    data = (stored.folder / shard.file).read_bytes()
    of_one = list(serving.batches(data, len(data) // shard.records + 8))
    assert b"".join(of_one) == data
    assert len(of_one) == shard.records
    assert list(serving.batches(data, len(data))) == [data]
    with pytest.raises(DataError, match=r"must fit into a request of transform\.max_payload_mb"):
        list(serving.batches(data, 20))
