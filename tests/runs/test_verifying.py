"""tfdist.verify by the name of a strategy: the same comparison as `tfdist verify`."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import tfdist
from tfdist.equivalence import Report
from tfdist.errors import DataError, ModelError, OptionError

pytestmark = pytest.mark.timeout(180)
_MODEL = """
from tensorflow import keras

def model_fn():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    return model
"""


@pytest.fixture
def asked(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(20, 8)).astype(np.float32), rng.normal(size=(20, 3))
    tfdist.records.write(rows, tmp_path / "data", num_shards=2)
    (tmp_path / "model.py").write_text(_MODEL)
    monkeypatch.chdir(tmp_path)
    return {"model_fn": "model.py:model_fn", "data": "data", "strategy": "mirrored"}


def test_processes_of_a_named_strategy_give_the_report(asked):
    report = tfdist.verify(
        **asked, options={"devices": 2}, steps=3, global_batch_size=6, tolerance=1e-4
    )
    assert isinstance(report, Report)
    assert report.exact, report
    assert (report.strategy, report.num_replicas, report.steps) == ("mirrored", 2, 3)
    assert report.tolerance == 1e-4
    assert [layer.layer for layer in report.layers] == ["dense"]


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"options": {"device": 2}}, OptionError, "but found 'device'"),
        ({"strategy": "mirored"}, OptionError, "Did you mean 'mirrored'"),
        ({"strategy": SimpleNamespace(), "workers": 2}, OptionError, "found workers with a str"),
        ({"data": (np.zeros((4, 8)), np.zeros(4))}, DataError, "must be shards"),
        ({"batched": True}, OptionError, "batched must go with a started strategy"),
        ({"steps": 0}, OptionError, "steps must be"),
        ({"model_fn": lambda: None}, ModelError, "must stand in a file or module"),
    ],
)
def test_mistakes_are_told_before_a_process_starts(changed, error, message, asked):
    with pytest.raises(error, match=message):
        tfdist.verify(**(asked | changed))
