"""tfdist.export.tflite on a trained model: what is written answers as Keras does."""

from __future__ import annotations

import os

import numpy as np
import pytest
import tensorflow as tf
from tiers import long

import tfdist
from tfdist.errors import DataError, ModelError, OptionError
from tfdist.export import ParityError

pytestmark = pytest.mark.timeout(240)


def answers(path, x: np.ndarray) -> np.ndarray:
    """What a program without tfdist gets that copies each record into the input tensor."""
    interpreter = tf.lite.Interpreter(str(path))
    interpreter.allocate_tensors()
    (given,) = interpreter.get_input_details()
    (taken,) = interpreter.get_output_details()
    rows = []
    for row in x:
        interpreter.set_tensor(given["index"], row[None].astype(given["dtype"]))
        interpreter.invoke()
        rows.append(interpreter.get_tensor(taken["index"])[0])
    return np.stack(rows)


@pytest.fixture(scope="module")
def exported(trained, digits, tmp_path_factory):
    """Exports with data, each quantization once: returns (path, report)."""
    done = {}

    def export(quantize):
        if quantize not in done:
            path = tmp_path_factory.mktemp(quantize) / "digits.tflite"
            report = tfdist.export.tflite(trained, path, quantize=quantize, data=digits)
            done[quantize] = path, report
        return done[quantize]

    return export


@pytest.mark.parametrize(
    ("quantize", "size", "difference"),
    [
        *(("none", 1.0, 1e-4), ("int8", 0.35, 2.0)),
        *long(("float16", 0.52, 0.05), ("dynamic", 0.30, 0.5)),
    ],
)
def test_raw_records_get_keras_answers(quantize, size, difference, trained, validation, exported):
    path, report = exported(quantize)
    assert report.path == path
    best = report.best
    assert best.bytes == path.stat().st_size <= size * report.float_bytes
    assert best.parity.records == 299
    assert best.parity.metric == "accuracy"
    assert best.parity.drop <= 0.01
    x, y = validation
    expected = trained.predict(x, verbose=0)
    found = answers(path, x)
    assert np.abs(found - expected).max() == pytest.approx(
        best.parity.largest_difference, rel=0.02, abs=1e-5
    )
    assert best.parity.largest_difference < difference
    assert np.mean(found.argmax(-1) == y) == pytest.approx(best.parity.file)
    assert np.mean(expected.argmax(-1) == y) == pytest.approx(best.parity.keras)
    assert list(path.parent.iterdir()) == [path]


def test_bytes_go_into_an_int8_file_as_they_are(exported):
    path, _ = exported("int8")
    (given,) = tf.lite.Interpreter(str(path)).get_input_details()
    assert given["dtype"] == np.uint8
    assert given["quantization"] == (1.0, 0)
    assert given["shape"].tolist() == [1, 8, 8, 1]


@pytest.mark.long
def test_bytes_can_go_into_the_other_files_too(trained, digits, validation, tmp_path):
    path = tmp_path / "digits.tflite"
    tfdist.export.tflite(trained, path, data=digits, input_type="uint8")
    (given,) = tf.lite.Interpreter(str(path)).get_input_details()
    assert given["dtype"] == np.uint8
    x, y = validation
    assert np.mean(answers(path, x).argmax(-1) == y) > 0.95


@pytest.mark.long
def test_integers_on_both_sides(trained, digits, tmp_path):
    path = tmp_path / "digits.tflite"
    types = {"input_type": "int8", "output_type": "int8"}
    report = tfdist.export.tflite(
        trained, path, quantize="int8", data=digits, layers=False, **types
    )
    assert report.best.parity.drop <= 0.01
    assert report.best.layers == ()
    interpreter = tf.lite.Interpreter(str(path))
    assert interpreter.get_input_details()[0]["dtype"] == np.int8
    assert interpreter.get_output_details()[0]["dtype"] == np.int8


def test_integers_out_need_int8(trained, digits, tmp_path):
    with pytest.raises(OptionError, match="int8"):
        tfdist.export.tflite(trained, tmp_path / "m.tflite", output_type="int8")


@pytest.mark.long
def test_a_scale_outside_of_the_model_is_put_into_the_file(digits, validation, tmp_path):
    tf.keras.utils.set_random_seed(0)
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [tf.keras.Input((8, 8, 1)), layers.Flatten(), layers.Dense(32, "relu"), layers.Dense(10)]
    )
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    x, y = validation
    model.fit(x / 8.0 - 1.0, y, epochs=20, verbose=0)
    path = tmp_path / "digits.tflite"
    report = tfdist.export.tflite(model, path, quantize="int8", data=digits, rescale=(1 / 8, -1))
    assert report.best.parity.keras > 0.9
    assert report.note is None
    assert np.mean(answers(path, x).argmax(-1) == y) > 0.9
    without = tfdist.export.tflite(model, path, data=digits)
    assert "--rescale" in without.note


def test_int8_names_its_worst_layers(trained, exported):
    _, report = exported("int8")
    layers = report.best.layers
    with_kernels = [layer.name for layer in trained.layers if hasattr(layer, "kernel")]
    assert len(with_kernels) == 4
    assert set(with_kernels) <= {error.layer for error in layers}
    errors = [error.relative_error for error in layers]
    assert errors == sorted(errors, reverse=True)
    assert 0.001 < errors[0] < 0.5
    # Only rounding, in every layer.
    assert all(error.rmse_in_steps < 0.6 for error in layers)
    assert layers[0].layer in str(report)


