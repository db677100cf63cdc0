"""How long workers have nothing to do."""

from __future__ import annotations

from tfdist.strategies.parameter_server.steps import Idle


def test_it_is_the_mean_over_workers():
    now = 0.0
    idle = Idle(2, clock=lambda: now)
    now = 1.0  # Both had nothing.
    assert idle.seconds() == 1.0
    idle.begin()
    now = 3.0  # One of two.
    assert idle.seconds() == 2.0
    idle.begin()
    idle.begin()
    now = 10.0  # None; and one step waits.
    idle.end()
    now = 11.0
    assert idle.seconds() == 2.0
    idle.end()
    idle.end()
    now = 12.0
    assert idle.seconds() == 3.0
