"""Sets of times: sorted intervals that do not overlap, float64 [n, 2], as begin and end."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

EMPTY = np.empty((0, 2))


def union(given: Iterable) -> np.ndarray:
    """Returns the times that are in any of the intervals, which may overlap."""
    pairs = np.asarray(given, float).reshape(-1, 2)
    pairs = pairs[pairs[:, 1] > pairs[:, 0]]
    if not len(pairs):
        return EMPTY
    pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    reached = np.maximum.accumulate(pairs[:, 1])
    is_first = np.concatenate([[True], pairs[1:, 0] > reached[:-1]])
    last = np.concatenate([np.flatnonzero(is_first)[1:] - 1, [len(pairs) - 1]])
    return np.stack([pairs[is_first, 0], reached[last]], axis=1)


def subtract(times: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Returns the times of a set that are not in another one."""
    if not len(times) or not len(others):
        return times
    begin, end = times[0, 0], times[-1, 1]
    gaps = np.stack(
        [np.concatenate([[-np.inf], others[:, 1]]), np.concatenate([others[:, 0], [np.inf]])],
        axis=1,
    )
    return intersect(times, np.clip(gaps, begin, end))


def intersect(times: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Returns the times that are in both sets."""
    if not len(times) or not len(others):
        return EMPTY
    # Of each interval, those of the other set that overlap it stand side by side.
    first = np.searchsorted(others[:, 1], times[:, 0], side="right")
    last = np.searchsorted(others[:, 0], times[:, 1], side="left")
    counts = np.maximum(last - first, 0)
    mine = np.repeat(np.arange(len(times)), counts)
    within = np.arange(len(mine)) - np.repeat(np.cumsum(counts) - counts, counts)
    theirs = first[mine] + within
    begun = np.maximum(times[mine, 0], others[theirs, 0])
    return union(np.stack([begun, np.minimum(times[mine, 1], others[theirs, 1])], axis=1))


def length(times: np.ndarray) -> float:
    """Returns how long a set is."""
    return float((times[:, 1] - times[:, 0]).sum())
