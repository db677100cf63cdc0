"""Which batch comes after which, and what a step on it gains."""

from __future__ import annotations

import pytest

from tfdist.training.loops.noise_scale import adascale_gain, next_batch


@pytest.mark.parametrize(
    ("variance", "signal", "batch", "expected"),
    [
        (150.0, 1.0, 100, 150),  # The noise scale.
        (151.0, 1.0, 100, 150),  # In whole rows on each of two replicas.
        (900.0, 1.0, 100, 200),  # At most twice as many.
        (900.0, 1.0, 200, 300),  # And at most those that were given.
        (5.0, 0.0, 100, 200),  # Noise alone.
        (10.0, 1.0, 200, 100),  # At least half.
        (0.0, 1.0, 65, 64),  # At least the first ones.
    ],
)
def test_the_next_batch(variance, signal, batch, expected):
    assert next_batch(variance, signal, batch, first=64, most=300, replicas=2) == expected


def test_the_gain_lies_between_none_and_that_of_noise_alone():
    assert adascale_gain(0.0, 1.0, 10, 40) == 1
    assert adascale_gain(5.0, 0.0, 10, 40) == pytest.approx(4)
    # (20 / 10 + 1) / (20 / 40 + 1)
    assert adascale_gain(20.0, 1.0, 10, 40) == pytest.approx(2)
    assert adascale_gain(20.0, 1.0, 10, 10) == 1
