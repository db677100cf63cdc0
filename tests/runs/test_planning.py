"""What a plan measures: bytes of its steps, and what rows do not change of their time."""

from __future__ import annotations

import pytest

from tfdist.errors import OptionError
from tfdist.planning.candidates import Candidate
from tfdist.planning.devices import DeviceTable
from tfdist.planning.plan import Speed
from tfdist.planning.report import make_plan
from tfdist.runs.needs import find_needs
from tfdist.runs.planning import check_plan, fixed_seconds

_MODEL = """
from tensorflow import keras

def model_fn():
    hidden = [keras.layers.Dense(256, "tanh") for _ in range(4)]
    model = keras.Sequential([keras.Input((256,)), *hidden])
    model.compile("adam", "mse")
    return model
"""
_ROWS = 512


@pytest.mark.long
@pytest.mark.timeout(600)
def test_told_bytes_are_shown_beside_those_of_a_step(model):
    asked = [Candidate("single"), Candidate("mirrored", {}, 2), Candidate("horovod", {}, 2)]
    found = find_needs(model, [each.traced for each in asked], rows=_ROWS)
    cluster = DeviceTable.load().cluster("cpu:2")
    made = make_plan(asked, found, cluster, _ROWS, speed=Speed(), several="horovod")
    checks = check_plan(model, made)
    assert [check.name for check in checks] == ["single", "mirrored"]
    for check, row in zip(checks, made.rows, strict=False):
        assert check.told == row.peak
        # Two replicas hold more or less at a time by the order in which threads run, less where
        # the machine is busy.
        least, most = (0.95, 1.05) if check.name == "single" else (0.6, 1.15)
        assert least <= check.measured / check.told <= most, check.why


def test_devices_that_are_not_here_are_refused():
    cluster = DeviceTable.load().cluster("h100:2")
    made = make_plan(
        [Candidate("single")],
        [OptionError("a model must be", received="none", mend="Give one")],
        cluster,
        _ROWS,
        speed=Speed(),
        several="horovod",
    )
    with pytest.raises(OptionError, match="--check must be of a plan for this machine's CPU"):
        check_plan("model.py:model_fn", made)


def test_what_rows_do_not_change_is_where_their_line_begins():
    assert fixed_seconds({16: 0.031, 64: 0.034}) == pytest.approx(0.03)
    assert fixed_seconds({64: 0.4, 16: 0.1}) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(
    "measured",
    [
        pytest.param({16: 0.03, 64: 0.03}, id="no slope"),
        pytest.param({16: 0.04, 64: 0.03}, id="noise"),
        pytest.param({1: 0.03}, id="one row"),
        pytest.param({16: 0.1, 64: 0.5}, id="begins below zero"),
    ],
)
def test_what_tells_nothing_is_all_computing(measured):
    assert fixed_seconds(measured) == 0.0
