"""Where to cut a row of costs into parts. Nothing here knows TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence


def balance(costs: Sequence[float], crossing: Sequence[float], parts: int) -> tuple[int, ...]:
    """Returns cuts such that the most expensive of ``parts`` parts is as cheap as it can be.

    Args:
        costs: of each item; no part is empty.
        crossing: item -> what crosses a cut before it; of equal cuts the cheapest is taken.

    Returns:
        The first item of each part but the first one, ascending.
    """
    count = len(costs)
    assert 1 <= parts <= count, (parts, count)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[end]: (largest part, crossings, cuts) of the items before ``end``, for so many parts.
    best = {end: (sums[end], 0.0, ()) for end in range(1, count + 1)}
    for part in range(2, parts + 1):
        longer = {}
        for end in range(part, count + 1):
            longer[end] = min(
                (
                    max(best[cut][0], sums[end] - sums[cut]),
                    best[cut][1] + crossing[cut],
                    (*best[cut][2], cut),
                )
                for cut in range(part - 1, end)
            )
        best = longer
    return best[count][2]
