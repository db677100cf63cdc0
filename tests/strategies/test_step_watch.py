"""The watch over steps, without an engine."""

from __future__ import annotations

import time

from tfdist.strategies.step_watch import StepWatch


def test_a_loop_within_a_step_takes_nothing_of_its_time():
    stalled = []
    watch = StepWatch(
        timeout_s=2.0, first_timeout_s=2.0, on_stall=lambda place, waited: stalled.append(place)
    )
    with watch.running():
        watch.on_train_batch_begin(0)
        with watch.paused():
            time.sleep(2.5)
        watch.on_train_batch_end(0)
    assert stalled == []


def test_a_step_that_takes_longer_is_told():
    stalled = []
    watch = StepWatch(
        timeout_s=0.1, first_timeout_s=0.1, on_stall=lambda place, waited: stalled.append(place)
    )
    with watch.running():
        watch.on_train_batch_begin(0)
        with watch.paused():
            pass
        while not stalled:
            time.sleep(0.05)
    assert stalled == ["epoch 1, step 1"]
