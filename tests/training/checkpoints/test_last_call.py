"""SIGTERM in a fit; what ``tfdist train`` makes of it is tried in tests/cli/test_train.py."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from tfdist.strategies import strategy
from tfdist.training.checkpoints import last_call
from tfdist.training.checkpoints.checkpoint import Checkpoints
from tfdist.training.checkpoints.last_call import LastCall
from tfdist.training.engine.elastic_collective import ElasticCollective


class Strike(tf.keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(autouse=True)
def _default_handler():
    """A command that ran in this process may have left its own."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def fit(tmp_path):
    def fitted():
        model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        keeper = Checkpoints(tmp_path)
        x = np.ones((8, 2), np.float32)
        with strategy("single") as single:
            built = single.build(model)
            built.fit(x, x[:, :1], batch_size=2, verbose=0, callbacks=[Strike(), keeper])
        return keeper

    return fitted


def test_the_step_in_progress_is_the_last(fit, tmp_path):
    with pytest.raises(SystemExit) as ended:
        fit()
    assert ended.value.code == 143
    assert (tmp_path / "ckpt-2.index").is_file()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_same_notice_may_arrive_within_a_long_step(monkeypatch):
    """Of one that Python hears of when the step is over it cannot tell when it was given."""
    ended = []
    monkeypatch.setattr(last_call, "_end", lambda: ended.append(True))
    monkeypatch.setattr(last_call.os, "kill", lambda *_: None)  # At the end of the fit.
    with last_call.listening():
        once_more = threading.Timer(0.3, signal.raise_signal, [signal.SIGTERM])
        once_more.start()
        signal.raise_signal(signal.SIGTERM)
        hashlib.pbkdf2_hmac("sha256", b"long", b"step", 6_000_000)
        once_more.join()
    assert ended == []


def test_a_handler_of_the_users_own_is_left_in_place(fit):
    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append("his own"))
    assert fit().newest.name == "ckpt-4"
    assert told == ["his own"]


def test_a_notice_that_nothing_has_heeded_ends_the_program(monkeypatch):
    ended = []
    monkeypatch.setattr(last_call.os, "kill", lambda _, number: ended.append(number))
    with last_call.listening():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # Of a launcher that passes it on.
        assert not ended
    assert ended == [signal.SIGTERM]
    with last_call.listening():
        monkeypatch.setattr(last_call, "_SAME_NOTICE_S", 0.0)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert len(ended) == 2
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_elastic_rank_leaves_at_once(monkeypatch):
    ended = []
    monkeypatch.setattr(last_call.os, "kill", lambda _, number: ended.append(number))
    monkeypatch.setattr(ElasticCollective, "__abstractmethods__", frozenset())
    call = LastCall(ElasticCollective.__new__(ElasticCollective))
    with last_call.listening():
        assert not call.after_step()
        assert not ended
        signal.raise_signal(signal.SIGTERM)
        assert not call.after_step()
        assert ended == [signal.SIGTERM]


def test_processes_of_another_pace_ask_each_other_after_the_same_steps(monkeypatch):
    of_chief = []

    def asked_after(seconds, gather):
        times = iter(np.arange(0, 40 * seconds, seconds))
        monkeypatch.setattr(last_call.time, "monotonic", lambda: next(times))
        call = LastCall(SimpleNamespace(num_processes=2, gather=gather))
        return [call.after_step() for _ in range(39)]

    def gather_on_chief(own):
        of_chief.append(own)
        return [own, (False, 0.0)]

    asked_after(0.1, gather_on_chief)
    assert 2 < len(of_chief) < 12
    answers = iter(of_chief)
    asked_after(1.0, lambda own: [next(answers), own])
    assert next(answers, None) is None
