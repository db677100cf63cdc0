"""tfdist.predict: the same outputs as `tfdist predict`, from Python."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from tensorflow import keras

import tfdist
from tfdist.errors import ModelError, OptionError, TfdistError
from tfdist.runs import predict_rank
from tfdist.training import model_path

pytestmark = pytest.mark.timeout(180)
_ROOT = Path(__file__).parents[2]
_MODEL = """
from tensorflow import keras

def model_fn():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3, name="scores")])
    model.compile("sgd", "mse")
    return model

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
    (folder / "text.keras").write_text("no model")
    return folder


@pytest.fixture
def asked(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(_ROOT), prepend=os.pathsep)
    return {"model": "model.py:model_fn", "weights": "model.keras", "data": "data/test"}


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


def test_several_outputs_for_one_array_are_refused_before_weights_are_read(asked, folder):
    asked |= {"model": "model.py:two_outputs", "weights": "text.keras"}
    with pytest.raises(TfdistError, match=r"must hold one output, but found 2: of_1, of_2"):
        tfdist.predict(**asked, output="found.npy", strategy="single")
    assert not (folder / "found.npy").exists()


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
    assert predict_rank._known_outputs(keras.Model(x, outputs)) == ["of_1", "of_2"]
    assert predict_rank._known_outputs(Own(x, outputs)) == []


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"strategy": "mirrored", "options": {"device": 2}}, OptionError, "but found 'device'"),
        ({"model": "nowhere.py:model_fn"}, ModelError, "no file nowhere.py"),
        ({"weights": "nowhere.keras"}, OptionError, "nowhere.keras, which is none"),
        ({"output": "found.csv"}, OptionError, "must end with .npz or .npy"),
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
