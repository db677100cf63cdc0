"""How long steps wait for their batches: measured beside them, changing nothing."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import tensorflow as tf

from tfdist.training.loops.data_wait import DataWait

_PRODUCED_S = 0.01


def _slow(number):
    def slow(number):
        time.sleep(_PRODUCED_S)
        return number

    result = tf.numpy_function(slow, [number], tf.int64)
    result.set_shape([])
    return result, {"a": number}


# Every step is looked at of few, one in two of more.
@pytest.mark.parametrize("steps", [20, 40])
def test_it_is_what_a_step_waits(steps):
    options = tf.data.Options()
    options.autotune.enabled = False
    batches = tf.data.Dataset.range(steps).map(_slow).prefetch(2).with_options(options)
    wait = DataWait()
    assert wait.take() is None
    watched = wait.watched(batches, steps)
    assert watched.element_spec == batches.element_spec
    assert watched.cardinality() == steps
    assert not watched.options().autotune.enabled
    waited, found, iterator = 0.0, [], iter(watched)
    for _ in range(steps):
        begun = time.perf_counter()
        number, _ = next(iterator)
        waited += time.perf_counter() - begun
        found.append(int(number))
    assert found == list(range(steps))
    mean = wait.take()
    # The clock within tf.data sees less than the one around it; and somebody did sleep.
    assert mean > _PRODUCED_S / 10
    if steps == 20:
        assert mean * steps <= waited
    assert wait.take() is None


def test_steps_fed_ahead_wait_as_long_as_both_clocks_say():
    """The fetcher waits for data all the time; the step, which is fed ahead, for a part of it."""
    model = SimpleNamespace(train_step=lambda data: data)
    binding = SimpleNamespace(model=model, put=lambda owner, values: vars(owner).update(values))
    batches = tf.data.Dataset.range(80).map(_slow)
    wait = DataWait()
    wait.watch_steps(binding)
    step = model.train_step
    wait.watch_steps(binding)
    assert model.train_step is step
    # Of two replicas the first brings the batch of the other: one in two would be the same one.
    iterator = iter(wait.watched(batches, 40, replicas=2).prefetch(2))
    for number in range(40):
        wait.on_train_batch_begin(number)
        first, second = (step(next(iterator)) for _ in range(2))
        time.sleep(_PRODUCED_S)  # The step computes, while the next batches are made.
        wait.on_train_batch_end(number)
        assert (int(first[0]), int(second[0])) == (2 * number, 2 * number + 1)
    mean = wait.take()
    # What was asked for while the step computed is in the data's clock alone.
    assert mean > _PRODUCED_S / 10
    assert wait.take() is None


def test_what_an_engine_notes_counts():
    wait = DataWait()
    wait.note(1.0)
    wait.note(3.0)
    assert wait.take() == 2.0
    assert wait.take() is None