def test_auto_keeps_the_smallest_that_passes(trained, digits, tmp_path):
    path = tmp_path / "digits.tflite"
    report = tfdist.export.tflite(trained, path, quantize="auto", data=digits, benchmark=True)
    by_name = {candidate.quantization: candidate for candidate in report.candidates}
    assert list(by_name) == ["none", "float16", "dynamic", "int8", "int16x8"]
    good = [c for c in report.candidates if c.problem is None]
    assert report.best.bytes == min(c.bytes for c in good) == path.stat().st_size
    for candidate in good:
        assert [latency.threads for latency in candidate.benchmark.latencies] == [1, 2]
        for latency in candidate.benchmark.latencies:
            assert 0 < latency.p50_ms <= latency.p90_ms
            assert latency.runs >= 30
    # Activations of int8 take a quarter; the scratch of a convolution does too.
    assert by_name["int8"].benchmark.arena_bytes < by_name["none"].benchmark.arena_bytes
    # The largest operator holds [8, 8, 32] twice.
    assert by_name["int8"].benchmark.arena_bytes >= 2 * 8 * 8 * 32


def test_a_file_that_is_not_good_enough_is_not_written(digits, tmp_path):
    """One weight a million times as large as the others: 256 steps cannot hold both."""
    layers = tf.keras.layers
    tf.keras.utils.set_random_seed(0)
    model = tf.keras.Sequential(
        [
            tf.keras.Input((8, 8, 1)),
            layers.Flatten(),
            layers.Dense(32, "relu", name="first"),
            layers.Dense(10, name="spoilt"),
        ]
    )
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    model.fit(tfdist.records.read(digits / "train", batch_size=64), epochs=5, verbose=0)
    kernel, bias = model.layers[-1].get_weights()
    bias[0] = -1e6
    model.layers[-1].set_weights([kernel, bias])
    path = tmp_path / "digits.tflite"
    older = b"    TFL3, an older file"
    path.write_bytes(older)
    with pytest.raises(ParityError, match="spoilt") as caught:
        tfdist.export.tflite(model, path, quantize="int8", data=digits)
    report = caught.value.report
    assert report.path is None
    assert report.best is None
    assert report.candidates[0].parity.drop > 0.01
    assert report.candidates[0].layers[0].layer == "spoilt"
    assert path.read_bytes() == older
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.long
def test_without_data_nothing_is_compared(trained, tmp_path):
    report = tfdist.export.tflite(trained, tmp_path / "digits.tflite", quantize="dynamic")
    assert report.best.parity is None
    assert "not compared" in str(report)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        (
            {"quantize": "int4"},
            OptionError,
            "Choose one of none, float16, dynamic, int8, int16x8, auto",
        ),
        ({"quantize": "int8"}, OptionError, "must have records"),
        ({"quantize": "auto"}, OptionError, "must have records"),
        ({"format": "java"}, OptionError, "Choose one of tflite, c"),
        ({"input_type": "uint16"}, OptionError, "Choose one of auto, float32, uint8, int8"),
        ({"input_type": "int8"}, OptionError, "int8 inputs"),
        ({"max_drop": -1}, OptionError, "max_drop"),
        ({"rescale": "much"}, OptionError, "rescale"),
        ({"samples": 0, "data": (np.zeros((4, 8, 8, 1)),)}, OptionError, "samples must be"),
        ({"data": (np.zeros((4, 8, 9, 1)),)}, DataError, r"\[8, 8, 1\].*\[8, 9, 1\]"),
        ({"data": (np.zeros((0, 8, 8, 1)),)}, DataError, "at least one record"),
        ({"data": "nowhere/at/all"}, DataError, "nowhere/at"),
    ],
)
def test_mistakes(options, kind, words, trained, tmp_path):
    with pytest.raises(kind, match=words):
        tfdist.export.tflite(trained, tmp_path / "digits.tflite", **options)
    assert list(tmp_path.iterdir()) == []


def test_mistakes_in_paths(trained, tmp_path):
    with pytest.raises(OptionError, match="does not exist"):
        tfdist.export.tflite(trained, tmp_path / "no" / "digits.tflite")
    with pytest.raises(OptionError, match="is a folder"):
        tfdist.export.tflite(trained, tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OptionError, match="is a pipe or a device"):
        tfdist.export.tflite(trained, tmp_path / "pipe")
    with pytest.raises(ModelError, match="does not exist"):
        tfdist.export.tflite(tmp_path / "no.keras", tmp_path / "digits.tflite")
    (tmp_path / "text.keras").write_text("no model")
    with pytest.raises(ModelError, match="that Keras can load"):
        tfdist.export.tflite(tmp_path / "text.keras", tmp_path / "digits.tflite")
    with pytest.raises(ModelError, match="but found an object of type int"):
        tfdist.export.tflite(3, tmp_path / "digits.tflite")
    with pytest.raises(OptionError, match=r"text\.keras, which is something else"):
        tfdist.export.tflite(trained, tmp_path / "text.keras")
    assert (tmp_path / "text.keras").read_text() == "no model"


@pytest.mark.long
def test_an_older_export_is_replaced(trained, tmp_path):
    path = tmp_path / "digits.tflite"
    for options in ({}, {"format": "c"}, {"quantize": "dynamic"}):
        tfdist.export.tflite(trained, path, **options)
        assert path.read_bytes().startswith(b"//") == ("format" in options)
    assert path.read_bytes()[4:8] == b"TFL3"
