"""The model in a replica, and what it says of rows that it does not take."""

from __future__ import annotations

import numpy as np
import pytest

import tfdist
from tfdist.errors import DataError
from tfdist.records.writing.instances import InstanceError, Limits, records_of
from tfdist.serving.handler import Handler, trained
from tfdist.serving.served import find
from tfdist.training.engine import model_path

_MODEL = """
from tensorflow import keras

def model_fn():
    ids = keras.Input((4,), name="ids", dtype="int64")
    model = keras.Model(ids, keras.layers.Embedding(10, 2, name="words")(ids))
    model.compile("sgd", "mse")
    return model
"""


@pytest.mark.parametrize("is_explained_by_the_loop", [False, True])
def test_an_id_that_is_unknown_spoils_no_other_and_is_named(tmp_path, is_explained_by_the_loop):
    """The loop of a divided model explains the error before the replica sees it."""
    (tmp_path / "model.py").write_text(_MODEL)
    model = f"{tmp_path / 'model.py'}:model_fn"
    tfdist.records.write(np.ones((8, 4), np.int64), tmp_path / "data", split="train=1")
    weights = tmp_path / "ids.weights.h5"
    model_path.load(model)().save_weights(weights)
    served = find(weights, model=model, trained_on=str(tmp_path / "data"), name="ids")
    handler = Handler(served, 8, "single", {})
    if is_explained_by_the_loop:
        handler._predict = _explained
    good, bad = (records_of(served.schema, [[1, 2, 3, n]], Limits()) for n in (4, 99))
    told, rows = handler.predict([bad, good])
    assert isinstance(told, InstanceError)
    assert "here 0 to 9, but found " in str(told)
    if not is_explained_by_the_loop:
        expected = trained(served).predict(np.array([[1, 2, 3, 4]]), verbose=0)
        np.testing.assert_allclose(rows["predictions"], expected)


def _explained(records):
    raise DataError("an id must be known, here 0 to 9", received="id 99", mend="Mend the ids")
