"""What one rank alone has set is named."""

from __future__ import annotations

import math

import pytest

from tfdist.errors import ModelError
from tfdist.training.loops.weight_agreement import check


@pytest.mark.parametrize(
    ("rates", "sums", "found"),
    [
        ([0.1, 0.1], [[("kernel", 12.0)], [("kernel", 12.001)]], None),
        ([0.1, None], [[], []], None),
        ([math.nan, math.nan], [[("kernel", math.nan)], [("kernel", math.inf)]], None),
        ([0.1, 0.1, 0.2], [[]] * 3, "learning_rate 0.2 on rank 2 and 0.1 on rank 0 after epoch 3"),
        ([0.1, 0.1 * (1 + 1e-8)], [[], []], None),
        (
            [0.1, 0.1],
            [[("kernel", 12.0), ("kernel", 3.0)], [("kernel", 12.1), ("kernel", 3.0)]],
            "weight 'kernel' on rank 1",
        ),
    ],
)
def test_ranks_are_compared(rates, sums, found):
    if found is None:
        check(rates, sums, 2)
        return
    with pytest.raises(ModelError, match=found):
        check(rates, sums, 2)
