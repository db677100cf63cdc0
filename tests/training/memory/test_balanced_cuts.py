"""Cutting a row of costs; no TensorFlow."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tfdist.training.memory.balanced_cuts import balance


def largest(costs, cuts):
    bounds = [0, *cuts, len(costs)]
    return max(sum(costs[a:b]) for a, b in itertools.pairwise(bounds))


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(5))
def test_no_cuts_balance_better(parts, seed):
    costs = [float(cost) for cost in np.random.default_rng(seed).integers(0, 30, 9)]
    best = min(largest(costs, cuts) for cuts in itertools.combinations(range(1, 9), parts - 1))
    cuts = balance(costs, [0.0] * 9, parts)
    assert len(cuts) == parts - 1
    assert largest(costs, cuts) == best


def test_of_equal_cuts_the_one_with_less_to_send():
    assert balance([4, 0, 0, 4], [0, 9, 2, 9], 2) == (2,)
