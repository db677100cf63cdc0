"""``tfdist export`` as a user runs it."""

from __future__ import annotations

import pytest

from tfdist.errors import OptionError
from tfdist.export.kinds import QUANTIZATIONS

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def saved(shards, model_file, tmp_path):
    """A model of the tests' own, trained for a moment."""
    import importlib.util

    import tfdist

    spec = importlib.util.spec_from_file_location("models_to_export", model_file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.mlp()
    model.fit(tfdist.records.read(shards / "train", batch_size=32), epochs=5, verbose=0)
    model.save(tmp_path / "model.keras")
    return tmp_path / "model.keras"


def test_a_file_its_table_and_nothing_else(run_cli, saved, shards, tmp_path):
    out = tmp_path / "model.tflite"
    done = run_cli("export", saved, out, "--quantize", "auto", "--data", shards, "--benchmark")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for words in (*QUANTIZATIONS, "of float32", "accuracy", "worst layers", "p90 ms", "arena"):
        assert words in done.stdout
    assert f"written {out}" in done.stdout
    assert out.read_bytes()[4:8] == b"TFL3"


def test_a_drop_above_the_limit_is_exit_code_1(run_cli, saved, shards, tmp_path):
    import tensorflow as tf

    model = tf.keras.models.load_model(saved)
    kernel, bias = model.layers[-1].get_weights()
    bias[0] = -1e7  # 256 steps cannot hold this and the others.
    model.layers[-1].set_weights([kernel, bias])
    model.layers[-1]._name = "spoilt"
    model.save(saved)
    out = tmp_path / "model.tflite"
    done = run_cli("export", saved, out, "--quantize", "int8", "--data", shards)
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert "at most 0.01" in line
    assert "worst layers are spoilt " in line
    assert "refused" in done.stdout
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("no.keras", "a.tflite"), "no.keras, which does not exist"),
        (("no.keras", "a.tflite", "--quantize", "int4"), "Did you mean 'int8'?"),
        (("no.keras", "a.tflite", "--quantize", "int8"), "must have records"),
        (("no.keras", "no/a.tflite"), "does not exist"),
        (("no.keras", "a.tflite", "--rescale", "1/0"), "--rescale 1/255"),
        (("no.keras", "a.tflite", "--format", "java"), "'tflite', 'c'"),
    ],
)
def test_a_mistake_is_one_line(arguments, words, tfdist):
    code, out, err = tfdist("export", *arguments)
    assert code == 2
    assert out == ""
    assert len(err.strip().splitlines()) == 1
    assert words in err


def test_help_lists_the_quantizations_and_shows_examples(tfdist):
    code, out, _ = tfdist("export", "--help")
    assert code == 0
    for words in (*QUANTIZATIONS, "Examples:", "uint8 input of scale 1"):
        assert words in out


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1/255", (1 / 255, 0.0)), ("2,-1", (2.0, -1.0)), ("1/4,1/2", (0.25, 0.5))],
)
def test_rescale(text, expected):
    from tfdist.cli.export import _parse_rescale

    assert _parse_rescale(text) == expected
    with pytest.raises(OptionError):
        _parse_rescale(text + ",1,2")
