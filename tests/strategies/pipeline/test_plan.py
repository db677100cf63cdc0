"""Where a pipeline with BatchNormalization takes batches whole; no TensorFlow."""

from __future__ import annotations

import pytest

from tfdist.strategies.pipeline.plan import with_whole_batches


@pytest.mark.parametrize(
    ("bounds", "norms", "short_after", "starts", "devices", "whole"),
    [
        # The first stage from its begin, the last one to its end; between them microbatches.
        ([0, 5, 10], [1, 3, 7, 9], None, (4, 5, 7), (0, 0, 1, 1), {0, 3}),
        # One in the middle from its first to its last layer, if it has any.
        ([0, 4, 8, 12], [5, 6], None, (4, 5, 7, 8), (0, 1, 1, 1, 2), {2}),
        ([0, 4, 8], [2], None, (3, 4), (0, 0, 1), {0}),
        # At the cut itself: nothing is left to be divided.
        ([0, 4, 8], [3, 4], None, (4,), (0, 1), {0, 1}),
        ([0, 6], [2, 4], None, (), (0,), {0}),
        # Short ones for recompute, but not of frozen layers alone.
        ([0, 6, 8], [2, 4], 0, (2, 4, 5, 6), (0, 0, 0, 0, 1), {0, 1, 2}),
        ([0, 6, 8], [2, 4], 2, (4, 5, 6), (0, 0, 0, 1), {0, 1}),
    ],
)
def test_whole_batches(bounds, norms, short_after, starts, devices, whole):
    made, found = with_whole_batches(bounds, norms, microbatches=4, short_after=short_after)
    assert found == starts
    assert made.device_of == devices
    assert made.whole == whole
    assert made.timeline()  # It comes to an end.
