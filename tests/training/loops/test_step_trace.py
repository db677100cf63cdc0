"""Chosen steps, traced with marks of our own: their numbers, and what they waited for."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.errors import OptionError
from tfdist.traces import places, wish
from tfdist.traces.report import Report, report
from tfdist.traces.shares import PARTS
from tfdist.training.loops.step_trace import Profile, StepTrace

_PRODUCED_S = 0.05


def _slow(number):
    def slow(number):
        time.sleep(_PRODUCED_S)
        return np.ones((4, 8), np.float32)

    x = tf.ensure_shape(tf.numpy_function(slow, [number], tf.float32), (4, 8))
    return x, x[:, :3]


def _model():
    layers = tf.keras.layers
    model = tf.keras.Sequential([tf.keras.Input((8,)), layers.Dense(3, name="only")])
    model.compile("sgd", "mse")
    return model


def _traced(
    folder: Path,
    steps: tuple[int, int],
    *,
    per_execution: int = 1,
    more: Any = (),
    run_eagerly: bool = False,
    strategy_name: str = "single",
    **of_data: Any,
) -> Report:
    """Fits an epoch of 30 steps, and traces some."""
    layers = tf.keras.layers

    def model_fn():
        model = tf.keras.Sequential([tf.keras.Input((8,)), layers.Dense(3, name="only")])
        model.compile("sgd", "mse", steps_per_execution=per_execution, run_eagerly=run_eagerly)
        return model

    with tfdist.strategy("single") as strategy:
        model = strategy.build(model_fn)
        x = np.ones((120, 8), np.float32)
        data = strategy.dataset((x, x[:, :3]), global_batch_size=4, **of_data)
        trace = StepTrace(lambda: folder, steps, strategy_name, contextlib.nullcontext)
        model.fit(data, epochs=2, verbose=0, callbacks=[*more, trace])
    return report(folder)


def test_steps_that_wait_for_data_are_told(tmp_path):
    """Batches come one after the other, each later than a step takes."""
    batches = tf.data.Dataset.range(30).map(_slow).prefetch(2)
    with tfdist.strategy("single") as strategy:
        model = strategy.build(_model)
        trace = StepTrace(lambda: tmp_path, (6, 25), "single", contextlib.nullcontext)
        model.fit(batches, verbose=0, callbacks=[trace])
    (share,) = report(tmp_path).shares
    assert share.for_data > share.compute
    assert share.step == pytest.approx(sum(getattr(share, name) for name in PARTS))


def test_what_data_compute_is_none_of_the_steps(tmp_path):
    def hard(x, y):
        made = tf.random.stateless_normal((300, 300), [0, 0])
        return x + 0 * tf.reduce_sum(tf.linalg.matmul(made, made)), y

    found = _traced(tmp_path, (6, 9), map_fn=hard)
    # Which of the step's own take longest, a busy machine decides.
    names = [name.lower() for name in found.traces[0].compute.names]
    assert any("only/matmul" in name for name in names)
    assert not any("stateless" in name for name in names)


@pytest.mark.parametrize(
    ("asked", "steps"),
    [
        ((6, 14), [(6, 10), (11, 15)]),
        ((9, 15), [(6, 10), (11, 15)]),
        ((3, 4), [(1, 5)]),  # Nothing has told yet how many an execution has.
    ],
)
def test_an_execution_of_several_steps_counts_them(tmp_path, asked, steps):
    """Executions of steps 1 to 5, 6 to 10 and 11 to 15: whole ones are traced."""
    found = _traced(tmp_path, asked, per_execution=5)
    (trace,) = found.traces
    assert trace.steps == steps
    assert trace.num_steps == 5 * len(steps)
    assert found.shares[0].step == pytest.approx(
        (trace.ended - trace.begun) / trace.num_steps / 1e6
    )


def test_an_eager_step_has_operations_too(tmp_path):
    found = _traced(tmp_path, (2, 3), run_eagerly=True)
    assert found.traces[0].steps == [(2, 2), (3, 3)]
    assert "MatMul" in found.traces[0].compute.kinds
    assert found.shares[0].compute > 0


def test_an_epoch_without_these_steps_says_so_and_the_next_is_not_traced(tmp_path, capsys):
    with tfdist.strategy("single") as strategy:
        model = strategy.build(_model)
        x = np.ones((8, 8), np.float32)
        trace = StepTrace(lambda: tmp_path, (3, 4), "single", contextlib.nullcontext)
        for trained in (4, 8):  # Of an epoch that is gone on with there may be less.
            feed = strategy.dataset((x[:trained], x[:trained, :3]), global_batch_size=2)
            model.fit(feed, verbose=0, callbacks=[trace])
    assert "no step was traced: this epoch had none of 3 to 4" in capsys.readouterr().out
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_profiler_that_runs_already_is_named(tmp_path):
    tf.profiler.experimental.start(str(tmp_path / "other"))
    try:
        with pytest.raises(OptionError, match="a process has one profiler"):
            _traced(tmp_path / "own", (2, 3))
    finally:
        tf.profiler.experimental.stop(save=False)
    assert not list(tmp_path.rglob(".tracing-*"))


def test_only_horovod_has_a_timeline_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOROVOD_TIMELINE", "timeline.json")
    (trace,) = _traced(tmp_path / "single", (2, 2)).traces
    assert trace.notes["horovod_timeline"] is None
    (trace,) = _traced(tmp_path / "horovod", (2, 2), strategy_name="horovod").traces
    assert trace.notes["horovod_timeline"] == str(tmp_path / "timeline.json")


def test_a_second_trace_takes_the_place_of_the_first(tmp_path):
    _traced(tmp_path, (2, 3))
    assert _traced(tmp_path, (4, 4)).traces[0].steps == [(4, 4)]
    assert not list(tmp_path.rglob(".tracing-*"))


def test_what_a_killed_rank_has_left_goes_with_the_next_trace_of_that_rank(tmp_path):
    run = places.run_of(tmp_path)
    for name in (".tracing-0-killed", ".tracing-1-other", ".tracing-10-other"):
        (run / name / "plugins").mkdir(parents=True)
    _traced(tmp_path, (2, 2))
    assert sorted(p.name for p in run.glob(".tracing-*")) == [
        ".tracing-1-other",
        ".tracing-10-other",
    ]
    places.remove_unfinished(tmp_path)
    assert not list(run.glob(".tracing-*"))


def test_five_steps_of_one_rank_need_the_profiler_too(tmp_path):
    tf.profiler.experimental.start(str(tmp_path / "other"))
    try:
        with pytest.raises(OptionError, match="a process has one profiler"):
            _model().fit(
                np.ones((8, 8)), np.ones((8, 3)), verbose=0, callbacks=[Profile(str(tmp_path), 1)]
            )
    finally:
        tf.profiler.experimental.stop(save=False)


@pytest.mark.parametrize("text", ["steps=0:3", "steps=5:4", "steps=5", "logs,steps=a:b"])
def test_steps_that_cannot_be_are_refused(text):
    with pytest.raises(OptionError, match="counted from 1"):
        wish.parsed(text)


def test_wishes_are_read_and_written():
    for text, folder, steps in (
        ("logs", "logs", None),
        ("steps=2:6", None, (2, 6)),
        ("s3://a,b,steps=10:20", "s3://a,b", (10, 20)),
    ):
        assert wish.parsed(text) == wish.Wish(folder, steps)
        assert str(wish.parsed(text)) == text
    with pytest.raises(OptionError, match="which has 5"):
        wish.check_steps(wish.parsed("steps=2:6"), 5)
