"""How long steps wait for their batches: measured beside them, changing nothing."""

from __future__ import annotations

import time

import pytest
import tensorflow as tf

from tfdist.training.data_wait import DataWait

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
