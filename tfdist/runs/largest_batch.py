"""The largest global batch that fits, found by trying: each try in processes of its own.

What Accelerate's find_executable_batch_size does within one process, which a batch that does not
fit may end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tfdist.errors import RankFailedError, SilentError
from tfdist.launch.jobs import Where
from tfdist.runs import ranks
from tfdist.strategies import spec_of
from tfdist.training.engine import model_path
from tfdist.training.engine.options import check_count

RANK = "tfdist.runs.made_up_rank"
# Rows of the first try, and of the last one where all fit.
_FIRST, _MOST = 32, 2**17
# Of the batch that fits: as near as it is found out, since each try takes a start of TensorFlow.
_NEAR = 0.05


@dataclass(frozen=True, kw_only=True)
class Try:
    """One batch that was tried.

    Attributes:
        rows: of the global batch.
        fits: whether all processes have made their steps.
        why: what ended it, in few words; empty where it fits.
    """

    rows: int
    fits: bool
    why: str = ""

    def __str__(self) -> str:
        return f"a global batch of {self.rows} " + ("fits" if self.fits else f"ended: {self.why}")


def find_batch(
    model: str,
    strategy: str,
    options: Mapping[str, Any] | None = None,
    *,
    workers: int | None = None,
    room: int | None = None,
    deadline_s: float = 300.0,
    on_try: Callable[[Try], None] = lambda tried: None,
) -> int:
    """Returns the rows of the largest global batch that two steps of a training fit with.

    Doubles until one does not fit, then halves the distance, to within 5 %. All are multiples of
    the rows that every replica and microbatch takes at least.

    Args:
        model: "FILE.py:NAME", as ``tfdist train`` takes it.
        strategy, options: as ``tfdist.strategy`` takes them.
        workers: processes, where the strategy has several.
        room: bytes that one device has, beside TensorFlow itself: processes without a GPU are held
            to it by the system, which also counts what kernels take for themselves, and stacks of
            threads. None: of GPUs all that they have, else this machine's free memory.
        deadline_s: seconds of silence after which a try counts as one that does not fit.
        on_try: called after each.

    Returns:
        0 where not even the least batch fits.

    Raises:
        TfdistError: a mistake of the user's, which no smaller batch mends.
        RankFailedError: a process failed with the least batch, and not for want of memory.
        LaunchError: processes could not be started.
    """
    ranks.refuse_within_rank("find_batch")
    model_path.check(model)
    for name, value in (("room", room), ("workers", workers)):
        if value is not None:
            check_count(name, value)
    where = Where(
        strategy=strategy,
        options=dict(options or {}),
        workers=workers,
        start_timeout_s=deadline_s,
        stall_timeout_s=deadline_s,
    )

    unit = _unit(where)

    def fits(units: int) -> bool:
        config = {"model": model, "rows": units * unit, "room": room}
        tried = _try(config, where, is_least=units == 1)
        on_try(tried)
        return tried.fits

    low, high = 0, -(-_FIRST // unit)
    while fits(high):
        low, high = high, 2 * high
        if low * unit >= _MOST:
            return low * unit
    while high - low > max(1, _NEAR * low):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low * unit


def _unit(where: Where) -> int:
    """Returns the rows of the least global batch that a strategy takes, and divides evenly."""
    named = ("accumulate_steps", "microbatches", "batch", "devices")
    counts = [where.options[name] for name in named if isinstance(where.options.get(name), int)]
    has_ranks = bool(spec_of(where.strategy, where.options).launchers)
    return math.prod(counts) * (where.workers or 2 if has_ranks else 1)


def _try(config: dict[str, Any], where: Where, *, is_least: bool) -> Try:
    told: set[str] = set()
    why = ""
    try:
        ranks.run(RANK, config, where, lambda _, event: told.add(event["event"]))
    except (RankFailedError, SilentError) as error:
        if isinstance(error, RankFailedError) and is_least and "full" not in told:
            raise
        why = error.received
    why = "out of memory" if "full" in told else why
    return Try(rows=config["rows"], fits=not why, why=why)
