"""Callbacks that run once in a job."""

from __future__ import annotations

import types

import pytest
import tensorflow as tf

import tfdist
from tfdist.errors import OptionError
from tfdist.training.loops.callbacks import for_process

keras = tf.keras


def process(is_chief: bool) -> types.SimpleNamespace:
    return types.SimpleNamespace(is_chief=is_chief, reads_together=False)


class Tells(keras.callbacks.Callback):
    pass


def test_it_runs_on_the_chief_and_others_everywhere():
    marked, other = tfdist.on_chief(Tells()), Tells()
    assert for_process([marked, other], process(True)) == [marked, other]
    assert for_process([marked, other], process(False)) == [other]


@pytest.mark.parametrize("package", ["wandb.integration.keras", "mlflow.tensorflow"])
def test_those_of_trackers_run_once(package):
    class Tracker(keras.callbacks.Callback):
        pass

    Tracker.__module__ = package

    class Mine(Tracker):
        pass

    for callback in (Tracker(), Mine()):
        assert for_process([callback], process(True)) == [callback]
        assert for_process([callback], process(False)) == []


def test_a_function_is_called_on_the_chief_alone(monkeypatch):
    assert isinstance(tfdist.on_chief(Tells), Tells)
    for name, value in (("RANK", "1"), ("SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_SIZE", "2")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    other = tfdist.on_chief(Tells)
    assert type(other) is keras.callbacks.Callback
    assert for_process([other], process(False)) == []


@pytest.mark.parametrize("given", [3, lambda: 3])
def test_what_is_no_callback(given):
    with pytest.raises(OptionError, match="must be given a Keras callback"):
        tfdist.on_chief(given)
