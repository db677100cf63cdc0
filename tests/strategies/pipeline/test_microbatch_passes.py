"""The order of a device's tasks, in which functions that TensorFlow inlines are no exception."""

from __future__ import annotations

import time

import tensorflow as tf

from tfdist.strategies.pipeline.functions import function_of
from tfdist.strategies.pipeline.microbatch_passes import Turns


def test_a_task_waits_until_the_function_of_the_one_before_has_its_result():
    ended = []

    def task(name: str, seconds: float):
        def run(x):
            time.sleep(seconds)
            ended.append(name)
            return x

        return function_of(lambda x: tf.numpy_function(run, [x], x.dtype, stateful=False))

    @tf.function
    def step(x):
        turns = Turns()
        first = task("first", 0.2)(x)
        turns.done("CPU:0", [first])
        with turns.after_last("CPU:0"):
            second = task("second", 0.0)(tf.identity(x))
        return first, second

    step(tf.ones([2]))
    assert ended == ["first", "second"]
